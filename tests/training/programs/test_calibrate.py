"""The calibration of stored predictions: its file, its measures on rows that it has not seen, and records by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.abstention.regimes import Population, many_labels_a_row, one_label
from tests.arrow import write_arrow
from tests.training import programs_here
from tests.training.programs_here import warnings_of
from tests.training.tiny import write_predictions
from training import task_types
from training.evaluation.calibration import calibration_error
from training.evaluation.stored_calibration import Calibration
from training.problems import UserError
from training.programs import calibrate
from training.task_types.multi_label_classification import _table as many_labels_table

ONE, MANY = "sequence-classification", "multi-label-classification"
ABSTAIN = {"max_error": 0.05, "confidence": 0.95}
ROWS = {"validation": range(1_500), "test": range(1_500, 3_500)}


def write_split(file: Path, population: Population, rows: range) -> None:
    """Predictions as training.programs.predict stores them."""
    logits, truth = population.logits[rows].astype(np.float32), population.truth[rows]
    if truth.ndim == 1:
        return write_predictions(file, truth, logits, np.ones(len(truth), np.int64))
    found = many_labels_table(logits, [0.4] * logits.shape[1])
    labels = pa.array([np.flatnonzero(row).tolist() for row in truth], pa.list_(pa.int64()))
    table = pa.Table.from_batches([found]).add_column(0, "label", labels)
    pq.write_table(table.replace_schema_metadata(found.schema.metadata), file)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Overconfident predictions, by task."""
    found = {}
    for task, draw in ((ONE, one_label(scale=3.0)), (MANY, many_labels_a_row)):
        folder, population = tmp_path_factory.mktemp("predictions"), draw(np.random.default_rng(1))
        for split, rows in ROWS.items():
            write_split(folder / f"{split}.parquet", population, rows)
        (folder / "labels.json").write_text(json.dumps([f"l{place}" for place in range(population.logits.shape[1])]))
        found[task] = {"predictions": folder, "data": folder}
    return found


def run(given: dict[str, Path], job_dir: Path, task: str, **more: Any) -> tuple[dict[str, Any], Calibration]:
    settings = {"task": task, "measured": True, "abstain": None, "prediction_sets": None, **more}
    result = programs_here.run(calibrate, job_dir, given, **settings)
    return result, Calibration.read(job_dir / "output")


def stored(given: dict[str, Path], split: str = "test") -> pa.Table:
    return pq.read_table(given["predictions"] / f"{split}.parquet")


@pytest.mark.parametrize("task", [ONE, MANY])
def test_the_error_is_measured_on_rows_that_the_temperature_has_not_seen(
    inputs: dict[str, dict[str, Path]], tmp_path: Path, task: str
) -> None:
    result, calibration = run(inputs[task], tmp_path, task)
    assert result["test_rows"] == 2_000 and result["validation_rows"] == 1_500
    assert result["calibration_error"] < 0.02 < result["calibration_error_before"]
    table = stored(inputs[task])
    given = calibration.probabilities(np.array(table["logits"].to_pylist()))
    if task == ONE:
        right = given.argmax(axis=1) == table["label"].to_numpy()
        assert result["calibration_error"] == pytest.approx(calibration_error(given.max(axis=1), right))
    pictures = sorted(file.name for file in (tmp_path / "output/log").iterdir())
    assert pictures == ["calibrated_test.png", "risk_coverage_test.png"]


@pytest.mark.parametrize("task", [ONE, MANY])
def test_records_have_calibrated_probabilities_the_same_labels_and_their_review(
    inputs: dict[str, dict[str, Path]], tmp_path: Path, task: str
) -> None:
    sets = {"prediction_sets": 0.9} if task == ONE else {}
    result, calibration = run(inputs[task], tmp_path, task, abstain=ABSTAIN, **sets)
    task_type, table = task_types.load(task), stored(inputs[task])
    records, plain = calibration.to_records(task_type, table), task_type.to_records(table, calibration.labels)
    name = "label" if task == ONE else "labels"
    assert [record[name] for record in records] == [record[name] for record in plain]
    given = calibration.probabilities(np.array(table["logits"].to_pylist()))
    assert [list(record["probabilities"].values()) for record in records] == pytest.approx(given, abs=1e-9)
    answered = np.array([not record["review"] for record in records])
    assert answered.mean() == pytest.approx(result["answered"]["share"])
    assert result["answered"]["error"] < 0.05
    assert pa.Table.from_pylist(records, pa.schema(list(calibration.record_types(task_type).items()))).num_rows == 2_000
    if task == ONE:
        labels = table["label"].to_pylist()
        covered = [
            calibration.labels[label] in record["label_set"] for label, record in zip(labels, records, strict=True)
        ]
        assert 0.89 < np.mean(covered) < 0.92
        assert all(record["label"] == record["label_set"][0] for record in records)


