"""One cell of the matrix: a task type, an engine, a strategy and a number of processes, tried by real trainings."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.jobs.commands import accelerate_argv, accelerate_environment
from tasks.jobs.hardware import visible_gpus
from tasks.jobs.launch import run_job
from tests import task_types as tiny
from tests.architectures import ARCHITECTURES
from tests.training import forks
from training.jobs.protocol import OUTPUT, Failure, Job, Outcome
from training.problems import UserError
from training.recipe import parse
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.strategies import STRATEGIES

OF_ENGINES = "sequence-classification"
"""The task type with which every engine is tried."""
USUAL_ENGINE = "trainer"
# 150 rows in 8 batches an epoch, the last of them smaller, and an evaluation with its checkpoint within some epochs.
TRAINING: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 9,
}
ROWS_A_STEP = 20
KILLS = 3
KILLS_OF_FORKS = 2
CHECKPOINTS_A_TRY = 2
"""After so many new checkpoints a rank is killed."""
GAIN, GAIN_OF_KINDS = 0.5, 0.25
"""The share of the loss that a training takes away at least: of labels, and of any task type, for tiny models of words
learn less."""
STALL_TIMEOUT_S = 300.0
forks.END_WITHIN_S = 600.0
ROUNDING = 1e-4
"""By how much figures of an exported model may differ from those of the shared one: sums are in another order."""


@dataclass(frozen=True)
class Combination:
    """A recipe of tests/task_types.py, an engine and the other settings of one cell."""

    task: str
    """The name of the recipe, which is mostly that of a task type."""
    engine: str
    strategy: str
    processes: int
    launched: bool
    """Whether by the command of the stage fit, which is the same for all task types: else the ranks are forks of one
    process that has imported everything."""
    architecture: str = ""
    """Of tests/architectures.py; empty for the task type's usual model."""

    @property
    def name(self) -> str:
        if self.architecture:
            return f"architectures-{self.architecture}"
        first = self.engine if self.launched else self.task
        return f"{first}-{self.strategy}-{self.processes}"

    def recipe(self, rows: Path) -> dict[str, Any]:
        """Its recipe for the rows of this folder, without the section `compute`."""
        values = tiny.recipe_of(self.task, rows, **self.training)
        if self.architecture:
            config = {"model_type": self.architecture, **ARCHITECTURES[self.architecture].config}
            values["model"] = {"source": "scratch", "config": config}
        return values

    @property
    def compute(self) -> dict[str, Any]:
        """The recipe's section."""
        return {"strategy": self.strategy, "num_processes": self.processes}

    @property
    def training(self) -> dict[str, Any]:
        """The fields of the recipe's section in addition to the task type's own."""
        rows = ROWS_A_STEP // 2 // self.processes
        return {**TRAINING, "engine": self.engine, "per_device_train_batch_size": rows}


WAYS = [(strategy, count) for strategy in STRATEGIES for count in ((1, 2) if strategy == "ddp" else (2,))]
OF_ONE_TASK_TYPE = ("deepspeed-zero1",)
"""Strategies that are tried with one task type and no launcher, because another does the same and more: ZeRO-2 has the
same optimizer of DeepSpeed."""
COMBINATIONS = [
    *(
        Combination(OF_ENGINES, engine, *way, launched=True)
        for engine in ENGINES
        for way in WAYS
        if way[0] not in OF_ONE_TASK_TYPE
    ),
    *(
        Combination(task, USUAL_ENGINE, *way, launched=False)
        for task in tiny.TINY
        for way in WAYS
        if task == OF_ENGINES or way[0] not in OF_ONE_TASK_TYPE
    ),
    *(Combination(one.task, USUAL_ENGINE, "ddp", 1, False, name) for name, one in ARCHITECTURES.items()),
]


@dataclass(frozen=True)
class Cell:
    """The result of a combination: for each promise `yes`, or the reason why it does not hold."""

    task: str
    engine: str
    strategy: str
    processes: int
    launched: bool
    commit: str
    """The one that was tried."""
    refused: str = ""
    """The reason, in place of all promises."""
    trains: str = ""
    resumes: str = ""
    exports: str = ""
    reloads: str = ""
    answers: str = ""
    architecture: str = ""
    onnx: str = ""
    """Of an architecture that has ONNX exports."""

    @property
    def promises(self) -> dict[str, str]:
        names = ["trains", "resumes", "exports", "reloads"]
        names += [] if self.launched else ["answers"]
        names += ["onnx"] if self.onnx else []
        return {name: getattr(self, name) for name in names}

    @property
    def holds(self) -> bool:
        """Whether it keeps every promise, or is refused before it costs anything."""
        return bool(self.refused) or all(found.startswith("yes") for found in self.promises.values())


def fill(combination: Combination, world: Path, folder: Path, commit: str) -> Cell:
    """Tries a combination in a folder of its own, on the world of its task type."""
    what = {**asdict(combination), "commit": commit}
    try:
        return _tried(combination, world, folder, what)
    except AssertionError as error:  # ranks that hang, or died without a word
        return Cell(**what, trains=f"no: {error}")


