"""Child programs that predict the shards of a run, which become artifacts one by one as they are done."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks.cache.digests import digest_of
from tasks.cache.stage import Listener, Work
from tasks.cache.store import link_or_copy
from tasks.environment_variables import BUCKETS, passed
from tasks.home import home
from tasks.jobs.commands import python_argv
from tasks.jobs.engines import engine_of
from tasks.jobs.engines.engine import Engine, Program
from tasks.jobs.engines.local import LOCAL
from tasks.jobs.hardware import assigned_gpus, device, visible_gpus
from tasks.jobs.launch import EventReader, follow_job
from tasks.jobs.retries import DEFAULT_STALL_TIMEOUT_S, TRIES, BatchDivision, prepare_next_try
from tasks.prediction.input_rows import Shard
from tasks.registry.model_spec import ModelSpec
from tasks.registry.pinned_versions import find_folders
from training import task_types
from training.data.prediction_rows import WantedShard
from training.jobs.protocol import EVENTS, OUTCOMES, Imports, Job, Outcome, write_atomically
from training.problems import UserError, renamed
from training.programs.predict_shards import SHARDS, PredictShardsSettings, ShardResult
from training.recipe import BatchPrediction, ResolvedCompute

PROGRAM = "training.programs.predict_shards"
PREDICTIONS = "predictions.parquet"
"""The file of a shard's artifact."""
POLL_S = 0.2
"""Between two looks at all programs."""


class ShardPredictor:
    """Predicts shards in programs that start when the first of them is needed, and end with the block.

    Args:
        model: the version that predicts.
        batch_size: rows in one forward pass.
        shard_rows: rows of a shard.
        shards: those to predict, in the order in which they will be needed.
        listener: follows the progress of the stage `predict`, in rows.
        processes: the number of programs at once, among which the GPUs are divided; auto: as many as there are GPUs.
        engine: where the programs run.
    """

    def __init__(
        self,
        model: ModelSpec,
        batch_size: int,
        shard_rows: int,
        shards: Sequence[Shard],
        listener: Listener,
        processes: int | Literal["auto"] = "auto",
        engine: Engine = LOCAL,
    ) -> None:
        gpus = visible_gpus()
        count = max(1, min(len(gpus) or 1 if processes == "auto" else processes, len(shards)))
        total = sum(shard.usable for shard in shards)
        self._work = Work(f"predict-{uuid.uuid4().hex[:12]}", Path(os.devnull), "", (listener,), "predict")
        self._model = model

        def report() -> None:
            self._work.progress(min(sum(program.done_rows for program in self._programs), total), total)

        self._programs = [
            _Program(
                _Options(model, batch_size, shard_rows, engine, share_of(gpus, number, count), POLL_S / count),
                shards[number::count],
                self._find_folders,
                listener,
                report,
            )
            for number in range(count)
        ]

    def __enter__(self) -> ShardPredictor:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as ending:
            ending.callback(shutil.rmtree, self._work.job, ignore_errors=True)
            for program in self._programs:
                ending.callback(program.end)

    def _find_folders(self) -> dict[str, Path]:
        """The folders of the model, which are downloaded once if no store has them."""
        return find_folders(self._work, self._model.pinned, "NAME")

    @property
    def rows_per_second(self) -> float | None:
        """The rate of all programs together, of the shards that were predicted; None without any."""
        rates = [rate for program in self._programs if (rate := program.rows_per_second) is not None]
        return sum(rates) if rates else None

    def predict(self, shard: Shard, out: Path) -> ShardResult:
        """Waits for the shard's predictions, links them into the folder `out`, and returns their numbers.

        Raises UserError for the user's mistakes and launch.JobFailed for all other failures.
        """
        program = next((program for program in self._programs if program.has(shard)), self._programs[0])
        program.require(shard)
        while shard.digest not in program.done:
            for each in self._programs:
                each.look()
        link_or_copy(str(program.file(shard)), str(out / PREDICTIONS))
        return program.done[shard.digest]


