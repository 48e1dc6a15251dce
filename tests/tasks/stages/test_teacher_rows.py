"""The stage check_teacher: rows of evaluated splits that a registered teacher was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.registry import pinned_versions
from tasks.registry.versions import TASK_TAG
from tasks.stages.resolve import pin
from tasks.stages.teacher_rows import check_teacher, find_teachers_rows
from tests import made
from tests.raised import raised_problems
from tests.tasks.watching import Heard
from training.recipe import Recipe, parse

ROWS = {"train": ["one", "two", "three"], "validation": ["four", "five"], "test": ["six", "Seven"]}
TEACHERS = {"train": ["six", "one", "two", "five", "seven"]}


def stored(splits: dict[str, list[str]], key: str, column: str = "text") -> Artifact:
    """The artifact of load_data with these texts."""
    files = {}
    for split, texts in splits.items():
        sink, batch = pa.BufferOutputStream(), pa.RecordBatch.from_pydict({column: texts, "label": [0] * len(texts)})
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        files[f"{split}.arrow"] = sink.getvalue().to_pybytes()
    return made.artifact("load_data", files, key=key)


@pytest.fixture(autouse=True)
def version(home: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The registered version big/7, whose rows are the artifact `theirs` of load_data."""
    home.mkdir(mode=0o700)
    tags = {TASK_TAG: json.dumps({"task": "sequence-classification", "options": {}})}
    tags["finetune.load_data.key"] = "theirs"
    found = SimpleNamespace(name="big", version=7, creation_timestamp=0, tags=tags)
    monkeypatch.setattr(pinned_versions, "_find_named", lambda path, where: found)
    return found


def recipe(**changes: Any) -> Recipe:
    values = {
        "name": "small",
        "task": "sequence-classification",
        "data": {"source": "json", "path": "rows.jsonl", "text": ["text"], "label": "label"},
        "model": {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}},
        "training": {"teacher": {"source": "registry", "path": "big/7"}},
    }
    return parse(values, changes)


def check(data: Artifact, home: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """The result of the stage, and its messages."""
    wanted, heard = recipe(**changes), Heard()
    lock = Lock(teacher_version=pinned_versions.find_teacher(wanted))
    rows = find_teachers_rows(wanted, lock, data)
    assert rows is not None
    result = check_teacher.make(Work("k", home / "out", "run", (heard,), "check_teacher"), wanted, lock, data, rows)
    return result, [str(event.get("message")) for event in heard.events]


def test_evaluated_rows_that_the_teacher_was_trained_on_are_counted_in_one_warning_a_split(home: Path) -> None:
    stored(TEACHERS, "theirs")
    result, messages = check(stored(ROWS, "own"), home)
    assert {split: (one["repeated"], one["rows"]) for split, one in result.items()} == {
        "validation": (1, 2),
        "test": (1, 2),
    }
    assert len(messages) == 2 and messages[1].startswith(
        "training.teacher.path: 1 of 2 rows of test is a training row of the teacher big/7 (such as 'six'): "
    )
    assert check(stored({**ROWS, "validation": ["eight"], "test": ["nine"]}, "own"), home)[1] == []


def test_such_rows_end_the_run_before_training_if_the_recipe_says_so(home: Path) -> None:
    stored(TEACHERS, "theirs")
    problems = raised_problems(check, stored(ROWS, "own"), home, **{"data.checks.teacher_rows": "error"})
    assert [(one.where, one.check, one.level) for one in problems] == [
        ("training.teacher.path", "teacher_rows", "error")
    ] * 2
    assert "set data.checks.teacher_rows to ignore" in problems[0].message


def test_training_rows_are_evaluated_where_there_are_folds(home: Path) -> None:
    data = stored(ROWS, "own")
    stored({"train": ROWS["train"]}, "theirs")
    lock = Lock(teacher_version=pinned_versions.find_teacher(recipe()))
    assert find_teachers_rows(recipe(), lock, data) is None, "shared_rows has compared these"
    result, (message,) = check(data, home, **{"evaluation.folds": 2})
    assert result["train"]["repeated"] == 3 and "out-of-fold figures on them flatter" in message


def test_nothing_is_compared_if_the_recipe_ignores_the_check_or_the_rows_have_other_columns(home: Path) -> None:
    data, lock = stored(ROWS, "own"), Lock(teacher_version=pinned_versions.find_teacher(recipe()))
    stored(TEACHERS, "theirs")
    assert find_teachers_rows(recipe(**{"data.checks.teacher_rows": "ignore"}), lock, data) is None
    stored(TEACHERS, "theirs", column="sentence")
    result, (message,) = check(data, home)
    assert result == {} and "was trained on rows without text, so it is not checked" in message


def test_evaluated_rows_are_in_the_key_and_those_that_are_trained_on_are_not(home: Path) -> None:
    rows = stored(TEACHERS, "theirs")

    def key(splits: dict[str, list[str]], **changes: Any) -> str:
        wanted, data = recipe(**changes), stored(splits, "own")
        lock = Lock(teacher_version=pinned_versions.find_teacher(wanted))
        return check_teacher.key(check_teacher.flat_inputs(wanted, lock, data, rows)[0])

    assert key(ROWS) == key({**ROWS, "train": ["other"]}, **{"training.seed": 5})
    others = [key({**ROWS, "test": ["other"]}), key(ROWS, **{"data.checks.teacher_rows": "error"})]
    folds = [key({**ROWS, "train": texts}, **{"evaluation.folds": 2}) for texts in (ROWS["train"], ["other"])]
    assert len({key(ROWS), *others, *folds}) == 5


def test_a_note_says_that_rows_which_this_home_lacks_are_not_checked(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a", "label": "x"}\n')
    own = {"data.path": str(file)}
    (note,) = pin(recipe(**own)).notes
    assert note.startswith("the training rows of the teacher big/7 are not in this home, so it is not checked whether")
    assert pin(recipe(**own, **{"data.checks.teacher_rows": "ignore"})).notes == []
    stored(TEACHERS, "theirs")
    assert pin(recipe(**own)).notes == []
