"""Folders of sentence-transformers: their pooling and prompts are read, and exports are such folders."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModel

from tests import task_types as tiny_tasks
from tests.raised import Says, raised_problems
from tests.training import tiny
from training import task_types
from training.engine.predictor import Predictor
from training.models.pooling import CONFIG, Pooling, pooling_of
from training.models.repository_files import name_of, part_of, text_prompts
from training.problems import UserError

TASK = "sentence-similarity"
TEXTS = ["cat dog", "hammer", "a saw and a horse and bread and cheese and rice"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tasks.make_world(TASK, tmp_path_factory.mktemp("world")) / "base/output"


def exported(base: Path, out: Path, **options: Any) -> tuple[Any, Path]:
    """A task type with these options, and an export of its untrained model with the published files."""
    task = task_types.load(TASK, options)
    tiny.export_untrained(base, out, task, [])
    for name, text in task.published_files(out, max_length=8).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    return task, out


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        file = folder / {"pooling": "1_Pooling.json"}.get(name, f"{name}.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def steps(*names: str) -> list[dict[str, Any]]:
    paths = {"Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    types = ((name, f"sentence_transformers.models.{name}") for name in names)
    return [{"idx": place, "path": paths.get(name, ""), "type": kind} for place, (name, kind) in enumerate(types)]


CASES = [
    ({}, {"pooling_mode_mean_tokens": True}),
    ({"pooling": "cls", "normalize": True}, {"pooling_mode_cls_token": True}),
    (
        {"pooling": "lasttoken", "prompts": {"sentence1": "query: ", "sentence2": "query: "}},
        {"pooling_mode_lasttoken": True},
    ),
]


@pytest.mark.parametrize(("options", "modes"), CASES)
def test_an_export_is_a_folder_of_sentence_transformers(
    options: dict[str, Any], modes: dict[str, bool], base: Path, tmp_path: Path
) -> None:
    task, folder = exported(base, tmp_path / "model", **options)
    files = {name: json.loads((folder / name).read_text()) for name in ("modules.json", "1_Pooling/config.json")}
    names = [step["type"].rpartition(".")[2] for step in files["modules.json"]]
    assert names == ["Transformer", "Pooling", *(["Normalize"] if options.get("normalize") else [])]
    settings = files["1_Pooling/config.json"]
    assert settings["word_embedding_dimension"] == 32 and settings.items() >= modes.items()
    assert sum(value is True for name, value in settings.items() if name.startswith("pooling_mode")) == 1
    rows = pa.record_batch({"sentence1": TEXTS})
    records = Predictor(task, folder, folder, 8).predict(rows)
    ours = np.array([record["embedding"] for record in records])
    if options.get("normalize"):
        np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1.0, rtol=1e-5)
    # A model that starts from the folder has the same pooling and prompts, without options.
    again = task_types.load(TASK, {})
    assert Predictor(again, folder, folder, 8).predict(rows) == records
    # As a base model from elsewhere, whose files load_model puts beside the model.
    (folder / "1_Pooling.json").write_text((folder / "1_Pooling/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), CONFIG: None}))
    assert Predictor(again, folder, folder, 8).predict(rows) == records
    if importlib.util.find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(str(folder), device="cpu")
        assert theirs.max_seq_length == 8 and theirs.similarity_fn_name == "cosine"
        np.testing.assert_allclose(ours, theirs.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Pooling("mean", False)),
        (
            {"modules": steps("Transformer", "Pooling"), "pooling": {"pooling_mode_cls_token": True}},
            Pooling("cls", False),
        ),
        (
            {"modules": steps("Transformer", "Pooling", "Normalize"), "pooling": {"pooling_mode": "lasttoken"}},
            Pooling("lasttoken", True),
        ),
    ],
)
def test_the_pooling_of_a_base_model_is_that_of_its_folder(files: Any, expected: Pooling, tmp_path: Path) -> None:
    assert pooling_of(object(), write(tmp_path, **files)) == expected
    assert pooling_of(object(), tmp_path, "cls", False) == Pooling("cls", False)


@pytest.mark.parametrize(
    ("files", "where", "message"),
    [
        (
            {"modules": steps("Transformer", "Dense")},
            "model.path",
            "modules.json has the step Dense, and Transformer, Pooling and Normalize are known: choose a base model "
            "without it.",
        ),
        (
            {
                "modules": steps("Pooling"),
                "pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            },
            "options.pooling",
            "1_Pooling.json has the pooling max and mean: set one of mean, cls, lasttoken.",
        ),
        (
            {"modules": steps("Pooling"), "pooling": {"pooling_mode": "mean", "include_prompt": False}},
            "model.path",
            Says("1_Pooling.json leaves prompts out of the pooling"),
        ),
    ],
)
def test_steps_that_are_not_known_are_refused(files: Any, where: str, message: str, tmp_path: Path) -> None:
    (problem,) = raised_problems(pooling_of, object(), write(tmp_path, **files))
    assert (problem.where, problem.message) == (where, message)


@pytest.mark.parametrize(
    "wrong", [{"pooling": "max"}, {"pooling": ["cls"]}, {"normalize": "no"}, {"other": 1, "pooling": "cls"}]
)
def test_a_pooling_of_config_that_is_none_is_refused(wrong: Any, tmp_path: Path) -> None:
    if "other" in wrong:
        wrong |= {"normalize": True}
    with pytest.raises(UserError, match=f"config.json has {CONFIG}: .*It has pooling, one of mean, cls, lasttoken"):
        pooling_of(SimpleNamespace(**{CONFIG: wrong}), tmp_path)


def test_files_of_other_folders_say_nothing_about_a_model(tmp_path: Path) -> None:
    write(tmp_path / "other", x_Pooling={"pooling_mode": "cls"})
    for path in ("../other/x_Pooling", str(tmp_path / "other/x_Pooling")):
        folder = write(tmp_path / "model", modules=[{"type": "Pooling", "path": path}])
        with pytest.raises(UserError, match=r"has the pooling None: set one of mean"):
            pooling_of(object(), folder)
    write(tmp_path / "model", modules=steps("Pooling"), pooling={"pooling_mode": 5})
    with pytest.raises(UserError, match=r"has the pooling None: set one of mean"):
        pooling_of(object(), tmp_path / "model")
    assert text_prompts(
        write(tmp_path, config_sentence_transformers={"prompts": {"a": "b"}, "default_prompt_name": []})
    )


def test_the_files_of_a_base_model_are_taken_and_its_prompts_are_read(tmp_path: Path) -> None:
    names = ["modules.json", "1_Pooling/config.json", "config_sentence_transformers.json", "2_Dense/config.json"]
    assert [part_of(name_of(name)) for name in names] == ["model", "model", "tokenizer", None]
    settings = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    write(tmp_path, config_sentence_transformers=settings)
    assert text_prompts(tmp_path) == {"query": "query: ", "default": "query: "}
    assert text_prompts(tmp_path / "none") == {}


def test_each_mode_takes_the_same_tokens_however_a_text_is_padded() -> None:
    hidden = torch.arange(24, dtype=torch.float32).reshape(1, 4, 6)
    left, right = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[1, 1, 0, 0]])
    for mask, first in ((left, 2), (right, 0)):
        own = hidden[:, first : first + 2]
        assert torch.equal(Pooling("mean")(hidden, mask), own.mean(dim=1))
        assert torch.equal(Pooling("cls")(hidden, mask), own[:, 0])
        assert torch.equal(Pooling("lasttoken")(hidden, mask), own[:, 1])


def test_a_pooler_is_kept_but_not_trained_and_models_with_two_parts_are_refused(base: Path) -> None:
    model, task = AutoModel.from_pretrained(base / "model"), task_types.load(TASK, {"matryoshka_dims": [64]})
    (problem,) = raised_problems(task.prepare, model, None)
    assert problem.where == "options.matryoshka_dims" and "64 is more than the 32 dimensions" in problem.message
    task_types.load(TASK, {}).prepare(model, None)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == ["pooler.dense.weight", "pooler.dense.bias"]
    both = AutoModel.from_config(AutoConfig.for_model(**tiny_tasks.T5))
    (problem,) = raised_problems(task.prepare, both, None)
    assert problem.message == "'t5' has an encoder and a decoder: choose a model with one of them."
