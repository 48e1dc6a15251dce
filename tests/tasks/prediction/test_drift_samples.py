"""The rows of a batch prediction that are new for a drift report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.prediction.drift_samples import ComparedShard, NewRows, Sample
from tasks.prediction.input_rows import Shard
from training.data.prediction_rows import Rows, digest_inputs
from training.data.row_problems import RowProblem
from training.evaluation.drift.sampling import Reservoir


def scan(
    files: dict[str, list[list[str | None]]], compared: list[ComparedShard] | None, stored: tuple[str, ...] = ()
) -> NewRows:
    """The new rows of files, whose shards are lists of texts; None for a row that cannot be used. Stored are shards
    that have these first texts."""
    found = NewRows(100, compared, lambda shard: shard.digest in known)
    known = set()
    for file, shards in files.items():
        for number, texts in enumerate(shards):
            errors = [RowProblem(1, "blank_text", "has nothing") if text is None else None for text in texts]
            rows = Rows([*range(len(texts))], [None if text is None else (text,) for text in texts], errors)
            shard = Shard(file, number, len(texts), 0, digest_inputs(rows), "")
            if texts[0] in stored:
                known.add(shard.digest)
            found.add(shard, rows)
    return found


def texts_of(found: NewRows) -> list[str | None]:
    return sorted((values[0] if values else None for values in found.draw().rows), key=str)


def through_json(shards: list[ComparedShard]) -> list[ComparedShard]:
    return [ComparedShard(*shard) for shard in json.loads(json.dumps(shards))]


def test_appended_rows_and_other_files_are_new_and_the_rows_before_them_are_not() -> None:
    first = scan({"a.csv": [["1", "2"], ["3", None]], "b.csv": [["x", "y"]]}, None)
    assert first.total == 6 and list(first.files) == ["a.csv", "b.csv"]
    compared = through_json(first.all)
    again = scan({"a.csv": [["1", "2"], ["3", None]], "b.csv": [["x", "y"]]}, compared)
    assert again.total == 0 and not again.files
    grown = scan({"a.csv": [["1", "2"], ["3", None, "4", "5"], ["6"]], "b.csv": [["x", "y"]]}, compared)
    assert texts_of(grown) == ["4", "5", "6"] and list(grown.files) == ["a.csv"]
    moved = scan({"c.csv": [["x", "y"], ["z"]]}, compared)
    assert texts_of(moved) == ["z"]


def test_a_file_that_was_written_anew_is_new_as_a_whole() -> None:
    compared = scan({"a.csv": [["1", "2"]]}, None).all
    assert texts_of(scan({"a.csv": [["1", "other", "3"]]}, compared)) == ["1", "3", "other"]
    assert texts_of(scan({"a.csv": [["1"]]}, compared)) == ["1"]


def test_rows_of_runs_that_compared_nothing_stay_new() -> None:
    """Such as too few rows for a report, or a killed run."""
    compared = scan({"a.csv": [["1", "2"]]}, None).all
    few = scan({"a.csv": [["1", "2", "3"]]}, compared)
    assert few.total == 1
    next_night = scan({"a.csv": [["1", "2", "3", "4"]]}, through_json(few.before))
    assert texts_of(next_night) == ["3", "4"]


def test_without_a_record_rows_that_were_predicted_before_are_not_new() -> None:
    assert texts_of(scan({"a.csv": [["1", "2"]], "b.csv": [["x"]]}, None, stored=("1",))) == ["x"]
    # With one, another version may have predicted nothing, and the rows are old all the same.
    assert texts_of(scan({"a.csv": [["1"]], "b.csv": [["x"]]}, [], stored=("1",))) == ["1", "x"]


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_a_sample_does_not_depend_on_how_the_rows_are_divided(part: int) -> None:
    whole, divided = Reservoir[int](20), Reservoir[int](20)
    whole.add(range(300))
    for start in range(0, 300, part):
        divided.add(range(start, min(300, start + part)))
    sample = divided.draw()
    assert sample == whole.draw() and divided.total == 300
    assert len(set(sample)) == 20 and max(sample) > 100 and sample != sorted(sample)


def test_each_row_is_drawn_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from training.evaluation.drift import sampling

    drawn = []
    for seed in range(400):
        monkeypatch.setattr(sampling, "SEED", seed)
        reservoir = Reservoir[int](10)
        reservoir.add(range(30))
        reservoir.add(range(30, 40))
        drawn += reservoir.draw()
    counts = [drawn.count(row) for row in range(40)]
    assert sum(counts) == 4000 and min(counts) > 65 and max(counts) < 140  # 100 each, with a deviation of 9


def test_a_sample_is_named_by_its_rows(tmp_path: Path) -> None:
    one, other = Sample([("a", 1.5), None], 9), Sample([("a", 1.5)], 9)
    assert one.digest == Sample([("a", 1.5), None], 9).digest != other.digest
    one.write(tmp_path / "sample.jsonl")
    assert (tmp_path / "sample.jsonl").read_text() == '["a",1.5]\nnull\n'
