"""The stage tokenize: its encoder and its warnings. A tokenizer that exists only in Python is as good as any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.results import Artifact, Lock, PinnedFile
from tasks.cache.stage import Work
from tasks.stages.load_model import load_model
from tasks.stages.tokenize import tokenize
from tests.arrow import read_arrow
from tests.tasks.watching import Heard
from tests.training import tiny
from tests.training.programs_here import PREDICT, run
from tests.training.vocabularies import CHAT, chat, save_repository
from training import task_types
from training.batching.batches import TokenRows
from training.jobs.protocol import sha256
from training.models.loading import export, load_for_training, load_tokenizer
from training.models.repository_files import chat_template
from training.problems import UserError
from training.programs import predict
from training.programs.create_model import ModelResult
from training.recipe import Recipe, parse

pytestmark = pytest.mark.usefixtures("model_unchecked")

PARTS = {f"{split}.arrow": f"of {split}" for split in ("train", "validation")}
DATA = Artifact(stage="load_data", key="d", digest="of the rows", parts=PARTS)
MODEL = Artifact(
    stage="load_model",
    key="m",
    digest="of the model",
    parts={"tokenizer": "of the tokenizer"},
    result=ModelResult(megabytes=1.0),
)
BYTES = {"tokenizer_class": "ByT5Tokenizer", "pad_token": "<pad>"}


def recipe_of(folder: Path, **checks: str) -> Recipe:
    data = {"source": "csv", "path": "rows", "text": ["text"], "label": "label", "checks": checks}
    model = {"source": "folder", "path": str(folder)}
    tokens = {"max_length": 48}
    return parse({"name": "test", "task": "sequence-classification", "data": data, "model": model, "tokens": tokens})


def pinned(file: Path) -> PinnedFile:
    return PinnedFile(path=str(file), sha256=sha256(file))


def loaded(repository: Path, recipe: Recipe, **other: PinnedFile) -> Path:
    """The folder that the stage load_model fills from the repository, and with other files over those."""
    MODEL.path.mkdir(parents=True)
    files = {path.name: pinned(path) for path in repository.iterdir()} | other
    work = Work(MODEL.key, MODEL.path, "run")
    load_model.make(work, recipe, Lock(model_files=files), None)
    assert not [file for file in work.job.rglob("*") if file.is_file()], "a base model may take half of the disk"
    return MODEL.path


def test_a_chat_template_of_the_recipe_is_the_tokenizers_byte_for_byte(home: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    repository = save_repository(tmp_path / "it", "llama", chat(), CHAT)
    (tmp_path / "mine.jinja").write_bytes(b"{{ messages[0]['content'] }}\r\n")
    recipe = recipe_of(repository)
    mine = pinned(tmp_path / "mine.jinja")
    folder = loaded(repository, recipe, **{"chat_template.jinja": mine}) / "tokenizer"
    assert (folder / "chat_template.jinja").read_bytes() == b"{{ messages[0]['content'] }}\r\n"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert chat_template(folder) == (theirs.chat_template, theirs.special_tokens_map)


def test_a_model_is_trained_with_a_tokenizer_that_exists_only_in_python(home: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    repository = save_repository(tmp_path / "it", "bert", None, BYTES)
    AutoModel.from_config(AutoConfig.for_model(**tiny.CONFIG | {"vocab_size": 384})).save_pretrained(repository)
    recipe, heard = recipe_of(repository), Heard()
    loaded(repository, recipe)
    tiny.write_data(DATA.path, {"train": 40, "validation": 20})
    figures = tokenize.make(Work("t", home / "tokens", "run", (heard,), "tokenize"), recipe, DATA, MODEL)

    first = read_arrow(DATA.path / "train.arrow")["text"][0].as_py()
    ids = AutoTokenizer.from_pretrained(repository)(first, truncation=True, max_length=48)["input_ids"]
    assert TokenRows(home / "tokens" / "train.arrow")[0]["input_ids"].tolist() == ids
    warnings = [event["message"] for event in heard.events if event["kind"] == "warning"]
    assert figures["rows"] == 60 and figures["truncated"] > 0
    assert len(warnings) == 2 and "of 40 rows of train" in warnings[0] and "of 20 rows of validation" in warnings[1]
    assert {"done": 60, "total": 60}.items() <= [e for e in heard.events if e["kind"] == "progress"][-1].items()

    task = task_types.load("sequence-classification")
    tokenizer = load_tokenizer(MODEL.path / "tokenizer", MODEL.path / "model")
    network = load_for_training(task, MODEL.path / "model", tiny.LABELS, tokenizer, seed=1)
    rows = TokenRows(home / "tokens" / "train.arrow")
    network(**task.collator(tokenizer, 8)([rows[0], rows[1]])).loss.backward()
    export(network, MODEL.path / "tokenizer", tmp_path / "trained")
    inputs = {"model": tmp_path / "trained", "tokens": home / "tokens"}
    predicted = run(predict, tmp_path / "predict", inputs, task="sequence-classification", **PREDICT)
    assert predicted["rows"] == 20


@pytest.fixture
def cut(home: Path, tmp_path: Path) -> Path:
    """A loaded repository with a complete tokenizer.json; some of its rows are too long."""
    repository = save_repository(tmp_path / "it", "llama", chat(), CHAT)
    loaded(repository, recipe_of(repository))
    tiny.write_data(DATA.path, {"train": 40})
    return repository


def test_the_stage_warns_of_cut_texts_unless_the_recipe_ignores_them(cut: Path, home: Path) -> None:
    for level, messages in (("warning", 1), ("ignore", 0)):
        heard, recipe = Heard(), recipe_of(cut, truncated=level)
        tokenize.make(Work("t", home / level, "run", (heard,), "tokenize"), recipe, DATA, MODEL)
        warnings = [event["message"] for event in heard.events if event["kind"] == "warning"]
        assert len(warnings) == messages and all(line.startswith("tokens.max_length: 48 cuts ") for line in warnings)
    with pytest.raises(UserError, match=r"^tokens\.max_length: 48 cuts"):
        tokenize.make(Work("t", home / "error", "run"), recipe_of(cut, truncated="error"), DATA, MODEL)


def test_transformers_and_the_models_type_are_ingredients_only_where_a_class_has_a_say(cut: Path) -> None:
    def names() -> set[str]:
        return set(tokenize.flat_inputs(recipe_of(cut), DATA, MODEL)[0])

    def by_class(names: set[str]) -> set[str]:
        return names & {
            "library.transformers",
            "model.config.model_type",
            "code.training/programs/tokenize_with_transformers.py",
        }

    before = names()
    assert not by_class(before) and {"level", "code.training/tokenization/encoder.py"} <= before
    config = MODEL.path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert len(by_class(names())) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer_class": "CTRLTokenizer"}, r"no vocabulary in any other file.*\(CTRLTokenizer needs a vocabulary"),
        ({"tokenizer_class": None}, r"names no class that needs none"),
    ],
)
def test_a_class_that_lacks_its_vocabulary_is_refused(
    home: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    repository = save_repository(tmp_path / "it", "ctrl", None, settings)
    with pytest.raises(UserError, match=words):
        loaded(repository, recipe_of(repository))
