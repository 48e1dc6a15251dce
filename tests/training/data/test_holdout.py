"""Rows that are held out are chosen by their text alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.arrow import read_arrow
from tests.training.data.task_types import CLASSIFICATION
from training.data.load_rows import load
from training.recipe import Data

Pair = tuple[str, str]


def texts(count: int, seed: int = 0) -> list[Pair]:
    draw = random.Random(seed)
    return [(f"row {seed} {draw.random()}", draw.choice(["a", "b", "c"])) for _ in range(count)]


def splits_of(folder: Path, rows: list[Pair], **data: object) -> dict[str, list[str]]:
    """The texts of each split, in order."""
    folder.mkdir()
    (folder / "all.jsonl").write_text("".join(json.dumps({"t": t, "y": y}) + "\n" for t, y in rows))
    recipe = Data(source="json", path="-", text=["t"], label="y", **data)  # type: ignore[arg-type]
    load(recipe, CLASSIFICATION, {"train": [str(folder / "all.jsonl")]}, folder / "out")
    return {file.stem: read_arrow(file)["text"].to_pylist() for file in (folder / "out").glob("*.arrow")}


def test_new_rows_move_no_old_row(tmp_path: Path) -> None:
    old, new = texts(2000), texts(100, seed=1)
    before = splits_of(tmp_path / "before", old, test_size=0.1)
    mixed = old + new
    random.Random(3).shuffle(mixed)
    after = splits_of(tmp_path / "after", mixed, test_size=0.1)
    known = {text for text, _ in old}
    assert {split: set(kept) & known for split, kept in after.items()} == {s: set(kept) for s, kept in before.items()}
    assert sum(map(len, after.values())) == 2100


def test_the_order_of_the_rows_does_not_change_the_split(tmp_path: Path) -> None:
    rows = texts(500)
    one, two = splits_of(tmp_path / "one", rows), splits_of(tmp_path / "two", rows[::-1])
    assert {split: kept[::-1] for split, kept in two.items()} == one


def test_equal_texts_stay_together_whatever_their_labels(tmp_path: Path) -> None:
    rows = [(f"text {n % 50}", "abc"[n % 3]) for n in range(400)]
    found = splits_of(tmp_path / "in", rows, validation_size=0.3)
    assert found["validation"] and not set(found["train"]) & set(found["validation"])
    assert len(found["train"]) + len(found["validation"]) == 400


def test_a_row_that_moves_to_another_share_moves_alone(tmp_path: Path) -> None:
    rows = texts(1000)
    small = splits_of(tmp_path / "small", rows, validation_size=0.1)
    large = splits_of(tmp_path / "large", rows, validation_size=0.2, test_size=0.1)
    assert set(small["validation"]) < set(large["validation"])
    assert 60 < len(small["validation"]) < 140 and 60 < len(large["test"]) < 140


def test_the_report_has_the_held_out_share_and_the_rows_of_each_label(tmp_path: Path) -> None:
    found = splits_of(tmp_path / "in", texts(300))
    report = json.loads((tmp_path / "in" / "out" / "log" / "report.json").read_text())
    assert report["held_out"] == {"validation": 0.1}
    assert report["rows"]["validation"] == len(found["validation"]) == sum(report["labels"]["validation"].values())
    assert set(report["labels"]["validation"]) == {"a", "b", "c"}


def test_too_few_rows_to_hold_any_out_say_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"data\.validation_size: no row of train fell into the 0\.01 of them"):
        splits_of(tmp_path / "in", texts(5), validation_size=0.01)
