"""Random changes of training images: what they do, and that they depend on seed, epoch and row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.training.batching.test_images import folder_of
from tests.training.pictures import file_of, noise, stored
from training.batching.augmentation import AugmentImages
from training.batching.batches import LengthGroupedBatches, TokenRows
from training.batching.images import ImagePreprocessor, StackImages
from training.problems import UserError
from training.recipe.augment_fields import Augment
from training.tokenization.features import list_column

SIZE = 16
EVERY = {
    "RandomResizedCrop": {},
    "RandomHorizontalFlip": {},
    "RandomVerticalFlip": {},
    "RandomRotation": {"degrees": 20},
    "RandAugment": {},
    "ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "RandomErasing": {},
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImagePreprocessor:
    folder = tmp_path_factory.mktemp("processor")
    return ImagePreprocessor(folder_of(folder, "ViTImageProcessorPil", size={"height": SIZE, "width": SIZE}))


def changed(processor: ImagePreprocessor, pixels: Any, count: int = 50, **augment: Any) -> list[Any]:
    """(H, W, C) the image as it is in `count` rows."""
    collate = AugmentImages(dict, processor, Augment.model_validate(augment))
    row = pixels.transpose(2, 0, 1).ravel()
    rows = (collate.change(row, np.random.default_rng(number)) for number in range(count))
    return [row.reshape(3, SIZE, SIZE).transpose(1, 2, 0) for row in rows]


def pixels() -> Any:
    return np.asarray(noise(1, SIZE, SIZE))


def flat(*color: int) -> Any:
    return np.broadcast_to(np.array(color, np.uint8), (SIZE, SIZE, 3))


@pytest.mark.parametrize(("name", "axis"), [("RandomHorizontalFlip", 1), ("RandomVerticalFlip", 0)])
def test_flips_mirror_as_often_as_p(processor: ImagePreprocessor, name: str, axis: int) -> None:
    mirrored = np.flip(pixels(), axis)
    assert all((one == mirrored).all() for one in changed(processor, pixels(), **{name: {"p": 1.0}}))
    often = [(one == mirrored).all() for one in changed(processor, pixels(), 400, **{name: {"p": 0.25}})]
    assert 0.15 < np.mean(often) < 0.35


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_a_crop_is_a_window_of_the_padded_image(processor: ImagePreprocessor, mode: Any) -> None:
    padded = np.pad(pixels(), ((2, 2), (2, 2), (0, 0)), mode)
    windows = {padded[y : y + SIZE, x : x + SIZE].tobytes() for y in range(5) for x in range(5)}
    found = changed(processor, pixels(), 200, RandomCrop={"padding": 2, "padding_mode": mode})
    assert {one.tobytes() for one in found} == windows


def test_a_resized_part_has_the_share_of_the_area_that_scale_gives(processor: ImagePreprocessor) -> None:
    whole = changed(processor, pixels(), RandomResizedCrop={"scale": [1.0, 1.0], "ratio": [1.0, 1.0]})
    assert all((one == pixels()).all() for one in whole)
    # Of a ramp from 0 to 240, a quarter of the area spans about half of the values.
    ramp = np.repeat(np.arange(0, 256, 16, np.uint8)[None, :, None], SIZE, 0).repeat(3, 2)
    parts = changed(processor, ramp, RandomResizedCrop={"scale": [0.25, 0.25], "ratio": [1.0, 1.0]})
    spans = [int(one.max()) - int(one.min()) for one in parts]
    assert set(spans) == {7 * 16} and len({int(one.min()) for one in parts}) > 5


def test_a_rotation_turns_about_the_center_and_leaves_black_corners(processor: ImagePreprocessor) -> None:
    found = changed(processor, flat(200, 200, 200), RandomRotation={"degrees": 45})
    assert all((one[4:12, 4:12] == 200).all() for one in found)
    assert any((one[0, 0] == 0).all() and (one[-1, -1] == 0).all() for one in found)


def test_jitter_keeps_within_its_factors(processor: ImagePreprocessor) -> None:
    levels = {int(one[0, 0, 0]) for one in changed(processor, flat(100, 100, 100), ColorJitter={"brightness": 0.2})}
    assert min(levels) in range(80, 85) and max(levels) in range(116, 121)
    gray = np.ptp(changed(processor, flat(200, 100, 50), ColorJitter={"saturation": 1.0}), axis=-1)
    assert gray.min() < 20 and gray.max() > 150
    # A red turned by a third of the circle, in either direction, is green or blue.
    hues = {tuple(one[0, 0].argsort()[-1:]) for one in changed(processor, flat(255, 0, 0), ColorJitter={"hue": 0.5})}
    assert hues == {(0,), (1,), (2,)}


def test_an_erased_rectangle_has_one_color_and_the_other_pixels_stay(processor: ImagePreprocessor) -> None:
    erased = changed(processor, pixels() // 2, 100, RandomErasing={"p": 1.0, "scale": [0.1, 0.3], "value": 255})
    for one in erased:
        is_erased = (one == 255).all(axis=-1)
        rows, columns = np.flatnonzero(is_erased.any(axis=1)), np.flatnonzero(is_erased.any(axis=0))
        assert is_erased[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert 0.05 <= is_erased.mean() <= 0.35 and (one[~is_erased] == (pixels() // 2)[~is_erased]).all()


def test_rand_augment_changes_shape_and_color_more_with_a_larger_magnitude(processor: ImagePreprocessor) -> None:
    photo = np.asarray(Image.fromarray(pixels()[:4, :4]).resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    differences = [
        np.mean([np.abs(one.astype(int) - photo).mean() for one in changed(processor, photo, 200, **given)])
        for given in ({"RandAugment": {"magnitude": value, "num_ops": ops}} for value, ops in ((1, 1), (9, 2), (30, 2)))
    ]
    assert differences == sorted(differences) and differences[0] > 0


def rows_of(processor: ImagePreprocessor) -> TokenRows:
    images = processor.prepare([stored(file_of(noise(seed, SIZE, SIZE))) for seed in range(20)])
    columns = {"pixel_values": list_column(images.ravel(), np.full(20, images.shape[1]))}
    columns |= {"length": pa.array(np.ones(20, np.int32)), "label": pa.array(range(20))}
    return TokenRows(pa.table(columns))


@pytest.mark.slow
def test_batches_are_the_same_in_any_number_of_workers_and_other_in_each_epoch(processor: ImagePreprocessor) -> None:
    rows, collate = rows_of(processor), AugmentImages(StackImages(processor), processor, Augment.model_validate(EVERY))

    def epoch(number: int, workers: int, **batches: Any) -> list[dict[str, torch.Tensor]]:
        sampler = LengthGroupedBatches(rows.lengths, batches.pop("size", 4), seed=7, **batches)
        sampler.set_epoch(number)
        # Workers get the collator pickled, as on macOS. A fork has what other tests left, and may fail at its exit.
        how = {"multiprocessing_context": "forkserver"} if workers else {}
        return [*DataLoader(rows, batch_sampler=sampler, collate_fn=collate, num_workers=workers, **how)]  # type: ignore[arg-type]

    first, of_workers = (epoch(1, workers) for workers in (0, 2))
    for one, same in zip(first, of_workers, strict=True):
        assert torch.equal(one["pixel_values"], same["pixel_values"]) and torch.equal(one["labels"], same["labels"])

    def by_row(found: list[dict[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
        return {int(label): image for one in found for label, image in zip(*reversed(one.values()), strict=True)}

    mine, later = by_row(first), by_row(epoch(2, 0))
    of_ranks = by_row(epoch(1, 0, size=8, world=2, rank=0)) | by_row(epoch(1, 0, size=8, world=2, rank=1))
    assert {*mine} == {*of_ranks} == {*range(20)}
    assert all(torch.equal(mine[row], of_ranks[row]) for row in mine)  # whatever the batch and the rank
    assert not any(torch.equal(mine[row], later[row]) for row in mine)


def test_evaluated_rows_stay_as_they_are(processor: ImagePreprocessor) -> None:
    plain = StackImages(processor)
    features = rows_of(processor).__getitems__([3, 4])
    found = AugmentImages(plain, processor, Augment.model_validate(EVERY))(features)
    assert torch.equal(found["pixel_values"], plain(features)["pixel_values"])


def test_a_processor_whose_numbers_are_stored_has_no_augmentation(tmp_path: Path) -> None:
    made = ImagePreprocessor(folder_of(tmp_path, "EfficientNetImageProcessorPil", size={"height": 16, "width": 16}))
    with pytest.raises(UserError, match="has 32-bit numbers stored"):
        AugmentImages(dict, made, Augment.model_validate(EVERY))
