"""Registered versions that are measured later: refusals by name, and what the registry keeps of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.cache.results import Artifact, PinnedVersion
from tasks.cache.stage import Work
from tasks.jobs.job import job_of
from tasks.registry.monitored_versions import (
    MonitoredVersion,
    read_drift_section,
    read_evaluations,
    require_no_reference,
    require_single_inputs,
)
from tasks.stages.evaluate import predict_labelled, record_evaluation
from tasks.tracking.connection import connect
from tests.made import KEY
from tests.tasks.stages.test_register import RECIPE
from training.problems import UserError
from training.programs.evaluate import EvaluateResult


def version(task: str, **options: Any) -> MonitoredVersion:
    pinned = PinnedVersion(name="small", version="3", model="weights", max_length=64)
    nothing: dict[str, Any] = {"columns": {}, "expected": {}, "predict": None, "mlflow_run": None}
    place = {"recipe": "small", "split": "test", "load_data": "key"}
    return MonitoredVersion(pinned=pinned, task=task, options=options, **nothing, **place)


@pytest.mark.parametrize("task", ["preference", "kto", "reward-modeling"])
def test_the_drift_of_models_that_compare_answers_is_not_measured(task: str) -> None:
    with pytest.raises(UserError, match=rf"small/3 compares answers \(task {task}\), whose drift is not measured"):
        require_single_inputs(version(task))
    require_single_inputs(version("sft"))


def test_without_the_record_of_a_version_no_other_thresholds_take_the_place_of_its_own(tracked: Path) -> None:
    client = connect()
    client.create_registered_model("small")
    for _ in range(3):
        client.create_model_version("small", "file:///nowhere")
    with pytest.raises(UserError, match=r"small/3 has no lineage\.json"):
        read_drift_section(version("sequence-classification"), {})


def test_an_evaluation_names_its_files_without_the_signatures_of_their_urls(
    tracked: Path,
) -> None:
    client = connect()
    client.create_registered_model("small")
    for _ in range(3):
        client.create_model_version("small", "file:///nowhere")
    files = ["/rows/march.csv", "https://host/april.csv?X-Amz-Signature=secret"]
    labelled = Artifact(stage="load_labelled", key=KEY, digest="d", parts={"test.arrow": "d" * 40})
    result = EvaluateResult(rows=2, groups=None, shared_rows=None, metrics={}, differences={})
    evaluated = Artifact(stage="evaluate", key=KEY, digest="d", result=result)
    recorded = version("sequence-classification"), RECIPE, labelled, evaluated, files
    record_evaluation.make(Work(KEY, Path(), "run"), *recorded)
    (entry,) = read_evaluations(client.get_model_version("small", "3"))
    assert entry.files == ["march.csv", "april.csv"]


def test_rows_with_labels_are_predicted_in_smaller_batches_if_memory_runs_out(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    labelled = Artifact(stage="load_labelled", key=KEY, digest="d", parts={"test.arrow": "d" * 40})
    job = job_of(predict_labelled, version("sequence-classification"), RECIPE, labelled)
    assert job.batches is not None
    assert job.batches(tmp_path).rows == RECIPE.training.per_device_eval_batch_size


def test_figures_relative_to_a_base_model_are_not_computed_for_new_rows() -> None:
    for one in (version("preference"), version("kto")):
        with pytest.raises(UserError, match=r"metrics of small/3 are relative to its base model"):
            require_no_reference(one)
    for one in (version("preference", loss="orpo"), version("reward-modeling"), version("sft")):
        require_no_reference(one)
