"""Multi-label classification of images: any number of labels, or none, for an image, as
multi_label_classification.py gives texts.

Rows, features and batches are those of image_task.py; a row's `label` is a list, and `labels`
are (B, P), padded with -1.
"""

from __future__ import annotations

from typing import ClassVar

from training.task_types.image_task import IMAGE, ImageTask
from training.task_types.multi_label_classification import MultiLabelClassification
from training.task_types.task_type import Column


class ImageMultiLabelClassification(ImageTask, MultiLabelClassification):  # type: ignore[misc]
    """Any number of labels for each image."""

    card_sentence = "Gives an image any number of {labels}"
    columns: ClassVar = {**IMAGE, "label": Column("labels", may_be_empty=True)}
