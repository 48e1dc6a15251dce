"""The program that creates a base model of images with random weights: `python -m
training.programs.create_image_model JOB`.

settings   CreateImageModelSettings, below
output     model/ (config.json, safetensors), tokenizer/ (preprocessor_config.json, in the place of a tokenizer): the
           same bytes every time
result     training.programs.create_model.ModelResult
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Settings
from training.jobs.search_path import hide_package
from training.models.configurations import RECIPE, invalid_values, make_config
from training.programs.create_model import ModelResult


class CreateImageModelSettings(Settings):
    """The settings of a job of this program."""

    config: dict[str, Any]
    """The configuration of transformers, with model_type, and image_size (pixels) for the image processor, also for a
    model type without such a setting."""
    seed: int


def main(job_dir: Path, job: Job, events: Events) -> ModelResult:
    """Draws the weights, and saves them with ViT's image processor for images of the size of the configuration."""
    from transformers import AutoModel, set_seed
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings, out = CreateImageModelSettings.model_validate(job.settings), job_dir / OUTPUT
    config, size = make_config(settings.config, RECIPE), settings.config["image_size"]
    set_seed(settings.seed)
    with invalid_values(RECIPE, f"no {config.model_type} can be made of it"):
        model = AutoModel.from_config(config, trust_remote_code=False)
    with hide_package("deepspeed"):  # where it is installed, transformers would look for an engine of it: 2 seconds
        model.save_pretrained(out / "model")
    ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(out / "tokenizer")
    return ModelResult(parameters=model.num_parameters())


if __name__ == "__main__":
    run_program(main)
