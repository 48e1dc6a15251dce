"""Stage: preparation of images for the model."""

from __future__ import annotations

from tasks.cache.code import figures_code
from tasks.cache.results import Artifact
from tasks.jobs.job import StageJob, files_of, folder_of, stage
from training import task_types
from training.data.ipc_files import SPLITS
from training.jobs.protocol import TaskSettings
from training.programs.create_model import ModelResult
from training.programs.process_images import ProcessImagesResult
from training.recipe import Recipe

PROGRAM = "training.programs.process_images"


def has_images(recipe: Recipe) -> bool:
    """Whether rows have images, which an image processor prepares in place of a tokenizer."""
    return task_types.class_of(recipe.task).reads_images()


@stage(ProcessImagesResult, may_repeat=True)
def process_images(recipe: Recipe, data: Artifact, model: Artifact[ModelResult]) -> StageJob:
    """Decodes every image, and resizes it by the model's own image processor, in blocks: an appended image costs one.

    The rows, the settings of the image processor (not the model's weights), the versions of transformers and Pillow.
    """
    task_type = task_types.load(**recipe.task_and_options)
    rows = files_of(data, [f"{split}.arrow" for split in SPLITS])
    return StageJob(
        PROGRAM,
        TaskSettings(task=recipe.task, options=task_type.options_of("process_images")),
        reads={"data": rows, "tokenizer": folder_of(model, "tokenizer")},
        code=task_types.code_modules(recipe.task),
        outside=figures_code(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("pyarrow", *task_type.libraries),
        blocks_without=tuple(f"upstream.{name}" for name in rows.digests),
    )
