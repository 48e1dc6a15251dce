"""The pictures of a report: there, whole, and of any labels."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.data.ipc_files import Spread
from training.evaluation.plots import draw_rows, draw_scores, draw_tokens
from training.evaluation.predictions import OneLabel

PNG = b"\x89PNG\r\n\x1a\n"


def lengths(*numbers: int) -> dict[str, Any]:
    """As the reports of rows and of tokens write them."""
    spread = Spread()
    spread.add(np.array(numbers, np.int64))
    return spread.summary() | {"histogram": spread.histogram()}


def drawn(folder: Path) -> list[str]:
    assert all(path.read_bytes().startswith(PNG) for path in folder.iterdir())
    return sorted(path.name for path in folder.iterdir())


def warned(recorder: pytest.WarningsRecorder) -> list[str]:
    return [f"{warning.filename}: {warning.message}" for warning in recorder.list]


def test_rows_are_drawn_whatever_their_labels_are_called(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["$\\frac{$", "日本語", "a\nb", "", *(f"label {n}" for n in range(40))]
    report = {
        "characters": {"train": lengths(3, 5, 5, 900), "validation": lengths(7), "test": lengths()},
        "labels": {
            "train": {name: place for place, name in enumerate(names)},
            "validation": dict.fromkeys(names, 1),
            "test": dict.fromkeys(names, 0),
        },
    }
    draw_rows(report, tmp_path / "log")
    assert drawn(tmp_path / "log") == ["labels.png", "lengths.png"]
    assert warned(recwarn) == [] and capsys.readouterr().err == ""


def test_tokens_are_drawn_with_what_is_cut(tmp_path: Path) -> None:
    report = {
        "rows": {"train": 3, "validation": 1},
        "truncated": {"train": 2, "validation": 0},
        "length": {"train": lengths(5, 32, 32), "validation": lengths(9)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_tokens(report, 32, tmp_path)
    assert drawn(tmp_path) == ["lengths.png"]


def test_where_there_are_no_rows_nothing_is_drawn(tmp_path: Path) -> None:
    draw_rows({"characters": {"train": lengths()}, "labels": {"train": {"a": 0}}}, tmp_path)
    draw_tokens({"rows": {"train": 0}, "truncated": {"train": 0}, "length": {"train": lengths()}}, 8, tmp_path)
    assert drawn(tmp_path) == []


def test_a_few_far_longer_texts_leave_the_others_their_bars(tmp_path: Path) -> None:
    statistics = lengths(*range(100, 600), 90_000, 95_000)
    edges, counts = statistics["histogram"]["edges"], statistics["histogram"]["counts"]
    assert (edges[0], edges[-2:], counts[-1], sum(counts)) == (100, [600, 95_001], 2, 502)
    assert len(counts) == 40
    draw_rows({"characters": {"train": statistics}, "labels": {"train": {"a": 502}}}, tmp_path)
    assert drawn(tmp_path) == ["labels.png", "lengths.png"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels", [["no", "$\\frac{$"], ["a", "日本語", "", *(f"label {n}" for n in range(9))]], ids=len
)
def test_scores_are_drawn_whatever_the_labels_and_where_one_is_missing(
    tmp_path: Path, labels: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(len(labels)), 30)
    references = np.arange(30) % (len(labels) - 1)
    predicted = OneLabel(references, probabilities.argmax(axis=1), probabilities, labels)
    draw_scores(predicted, "test", tmp_path)
    assert drawn(tmp_path) == ["calibration_test.png", "confusion_test.png", "precision_recall_test.png"]
    lost = OneLabel(references, references, probabilities * np.nan, labels)
    draw_scores(lost, "lost", tmp_path)
    assert len(drawn(tmp_path)) == 4 and warned(recwarn) == []
