"""The cost of a checkpoint, and its share of a training at the default setting."""

from __future__ import annotations

import statistics

from tests.benchmarks.subject import Subject, run, training_argv
from tests.benchmarks.table import Row
from training.jobs.protocol import CHECKPOINTS, EVENTS, read_events
from training.recipe import Training

OFTEN_S = 8.0


def measure(subject: Subject) -> list[Row]:
    """Seconds of one checkpoint, and the share, from one epoch with an evaluation and many checkpoints."""
    job = subject.training_job("checkpoints", num_train_epochs=1, checkpoint_interval_s=OFTEN_S)
    figures = run(job, training_argv())
    saved = read_events(job / EVENTS, 0, ["checkpoint"])[0]
    seconds, paused = ([event[name] for event in saved] for name in ("seconds", "paused"))
    newest = max((job / CHECKPOINTS).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)
    mib = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 2**20
    cost_s = statistics.median(seconds)
    epoch_s = subject.rows / figures["train_rows_per_second"] - sum(paused)
    default_s = Training().checkpoint_interval_s
    a_while = epoch_s / default_s + 1
    return [
        Row(
            "one checkpoint",
            cost_s,
            f"{mib:.0f} MiB: written, hashed, on the disk; median of {len(seconds)}, "
            f"{min(seconds):.2f} to {max(seconds):.2f} s; training waits {statistics.median(paused):.2f} s",
            unit="s",
        ),
        Row(
            "checkpoints, share of training",
            100 * cost_s * a_while / (epoch_s + cost_s * a_while),
            f"the default: one every {default_s / 60:g} minutes and one at the evaluation of each epoch; "
            f"epochs of {subject.rows:,} rows, {epoch_s:.0f} s",
            unit="%",
            most=2.0,
        ),
    ]
