"""Image regression: a number for an image, such as a rating or a count, as regression.py gives texts.

Rows, features and batches are those of image_task.py; `labels` are float32.
"""

from __future__ import annotations

from typing import ClassVar

from training.task_types.image_task import IMAGE, ImageTask
from training.task_types.regression import Regression
from training.task_types.task_type import Column


class ImageRegression(ImageTask, Regression):  # type: ignore[misc]
    """A number for each image."""

    pipeline = False  # transformers' pipeline for images gives the sigmoid of a number
    card_sentence = "Gives an image a number"
    columns: ClassVar = {**IMAGE, "label": Column("number")}