def test_probabilities_without_a_scale_are_those_of_the_task_type(inputs: dict[str, dict[str, Path]]) -> None:
    for task, function in ((ONE, "softmax"), (MANY, "sigmoid")):
        table, labels = stored(inputs[task]), json.loads((inputs[task]["data"] / "labels.json").read_text())
        plain = Calibration(function=function, labels=labels, scale=[1.0], offset=[0.0])  # type: ignore[arg-type]
        task_type = task_types.load(task)
        expected = task_type.metric_inputs(table, labels).probabilities  # type: ignore[attr-defined]
        assert plain.probabilities(np.array(table["logits"].to_pylist())) == pytest.approx(expected, abs=1e-12)


def test_without_a_test_split_nothing_is_measured_and_a_warning_says_so(
    inputs: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    result, calibration = run(inputs[ONE], tmp_path, ONE, measured=False)
    assert result["calibration_error"] is None and result["test_rows"] is None
    assert calibration.scale[0] == pytest.approx(1 / 3, rel=0.1)
    (warning,) = warnings_of(tmp_path)
    assert "the calibration is not measured" in warning and "data.test_size" in warning


def test_a_bound_that_no_threshold_keeps_leaves_every_row_to_a_person_and_a_warning_says_so(
    inputs: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    result, calibration = run(inputs[ONE], tmp_path, ONE, abstain={"max_error": 0.0005, "confidence": 0.95})
    assert result["answered"]["share"] == 0 and result["answered"]["error"] is None
    assert all(record["review"] for record in calibration.to_records(task_types.load(ONE), stored(inputs[ONE])))
    assert "every row is for a person" in warnings_of(tmp_path)[0]


def test_with_groups_fewer_rows_are_answered_and_sets_are_larger(
    inputs: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    settings = {"abstain": {"max_error": 0.1, "confidence": 0.95}, "prediction_sets": 0.9}
    plain, calibration = run(inputs[ONE], tmp_path / "plain", ONE, **settings)
    data = shutil.copytree(inputs[ONE]["data"], tmp_path / "data")
    for split, rows in ROWS.items():
        table = stored(inputs[ONE], split)
        given = calibration.probabilities(np.array(table["logits"].to_pylist()))
        alike = np.argsort(np.argsort(given[np.arange(len(rows)), table["label"].to_numpy()])) // 10
        write_arrow(data / f"{split}.groups.arrow", pa.table({"group": alike}))
    found, _ = run(inputs[ONE] | {"data": data}, tmp_path / "groups", ONE, **settings)
    assert 0 < found["answered"]["share"] < plain["answered"]["share"]
    assert found["mean_set_size"] > plain["mean_set_size"]
    assert found["calibration_error"] == plain["calibration_error"]
    for split, rows in ROWS.items():
        write_arrow(data / f"{split}.groups.arrow", pa.table({"group": np.arange(len(rows)) // 500}))
    found, _ = run(inputs[ONE] | {"data": data}, tmp_path / "few", ONE, **settings)
    assert found["answered"]["share"] == 0
    assert "every row is for a person" in (warning := warnings_of(tmp_path / "few")[0])
    assert "Bring more groups to test" in warning


def test_predictions_without_logits_are_refused_by_the_field(
    tmp_path: Path, inputs: dict[str, dict[str, Path]]
) -> None:
    for split in ROWS:
        pq.write_table(stored(inputs[ONE], split).rename_columns({"logits": "scores"}), tmp_path / f"{split}.parquet")
    (tmp_path / "labels.json").write_text(json.dumps(["l0", "l1", "l2", "l3"]))
    with pytest.raises(UserError, match=r"release\.calibrate: needs predictions with a column `logits`"):
        run({"predictions": tmp_path, "data": tmp_path}, tmp_path / "job", ONE)
