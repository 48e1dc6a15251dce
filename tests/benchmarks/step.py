"""Training against the raw forward, backward and step on the same batches, and where a step's time goes.

Each batch is trained on twice in a row in one process: by the project's Trainer, and by a copy of its network in
a bare loop. Which of them comes first alternates: the first to meet a new shape pays for setting it up. So both
see the same machine, the same batches and the same load, a fraction of a second apart.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.subject import BATCH_ROWS, Subject, run, training_argv
from tests.benchmarks.table import Row
from training.protocol import Events, Job, run_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from training.trainer import ExactTrainer

PROGRAM = "tests.benchmarks.step"
WARM_UP, STEPS, BLOCK = 10, 80, 10


def measure(subject: Subject) -> list[Row]:
    """The ratio, and the shares of a step."""
    job = subject.training_job(
        "step",
        PROGRAM,
        max_steps=WARM_UP + STEPS,
        eval_strategy="no",
        load_best_model_at_end=False,
        checkpoint_interval_s=1e9,
    )
    figures = run(job, training_argv(PROGRAM))
    trainer_s, raw_s = figures["trainer_s"], figures["raw_s"]
    blocks = [slice(start, start + BLOCK) for start in range(0, STEPS, BLOCK)]
    ratio = statistics.median(sum(raw_s[block]) / sum(trainer_s[block]) for block in blocks)
    rates = [STEPS * BATCH_ROWS / sum(seconds) for seconds in (trainer_s, raw_s)]
    shares = {name: seconds / sum(trainer_s) for name, seconds in figures["parts_s"].items()}
    shares["the Trainer's own"] = 1 - sum(shares.values())
    return [
        Row(
            "training / raw step",
            ratio,
            f"each of {STEPS} batches of {BATCH_ROWS} rows by both in turn, {figures['precision']}; median of "
            f"blocks of {BLOCK}; {rates[0]:.0f} and {rates[1]:.0f} rows/s",
            least=0.9,
        ),
        Row(
            "where a step's time goes",
            ", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
            "timers around the calls, the same steps",
        ),
    ]


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Trains for some steps, each repeated by the bare loop; gives the seconds of each step by both."""
    from training import fit, model
    from training.trainer import make_trainer

    model.make_deterministic()
    task = fit.make_task(job_dir, job, events)
    twin = copy.deepcopy(task.model)
    trainer = make_trainer(task)
    precision = task.compute["mixed_precision"]
    beside = beside_the_trainer(trainer, raw_step(twin.to(trainer.args.device).train(), trainer.args, precision))
    trainer.train()
    return {
        "precision": "fp32" if precision == "no" else precision,
        "trainer_s": beside.trainer_s[WARM_UP:],
        "raw_s": beside.raw_s[WARM_UP:],
        "parts_s": dict(beside.parts_s),
    }


def raw_step(network: PreTrainedModel, args: TrainingArguments, precision: str) -> Callable[[dict[str, Any]], None]:
    """One optimizer step on a batch, and nothing else. It may use kernels that are not deterministic."""
    import torch

    optimizer = torch.optim.AdamW(
        network.parameters(), args.learning_rate, (args.adam_beta1, args.adam_beta2), args.adam_epsilon, fused=True
    )
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def step(batch: dict[str, Any]) -> None:
        torch.use_deterministic_algorithms(False)
        with torch.autocast(network.device.type, dtype, enabled=precision != "no"):
            loss = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True, warn_only=True)

    return step


def beside_the_trainer(trainer: ExactTrainer, raw: Callable[[dict[str, Any]], None]) -> Any:
    """A callback, added to the trainer, that repeats each of its steps by `raw` and keeps both times."""
    import torch
    from transformers import TrainerCallback

    class Beside(TrainerCallback):
        def __init__(self) -> None:
            self.trainer_s: list[float] = []
            self.raw_s: list[float] = []
            self.parts_s: Counter[str] = Counter()
            self._batches: deque[dict[str, Any]] = deque()  # collated and not yet trained on
            self._mark = 0.0

        def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
            self._batches.append(collator(rows))
            return dict(self._batches[-1])

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._mark = _now()
            self._timed(trainer, "get_batch_samples", "data")
            self._timed(trainer, "compute_loss", "forward")
            self._timed(trainer.accelerator, "backward", "backward")
            self._timed(trainer.accelerator, "clip_grad_norm_", "clipping")
            self._timed(trainer.optimizer, "step", "optimizer")

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 2 == 0:
                self._mark += self._repeat()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trainer_s.append(_now() - self._mark)
            if state.global_step % 2 == 0:
                self._repeat()
            if state.global_step == WARM_UP:
                self.parts_s.clear()
            self._mark = _now()

        def _repeat(self) -> float:
            began = _now()
            raw(self._batches.popleft())
            self.raw_s.append(_now() - began)
            return self.raw_s[-1]

        def _timed(self, owner: Any, name: str, part: str) -> None:
            call = getattr(owner, name)

            def timed(*args: Any, **kwargs: Any) -> Any:
                began = _now()
                result = call(*args, **kwargs)
                self.parts_s[part] += _now() - began
                return result

            setattr(owner, name, timed)

    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    collator, beside = trainer.data_collator, Beside()
    trainer.data_collator = beside.collate
    trainer.add_callback(beside)
    return beside


if __name__ == "__main__":
    run_program(main, stops_itself=True)
