"""A base model from nothing, the same every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import tiny
from training.protocol import Job, read_outcome


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The outputs of two processes that hash strings differently."""
    home = tmp_path_factory.mktemp("scratch")
    data = tiny.write_data(home / "data", {"train": 200, "validation": 5})
    settings = {"config": tiny.CONFIG, "seed": 3, "texts": ["text"]}
    processes = []
    for hash_seed in ("1", "2"):
        job_dir = home / hash_seed
        Job(program="training.scratch", key=hash_seed, settings=settings, inputs={"data": str(data)}).write(job_dir)
        command = [sys.executable, "-m", "training.scratch", str(job_dir)]
        processes.append(subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}))
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return [home / "1", home / "2"]


def test_two_processes_make_the_same_bytes(made: list[Path]) -> None:
    first, second = (read_outcome(job_dir) for job_dir in made)
    assert first is not None and second is not None
    assert {"model/model.safetensors", "tokenizer/tokenizer.json"} <= first.files.keys()
    assert first.files == second.files


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