def share_of(gpus: Sequence[str], number: int, count: int) -> Sequence[str]:
    """The GPUs of one of `count` programs, by its number from 0. More programs than GPUs share them."""
    return gpus[number::count] or gpus[number % len(gpus) :][:1] if gpus else []


class _Options(NamedTuple):
    model: ModelSpec
    batch_size: int
    shard_rows: int
    engine: Engine
    gpus: Sequence[str]
    poll_s: float


class _Program:
    """A program that predicts some of the shards, and starts again after failures that another try may mend.

    Args:
        options: of all programs, and its own GPUs.
        shards: those to predict, in the order in which they will be needed.
        find_folders: the folders of the model.
        listener: receives its warnings.
        report: called when more rows are predicted.
    """

    def __init__(
        self,
        options: _Options,
        shards: Sequence[Shard],
        find_folders: Callable[[], Mapping[str, Path]],
        listener: Listener,
        report: Callable[[], None],
    ) -> None:
        self._options, self._find_folders, self._report = options, find_folders, report
        self._waiting = {shard.digest: shard for shard in shards}
        """The shards that are not predicted yet."""
        self._work = Work(f"predict-{uuid.uuid4().hex[:12]}", Path(os.devnull), "", (listener,), "predict")
        self._events = EventReader(self._work.job / EVENTS, self._read)
        self.done: dict[str, ShardResult] = {}
        """The predicted shards, by digest."""
        self.done_rows = 0
        """The rows that are predicted, those of the present shard too."""
        self._listed: set[str] = set()
        self._looks: Generator[None, None, Outcome] | None = None
        self._context = contextvars.copy_context()
        self._context.run(assigned_gpus.set, options.gpus)
        self._batches: BatchDivision | None = None
        self._before = 0
        """The rows of shards that earlier tries have predicted."""
        self._seconds = 0.0
        self._tries = TRIES
        self._saved_divisor = 1

    def has(self, shard: Shard) -> bool:
        """Whether it has predicted the shard or will."""
        return shard.digest in self.done or shard.digest in self._waiting

    def require(self, shard: Shard) -> None:
        """Makes the shard one that it predicts."""
        if shard.digest not in self._listed and shard.digest not in self.done:
            self._waiting = {shard.digest: shard, **self._waiting}  # such as one whose artifact is damaged
            self._stop()

    def file(self, shard: Shard) -> Path:
        """The shard's predictions."""
        return self._work.job / SHARDS / f"{shard.digest}.parquet"

    @property
    def rows_per_second(self) -> float | None:
        """The mean rate of its shards; None without any."""
        rows = sum(shard.rows for shard in self.done.values())
        return rows / self._seconds if rows and self._seconds else None

    def end(self) -> None:
        """Stops it, and removes its files."""
        self._stop()
        shutil.rmtree(self._work.job, ignore_errors=True)

    def look(self) -> None:
        """Looks at the program's events once, and starts the program if shards wait and it does not run."""
        if self._looks is None and self._waiting:
            self._looks = self._context.run(self._start)
        if self._looks is not None:
            self._context.run(self._look, self._looks)

    def _look(self, looks: Generator[None, None, Outcome]) -> None:
        try:
            next(looks)
        except StopIteration as ended:
            self._looks, outcome = None, ended.value
            if outcome.failure is not None:
                warning = prepare_next_try(outcome, outcome.failure, self._tries - 1, self._batches)
                self._tries -= outcome.failure.kind != "out_of_memory"
                self._work.on_events([warning])

    def _stop(self) -> None:
        if self._looks is not None:
            self._context.run(self._looks.close)
            self._looks = None

    def _start(self) -> Generator[None, None, Outcome]:
        spec, job = self._options.model, self._work.job
        folders = self._find_folders()
        for outcome in job.glob(OUTCOMES):
            outcome.unlink()
        self._batches = self._batches or BatchDivision(
            self._options.batch_size,
            folders["model"],
            program=PROGRAM,
            max_length=spec.max_length,
            mixed_precision=spec.mixed_precision,
            options=spec.task["options"],
        )
        self._listed, self._before = {*self._waiting}, sum(shard.rows for shard in self.done.values())
        values = PredictShardsSettings(
            **spec.task,
            columns=dict(spec.columns),
            reading=spec.rules.model_dump(),
            shards=[
                WantedShard(file=shard.file, number=shard.number, digest=shard.digest)
                for shard in self._waiting.values()
            ],
            shard_rows=self._options.shard_rows,
            max_length=spec.max_length,
            batch_size=self._options.batch_size,
            mixed_precision=spec.mixed_precision,
            micro_batch_divisor=self._batches.divisor,
            calibration=spec.calibration,
        )
        places = {name: str(path) for name, path in folders.items()}
        Job(program=PROGRAM, key=job.name, settings=values.model_dump(mode="json"), inputs=places).write(job)
        argv, env = python_argv(PROGRAM), self._environment()
        compute = ResolvedCompute(num_processes=1, mixed_precision=spec.mixed_precision)
        imports = Imports(modules=["training.engine.predictor", *task_types.code_modules(spec.task["task"])])
        program = Program(PROGRAM, argv, env, compute, imports, logins=BUCKETS)
        return follow_job(
            job,
            argv,
            env=env,
            events=self._events,
            stall_timeout_s=DEFAULT_STALL_TIMEOUT_S,
            poll_s=self._options.poll_s,
            runner=self._options.engine.runner(program, folders, self._work.on_events),
        )

    def _read(self, events: list[Any]) -> None:
        for event in events:
            if event["kind"] == "shard":
                self._add(event)
            elif event["kind"] == "predicted":
                self.done_rows = self._before + event["done"]
                self._report()
            elif event["kind"] in ("warning", "note"):
                self._work.on_events([event])

    def _add(self, event: dict[str, Any]) -> None:
        shard = ShardResult(**{name: event[name] for name in ShardResult.model_fields})
        self._waiting.pop(event["digest"], None)
        self.done[event["digest"]] = shard
        self._seconds += shard.rows / max(shard.rows_per_second, 1e-6)
        self._tries = TRIES  # a shard further, another failure is not the same one
        if self._batches and self._batches.divisor > self._saved_divisor:
            self._batches.save()
            self._saved_divisor = self._batches.divisor

    def _environment(self) -> dict[str, str]:
        """The credentials of buckets with rows, threads for the tokenizer, and its own GPUs."""
        return {
            **passed(BUCKETS),
            **({"CUDA_VISIBLE_DEVICES": ",".join(self._options.gpus)} if self._options.gpus else {}),
            "TOKENIZERS_PARALLELISM": "true",
        }


