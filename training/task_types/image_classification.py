"""Image classification: one label for an image, as sequence_classification.py gives texts.

Rows, features and batches are those of image_task.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from training.task_types.image_task import IMAGE, ImageTask
from training.task_types.sequence_classification import SequenceClassification
from training.task_types.task_type import Column


class ImageClassification(ImageTask, SequenceClassification):  # type: ignore[misc]
    """One label for each image."""

    card_sentence = "Gives an image one of {labels}"
    columns: ClassVar = {**IMAGE, "label": Column("label")}

    def same_served(self, served: Any, stored: Sequence[Mapping[str, Any]], tolerance: float) -> bool:
        """Compares the probability of the likeliest label. MLflow gives a column a rank, and in it `{label, score}`."""
        pairs = zip(served[0], stored, strict=True)
        return all(abs(best["score"] - record["probability"]) <= tolerance for best, record in pairs)
