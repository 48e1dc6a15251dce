"""The training of a fold: as if its rows had never been in the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow, write_arrow
from tests.raised import raised_problems
from tests.training import programs_here, tiny
from tests.training.forks import curve, finish, weights
from tests.training.programs_here import PREDICT
from training.batching.batches import rows_of_fold
from training.data import folds
from training.jobs.protocol import Job
from training.programs import predict


def write_folds(folder: Path, of_row: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folds.write(np.array(of_row, np.int32), folder / "folds.arrow")
    return folder


@pytest.mark.slow
def test_a_fold_ends_with_the_bytes_of_a_training_on_a_file_without_its_rows(world: Path, tmp_path: Path) -> None:
    tokens = read_arrow(world / "tokens/train.arrow")
    of_row = np.random.default_rng(0).integers(1, 4, len(tokens))
    given = write_folds(tmp_path / "folds", of_row.tolist())
    for name, mask in {"without": of_row != 2, "held": of_row == 2}.items():
        write_arrow(world / name / "train.arrow", tokens.filter(pa.array(mask)))
        shutil.copy(world / "tokens/validation.arrow", world / name)

    alone = tiny.fit_job(world, tmp_path / "alone", tokens="without")
    fold = tiny.fit_job(world, tmp_path / "fold", settings={"fold": 2})
    job = Job.read(fold)
    job.model_copy(update={"inputs": {**job.inputs, "folds": str(given)}}).write(fold)
    assert finish(alone).state == finish(fold).state == "finished"
    assert weights(fold) == weights(alone) and curve(fold) == curve(alone)

    common = {**PREDICT, "task": "sequence-classification", "splits": ["train"]}
    inputs = {"model": fold / "output/model", "tokens": world / "tokens", "folds": given}
    programs_here.run(predict, tmp_path / "a", inputs, **common, fold=2)
    programs_here.run(predict, tmp_path / "b", {**inputs, "tokens": world / "held"}, **common)
    found, expected = (pq.read_table(tmp_path / name / "output/train.parquet") for name in "ab")
    assert found["row"].to_pylist() == np.flatnonzero(of_row == 2).tolist()
    assert found.drop_columns("row") == expected.drop_columns("row")


def windows(file: Path) -> Path:
    """Token rows of three rows of the data, the first and the last with two windows each."""
    columns = {
        "input_ids": pa.array([[1, 2], [3], [4, 5], [6], [7, 8]], pa.list_(pa.int32())),
        "length": pa.array([2, 1, 2, 1, 2], pa.int32()),
        "row": pa.array([0, 0, 1, 2, 2], pa.int64()),
    }
    return write_arrow(file, pa.table(columns))


def test_the_windows_of_a_row_are_in_its_fold(tmp_path: Path) -> None:
    file, given = windows(tmp_path / "train.arrow"), write_folds(tmp_path, [1, 2, 1]) / "folds.arrow"
    held, others = (rows_of_fold(file, given, 1, held_out=one) for one in (True, False))
    assert [row["input_ids"].tolist() for row in map(held.__getitem__, range(len(held)))] == [[1, 2], [3], [6], [7, 8]]
    assert held.tokens.tolist() == [3, 3] and held.table["row"].to_pylist() == [0, 0, 1, 1]
    assert [others[0]["input_ids"].tolist(), others.tokens.tolist()] == [[4, 5], [2]]


def test_the_rows_of_a_fold_are_read_from_the_file_without_a_copy_of_tokens_or_pixels(tmp_path: Path) -> None:
    pixels = pa.array([[row] * 100_000 for row in range(6)], pa.list_(pa.uint8()))
    columns = {"pixel_values": pixels, "length": pa.array([1] * 6, pa.int32()), "label": pa.array(range(6))}
    file, given = write_arrow(tmp_path / "train.arrow", pa.table(columns)), write_folds(tmp_path, [1, 2, 1, 2, 1, 2])
    before = pa.total_allocated_bytes()
    held = rows_of_fold(file, given / "folds.arrow", 2, held_out=True)
    rows = [held[place] for place in range(3)]
    assert [(row["pixel_values"][-1], row["label"]) for row in rows] == [(1, 1), (3, 3), (5, 5)]
    assert held.with_labels(pa.table({"predicted": [0, 0, 0]}))["label"].to_pylist() == [1, 3, 5]
    assert pa.total_allocated_bytes() - before < 100_000


def test_packed_rows_are_refused(tmp_path: Path) -> None:
    file, given = windows(tmp_path / "train.arrow"), write_folds(tmp_path, [1, 2, 1, 2]) / "folds.arrow"
    (problem,) = raised_problems(rows_of_fold, file, given, 1, held_out=True)
    assert problem.where == "evaluation.folds" and "hold several rows" in problem.message