# <home>/estimates/predict-<digest>.json    the rate of a model on this hardware, for plans


def remember_rate(model: ModelSpec, rows_per_second: float) -> None:
    """Stores the rate at which the model predicted."""
    file = _rate_file(model)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomically(file, json.dumps({"rows_per_second": rows_per_second, "time": time.time()}).encode())


def last_rate(model: ModelSpec) -> float | None:
    """The last rate of the model on this hardware, in rows a second; None if it is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return float(json.loads(_rate_file(model).read_bytes())["rows_per_second"])
    return None


def _rate_file(model: ModelSpec) -> Path:
    digest = digest_of({"model": model.digest, "precision": model.mixed_precision, "device": device()})
    return home() / "estimates" / f"predict-{digest[:32]}.json"


FIELDS = {
    "compute.cluster": "cluster",
    "compute.cluster_address": "cluster_address",
    "compute.num_machines": "processes",
}
"""The parameters in place of a recipe's fields."""


def require_engine(prediction: BatchPrediction) -> None:
    """Raises UserError if a package for the prediction's engine is missing here, or nothing listens at its address."""
    engine = engine_of(prediction.cluster, prediction.cluster_address)
    if problems := engine.find_package_problems() or engine.find_address_problems():
        with renamed(FIELDS):
            raise UserError(problems)