def _tried(combination: Combination, world: Path, folder: Path, what: dict[str, Any]) -> Cell:
    if reason := refusal(combination, world):
        return Cell(**what, refused=reason)
    if combination.strategy.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return Cell(**what, trains="not tried: the extra deepspeed is not installed")
    values = combination.recipe(world / "rows") | {"compute": {**combination.compute, "mixed_precision": "no"}}
    whole, killed = (tiny.write_fit_job(values, world, folder / name) for name in ("whole", "killed"))
    ended = _launched if combination.launched else _forked
    outcome, _ = ended(combination, whole, kills=0)
    if outcome.failure is not None:
        reason = _of_the_strategy(outcome.failure)
        return Cell(**what, refused=reason) if reason else Cell(**what, trains=f"no: {outcome.failure.message}")
    kills = KILLS if combination.launched else KILLS_OF_FORKS
    exported = Exported(whole, world)
    return Cell(
        **what,
        trains=_trains(whole, outcome, GAIN if combination.launched else GAIN_OF_KINDS),
        resumes=_resumes(whole, killed, kills, *ended(combination, killed, kills)),
        exports=exported.files(),
        reloads=exported.figures(outcome.result["best_step"]),
        answers="" if combination.launched else exported.answers(combination.task),
        onnx=exported.onnx() if combination.architecture else "",
    )


def refusal(combination: Combination, world: Path) -> str:
    """The recipe's refusal of the combination; empty if it is allowed."""
    try:
        parse(combination.recipe(world / "rows") | {"compute": combination.compute})
    except UserError as error:
        return "; ".join(f"{problem.where}: {problem.message}" for problem in error.problems)
    return ""


def _of_the_strategy(failure: Failure) -> str:
    """The refusal to distribute such a model; empty if the training failed for another reason."""
    found = [problem for problem in failure.problems if problem.where == "compute.strategy"]
    return "; ".join(f"{problem.where}: {problem.message}" for problem in found)


def _launched(combination: Combination, job: Path, kills: int) -> tuple[Outcome, int]:
    """How the job ended, and how many kills it lived through: of one rank and another, each after some checkpoints."""
    use_cpu, lived = not visible_gpus(), 0
    argv = accelerate_argv(
        "training.programs.fit", num_processes=combination.processes, mixed_precision="no", use_cpu=use_cpu
    )
    env = accelerate_environment(num_processes=combination.processes, use_cpu=use_cpu, strategy=combination.strategy)
    while True:
        victim = Victim(lived % combination.processes, tries_before=lived) if lived < kills else None
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


class Victim:
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


def _forked(combination: Combination, job: Path, kills: int) -> tuple[Outcome, int]:
    """The same, of ranks that are forks."""
    lived = 0
    for number in range(kills):
        wanted = forks.checkpoints_written(job) + CHECKPOINTS_A_TRY

        def reached(wanted: int = wanted) -> bool:
            return forks.checkpoints_written(job) >= wanted

        lived += forks.kill_when(job, reached, victim=number % combination.processes)
    return forks.finish(job), lived


def _trains(job: Path, outcome: Outcome, gain: float) -> str:
    losses = [point["train_loss"] for point in forks.curve(job).values() if "train_loss" in point]
    first, last = (sum(some) / len(some) for some in (losses[:4], losses[-4:]))
    if len(losses) != outcome.result["steps"] or last > first * (1 - gain):
        return f"no: {outcome.result['steps']} steps, loss {first:.3g} to {last:.3g}"
    return "yes"


def _resumes(whole: Path, killed: Path, kills: int, outcome: Outcome, lived: int) -> str:
    if outcome.failure is not None:
        return f"no: {outcome.failure.message}"
    if lived < kills:
        return f"no: it ended after {lived} kills"
    files = [{file.name: file.read_bytes() for file in _model(job).iterdir()} for job in (whole, killed)]
    if files[0] != files[1] or forks.curve(whole) != forks.curve(killed):
        return "no: other bytes"
    return f"yes, {lived} kills"


