"""A base model from nothing, the same every time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.fork_server import NEW_PYTHON, ROOT, Fork, run_code
from tests.training import tiny
from training.jobs.protocol import Job, read_outcome
from training.programs import create_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The outputs of two processes that hash strings differently."""
    return make_twice(tmp_path_factory.mktemp("scratch"))


PROGRAM = """
import contextlib, sys
from training.jobs.program import run_program
from training.programs import create_model

for sys.argv[1:] in [[job] for job in sys.argv[1:]]:
    with contextlib.suppress(SystemExit):
        run_program(create_model.main)
"""
"""Several jobs in one process: to import costs more than to make a model."""


def make_twice(home: Path) -> list[Path]:
    """A model that reads and one that writes, by two processes; gives a folder for each process."""
    data = tiny.write_data(home / "data", {"train": 200, "validation": 5})
    folders = [home / "new", home / "fork"]
    for folder in folders:
        for job_dir, writes in ((folder, False), (_that_writes(folder), True)):
            settings = {"config": tiny.CONFIG, "seed": 3, "texts": ["text"], "writes": writes}
            program = "training.programs.create_model"
            Job(program=program, key=folder.name, settings=settings, inputs={"data": str(data)}).write(job_dir)
    new, forked = ([PROGRAM, str(folder), str(_that_writes(folder))] for folder in folders)
    # The fork has the random seed of its server.
    fork = Fork(run_code, forked).start()
    subprocess.run(
        [NEW_PYTHON, "-c", *new], env=os.environ | {"PYTHONHASHSEED": "1"}, cwd=ROOT, check=True, timeout=120
    )
    assert fork.join(120) == 0
    return folders


def _that_writes(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-writes")


def test_two_processes_make_the_same_bytes(made: list[Path]) -> None:
    first, second = (read_outcome(job_dir) for job_dir in made)
    assert first is not None and second is not None
    assert {"model/model.safetensors", "tokenizer/tokenizer.json"} <= first.files.keys()
    assert first.files == second.files


def test_for_a_model_that_writes_two_processes_make_the_same_bytes_too(made: list[Path]) -> None:
    first, second = (read_outcome(_that_writes(job_dir)) for job_dir in made)
    assert first is not None and second is not None
    assert first.files == second.files != read_outcome(made[0]).files


def test_a_tokenizer_of_a_model_that_writes_gives_texts_back_as_they_were() -> None:
    texts = ["Ein Mann läuft, über 20 €!", "„Wohin?“, fragt sie.\n\tNach  Haus", "don't (mind) the_gap"]
    learnt = create_model.train_bpe(lambda: iter(texts), 300)
    encodings = [learnt.encode(text, add_special_tokens=False) for text in texts]
    assert [learnt.decode(one.ids) for one in encodings] == texts
    assert "." in encodings[1].tokens and "▁Mann" in encodings[0].tokens
    ids = learnt.encode(texts[0]).ids
    assert [learnt.id_to_token(ids[place]) for place in (0, -1)] == ["[CLS]", "[SEP]"]


def test_model_and_tokenizer_load_and_fit_each_other(made: list[Path]) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made[0] / "output/tokenizer")
    model = AutoModel.from_pretrained(made[0] / "output/model")
    assert tokenizer.model_max_length == tiny.CONFIG["max_position_embeddings"]
    assert len(tokenizer) == model.config.vocab_size <= tiny.CONFIG["vocab_size"]
    assert tokenizer.pad_token_id == model.config.pad_token_id
    pair = tokenizer("The CAT", "a Hammer", return_tensors="pt")
    assert tokenizer.decode(pair["input_ids"][0]) == "[CLS] the cat [SEP] a hammer [SEP]"
    assert model(**pair).last_hidden_state.shape[-1] == tiny.CONFIG["hidden_size"]


def test_a_type_with_two_models_for_its_body_can_be_made() -> None:
    learnt = create_model.train_bpe(lambda: iter(["a text"]), 300)
    sizes = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "vocab_size": 300}
    made = create_model.create({"model_type": "funnel", **sizes}, learnt, 0)
    assert type(made).__name__ == "FunnelModel" and made.num_parameters() > 0
