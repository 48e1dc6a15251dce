"""Tasks with one prediction for each image: what they have in place of texts and their tokens.

A row of the data set        {"image": "photos/17.jpg", "label": "cat"}
features                     {"pixel_values": [52, 61, ..., 7], "length": 1, "label": 1}, C·H·W numbers of 8 bits
a batch                      {"pixel_values": (B, C, H, W), "labels": (B,)}, float32
the model's output           logits (B, L)

A task type of images names it before the task type of texts that has the same labels, predictions and loss.

B rows of a batch, C channels, H and W pixels, L labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from training.task_types.task_type import Column, TaskType
from training.tokenization.features import Features, list_column

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import PadToLongest
    from training.tokenization.encoder import Encoder

IMAGE = {"image": Column("image", advice="Name the column of paths or images in data.columns.image.")}


class ImageTask(TaskType):
    """The base of task types with one prediction for each image."""

    # Neither contrastive training nor teachers: both read tokens.
    Options = TaskType.Options
    auto_class = "AutoModelForImageClassification"
    hub_task = "image-classification"
    teacher_outputs = None
    serves: ClassVar = {}
    libraries: ClassVar = ("transformers", "torch", "pillow", "numpy")

    def options_of(self, stage: str) -> dict[str, Any]:
        """None."""
        return {}

    def while_training(self, strategy: str) -> Self:
        return self

    def preprocessor(self, folder: Path) -> Any:
        from training.batching.images import ImagePreprocessor

        return ImagePreprocessor(folder)

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """`pixel_values`, as the image processor gives them before they are rescaled and normalized."""
        prepared = encoder.prepare(rows.column("image").to_pylist())  # type: ignore[attr-defined]
        sizes = np.full(len(prepared), prepared.shape[1])
        columns: dict[str, Any] = {
            "pixel_values": list_column(prepared.ravel(), sizes),
            "length": np.ones(len(prepared), np.int32),
        }
        if "label" in rows.schema.names:
            columns["label"] = rows.column("label")
        return Features(pa.RecordBatch.from_pydict(columns), np.zeros(len(prepared), np.int64))

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        from training.batching.images import StackImages

        return StackImages(tokenizer)

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Requires a model for images of the processor's size."""
        tokenizer.require_fitting(model)
        super().prepare(model, tokenizer)
