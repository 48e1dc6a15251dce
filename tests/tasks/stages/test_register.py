"""A model that is registered already."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.code import git_commit
from tasks.cache.results import Artifact, Lock, Verdict, Version
from tasks.cache.stage import Work
from tasks.stages.register import LONGEST_DESCRIPTION, format_example_arguments, register
from tasks.tracking.connection import connect
from tests.made import FITTED, LABELS, ROWS, artifact, predictions
from training.recipe import parse

RECIPE = parse(
    {
        "name": "test",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
        "model": {"source": "hub", "path": "me/model"},
        "release": {"registry": "reviews"},
    }
)
TRAINED = Artifact(stage="fit", key="f", digest="d", parts={"model": "m"}, result=FITTED)


def scored(accuracy: float) -> Artifact:
    figures: dict[str, Any] = {
        "validation": {"accuracy": {"value": accuracy, "low": accuracy - 0.02, "high": accuracy + 0.02}}
    }
    figures["validation"]["roc_auc"] = {"value": None, "low": None, "high": None}  # of one label alone
    return Artifact(stage="score", key=f"score-{accuracy}", digest="d", result=figures)


@pytest.mark.slow
def test_the_same_model_is_the_same_version_with_the_latest_verdict_and_figures(tracked: Path) -> None:
    client = connect()
    client.create_registered_model("reviews")
    client.create_model_version(
        "reviews", "file:///nowhere", tags={"finetune.model_digest": "m", "finetune.recipe": "r"}
    )
    rows, given_to_them = (
        artifact("load_data", {"labels.json": LABELS}, ROWS),
        predictions("validation", [0, 1], [0, 0]),
    )
    for decision, accuracy in (("keep", 0.75), ("promote", 0.875)):
        verdict = Verdict.model_validate({"decision": decision, "reason": "of this and that"})
        made = (rows, TRAINED, given_to_them, scored(accuracy), None)
        given = register.make(Work("k", Path(), "run"), RECIPE, Lock(), verdict, *made)
        assert given == Version(name="reviews", version="1")
        (version,) = client.search_model_versions("name = 'reviews'")
        assert version.tags["finetune.verdict"] == decision and version.tags["finetune.recipe"] == "r"
        assert version.tags["finetune.score.key"] == f"score-{accuracy}"
        assert json.loads(version.tags["finetune.figures"]) == scored(accuracy).result
        assert "(judged) | roc_auc | - | - |" in version.description
        assert version.description.startswith(f"{decision}: of this and that\n\nGives a text one of 2 labels")
        assert f"(judged) | accuracy | {accuracy:.4f} | {accuracy - 0.02:.4f} to" in version.description
    several = {f"metric-{number}": {"value": 0.5, "low": None, "high": None} for number in range(500)}
    many = Artifact(stage="score", key="many", digest="d", result={"validation": several})
    register.make(Work("k", Path(), "run"), RECIPE, Lock(), verdict, rows, TRAINED, given_to_them, many)
    assert len(client.get_model_version("reviews", "1").description) == LONGEST_DESCRIPTION


def test_a_model_that_another_machine_registers_at_the_same_time_gets_one_version(tracked: Path) -> None:
    client = connect()
    client.create_registered_model("reviews")

    @contextmanager
    def after_another_machine() -> Iterator[None]:
        client.create_model_version("reviews", "file:///nowhere", tags={"finetune.model_digest": "m"})
        yield

    rows, predicted = artifact("load_data", {"labels.json": LABELS}, ROWS), predictions("validation", [0, 1], [0, 0])
    work = Work("k", Path(), "run", one_at_a_time=after_another_machine)
    verdict = Verdict(decision="keep", reason="of this and that")
    given = register.make(work, RECIPE, Lock(), verdict, rows, TRAINED, predicted, scored(0.75), None)
    assert given == Version(name="reviews", version="1") and work.rollback is None


def test_the_commit_is_that_of_the_working_directory_and_dirty_where_known_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    (tmp_path / "unknown").write_text("1")
    clean = git_commit()
    assert clean is not None and len(clean.commit) == 40 and not clean.dirty
    (tmp_path / "file").write_text("2")
    assert git_commit() == clean._replace(dirty=True)


@pytest.mark.parametrize("bare", [True, False])
def test_a_repository_in_the_working_directory_runs_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    work, ran = tmp_path / "work", tmp_path / "ran"
    for folder in (work, ran):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (work / "file").write_text("1")
    (work / ".gitattributes").write_text("file filter=a=b\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    (work / "file").write_text("2")
    programs = {"core.fsmonitor": "monitor", "filter.a=b.clean": "clean", "filter.a=b.process": "process"}
    for name, program in programs.items():
        subprocess.run(["git", "config", name, f"touch {ran / program}; false"], check=True)
    if bare:
        subprocess.run(["git", "config", "core.worktree", str(work)], check=True)
        for part in (work / ".git").iterdir():
            part.rename(work / part.name)
        (work / ".git").rmdir()
    found = git_commit()
    assert not list(ran.iterdir())
    assert found is None if bare else found is not None and found.dirty


def test_the_example_of_a_prediction_has_no_optional_values() -> None:
    data = {"source": "json", "path": "rows", "columns": {"messages": "talk", "tools": "tools"}}
    recipe = RECIPE.model_dump() | {"task": "sft", "options": {}, "data": data, "evaluation": {}, "training": {}}
    assert format_example_arguments(parse(recipe)) == """'[{"role": "user", "content": "Hi"}]'"""
    recipe["data"] = data | {"columns": {"instruction": "instruction", "input": "input", "output": "output"}}
    assert format_example_arguments(parse(recipe)) == '"some instruction"'
