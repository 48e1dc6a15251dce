"""The worst predictions of images: shown as pictures, and not as the text that an image is stored as."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from tests.training.pictures import PLACES, data_url, square
from training.evaluation.predictions import OneLabel
from training.programs.score import sample_worst_rows
from training.task_types.image_classification import ImageClassification


def test_the_worst_images_are_drawn_with_labels_and_predictions_and_left_out_of_the_table(tmp_path: Path) -> None:
    draw = random.Random(1)
    labels = [*PLACES]
    images = [data_url(square(corner, draw)).partition(",")[2] for corner in labels]
    table = pa.table({"image": images, "label": [*range(len(labels))]})
    with pa.ipc.new_file(tmp_path / "test.arrow", table.schema) as writer:
        writer.write_table(table)
    probabilities = np.full((len(labels), len(labels)), 0.1)
    probabilities[:, 1] = 1 - 0.1 * (len(labels) - 1)  # all images are taken for the second corner
    truth = np.arange(len(labels))
    predicted = OneLabel(truth, np.full(len(labels), 1), probabilities, labels)
    rows = sample_worst_rows(ImageClassification(), "test", predicted, tmp_path / "test.arrow", tmp_path / "log")
    assert [row["row"] for row in rows] == [0, *range(2, len(labels)), 1]
    assert rows[0]["label"] == labels[0] and rows[0]["prediction"] == labels[1] and "image" not in rows[0]
    with Image.open(tmp_path / "log" / "worst_test.png") as picture:
        assert picture.width > picture.height > 100 and len(set(picture.convert("L").tobytes())) > 20
