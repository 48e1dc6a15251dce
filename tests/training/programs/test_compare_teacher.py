"""A model and its teacher side by side, on the same rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tasks.reports.model_reports import describe_teacher, summarize_teacher, tabulate_teacher
from tests.training import tiny
from tests.training.programs_here import run
from training.evaluation.scores import ComparedTeacher
from training.jobs.protocol import OUTPUT
from training.models.loading import load_tokenizer, load_trained
from training.programs import compare_teacher, predict_champion
from training.task_types import load

TASK = "sequence-classification"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ComparedTeacher:
    """A teacher with random weights, and a model that is the same but for one label, which it never gives."""
    home = tiny.make_world(tmp_path_factory.mktemp("world") / "world")
    tiny.export_untrained(home / "base", home / "big", labels=tiny.LABELS)
    model, task_type = load_trained(load(TASK), home / "big"), load(TASK)
    with torch.no_grad():
        model.classifier.bias[0] = -100.0
    model.save_pretrained(home / "small")
    for file in (home / "big").iterdir():
        if not (home / "small" / file.name).exists():
            shutil.copy(file, home / "small" / file.name)
    assert load_tokenizer(home / "small") and task_type
    common = {"task": TASK, "split": "validation", "max_length": 64, "batch_size": 16, "mixed_precision": "no"}
    folders: dict[str, Path] = {}
    for name in ("small", "big"):
        inputs = {"model": home / name, "tokenizer": home / name, "data": home / "data"}
        run(predict_champion, home / f"of-{name}", inputs, **common, champion=name)
        folders[name] = home / f"of-{name}" / OUTPUT
    inputs = {
        **{"model": home / "small", "tokenizer": home / "small", "data": home / "data"},
        **{"teacher_model": home / "big", "teacher_tokenizer": home / "big"},
        **{"predictions": folders["small"], "teacher": folders["big"]},
    }
    settings = {
        **common,
        **{"metrics": ["accuracy"], "figure": "accuracy", "shown": ["accuracy", "f1"], "less_is_better": []},
        **{"margin": 0.0, "confidence": 0.95, "champion": "big/1", "teacher_max_length": 64},
        "teacher": {"task": TASK, "options": {}},
    }
    return ComparedTeacher.model_validate(run(compare_teacher, home / "compared", inputs, **settings))


def test_both_have_their_metrics_size_and_speed(found: ComparedTeacher) -> None:
    assert found.student.parameters == found.teacher.parameters > 10_000
    assert found.student.bytes > 4 * found.student.parameters and found.student.rows_per_second > 0
    assert [*found.figures] == ["accuracy", "f1"]
    assert found.comparison.rows == 60 and found.comparison.champion == "big/1"
    assert found.figures["accuracy"] == (found.comparison.value, found.comparison.champion_value)


def test_the_table_has_a_row_for_each_and_the_sentence_a_bound(found: ComparedTeacher) -> None:
    table = tabulate_teacher(found)
    assert [row["model"] for row in table] == ["this model", "teacher big/1"]
    assert {"validation.accuracy", "validation.f1", "parameters", "size", "rows/s"} < {*table[0]}
    assert "than its teacher on the same 60 rows of validation; at 95% confidence" in describe_teacher(found)
    assert "of big/1" in summarize_teacher(found)
