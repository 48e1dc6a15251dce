"""Scores from stored predictions."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from training import predict, score
from training.protocol import Events, Job

TEXTS = ["good", "bad", 'a "quoted", split\nline', "fine"]
LOGITS = np.array([[0, 2], [3, 0], [0, 5], [1, 0]], dtype=np.float32)
TRUE = np.array([1, 0, 0, 1])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The output folder and the figures for four rows, two of them right."""
    home = tmp_path_factory.mktemp("score")
    for folder in ("predictions", "data", "job/output"):
        (home / folder).mkdir(parents=True)
    predict.write(home / "predictions/validation.parquet", TRUE, LOGITS.argmax(-1), LOGITS)
    table = pa.table({"text": TEXTS, "label": TRUE})
    with (
        pa.OSFile(str(home / "data/validation.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    settings = {
        "kind": "sequence-classification",
        "metrics": ["accuracy", "recall"],
        "labels": ["neg", "pos"],
    }
    inputs = {name: str(home / name) for name in ("predictions", "data")}
    job = Job(program="training.score", key="score", settings=settings, inputs=inputs)
    return home / "job/output", score.main(home / "job", job, Events(home / "job/events.jsonl"))


def test_metrics_are_written_with_room_for_intervals(scored: tuple[Path, dict[str, float]]) -> None:
    output, figures = scored
    value = {"value": 0.5, "low": None, "high": None}
    assert json.loads((output / "metrics.json").read_text()) == {"validation": {"accuracy": value, "recall": value}}
    assert figures == {"validation.accuracy": 0.5, "validation.recall": 0.5}


def test_sample_has_the_worst_rows_first_with_text_and_probability(
    scored: tuple[Path, dict[str, float]],
) -> None:
    with open(scored[0] / "log/predictions_sample.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["2", "3", "0", "1"]
    assert [row["text"] for row in rows] == [TEXTS[2], TEXTS[3], TEXTS[0], TEXTS[1]]
    assert (rows[0]["label"], rows[0]["prediction"]) == ("neg", "pos")
    assert float(rows[0]["probability"]) == pytest.approx(1 / (1 + np.exp(-5)), abs=1e-4)


def test_confusion_is_a_picture(scored: tuple[Path, dict[str, float]]) -> None:
    assert (scored[0] / "log/confusion_validation.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_needs_no_display_and_leaves_the_users_backend_alone() -> None:
    assert "matplotlib.pyplot" not in sys.modules
