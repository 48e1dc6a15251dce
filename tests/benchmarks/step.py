"""Training against the raw forward, backward and step on the same batches, and where a step's time goes.

Each batch is trained on twice in a row in one process: by an engine of the project, and by a copy of its network in
a bare loop. Which of them comes first alternates: the first to meet a new shape pays for setting it up. So both
see the same machine, the same batches and the same load, a fraction of a second apart.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.subject import BATCH_ROWS, Subject, run, training_argv
from tests.benchmarks.table import Row
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.recipe.tables.engines import ENGINES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.engine.training_task import Task

PROGRAM = "tests.benchmarks.step"
WARM_UP, STEPS, BLOCK = 10, 80, 10


def measure(subject: Subject) -> list[Row]:
    """The ratio of each engine, and the shares of the Trainer's step."""
    return [row for engine in ENGINES for row in _measure(subject, engine)]


def _measure(subject: Subject, engine: str) -> list[Row]:
    job = subject.training_job(
        f"step-{engine}",
        PROGRAM,
        engine=engine,
        max_steps=WARM_UP + STEPS,
        eval_strategy="no",
        load_best_model_at_end=False,
        checkpoint_interval_s=1e9,
    )
    figures = run(job, training_argv(PROGRAM))
    ours_s, raw_s = figures["ours_s"], figures["raw_s"]
    blocks = [slice(start, start + BLOCK) for start in range(0, STEPS, BLOCK)]
    ratio = statistics.median(sum(raw_s[block]) / sum(ours_s[block]) for block in blocks)
    rates = [STEPS * BATCH_ROWS / sum(seconds) for seconds in (ours_s, raw_s)]
    row = Row(
        f"training / raw step, engine {engine}",
        ratio,
        f"each of {STEPS} batches of {BATCH_ROWS} rows by both in turn, {figures['precision']}; median of "
        f"blocks of {BLOCK}; {rates[0]:.0f} and {rates[1]:.0f} rows/s",
        least=0.9,
    )
    if not figures["parts_s"]:
        return [row]
    shares = {name: seconds / sum(ours_s) for name, seconds in figures["parts_s"].items()}
    shares["the Trainer's own"] = 1 - sum(shares.values())
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return [row, Row("where the Trainer's step goes", parts, "timers around the calls, the same steps")]


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Trains for some steps, each repeated by the bare loop; gives the seconds of each step by both."""
    from training.engine.fit_settings import FitSettings
    from training.engine.task_setup import make_task
    from training.models import loading

    loading.make_deterministic()
    task = make_task(FitSettings.model_validate(job.settings), job.inputs, job_dir, events)
    repeated = Repeated(raw_step(copy.deepcopy(task.model), task), task)
    {"trainer": by_the_trainer, "accelerate": by_the_loop}[task.training.engine](repeated)
    precision = task.compute.mixed_precision
    return {
        "precision": "fp32" if precision == "no" else precision,
        "ours_s": repeated.ours_s[WARM_UP:],
        "raw_s": repeated.raw_s[WARM_UP:],
        "parts_s": dict(repeated.parts_s),
    }


def raw_step(network: PreTrainedModel, task: Task) -> Callable[[dict[str, Any]], None]:
    """One optimizer step on a batch, and nothing else. It may use kernels that are not deterministic."""
    import torch

    network.to("cuda" if torch.cuda.is_available() else "cpu").train()
    optimizer = torch.optim.AdamW(network.parameters(), task.training.learning_rate, weight_decay=0.0, fused=True)
    precision = task.compute.mixed_precision
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def step(batch: dict[str, Any]) -> None:
        torch.use_deterministic_algorithms(False)
        with torch.autocast(network.device.type, dtype, enabled=precision != "no"):
            loss = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), task.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True, warn_only=True)

    return step


class Repeated:
    """Repeats each step of an engine by `raw`, and keeps both times, in seconds.

    `task` is the engine's, with a collator that shows its batches here.
    """

    def __init__(self, raw: Callable[[dict[str, Any]], None], task: Task) -> None:
        self.ours_s: list[float] = []
        self.raw_s: list[float] = []
        self.parts_s: Counter[str] = Counter()
        self.task = dataclasses.replace(task, collate=self._collate)
        self._raw, self._own = raw, task.collate
        self._batches: deque[dict[str, Any]] = deque()  # collated and not yet trained on
        self._mark = 0.0

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self._batches.append(self._own(rows))
        return dict(self._batches[-1])

    def begin(self) -> None:
        """Training begins."""
        self._mark = now()

    def step_begins(self) -> None:
        if len(self.ours_s) % 2 == 0:
            self._mark += self._repeat()

    def step_ends(self) -> None:
        self.ours_s.append(now() - self._mark)
        if len(self.raw_s) < len(self.ours_s):
            self._repeat()
        if len(self.ours_s) == WARM_UP:
            self.parts_s.clear()
        self._mark = now()

    def time(self, owner: Any, name: str, part: str) -> None:
        """From here on, the seconds of this call count as that part."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = now()
            result = call(*args, **kwargs)
            self.parts_s[part] += now() - began
            return result

        setattr(owner, name, timed)

    def _repeat(self) -> float:
        began = now()
        self._raw(self._batches.popleft())
        self.raw_s.append(now() - began)
        return self.raw_s[-1]


def now() -> float:
    """Seconds, once all that was begun is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def by_the_trainer(repeated: Repeated) -> None:
    """Trains the task by the engine `trainer`."""
    from transformers import TrainerCallback

    from training.engine.trainer import make_trainer

    trainer = make_trainer(repeated.task)

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            repeated.time(trainer, "get_batch_samples", "data")
            repeated.time(trainer, "compute_loss", "forward")
            repeated.time(trainer.accelerator, "backward", "backward")
            repeated.time(trainer.accelerator, "clip_grad_norm_", "clipping")
            repeated.time(trainer.optimizer, "step", "optimizer")
            repeated.begin()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            repeated.step_begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            repeated.step_ends()

    trainer.add_callback(Watch())
    trainer.train()


def by_the_loop(repeated: Repeated) -> None:
    """Trains the task by the engine `accelerate`."""
    from training.engine.loop import Loop

    class Watched(Loop):
        def step(self, batches: Any) -> Any:
            batch = next(batches)
            repeated.step_begins()
            done = super().step(iter([batch]))
            repeated.step_ends()
            return done

    loop = Watched(repeated.task)
    repeated.begin()
    loop.run()


if __name__ == "__main__":
    run_program(main, stops_itself=True)
