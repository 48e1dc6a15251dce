"""One child program that predicts all shards of a run, which become artifacts one by one as they are done."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.digests import digest_of
from tasks.cache.settings import STORAGE_LOGIN
from tasks.cache.stage import Listener, Work
from tasks.cache.store import link_or_copy
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import DEFAULT_STALL_TIMEOUT_S, TRIES, prepare_next_try
from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import device
from tasks.jobs.launch import EventReader, follow_job
from tasks.prediction.scan import Shard
from tasks.registry.champions import find_folders
from tasks.registry.prediction_job import ModelSpec
from training.jobs.protocol import EVENTS, OUTCOMES, Job, Outcome, write_atomically
from training.programs.predict_shards import SHARDS
from training.recipe.program_settings import PredictShardsSettings, WantedShard

PROGRAM = "training.programs.predict_shards"
PREDICTIONS = "predictions.parquet"
"""The file of a shard's artifact."""


class ShardPredictor:
    """Predicts shards in a program that starts when the first of them is needed, and ends with the block.

    Args:
        model: the version that predicts.
        batch_size: rows in one forward pass.
        shard_rows: rows of a shard.
        shards: those to predict, in the order in which they will be needed.
        listener: follows the progress of `stage`, in rows.
        stage: the name of the progress.
    """

    def __init__(
        self,
        model: ModelSpec,
        batch_size: int,
        shard_rows: int,
        shards: Sequence[Shard],
        listener: Listener,
        stage: str = "predict",
    ) -> None:
        self._model, self._batch_size, self._shard_rows = model, batch_size, shard_rows
        self._waiting = {shard.digest: shard for shard in shards}
        """The shards that are not predicted yet."""
        self._work = Work(f"predict-{uuid.uuid4().hex[:12]}", Path(os.devnull), "", (listener,), stage)
        self._events = EventReader(self._work.job / EVENTS, self._read)
        self._done: dict[str, dict[str, Any]] = {}
        """The figures of predicted shards, by digest."""
        self._listed: set[str] = set()
        self._looks: Generator[None, None, Outcome] | None = None
        self._batches: BatchDivision | None = None
        self._total = sum(shard.usable for shard in self._waiting.values())
        self._before = 0
        """The rows of shards that earlier tries have predicted."""
        self._seconds = 0.0
        self._tries = TRIES
        self._saved_divisor = 1

    def __enter__(self) -> ShardPredictor:
        return self

    def __exit__(self, *error: object) -> None:
        if self._looks is not None:
            self._looks.close()
        shutil.rmtree(self._work.job, ignore_errors=True)

    @property
    def rows_per_second(self) -> float | None:
        """The mean rate of the shards that were predicted; None without any."""
        rows = sum(figures["rows"] for figures in self._done.values())
        return rows / self._seconds if rows and self._seconds else None

    def predict(self, shard: Shard, out: Path) -> dict[str, Any]:
        """Waits for the shard's predictions, links them into the folder `out`, and returns their figures.

        Raises UserError for the user's mistakes and launch.JobFailed for all other failures.
        """
        if shard.digest not in self._listed and shard.digest not in self._done:
            self._waiting = {shard.digest: shard, **self._waiting}  # such as one whose artifact is damaged
            self._stop()
        while shard.digest not in self._done:
            self._look()
        file = self._work.job / SHARDS / f"{shard.digest}.parquet"
        link_or_copy(str(file), str(out / PREDICTIONS))
        return self._done[shard.digest]

    def _look(self) -> None:
        """Looks at the program's events once, and starts the program if it does not run."""
        if self._looks is None:
            self._looks = self._start()
        try:
            next(self._looks)
        except StopIteration as ended:
            self._looks, outcome = None, ended.value
            if outcome.failure is not None:
                warning = prepare_next_try(outcome, outcome.failure, self._tries - 1, self._batches)
                self._tries -= outcome.failure.kind != "out_of_memory"
                self._work.on_events([warning])

    def _stop(self) -> None:
        if self._looks is not None:
            self._looks.close()
            self._looks = None

    def _start(self) -> Generator[None, None, Outcome]:
        folders, job = find_folders(self._work, self._model.champion, "NAME"), self._work.job
        for outcome in job.glob(OUTCOMES):
            outcome.unlink()
        precision, spec = self._model.mixed_precision, self._model
        self._batches = self._batches or BatchDivision(
            self._batch_size,
            folders["model"],
            program=PROGRAM,
            max_length=spec.max_length,
            mixed_precision=precision,
            options=spec.task["options"],
        )
        self._listed, self._before = {*self._waiting}, sum(figures["rows"] for figures in self._done.values())
        values = PredictShardsSettings(
            **spec.task,
            columns=dict(spec.columns),
            shards=[
                WantedShard(file=shard.file, number=shard.number, digest=shard.digest)
                for shard in self._waiting.values()
            ],
            shard_rows=self._shard_rows,
            max_length=spec.max_length,
            batch_size=self._batch_size,
            mixed_precision=precision,
            micro_batch_divisor=self._batches.divisor,
        )
        places = {name: str(path) for name, path in folders.items()}
        Job(program=PROGRAM, key=job.name, settings=values.model_dump(mode="json"), inputs=places).write(job)
        return follow_job(
            job,
            python_argv(PROGRAM),
            env=_environment(),
            events=self._events,
            stall_timeout_s=DEFAULT_STALL_TIMEOUT_S,
        )

    def _read(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "shard":
                self._add(event)
            elif event["kind"] == "predicted":
                done = min(self._before + event["done"], self._total)
                self._work.progress(done, self._total)
            elif event["kind"] in ("warning", "note"):
                self._work.on_events([event])

    def _add(self, event: dict[str, Any]) -> None:
        figures = {name: event[name] for name in ("rows", "rows_per_second", "predicted_at_s")}
        self._waiting.pop(event["digest"], None)
        self._done[event["digest"]] = figures
        self._seconds += figures["rows"] / max(figures["rows_per_second"], 1e-6)
        self._tries = TRIES  # a shard further, another failure is not the same one
        if self._batches and self._batches.divisor > self._saved_divisor:
            self._batches.save()
            self._saved_divisor = self._batches.divisor


def _environment() -> dict[str, str]:
    """The credentials of buckets with rows, and threads for the tokenizer."""
    return {
        **{name: os.environ[name] for name in STORAGE_LOGIN if name in os.environ},
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
    return settings.home() / "estimates" / f"predict-{digest[:32]}.json"
