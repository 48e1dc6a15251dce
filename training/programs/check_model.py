"""The program that checks a model before anything is downloaded or trained: `python -m training.programs.check_model
JOB`.

The model is built on the meta device, from its configuration alone: without weights, in some seconds.

settings   training.recipe.program_settings.CheckModelSettings
figures    none; problems end it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.jobs.search_path import hide_package
from training.models.configurations import invalid_values, make_config, require_class
from training.problems import Problem, UserError
from training.recipe.program_settings import CheckModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.task_types.task_type import TaskType


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Raises UserError with all problems of the model."""
    with hide_package("deepspeed"):  # where it is installed, transformers would look for an engine of it: 2 seconds
        check(CheckModelSettings.model_validate(job.settings))
    return {}


def check(settings: CheckModelSettings) -> None:
    """Raises UserError with all problems of the model."""
    from training import task_types
    from training.models import adapters, gpu_kernels, loading

    task_type = task_types.load(settings.task, settings.options)
    network = build(settings.config, settings.field, task_type, settings.labels)
    if network is None:
        return
    problems: list[Problem] = []
    try:
        loading.require_positions(network, max_length=settings.max_length, **task_type.position_limits())
    except UserError as error:
        problems += error.problems
    if settings.lora:
        problems += adapters.find_unknown_layers(network, settings.lora)
    problems += gpu_kernels.find_unsupported(network, settings.attn_implementation, settings.use_liger_kernel)
    if problems:
        raise UserError(problems)


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
