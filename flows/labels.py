"""The flow `labels`: the training rows whose labels are probably wrong, by models that have not seen them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.callers import EXPECTED, WORKER, Caller, fail
from flows.reports.result import build_result
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.results import Artifact
from tasks.prefect import events
from tasks.prefect.prefect_artifacts import PrefectProgress
from tasks.registry.lineage import find_record
from tasks.reports.label_reports import describe_suspects
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.labels import (
    find_out_of_fold,
    list_labels,
    log_labels,
    require_new,
    save_review,
)
from tasks.stages.load_labelled import find_other_labels, load_labelled
from tasks.tracking.outbox import running


@flow(name="labels", flow_run_name="labels of {model}")
def labels(model: str, out: str = "", against: str = "", against_label: str = "") -> dict[str, Any] | State[Any]:
    """Lists the training rows whose labels are probably wrong, and writes a file to decide about them.

    Args:
        model: NAME/VERSION or NAME@ALIAS of a registered version, or a recipe's name for its last run.
        out: The file to write; by default RECIPE-labels.csv in the working directory.
        against: Files of rows with labels of another source, read as the recipe reads its own.
        against_label: Their column of labels, if it is another one than the recipe's.
    """
    return run_labels(WORKER, model, out, against, against_label)


def run_labels(caller: Caller, model: str, out: str, against: str, against_label: str) -> dict[str, Any] | State[Any]:
    """Runs the flow `labels` for a caller."""
    run, progress = str(flow_run.get_id()), PrefectProgress()
    executor: Executor | None = None
    error: Exception | None = None
    report: dict[str, Any] | None = None
    with events.emit_heartbeats(run), in_use(), running(run):
        try:
            found = find_out_of_fold(find_record(model), model)
            file = Path(out or f"{found.recipe.name}-labels.csv")
            require_new(file)
            executor = Executor(found.recipe.name, run, (progress, *caller.listeners), remote=open_remote())
            other: Artifact | None = None
            if against:
                files = find_other_labels(found.recipe, against, against_label or None)
                other = executor(load_labelled, found.recipe, found.data, files)
            listed: Artifact = executor(list_labels, found.recipe, found.data, found.predictions, other)
            save_review(found.recipe, listed, file)
            report = {"recipe": found.recipe.name, "file": str(file), **listed.result.model_dump(mode="json")}
            if found.mlflow_run is not None:
                executor(log_labels, listed, found.mlflow_run)
            for line in describe_suspects(report):
                get_run_logger().info(line)
        except EXPECTED as caught:
            error = caught
        rows = executor.rows if executor else []
        warnings = executor.end_uploads(wait=True) if executor else []
        progress.end()
        result = build_result("failed" if error else "completed", rows, flow_run_id=run, error=error, where="labels")
        result |= {"labels": report, "warnings": warnings}
        caller.send(result)
        return result if error is None else fail(error)
