"""Image processors of transformers, stored in 8 bits: batches are the processor's own to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.training.pictures import file_of, noise, stored
from training.batching.images import ImagePreprocessor, StackImages
from training.data.images import open_image
from training.problems import UserError

PROCESSORS: dict[str, dict[str, Any]] = {
    "ViTImageProcessorPil": {"size": {"height": 16, "width": 16}},
    "ConvNextImageProcessorPil": {"size": {"shortest_edge": 24}},
    "CLIPImageProcessorPil": {"size": {"shortest_edge": 24}, "crop_size": {"height": 16, "width": 16}},
    "BitImageProcessorPil": {"size": {"shortest_edge": 24}, "crop_size": {"height": 16, "width": 16}},
    "SiglipImageProcessorPil": {"size": {"height": 16, "width": 16}},
    "DeiTImageProcessorPil": {"size": {"height": 24, "width": 24}, "crop_size": {"height": 16, "width": 16}},
    "EfficientNetImageProcessorPil": {"size": {"height": 16, "width": 16}},
}


def folder_of(tmp_path: Path, name: str, **settings: Any) -> Path:
    getattr(transformers, name)(**settings).save_pretrained(tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("name", PROCESSORS)
def test_batches_are_those_of_the_processor_to_the_bit(name: str, tmp_path: Path) -> None:
    made = ImagePreprocessor(folder_of(tmp_path, name, **PROCESSORS[name]))
    images = [stored(file_of(noise(seed, width, height))) for seed, (width, height) in enumerate([(40, 30), (25, 60)])]
    batch = StackImages(made)([{"pixel_values": one, "label": 1} for one in made.prepare(images)])
    own = made.processor(images=[open_image(image) for image in images], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(batch["pixel_values"].numpy(), own)
    assert batch["pixel_values"].dtype.is_floating_point and batch["labels"].tolist() == [1, 1]
    # This one rescales in another way if it does not normalize, so its finished numbers are stored.
    assert made.prepare(images).dtype == (np.float32 if name.startswith("EfficientNet") else np.uint8)


def test_a_processor_that_makes_images_of_several_sizes_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "CLIPImageProcessorPil", size={"shortest_edge": 24}, do_center_crop=False)
    with pytest.raises(UserError, match="a batch needs RGB of one size"):
        ImagePreprocessor(folder)


def test_a_model_for_images_of_another_size_is_refused(tmp_path: Path) -> None:
    made = ImagePreprocessor(folder_of(tmp_path, "ViTImageProcessorPil", size={"height": 16, "width": 16}))
    sizes = {
        "patch_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    for config, words in (
        ({"image_size": 32}, "takes those of 32"),
        ({"image_size": 16, "num_channels": 1}, "1 channels"),
    ):
        model = transformers.ViTModel(transformers.ViTConfig(**sizes, **config))
        with pytest.raises(UserError, match=words):
            made.require_fitting(model)
