"""What the README shows is true: its examples run, its tree is the tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from training.recipe import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    """The code block behind `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found[1]


def module(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module that can be imported by name."""
    made = ModuleType(name)
    exec(source, made.__dict__)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_the_recipe_for_your_own_csv_is_valid() -> None:
    document = yaml.safe_load(example("recipe"))
    assert parse(document["deployments"][0]["parameters"]["recipe"]).data.source == "csv"


def test_the_function_gives_rows_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.recipe import Data
    from training.rows.load import load
    from training.rows.sources import fingerprint, load_object

    module("my_rows", example("rows"), monkeypatch)
    figures = load(Data(source="python", path="my_rows:rows", text=["text"], label="label"), {}, tmp_path)
    assert figures == {"train_rows": 100, "validation_rows": 20, "labels": 2, "warnings": 0}
    assert fingerprint(load_object("my_rows:rows")) == "one to a hundred, second edition"


def test_the_metric_is_computed_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from training import metrics
    from training.predicted import Predicted

    module("my_metrics", example("metric"), monkeypatch)
    predictions, references = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    predicted = Predicted(references, predictions, np.eye(2)[predictions], ["no", "yes"])
    found = metrics.compute(["accuracy", "my_metrics:Errors"], predicted)
    assert found == {"accuracy": 0.75, "errors": 0.25}


def test_the_tree_names_what_is_there_and_misses_no_stage() -> None:
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", README, re.DOTALL)
    assert tree
    folder, inner, named = "", "", set()
    for line in tree[1].splitlines():
        words = line.split()
        if not line.startswith(" "):
            folder = words[0]
            assert (ROOT / folder).is_dir(), folder
        elif not line.startswith("    "):
            inner = words[0] if words[0].endswith("/") else ""
        path = folder + (inner if line.startswith("    ") else "")
        for word in words:
            if line.startswith(" ") and (word.endswith(".py") or (word.endswith("/") and word == words[0])):
                assert (ROOT / path / word).exists(), path + word
                named.add(path + word)
    rows = {f"training/rows/{file.name}" for file in (ROOT / "training/rows").glob("*.py") if file.stem != "__init__"}
    assert rows <= named
    stages = {f"tasks/{path.name}" for path in (ROOT / "tasks").glob("*.py") if path.name != "__init__.py"}
    assert stages <= named
    assert {path.name + "/" for path in ROOT.iterdir() if path.is_dir() and path.name in tree[1]} <= {
        line.split()[0] for line in tree[1].splitlines()
    }


def test_the_chapter_on_evaluation_names_every_metric_and_what_a_run_prints_of_them() -> None:
    from flows.terminal import figure
    from tasks.runtime.refs import Ref
    from training.recipe.release import METRICS

    chapter = README.partition("\n## Evaluate\n")[2].partition("\n## ")[0]
    averages = [name for name in METRICS if name.endswith(("_macro", "_micro", "_weighted"))]
    assert [name for name in METRICS if f"`{name}`" not in chapter and name not in averages] == []
    assert {name.partition("_")[2] for name in averages} == set(re.findall(r"`_(\w+)`", chapter))
    shown = re.findall(r"(\w+) (0\.\d{4}) \((0\.\d{3}) to (0\.\d{3})\)", chapter)
    figures = {name: dict(zip(("value", "low", "high"), map(float, ends), strict=True)) for name, *ends in shown}
    asked = re.findall(r"evaluation.metrics=\[(.*)\]", chapter)[0].split(", ")
    assert list(figures) == asked
    assert figure("score", Ref(kind="score", key="k", digest="d", figures={"validation": figures})) in chapter
