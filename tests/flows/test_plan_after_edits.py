"""The plan after an edit to this project's own code, in a copy of the checkout.

The small recipe trains a sequence classification with the Trainer on one process, and chooses the best checkpoint by
accuracy.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.pipeline import pipeline
from tasks.cache import code, store
from tasks.cache.history import History
from tasks.cache.stage import Stage
from tasks.stages.resolve import pin
from tests.flows.small import write_project
from training.recipe import Recipe, load

ROOT = Path(__file__).parents[2]


def add_code(text: str) -> str:
    return f"{text}\n\nEDITED = True\n"


def add_docstrings(text: str) -> str:
    """The text with a docstring in every function that has none, and a string under every field of a class."""
    lines = text.splitlines(keepends=True)
    places: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is None:
            first = node.body[0]
            line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))])
            if not lines[line - 1][: first.col_offset].strip():  # else it stands on the line of the signature
                places.append((line - 1, first.col_offset))
        if isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)]
            places += [(one.end_lineno or one.lineno, one.col_offset) for one in fields]
    for line, indent in sorted(places, reverse=True):
        lines.insert(line, " " * indent + '"""Edited."""\n')
    return "".join(lines)


def edit_messages(text: str) -> str:
    return re.sub(r'\b(message = f?")(?=[^"])', r"\1Edited: ", text)


def everywhere(folder: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]


EDITS: dict[str, tuple[Callable[[str], str], Iterable[str]]] = {
    "a metric that does not choose the checkpoint": (
        add_code,
        [f"training/evaluation/metrics/{name}.py" for name in ("texts", "numbers", "rewards", "probabilities")],
    ),
    "a plot": (add_code, ["training/evaluation/plots.py"]),
    "every docstring": (add_docstrings, [*everywhere("training"), "tasks/stages/fit.py"]),
    "every message": (edit_messages, [*everywhere("training"), "tasks/stages/fit.py"]),
    "another task type": (add_code, ["training/task_types/seq2seq.py", "training/task_types/token_classification.py"]),
    "another strategy": (add_code, ["training/distributed/fsdp.py", "training/distributed/zero.py"]),
    "another engine": (add_code, ["training/engine/loop.py"]),
    "the tables of what a recipe may name": (
        add_code,
        [f"training/recipe/tables/{name}.py" for name in ("engines", "formats", "metrics", "optimizers", "strategies")],
    ),
    "how programs are started and watched": (add_code, everywhere("training/jobs")),
    "the test of significance": (add_code, ["training/evaluation/significance.py"]),
}
RETRAINING = {
    "the task type": "training/task_types/sequence_classification.py",
    "the engine": "training/engine/trainer.py",
    "the metric that chooses the checkpoint": "training/evaluation/metrics/labels.py",
}


# Files of each artifact that later keys or checks read.
ARTIFACTS = {
    "load_data": {"train.arrow": "", "validation.arrow": "", "labels.json": '["neg", "pos"]'},
    "load_model": {"model/config.json": "{}", "tokenizer/tokenizer.json": "{}"},
    "tokenize": {"train.arrow": "", "validation.arrow": "", "test.arrow": ""},
    "fit": {"model/model.safetensors": ""},
}
RESULTS: dict[str, Any] = {
    "load_data": {"labels": 2, "warnings": 0},
    "load_model": {"megabytes": 0.1, "vocab_size": 300},
    "tokenize": {"rows": 300, "tokens": 3000, "truncated": 0, "lost": 0},
    "fit": dict.fromkeys(
        (
            *("trainable_parameters", "micro_batch_size", "steps", "epochs", "train_loss", "best_step", "best_metric"),
            *("train_rows_per_second", "estimated_memory_mb", "peak_memory_mb"),
        ),
        1,
    ),
}
"""The result of each of these stages, as its program stores it."""


class Trained(Exception):
    """The pipeline has reached the end of fit."""


class Filler:
    """Publishes an artifact under the key of each stage, up to fit, without running the stages."""

    def __call__(self, stage: Stage[Any], recipe: Recipe, *arguments: Any) -> Any:
        if stage.name == "resolve":
            return pin(recipe)
        flat, _ = stage.flat_inputs(recipe, *arguments)
        key = stage.key(flat)
        with store.filling(stage.name, key) as aside:
            for name, content in ARTIFACTS[stage.name].items():
                (aside / name).parent.mkdir(exist_ok=True)
                (aside / name).write_text(content)
            ref = store.publish(aside, stage.name, key, flat, RESULTS.get(stage.name))
        History(recipe.name).remember_key(stage.name, key)
        if stage.name == "fit":
            raise Trained
        return stage.open(ref)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A copy of the project, whose code keys are computed from, and the deployment file of a recipe that has been
    trained there."""
    folder = tmp_path_factory.mktemp("trained")
    for package in ("tasks", "training"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / "checkout" / package, ignore=ignored)
    file = write_project(folder / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "PROJECT", folder / "checkout")
        patch.setenv("FINETUNE_HOME", str(folder / "home"))
        with pytest.raises(Trained):
            pipeline(Filler(), load(file))  # type: ignore[arg-type]
        yield folder / "checkout", file


@pytest.fixture
def checkout(trained: tuple[Path, Path]) -> Iterator[Path]:
    """The copy, without its edits after the test."""
    before = {path: path.read_bytes() for path in trained[0].rglob("*.py")}
    yield trained[0]
    for path, content in before.items():
        if path.read_bytes() != content:
            path.write_bytes(content)


@pytest.fixture
def file(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, model_unchecked: None) -> Path:
    """The deployment file."""
    monkeypatch.setattr("flows.cli.plan._estimate", lambda *_: [])
    return trained[1]


def state_of_fit(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of the plan on the stage fit, without its name."""
    assert main(["plan", str(file)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "fit"]
    return line.split(maxsplit=1)[1]


@pytest.mark.slow
def test_edits_that_cannot_change_the_weights_leave_fit_cached(
    checkout: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All edits are made at once; a plan names the changed files that are in a key."""
    for edit, (change, paths) in EDITS.items():
        edited = 0
        for path in paths:
            before = (checkout / path).read_text()
            after = change(before)
            ast.parse(after)
            (checkout / path).write_text(after)
            edited += before != after
        assert edited, edit
    assert state_of_fit(file, capsys).startswith("cached")


@pytest.mark.parametrize("edit", RETRAINING)
def test_an_edit_that_can_change_the_weights_is_named_by_the_plan(
    edit: str, checkout: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RETRAINING[edit]
    (checkout / path).write_text(add_code((checkout / path).read_text()))
    assert f"{path} changed" in state_of_fit(file, capsys)