class Exported:
    """The model that a job left, as a person gets it."""

    def __init__(self, job: Path, world: Path) -> None:
        from training import task_types

        self.settings, self.folder = Job.read(job).settings, _model(job)
        self.task_type, self._job, self._world = task_types.from_settings(self.settings), job, world

    def files(self) -> str:
        """One safetensors file, its configuration, that of the task type, and the tokenizer's files byte for byte; no
        pickle."""
        tokenizer = {file.name: file.read_bytes() for file in (self._world / "base/output/tokenizer").iterdir()}
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        own = {"config.json", "model.safetensors", *self.task_type.exported_files(self.folder)}
        more = files.keys() - own - tokenizer.keys() - {"generation_config.json"}
        there = tokenizer.items() <= files.items() and own <= files.keys() and not more
        return "yes" if there else f"no: {', '.join(sorted(files))}"

    def figures(self, best_step: int, device: str = "cpu", precision: str = "no", rounding: float = ROUNDING) -> str:
        """Transformers loads it without warnings, and its metrics are those of the best model in training."""
        import transformers

        from training.batching.batches import TokenRows
        from training.engine import inference
        from training.evaluation import metrics
        from training.models.loading import load_preprocessor
        from training.task_types.sequence_classification import ContrastiveClassification

        loaded = getattr(transformers, self.task_type.auto_class).from_pretrained
        network, found = loaded(self.folder, output_loading_info=True)
        if any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return f"no: {found}"
        tokenizer = load_preprocessor(self.task_type, self.folder)
        rows = TokenRows(self._world / "tokens/validation.arrow")
        collate = self.task_type.collator(tokenizer, 1)
        answers = inference.predict(self.task_type, network.to(device).eval(), rows, collate, 16, precision)
        self.stored = self.task_type.decode(answers, tokenizer)
        inputs = self.task_type.metric_inputs(self.stored, self.settings["labels"])
        figures = metrics.compute(self.settings["metrics"], inputs)
        if {"loss", "targets"} <= {*answers.column_names}:
            sums = {name: sum(answers[name].to_pylist()) for name in ("loss", "targets")}
            figures["loss"] = sums["loss"] / sums["targets"]
        trained_type = self.task_type.while_training("ddp")
        if isinstance(trained_type, ContrastiveClassification):
            figures["loss"] = self._contrastive_loss(trained_type, network, rows)
        reported = {name.removeprefix("eval_"): value for name, value in forks.curve(self._job)[best_step].items()}
        both = figures.keys() & reported.keys()
        worse = [name for name in both if abs(figures[name] - reported[name]) > rounding * max(1, abs(reported[name]))]
        if worse or not both:
            return f"no: {', '.join(f'{name} {figures[name]:.6g}, not {reported[name]:.6g}' for name in worse)}"
        return "yes"

    def _contrastive_loss(self, trained_type: Any, network: Any, rows: Any) -> float:
        """The loss of the embeddings that the head reads, the only figure of evaluations in training. Takes the head
        from the network."""
        import torch

        from training.batching.batches import EvaluationBatches
        from training.engine import inference
        from training.models.classifier_inputs import take_head
        from training.models.loading import load_tokenizer
        from training.task_types.losses.contrastive_loss import SupervisedContrast
        from training.task_types.sequence_level import logits_of

        take_head(network)
        collate = trained_type.collator(load_tokenizer(self.folder), 1)
        found = inference.predict(trained_type, network, rows, collate, 16, "no")
        embeddings = torch.tensor(logits_of(found, network.config.hidden_size))  # (N, H)
        contrast, labels = SupervisedContrast(trained_type.options.temperature), torch.tensor(rows.labels)
        batches = EvaluationBatches(rows.lengths, self.settings["training"]["per_device_eval_batch_size"])
        return sum(len(batch) * float(contrast(embeddings[batch], labels[batch])) for batch in batches) / len(rows)

    def answers(self, name: str) -> str:
        """Whether predictions for single rows equal the stored ones of the split."""
        import pyarrow as pa

        from training.engine.predictor import Predictor
        from training.recipe.rules.column_rules import source_columns

        recipe = parse(tiny.recipe_of(name, self._world / "rows"))
        shown = [column.name for column in source_columns(recipe).contents]
        with pa.memory_map(str(self._world / "data/validation.arrow")) as file:
            rows = pa.ipc.open_file(file).read_all().select(shown).combine_chunks().to_batches()[0]
        given = Predictor(self.task_type, self.folder, self.folder, recipe.tokens.max_length).predict(rows)
        stored = self.task_type.to_records(self.stored, self.settings["labels"])
        other = [
            row
            for row, both in enumerate(zip(given, stored, strict=True))
            if not self.task_type.same_prediction(*both, ROUNDING)
        ]
        if other:
            return f"no: {len(other)} of {len(given)} rows, first {json.dumps(given[other[0]], default=str)}"
        return "yes"

    def onnx(self) -> str:
        """Whether the ONNX export predicts as the model does; empty for models of classes that have none."""
        import numpy as np

        from training.batching.batches import TokenRows
        from training.engine import inference
        from training.models import onnx_files
        from training.models.loading import load_tokenizer, load_trained
        from training.recipe.tables.exports import OUTPUTS

        auto_class = self.task_type.auto_class
        if auto_class not in OUTPUTS:
            return ""
        try:
            file = onnx_files.export(auto_class, self.folder, ["onnx"], self._job / "onnx")["onnx"]
        except UserError as error:
            return f"no: {error}"
        network, tokenizer = load_trained(self.task_type, self.folder), load_tokenizer(self.folder)
        rows, collate = TokenRows(self._world / "tokens/validation.arrow"), self.task_type.collator(tokenizer, 1)
        both = [
            inference.predict(self.task_type, model, rows, collate, 16, "no")["logits"].combine_chunks().flatten()
            for model in (network, onnx_files.OnnxModel(file, network.config))
        ]
        furthest = float(np.abs(both[0].to_numpy() - both[1].to_numpy()).max())
        return "yes" if furthest < ROUNDING else f"no: logits differ by {furthest:.2g}"


def _model(job: Path) -> Path:
    return job / OUTPUT / "model"
