"""The flow `batch_predict`: predictions of a registered model for the rows of files."""

import contextvars
import time
from typing import Any

import pyarrow.parquet as pq
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.batch_drift import compare_new_rows, remember_earlier_rows
from flows.batch_plan import PreparedBatch, history_name, history_of, prepare
from flows.reports.predictions import Shards, build_result, count, describe
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.remote import Remote
from tasks.cache.results import Artifact
from tasks.cache.stage import Listener
from tasks.home import home
from tasks.jobs.engines import engine_of
from tasks.jobs.launch import JobFailed
from tasks.prediction.input_rows import Shard, require_few_errors
from tasks.prediction.output import Output, open_output
from tasks.prediction.shard_job import FIELDS, PREDICTIONS, ShardPredictor, remember_rate, require_engine
from tasks.prefect import events
from tasks.prefect.artifacts import PrefectProgress
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.predict_shard import predict_shard
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.outbox import running
from training.problems import UserError, full_disk, renamed
from training.recipe import BatchPrediction, parse_batch_prediction

# Further listeners of a flow that is called in this process: the terminal of `finetune predict`.
listeners: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("listeners", default=())


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
    run, began_s = str(flow_run.get_id()), time.time()
    with events.emit_heartbeats(run), in_use(), running(run):
        if reason:
            get_run_logger().info(f"Started because of {reason}")
        remote, progress = open_remote(), PrefectProgress()
        shards = Shards((progress, *listeners.get()))
        prepared, error, drift, warnings = None, None, None, list[str]()
        try:
            remote.deliver_earlier()
            checked = parse_batch_prediction(prediction.model_dump(exclude_unset=True))
            require_engine(checked)
            prepared = prepare(checked, remote, shards)
            require_few_errors(prepared.scan, prepared.prediction.max_error_rate)
            remember_earlier_rows(prepared)
            _predict(prepared, run, remote, shards)
            shards.end()
            drift, warnings = compare_new_rows(prepared, run, remote, (progress, *listeners.get()))
        except BaseException as raised:  # what ended the run is part of its result
            error = full_disk(home(), raised) or raised
        shards.end(failed=error is not None)
        warnings += [*prepared.scan.warnings(), *prepared.files.warnings()] if prepared else []
        result = build_result(run, prepared, began_s, error) | {"drift": drift}
        result["warnings"] = [*warnings, *remote.end_run(wait=result["state"] != "interrupted")]
        progress.end()
        for warning in result["warnings"]:
            get_run_logger().warning(warning)
        for follower in listeners.get():
            follower.run_ended(result)
        if isinstance(error, UserError | JobFailed | MlflowFailed):
            return Failed(message=str(error))
        if error is not None:
            raise error
        verdict = f" (drift: {drift['verdict']})" if drift else ""
        return Completed(message=describe(result)[0] + verdict, data=result)


def _predict(prepared: PreparedBatch, run: str, remote: Remote, shards: Shards) -> None:
    """Builds all shards that the output lacks: predictions from the store or the program, rows from the files."""
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
            ref = executor(predict_shard, model, prediction.batch_size, shard, predictor)
            _write(output, shard, rows(), ref)
        output.finish(count(prepared))
        if rate := predictor.rows_per_second:
            remember_rate(model, rate)
    stages = [{"name": predict_shard.name, "key": key} for key in prepared.keys.values()]
    history_of(prediction).remember_completed({"stages": stages})  # so that garbage collection keeps them


def _write(output: Output, shard: Shard, rows: Any, ref: Artifact) -> None:
    output.write(shard, rows, pq.read_table(ref.path / PREDICTIONS), int(ref.figures["predicted_at_s"]))
