"""The program that trains: `python -m training.fit JOB`, usually through `accelerate launch`.

inputs     model (config.json and safetensors), tokenizer, tokens (train.arrow, validation.arrow)
settings   kind, labels, training (the recipe's), compute (the recipe's, with what
           num_processes and mixed_precision came to), metrics, batch_division (by how much batches are cut so that
           they fit into memory)
output     model/: config.json, safetensors and the tokenizer's files; log/loss.png: the curves
figures    steps, epochs, train_loss, best_step, best_metric, train_samples_per_second, micro_batch (rows)
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.problems import Problem, UserError
from training.protocol import (
    CHECKPOINTS,
    EVENTS,
    OUTPUT,
    Events,
    Interrupted,
    Job,
    read_events,
    run_program,
    stop_requested,
)

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

    from training.trainer import ExactTrainer


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Train, or go on training, and export the model; gives the figures."""
    import torch

    from training import curves, dropout, kinds, model, ranks, strategies

    model.make_deterministic()
    settings = job.settings
    kind = kinds.load(settings["kind"])
    tokenizer = model.load_tokenizer(Path(job.inputs["tokenizer"]), Path(job.inputs["model"]))
    network = model.load_for_training(
        kind, Path(job.inputs["model"]), settings["labels"], tokenizer, settings["training"]["seed"]
    )
    if not torch.cuda.is_available():
        dropout.cheapen(network)
    trainer = make_trainer(job_dir, job, events, network, tokenizer)
    require_as_asked(trainer, settings["compute"])
    first = trainer.is_world_process_zero()
    if first and trainer.args.torch_compile:
        events.warning("torch_compile: if this run is killed, it goes on, but may end with other bytes.")
    start = ranks.from_first(begin_with(job_dir, job, events) if first else None)
    if start is not None and first:
        events.note(f"going on from {start.name}")
    if any(ranks.any_rank(stop_requested())):
        raise Interrupted("stopped before the first step")
    result = trainer.train(resume_from_checkpoint=str(start) if start else None)
    weights = strategies.load(settings["compute"]["strategy"]).whole_weights(trainer)
    require_more_steps(trainer, job)
    if first:
        model.export(trainer.model, Path(job.inputs["tokenizer"]), job_dir / OUTPUT / "model", weights)
        curves.draw_curves(read_events(job_dir / EVENTS, 0)[0], job_dir / OUTPUT / "log" / "loss.png")
    ranks.part()
    state = trainer.state
    return {
        "micro_batch": trainer.args.per_device_train_batch_size,
        "steps": state.global_step,
        "epochs": round(state.epoch or 0.0, 4),
        "train_loss": trainer.mean_loss,
        "best_step": state.best_global_step,
        "best_metric": state.best_metric,
        "train_samples_per_second": result.metrics["train_samples_per_second"],
    }


def begin_with(job_dir: Path, job: Job, events: Events) -> Path | None:
    """The job's newest good checkpoint; before there is one, that of another job which the recipe names.

    Raises UserError where that one cannot be gone on from.
    """
    from training import checkpoints
    from training.trainer import LOSS_SUM

    folder = job_dir / CHECKPOINTS
    found = checkpoints.newest_good(folder, events.warning)
    if found is not None or "checkpoint" not in job.inputs:
        return found
    named, asked = Path(job.inputs["checkpoint"]), job.settings["compute"]["num_processes"]
    checkpoints.adopt(named, folder)
    processes = len(list(named.glob(LOSS_SUM.format("*"))))
    if processes != asked:
        message = f"{named.name} is of {processes} processes, and compute.num_processes is {asked}: use as many."
        raise UserError([Problem(kind="training", where=checkpoints.NAMED, message=message)])
    return folder / named.name


def require_more_steps(trainer: ExactTrainer, job: Job) -> None:
    """Raises UserError where a checkpoint that the recipe names was at the end of this training already."""
    from training import checkpoints

    named, step = job.inputs.get("checkpoint"), trainer.state.global_step
    if named is not None and checkpoints.step_of(Path(named)) >= step:
        message = f"{Path(named).name} is where this training ends, after {step} steps: raise num_train_epochs."
        raise UserError([Problem(kind="training", where=checkpoints.NAMED, message=message)])


