"""One cell of the matrix: an engine with a strategy and a number of processes, tried by real launches."""

from __future__ import annotations

import importlib.util
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.runtime.hardware import visible_gpus
from tasks.runtime.launch import accelerate_argv, accelerate_environment, run_job
from tests.training import tiny
from tests.training.forks import curve
from training.engines import ENGINES
from training.problems import UserError
from training.protocol import OUTPUT, Outcome, sha256
from training.recipe import parse
from training.strategies import STRATEGIES

# 150 rows in 8 batches an epoch, the last of them smaller, and an evaluation after each epoch.
TRAINING: dict[str, Any] = {
    "num_train_epochs": 12,
    "learning_rate": 3e-3,
    "gradient_accumulation_steps": 2,
    "metric_for_best_model": "accuracy",
    "logging_steps": 1,
    "checkpoint_interval_s": 0.05,
}
ROWS_A_STEP = 20
KILLS = 3
CHECKPOINTS_A_TRY = 2
"""After so many new checkpoints a rank is killed."""
STALL_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Combination:
    """What is tried."""

    engine: str
    strategy: str
    processes: int

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.strategy}-{self.processes}"


COMBINATIONS = [
    Combination(engine, strategy, processes)
    for engine in ENGINES
    for strategy in STRATEGIES
    for processes in ((1, 2) if strategy == "ddp" else (2,))
]


@dataclass(frozen=True)
class Cell:
    """What came of a combination: of each promise `yes`, or why it does not hold."""

    engine: str
    strategy: str
    processes: int
    refused: str = ""
    """The recipe's reason, in place of all promises."""
    trains: str = ""
    resumes: str = ""
    exports: str = ""
    reloads: str = ""

    @property
    def promises(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("trains", "resumes", "exports", "reloads")}

    @property
    def holds(self) -> bool:
        """Whether it keeps every promise, or is refused before it costs anything."""
        return bool(self.refused) or all(found.startswith("yes") for found in self.promises.values())


def fill(combination: Combination, world: Path, folder: Path) -> Cell:
    """Tries a combination in a folder of its own."""
    what = asdict(combination)
    if reason := refusal(combination):
        return Cell(**what, refused=reason)
    if combination.strategy.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return Cell(**what, trains="not tried: the extra deepspeed is not installed")
    whole, killed = (_job(combination, world, folder / name) for name in ("whole", "killed"))
    outcome, _ = _launched(combination, whole, kills=0)
    if outcome.failure is not None:
        return Cell(**what, trains=f"no: {outcome.failure.message}")
    return Cell(
        **what,
        trains=_trains(whole, outcome),
        resumes=_resumes(whole, killed, *_launched(combination, killed, KILLS)),
        exports=_exports(whole, world),
        reloads=_reloads(whole, outcome, world),
    )


def refusal(combination: Combination) -> str:
    """What the recipe says against it; empty where nothing."""
    recipe = {
        "name": "matrix",
        "kind": "sequence-classification",
        "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": "base"},
        "training": {"engine": combination.engine},
        "compute": {"strategy": combination.strategy, "num_processes": combination.processes},
    }
    try:
        parse(recipe)
    except UserError as error:
        return "; ".join(f"{problem.where}: {problem.message}" for problem in error.problems)
    return ""


def _job(combination: Combination, world: Path, job: Path) -> Path:
    asked = TRAINING | {"engine": combination.engine}
    asked["per_device_train_batch_size"] = ROWS_A_STEP // 2 // combination.processes
    compute = {"strategy": combination.strategy}
    return tiny.fit_job(world, job, processes=combination.processes, compute=compute, **asked)


def _launched(combination: Combination, job: Path, kills: int) -> tuple[Outcome, int]:
    """How the job ended, and how many kills it lived through: of one rank and another, each after some checkpoints."""
    use_cpu, lived = not visible_gpus(), 0
    argv = accelerate_argv("training.fit", num_processes=combination.processes, mixed_precision="no", use_cpu=use_cpu)
    env = accelerate_environment(num_processes=combination.processes, use_cpu=use_cpu, strategy=combination.strategy)
    while True:
        victim = _Victim(lived % combination.processes, tries_before=lived) if lived < kills else None
        outcome = run_job(
            job,
            argv,
            env={**env, "OMP_NUM_THREADS": "1"},
            on_events=victim or (lambda events: None),
            stall_timeout_s=STALL_TIMEOUT_S,
            poll_s=0.02,
        )
        if victim is None or not victim.killed:
            return outcome, lived
        lived += 1


class _Victim:
    """Follows a job's events and kills one of its ranks once it has written some checkpoints in this try."""

    def __init__(self, rank: int, tries_before: int) -> None:
        self.killed = False
        self._rank, self._to_come = rank, tries_before + 1
        self._checkpoints, self._pid = 0, 0

    def __call__(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "started" and event["rank"] == self._rank:
                self._to_come -= 1
                self._pid = event["pid"]
            self._checkpoints += event["kind"] == "checkpoint" and not self._to_come
        if self._checkpoints >= CHECKPOINTS_A_TRY and not self.killed:
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)


def _trains(job: Path, outcome: Outcome) -> str:
    losses = [point["train_loss"] for point in curve(job).values() if "train_loss" in point]
    if len(losses) != outcome.figures["steps"] or losses[-1] > losses[0] / 2:
        return f"no: {outcome.figures['steps']} steps, loss {losses[0]:.3g} to {losses[-1]:.3g}"
    return "yes"


def _resumes(whole: Path, killed: Path, outcome: Outcome, kills: int) -> str:
    if outcome.failure is not None:
        return f"no: {outcome.failure.message}"
    if kills < KILLS:
        return f"no: it ended after {kills} kills"
    if sha256(_model(whole)) != sha256(_model(killed)) or curve(whole) != curve(killed):
        return "no: other bytes"
    return f"yes, {kills} kills"


def _exports(job: Path, world: Path) -> str:
    """One safetensors file and the tokenizer's, byte for byte; no pickle."""
    tokenizer = {file.name: file.read_bytes() for file in (world / "base/tokenizer").iterdir()}
    files = {file.name: file.read_bytes() for file in _model(job).parent.iterdir()}
    there = tokenizer.items() <= files.items() and files.keys() == {"config.json", "model.safetensors", *tokenizer}
    return "yes" if there else f"no: {', '.join(sorted(files))}"


def _reloads(job: Path, outcome: Outcome, world: Path) -> str:
    """Transformers load it without a word, and it is as good as the training said of its best model."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from training.batching import PadToLongest, TokenRows

    folder = _model(job).parent
    model, found = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    if any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return f"no: {found}"
    rows = TokenRows(world / "tokens" / "validation.arrow")
    batch = PadToLongest(AutoTokenizer.from_pretrained(folder), 1)([rows[row] for row in range(len(rows))])
    with torch.inference_mode():
        right = model(**batch).logits.argmax(-1) == batch["labels"]
    accuracy = right.double().mean().item()
    if abs(accuracy - outcome.figures["best_metric"]) > 1e-9:
        return f"no: accuracy {accuracy:.4f}, and {outcome.figures['best_metric']:.4f} while training"
    return "yes"


def _model(job: Path) -> Path:
    return job / OUTPUT / "model" / "model.safetensors"
