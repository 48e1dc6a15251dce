"""The evaluation of a version on later rows, from stored predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from tests.arrow import write_arrow
from tests.training import programs_here, tiny
from tests.training.programs_here import folders
from training.programs import evaluate

pytestmark = pytest.mark.slow

ROWS, SIZE = 400, 10
SETTINGS: dict[str, Any] = {
    **{"task": "sequence-classification", "metrics": ["accuracy"], "slices": ["label"], "fewest_rows": 10},
    **{"most_groups": 50, "columns": ["text"], "split": "validation", "calibration": None},
}


def write(folder: Path, data: Path, split: str, right: npt.NDArray[np.bool_], name: str, groups: str | None) -> None:
    """Predictions, of which some are `right`, and their rows in groups of SIZE rows."""
    labels = np.arange(ROWS) % 2
    logits = np.eye(2, dtype=np.float32)[np.where(right, labels, 1 - labels)]
    folder.mkdir(parents=True)
    tiny.write_predictions(folder / f"{split}.parquet", labels, logits, np.ones(ROWS, np.int32))
    write_arrow(data / f"{split}.arrow", pa.table({"text": [f"{name} {n}" for n in range(ROWS)], "label": labels}))
    (data / "labels.json").write_text('["neg", "pos"]')
    if groups is not None:
        hashes = np.arange(ROWS, dtype=np.uint64) // SIZE + {"old": 0, "new": ROWS}[groups]
        write_arrow(data / f"{split}.groups.arrow", pa.table({"group": hashes}))


def run(home: Path, *, same: bool, groups: bool) -> dict[str, Any]:
    """The result for later rows, of which whole groups are right or wrong: those that were judged, or others."""
    random = np.random.default_rng(0)
    now, then = (np.repeat(random.random(ROWS // SIZE) < 0.8, SIZE) for _ in range(2))
    name = "old" if same else "new"
    write(home / "predictions", home / "data", "test", then if same else now, name, name if groups else None)
    write(home / "expected", home / "expected_data", "validation", then, "old", "old" if groups else None)
    expected = {"accuracy": {"value": float(then.mean())}}
    inputs = folders(home, "predictions", "data", "expected", "expected_data")
    return programs_here.run(evaluate, home / "job", inputs, **SETTINGS, expected=expected)


def width(score: dict[str, float]) -> float:
    return score["high"] - score["low"]


def test_intervals_of_later_rows_in_groups_and_of_their_difference_are_those_of_so_many_groups(tmp_path: Path) -> None:
    rows, groups = (run(tmp_path / name, same=False, groups=name == "groups") for name in ("rows", "groups"))
    assert (rows["groups"], groups["groups"]) == (None, ROWS // SIZE)
    for figures in ("metrics", "differences"):
        plain, grouped = rows[figures]["accuracy"], groups[figures]["accuracy"]
        assert plain["value"] == grouped["value"]
        assert width(grouped) == pytest.approx(np.sqrt(SIZE) * width(plain), rel=0.2)
    slices = [json.loads((tmp_path / name / "job/output/evaluation.json").read_text()) for name in ("rows", "groups")]
    first, second = (found["slices"]["label"][0]["metrics"]["accuracy"] for found in slices)
    assert width(second) > 1.5 * width(first)


@pytest.mark.parametrize("groups", [False, True])
def test_rows_that_were_judged_have_no_difference_with_groups_and_without(tmp_path: Path, groups: bool) -> None:
    found = run(tmp_path, same=True, groups=groups)
    assert found["shared_rows"] == ROWS
    assert found["differences"]["accuracy"] == {"value": 0.0, "low": 0.0, "high": 0.0}