def make_trainer(
    job_dir: Path,
    job: Job,
    events: Events,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> ExactTrainer:
    """The job's Trainer, its checkpoints in the job's folder."""
    from training import kinds, losses, metrics, own_classes, strategies
    from training.batching import TokenRows

    settings = job.settings
    asked, labels = settings["training"], settings["labels"]
    training = divided(asked, settings["batch_division"])
    kind = kinds.load(settings["kind"])
    tokens = Path(job.inputs["tokens"])

    def compute_metrics(evaluated: EvalPrediction) -> dict[str, float]:
        predictions = kind.predictions(evaluated.predictions)
        return metrics.compute(settings["metrics"], predictions, evaluated.label_ids, labels)

    rows = TokenRows(tokens / "train.arrow")
    compute = settings["compute"]
    shared = strategies.load(compute["strategy"]).arguments(compute, network)
    arguments = training_arguments(job_dir, training, compute, shared)
    a_pass = asked["per_device_train_batch_size"] * arguments.world_size
    return own_classes.trainer_class(training)(
        model=network,
        args=arguments,
        rows_a_step=a_pass * asked["gradient_accumulation_steps"],
        train_dataset=rows,
        eval_dataset=TokenRows(tokens / "validation.arrow"),
        data_collator=own_classes.collator(training, kind, tokenizer),
        compute_metrics=compute_metrics,
        callbacks=own_classes.callbacks(training),
        loss=losses.make(training, labels, rows.labels),
        events=events,
        compute=compute,
        checkpoint_interval_s=training["checkpoint_interval_s"],
    )


def divided(training: dict[str, Any], by: int) -> dict[str, Any]:
    """The training section with batches that are smaller by this factor, and as many rows an optimizer step."""
    rows = training["per_device_train_batch_size"]
    fewer = -(-rows // by)
    return training | {
        "per_device_train_batch_size": fewer,
        "gradient_accumulation_steps": -(-rows * training["gradient_accumulation_steps"] // fewer),
        "per_device_eval_batch_size": -(-training["per_device_eval_batch_size"] // by),
    }


def require_as_asked(trainer: ExactTrainer, compute: dict[str, Any]) -> None:
    """Raises RuntimeError where what runs is not what the recipe asked for; every rank looks for itself.

    The launchers of accelerate fall back in silence, to one process or to ranks that train alone.
    """
    import torch

    from training import strategies

    arguments, accelerator = trainer.args, trainer.accelerator
    processes, device = compute["num_processes"], "cuda" if torch.cuda.is_available() else "cpu"
    shared = strategies.load(compute["strategy"]).DISTRIBUTED_TYPE[device]
    kind = "NO" if processes == 1 else shared
    asked = {"processes": processes, "launched": processes, "distributed type": kind, "GPUs a process": True}
    runs = {
        "processes": arguments.world_size,
        "launched": int(os.environ.get("WORLD_SIZE", "1")),
        "distributed type": accelerator.distributed_type.value,
        "GPUs a process": arguments.n_gpu <= 1,
    }
    if runs != asked:
        raise RuntimeError(f"asked for {asked}, but what runs is {runs}")


def training_arguments(
    job_dir: Path, training: dict[str, Any], compute: dict[str, Any], shared: dict[str, Any]
) -> TrainingArguments:
    """The recipe's training section as TrainingArguments, with what the project decides itself and what the strategy
    asks for. Raises UserError where TrainingArguments refuses a value.
    """
    import torch
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    theirs = {name: value for name, value in training.items() if name in known and value is not None}
    decided = {
        "output_dir": str(job_dir / CHECKPOINTS),
        "save_strategy": training["eval_strategy"],
        "bf16": compute["mixed_precision"] == "bf16",
        "fp16": compute["mixed_precision"] == "fp16",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "report_to": training["report_to"] or "none",
        "remove_unused_columns": False,
        "restore_callback_states_from_checkpoint": True,
    }
    if training["eval_strategy"] != "no":
        theirs.setdefault("metric_for_best_model", "loss")  # early stopping asks for it
    if training["eval_strategy"] == "steps":
        decided["save_steps"] = training["eval_steps"]
    try:
        return TrainingArguments(**{**theirs, **training["extra"], **decided, **shared})
    except (TypeError, ValueError) as error:
        raise UserError([Problem(kind="training", where="training", message=str(error))]) from error


if __name__ == "__main__":
    run_program(main, stops_itself=True)
