"""Cases of `make gpu` about the answers of a trained model: the program that serves it, and the one that predicts the
rows of files, answer on the GPU as on the CPU."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks.jobs.commands import python_argv
from tasks.jobs.launch import EventReader, follow_job, require_finished, run_job
from tests.gpu.cases import Result
from tests.gpu.ground import STALL_TIMEOUT_S, Ground
from tests.matrix.cells import ROUNDING
from tests.task_types import recipe_of
from training import task_types
from training.data.prediction_rows import RowReader, WantedShard, digest_inputs
from training.jobs.protocol import EVENTS, OUTPUT, Event, Job
from training.programs import predict_shards, serve
from training.recipe import parse
from training.recipe.rules.column_rules import source_columns

SHARD_ROWS = 100
PROMPT = "prompt"
"""The column that is continued, of a task type that has it."""
DEVICES: Mapping[str, Mapping[str, str]] = {"gpu": {}, "cpu": {"CUDA_VISIBLE_DEVICES": "-1"}}


def same_on_both(ground: Ground, folder: Path, task: str) -> Result:
    """Trains, and answers the validation rows on the GPU and on the CPU in full precision."""
    world = ground.world(task)
    fit = ground.small_job(world, task, folder / "fit", {"num_processes": 1, "mixed_precision": "bf16"})
    require_finished(ground.run(fit))
    recipe, file = parse(recipe_of(task, world / "rows")), world / "rows/validation.jsonl"
    settings = {
        **recipe.task_and_options,
        "columns": {column.name: column.source_name for column in source_columns(recipe).inputs},
        "max_length": recipe.tokens.max_length,
        "batch_size": 16,
        "mixed_precision": "no",
    }
    records, texts = dict[str, list[Any]](), dict[str, list[str]]()
    for device, env in DEVICES.items():
        served, texts[device] = _serve(fit, folder / f"serve-{device}", settings, file, env)
        records[device] = [*served, *_predict(fit, folder / f"predict-{device}", settings, file, env)]
    task_type = task_types.from_settings(settings)
    pairs = [*zip(records["gpu"], records["cpu"], strict=True)]
    other = [pair for pair in pairs if not task_type.same_prediction(*pair, ROUNDING)]
    checks = {"predictions": f"no: {len(other)} of {len(pairs)} differ, first {other[0]}" if other else "yes"}
    if texts["gpu"]:
        checks["texts"] = "yes" if texts["gpu"] == texts["cpu"] else f"no: {texts['gpu']}, not {texts['cpu']}"
    return Result(checks, {"answers": len(pairs) + len(texts["gpu"])})


def _serve(
    fit: Path, job: Path, settings: dict[str, Any], file: Path, env: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of the file's rows, and the likeliest continuation of each prompt, as the served model sends them."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    texts = [row[PROMPT] for row in rows if PROMPT in row]
    wanted = [serve.Predict(id=0, rows=rows)]
    wanted += [serve.Generate(id=number, text=text, temperature=0) for number, text in enumerate(texts, 1)]
    argv, events = _write(serve.__name__, fit, job, settings), list[Event]()
    reader = EventReader(job / EVENTS, events.extend)
    looks = follow_job(job, argv, env=env, events=reader, stall_timeout_s=STALL_TIMEOUT_S, poll_s=0.05)
    while not any(event["kind"] == serve.READY for event in events):
        try:
            next(looks)
        except StopIteration as ended:
            require_finished(ended.value)
    with socket.socket(socket.AF_UNIX) as connection, serve.socket_path(job) as path:
        connection.connect(path)
        connection.sendall(b"".join(serve.ASKED.dump_json(one) + b"\n" for one in wanted))
        with connection.makefile("rb") as lines:
            answers = sorted((serve.SAID.validate_json(next(lines)) for _ in wanted), key=lambda said: said.id)
    for _ in looks:  # the program ends with its connection
        pass
    return answers[0].records, [answer.text for answer in answers[1:]]


def _predict(
    fit: Path, job: Path, settings: dict[str, Any], file: Path, env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The records of the file's rows, as a batch prediction stores them."""
    reader = RowReader(task_types.from_settings(settings), settings["columns"])
    shards = [
        WantedShard(file=str(file), number=number, digest=digest_inputs(rows))
        for number, rows in enumerate(reader.shards(str(file), SHARD_ROWS))
    ]
    more = {"shards": [shard.model_dump() for shard in shards], "shard_rows": SHARD_ROWS}
    argv = _write(predict_shards.__name__, fit, job, {**settings, **more})
    require_finished(run_job(job, argv, env=env, stall_timeout_s=STALL_TIMEOUT_S))
    files = [job / predict_shards.SHARDS / f"{shard.digest}.parquet" for shard in shards]
    return [record for file in files for record in pq.read_table(file).to_pylist()]


def _write(program: str, fit: Path, job: Path, settings: dict[str, Any]) -> list[str]:
    """Writes a job that answers by the trained model, and returns its command."""
    model = str(fit / OUTPUT / "model")
    Job(program=program, key=job.name, settings=settings, inputs={"model": model, "tokenizer": model}).write(job)
    return python_argv(program)
