"""Goodput: the share of all time in which a training that is killed once a minute does steps that last.

All processes of the training get SIGKILL each KILL_EVERY_S seconds, and their run starts it again. Each fifth time the
machine is lost: the run and the process that its programs are forks of get SIGKILL too, and start anew. Beside it a
script with the Trainer, which is started again at once each time, and resumes from its newest checkpoint. Both write a
checkpoint each CHECKPOINT_S seconds. Run as a program it is one process: `... run JOB PROCESSES` is the run, and
`... plain JOB STEPS` the script, with STEPS between two checkpoints, as many as may be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.jobs.engines.local import LOCAL, early_launches
from tests.benchmarks.subject import BATCH_ROWS, Subject, training_argv, training_environment
from tests.benchmarks.table import Row
from training.jobs.processes import descendants, send
from training.jobs.protocol import EVENTS, Job, read_events

KILL_EVERY_S = 60.0
LOST_EACH = 5
"""Kills from one lost machine to the next."""
CHECKPOINT_S = 8.0
"""By Young's formula: sqrt(2 * cost of a checkpoint * KILL_EVERY_S), with a cost of 0.5 s."""
ALONE_S = 40.0
"""Of an undisturbed training, whose later half gives the seconds of a step."""
STEPS_DONE = "steps.txt"


def measure(subject: Subject) -> list[Row]:
    """The goodput in one process and in two, and that of the script."""
    minutes = subject.minutes
    rows = []
    for processes in (1, 2):
        job, alone = (
            _training_job(subject, f"goodput-{processes}-{name}", processes, every_s)
            for name, every_s in (("killed", CHECKPOINT_S), ("alone", 1e9))
        )
        argv = ["run", str(job), str(processes)]
        step_s = _step_s(["run", str(alone), str(processes)], lambda alone=alone: _steps_of_job(alone))
        done, kills = _play(argv, lambda job=job: _steps_of_job(job), minutes * 60)
        rows.append(_row(f"goodput, {processes} process{'es' * (processes > 1)}", done, step_s, minutes, kills))
    job, alone = (_training_job(subject, f"goodput-plain-{name}", 1, 1e9) for name in ("killed", "alone"))
    step_s = _step_s(["plain", str(alone), "1000000"], lambda: _steps_of_script(alone))
    argv = ["plain", str(job), str(max(1, round(CHECKPOINT_S / step_s)))]
    done, kills = _play(argv, lambda: _steps_of_script(job), minutes * 60)
    return [*rows, _row("goodput of a script with the Trainer", done, step_s, minutes, kills, least=None)]


def _row(what: str, done: int, step_s: float, minutes: float, kills: int, least: float | None = 0.9) -> Row:
    how = f"{done:,} steps in {minutes:g} minutes with {kills} kills, of {step_s:.3f} s undisturbed; a checkpoint each "
    return Row(what, done * step_s / (minutes * 60), f"{how}{CHECKPOINT_S:g} s", least=least)


def _training_job(subject: Subject, name: str, processes: int, checkpoint_every_s: float) -> Path:
    return subject.training_job(
        name,
        num_processes=processes,
        num_train_epochs=1000,
        eval_strategy="no",
        load_best_model_at_end=False,
        checkpoint_interval_s=checkpoint_every_s,
    )


def _step_s(argv: list[str], steps: Callable[[], int]) -> float:
    """The seconds of a step of an undisturbed training."""
    process = _start(argv)
    while not steps():
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with exit code {process.returncode}")
        time.sleep(0.05)
    time.sleep(ALONE_S / 2)
    first, began = steps(), time.monotonic()
    time.sleep(ALONE_S / 2)
    while (done := steps()) == first:  # on a busy machine a step may take longer
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with exit code {process.returncode}")
        time.sleep(0.05)
    found = (time.monotonic() - began) / (done - first)
    _kill(process)
    return found


def _play(argv: list[str], steps: Callable[[], int], seconds: float) -> tuple[int, int]:
    """The steps that were done after so many seconds, and the kills."""
    process, kills, began = _start(argv), 0, time.monotonic()
    for number in range(1, int(seconds / KILL_EVERY_S)):
        time.sleep(max(0.0, began + number * KILL_EVERY_S - time.monotonic()))
        kills += 1
        if argv[0] == "plain" or kills % LOST_EACH == 0:
            _kill(process)
            process = _start(argv)
        else:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    done = steps()
    _kill(process)
    return done, kills


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.benchmarks.goodput", *argv], stdout=subprocess.DEVNULL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The machine is lost."""
    for pid in [process.pid, *descendants(process.pid)]:
        send(pid, signal.SIGKILL)
    process.wait()


def _steps_of_job(job: Path) -> int:
    events = read_events(job / EVENTS, 0)[0] if (job / EVENTS).is_file() else []
    return max((event["done"] for event in events if event["kind"] == "progress" and "done" in event), default=0)


def _steps_of_script(job: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((job / STEPS_DONE).read_text())
    return 0


def _run(job: Path, processes: int) -> None:
    """Starts the job again whenever it ends; SIGUSR1 kills it."""
    argv, env = training_argv(num_processes=processes), training_environment(processes)
    with early_launches():
        while True:
            handle = LOCAL.start(job, argv, env)
            signal.signal(
                signal.SIGUSR1,
                lambda *_, pid=handle.pid: [send(one, signal.SIGKILL) for one in [pid, *descendants(pid)]],
            )
            while LOCAL.poll(handle):
                LOCAL.wait(handle, 1.0)


def _plain(folder: Path, save_steps: int) -> None:
    """Trains the model of the job by the Trainer alone."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

    from training.batching.batches import PadToLongest, TokenRows

    job = Job.read(folder)

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            aside = folder / f"{STEPS_DONE}.aside"
            aside.write_text(str(state.global_step))
            os.replace(aside, folder / STEPS_DONE)

    rows = TokenRows(Path(job.inputs["tokens"]) / "train.arrow")
    tokenizer = AutoTokenizer.from_pretrained(job.inputs["tokenizer"])
    arguments = TrainingArguments(
        output_dir=str(folder / "plain"),
        per_device_train_batch_size=BATCH_ROWS,
        num_train_epochs=1000,
        save_steps=save_steps,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = AutoModelForSequenceClassification.from_pretrained(job.inputs["model"], num_labels=2)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=PadToLongest(tokenizer, 1), callbacks=[Count()]
    )
    newest = get_last_checkpoint(str(folder / "plain")) if (folder / "plain").is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    what, place, number = sys.argv[1:]
    {"run": _run, "plain": _plain}[what](Path(place), int(number))
