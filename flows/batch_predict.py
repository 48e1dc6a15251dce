"""The flow `batch_predict`: predictions of a registered model for the rows of files."""

import time
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.batch_plan import PreparedBatch, history_name, history_of, prepare
from flows.callers import EXPECTED, WORKER, Caller, fail
from flows.drift import announce_drift, run_drift_stages
from flows.reports.batch_prediction_report import Shards, build_result, count, describe
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.remote import Remote
from tasks.cache.stage import Listener
from tasks.home import home
from tasks.jobs.engines import engine_of
from tasks.prediction.drift_samples import Monitoring
from tasks.prediction.input_rows import require_few_errors
from tasks.prediction.output import open_output
from tasks.prediction.shard_job import FIELDS, PREDICTIONS, ShardPredictor, remember_rate, require_engine
from tasks.prefect import events
from tasks.prefect.prefect_artifacts import PrefectProgress
from tasks.registry.monitored_versions import find_rows
from tasks.reports.formatting import format_count
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.predict_shard import predict_shard
from tasks.tracking.outbox import running
from training.problems import full_disk, renamed
from training.recipe import BatchPrediction, parse_batch_prediction


def flow_run_name() -> str:
    """Prefect calls this at the start of a run, before it validates the parameters."""
    prediction = flow_run.get_parameters().get("prediction")
    values = prediction.model_dump() if isinstance(prediction, BatchPrediction) else prediction or {}
    return f"{values.get('model', '?')} · {values.get('output', '?')}"


@flow(name="batch-predict", flow_run_name=flow_run_name)
def batch_predict(prediction: BatchPrediction, reason: str | None = None) -> dict[str, Any] | State[Any]:
    """Predicts the rows of files by a registered model. Shards that were predicted before are not predicted again. Then
    the new rows are compared with the version's validation rows, and the event `finetune.drift` has the verdict.

    Args:
        prediction: The model, the rows, and the place of the predictions.
        reason: Why this run was started; shown in Prefect.
    """
    return run_batch_prediction(WORKER, prediction, reason)


def run_batch_prediction(
    caller: Caller, prediction: BatchPrediction, reason: str | None
) -> dict[str, Any] | State[Any]:
    """Runs the flow `batch-predict` for a caller."""
    run, began_s = str(flow_run.get_id()), time.time()
    with events.emit_heartbeats(run), in_use(), running(run):
        if reason:
            get_run_logger().info(f"Started because of {reason}")
        remote, progress = open_remote(), PrefectProgress()
        shards = Shards((progress, *caller.listeners))
        prepared, error, drift, review, warnings = None, None, None, None, list[str]()
        try:
            remote.deliver_earlier()
            checked = parse_batch_prediction(prediction.model_dump(exclude_unset=True))
            require_engine(checked)
            prepared = prepare(checked, remote, shards)
            require_few_errors(prepared.scan, prepared.prediction.max_error_rate)
            _remember_earlier_rows(prepared)
            review = _predict(prepared, run, remote, shards)
            shards.end()
            drift, warnings = _compare_new_rows(prepared, run, remote, (progress, *caller.listeners))
        except BaseException as raised:  # what ended the run is part of its result
            error = full_disk(home(), raised) or raised
        shards.end(failed=error is not None)
        warnings += [*prepared.scan.warnings(), *prepared.files.warnings()] if prepared else []
        result = build_result(run, prepared, began_s, error, review) | {"drift": drift}
        result["warnings"] = [*warnings, *remote.end_run(wait=result["state"] != "interrupted")]
        progress.end()
        for warning in result["warnings"]:
            get_run_logger().warning(warning)
        caller.send(result)
        if error is not None:
            return fail(error)
        verdict = f" (drift: {drift['verdict']})" if drift else ""
        return Completed(message=describe(result)[0] + verdict, data=result)


def _predict(prepared: PreparedBatch, run: str, remote: Remote, shards: Shards) -> int | None:
    """Builds all shards that the output lacks: predictions from the store or the program, rows from the files. Returns
    the rows of the output that are for a person; None if the version marks none."""
    prediction, model, scan = prepared.prediction, prepared.model, prepared.scan
    executor = Executor(history_name(prediction), run, (shards,), remote=remote)
    engine = engine_of(prediction.cluster, prediction.cluster_address)
    with (
        renamed(FIELDS),
        engine.keep_open(several=prediction.processes != 1),
        open_output(prediction, model, scan, prepared.keys) as output,
        ShardPredictor(
            model,
            prediction.batch_size,
            prepared.files.shard_rows,
            prepared.new,
            shards,
            processes=prediction.processes,
            engine=engine,
        ) as predictor,
    ):
        for shard, rows in prepared.files.read(scan.shards, output.lacks):
            found = executor(predict_shard, model, prediction.batch_size, shard, predictor)
            table = pq.read_table(found.path / PREDICTIONS)
            output.write(shard, rows(), table, found.result.predicted_at_s)
        output.finish(count(prepared, output.review))
        review = output.review
        if rate := predictor.rows_per_second:
            remember_rate(model, rate)
    stages = [{"name": predict_shard.name, "key": key} for key in prepared.keys.values()]
    history_of(prediction).remember_completed({"stages": stages})  # so that garbage collection keeps them
    return review


def _remember_earlier_rows(prepared: PreparedBatch) -> None:
    """Remembers the rows that are not new. Call it before anything is predicted. Rows count as compared only
    after the report is stored, so a killed run compares them again, and so does one with too few rows."""
    if isinstance(prepared.monitoring, Monitoring):
        history_of(prepared.prediction).remember_compared(prepared.monitoring.new_rows.before)


def _compare_new_rows(
    prepared: PreparedBatch, run: str, remote: Remote, listeners: Sequence[Listener]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Runs the stages of the report, emits its event, and remembers the rows that it compared.

    Returns the report and warnings. The report has a `reason` if nothing was compared, and is None if nothing was to
    be. Its failure is a warning, since the predictions are complete; the rows are new in the next run too.
    """
    monitoring = prepared.monitoring
    if not isinstance(monitoring, Monitoring):
        return _undecided(monitoring, 0) if monitoring else None, []
    version, section, new = monitoring.version, monitoring.section, monitoring.new_rows
    if prepared.scan.unfiltered:
        reason = f"the training rows were filtered, and these rows are not: {prepared.scan.unfiltered[0]}. Set "
        return _undecided(f"{reason}data.filter to null, or to a condition on columns that they have", new.total), []
    at_least = f"at least {section.min_rows:,} are needed (release.drift.min_rows)"
    if not new.total:
        return _undecided("no rows are new", 0), []
    if new.total < section.min_rows:
        rows = f"{format_count(new.total, 'row')} wait for more"
        return _undecided(f"{rows}: {at_least}", new.total), []
    try:
        reference = find_rows(version).result.rows.get(version.split, section.min_rows)
        if reference < section.min_rows:
            split = f"{version.pinned} has {format_count(reference, f'{version.split} row')}"
            return _undecided(f"{split}: {at_least}", new.total), []
        executor = Executor(history_name(prepared.prediction), run, listeners, remote=remote)
        report = run_drift_stages(executor, version, section, new.draw(), list(new.files))
    except EXPECTED as error:
        return _undecided(str(error), new.total), [f"The new rows were not compared (drift): {error}"]
    announce_drift(version, report, prepared.prediction.input)
    history_of(prepared.prediction).remember_compared(new.all)
    return report, []


def _undecided(reason: str, rows: int) -> dict[str, Any]:
    return {"verdict": "undecided", "reason": reason, "rows": {"new": rows}}
