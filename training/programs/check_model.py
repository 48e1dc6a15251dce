"""The program that checks a model before anything is downloaded or trained: `python -m training.programs.check_model
JOB`.

The model is built on the meta device, from its configuration alone, in some seconds. Of its weights, only the names and
shapes are compared with it. A small copy is tried: see training.models.small_copy.

settings   CheckModelSettings, below
result     CheckedModel, below; errors end it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from training import task_types
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job, Result, TaskSettings
from training.jobs.search_path import hide_package
from training.models.configurations import RECIPE, code_fields, invalid_values, make_config, require_class
from training.models.weights import Fit, compare, head_problem, new_head_problem
from training.problems import Problem, UserError, collected
from training.recipe.training_fields import Lora
from training.task_types.task_type import BaseReference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.task_types.task_type import TaskType


class CheckModelSettings(TaskSettings):
    """The settings of a job of this program."""

    labels: list[str]
    """Names, or stand-ins for them."""
    max_length: int
    """Tokens a row."""
    lora: Lora | None
    attn_implementation: str | None = None
    """model.attn_implementation."""
    use_liger_kernel: bool = False
    """training.use_liger_kernel."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """The number format of the run."""
    exports: list[str] = Field(default_factory=list)
    """release.exports, if the packages for them are installed."""
    config: dict[str, Any]
    """The content of config.json, or `model.config`."""
    weights: dict[str, list[int]] | None = None
    """The shape of each tensor in the model's files, by name; None if they are not on this machine."""
    field: str
    """The recipe's field that names the model."""


class CheckedModel(Result):
    """The findings of this program that do not end a run."""

    notes: list[str] = Field(default_factory=list)
    warnings: list[Problem] = Field(default_factory=list)
    vocab_size: int | None = None
    """The rows of the model's embedding; None if it has none."""


def main(job_dir: Path, job: Job, events: Events) -> CheckedModel:
    """Raises UserError with all problems of the model."""
    with hide_package("deepspeed"):  # where it is installed, transformers would look for an engine of it: 2 seconds
        return check(CheckModelSettings.model_validate(job.settings))


def check(settings: CheckModelSettings) -> CheckedModel:
    """What was found and does not end a run. Raises UserError with all problems of the model."""
    from training.models import adapters, layers, loading, small_copy

    task_type = task_types.load(settings.task, settings.options)
    network = build(settings.config, settings.field, task_type, settings.labels)
    found = CheckedModel(notes=list(_ignored_code(settings)))
    if network is None:
        return found
    found = found.model_copy(update={"vocab_size": loading.vocab_size(network)})
    problems: list[Problem] = []
    with collected(problems):
        if not task_type.reads_images():
            loading.require_positions(network, max_length=settings.max_length, **task_type.position_limits())
    if settings.lora:
        problems += adapters.find_unfit_layers(network, settings.lora)
    problems += layers.find_unsupported(network, settings.attn_implementation, settings.use_liger_kernel)
    is_reference = isinstance(task_type, BaseReference) and task_type.needs_reference
    if settings.field == RECIPE and is_reference:
        problems += new_head_problem(network, settings.field)
    if settings.weights is not None:
        of_weights = compare_weights(network, settings.weights)
        problems += [*of_weights.problems(network, settings.field)]
        problems += head_problem(network, of_weights, task_type.auto_class, settings.field, is_reference=is_reference)
        if of_weights.pooler:
            found.notes.append(
                f"{settings.field}: its files lack the pooler ({of_weights.pooler[0]}), as masked language models do: "
                "it is drawn at random and trained."
            )
    if not any(problem.level == "error" for problem in problems):
        tried = (settings.mixed_precision, settings.exports)
        problems += small_copy.find_failures(network, task_type.auto_class, *tried)
    if any(problem.level == "error" for problem in problems):
        raise UserError(problems)
    return found.model_copy(update={"warnings": problems})


def compare_weights(network: PreTrainedModel, shapes: Mapping[str, list[int]]) -> Fit:
    """How weights of these shapes fit the network, by the rules of from_pretrained, which renames and joins some."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it prints a table of the names
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    _, info = type(network).from_pretrained(
        None,
        config=network.config,
        state_dict=state,
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return compare(network, info)


def _ignored_code(settings: CheckModelSettings) -> Iterator[str]:
    for name, value in code_fields(settings.config).items():
        if settings.field != RECIPE:
            yield f"{settings.field}: {name} {value!r} of its config.json is not used: only the recipe chooses code."


def build(values: Mapping[str, Any], field: str, task_type: TaskType, labels: list[str]) -> PreTrainedModel | None:
    """The model on the meta device; None if this type cannot be built there. Raises UserError if there is none."""
    import torch
    import transformers

    config = make_config(values, field, task_type.config_fields(labels))
    require_class(config, task_type.auto_class, field)
    try:
        with torch.device("meta"), invalid_values(field, f"no {config.model_type} can be made of it"):
            auto_class = getattr(transformers, task_type.auto_class)
            network: PreTrainedModel = auto_class.from_config(config, trust_remote_code=False)
    except (NotImplementedError, UserError) as error:
        if isinstance(error, UserError) and "meta" not in str(error.__cause__):
            raise
        return None
    return network


if __name__ == "__main__":
    run_program(main)
