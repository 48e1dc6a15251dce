"""Random changes of training images: a pure function of the seed, the epoch and the row, whichever process makes the
batch. Their meanings are those of torchvision.transforms for images of PIL.

They change the stored 8 bits, before the image processor's rescaling and normalization, and keep the size. Rows of
evaluations stay as they are. C channels, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform, Transpose

from training.batching.random_states import SeededBatch
from training.problems import UserError

if TYPE_CHECKING:
    from training.batching.images import ImagePreprocessor
    from training.recipe import augment_fields as fields

Draw = np.random.Generator
Collate = Callable[[Any], dict[str, torch.Tensor]]
Step = Callable[[Image.Image, Any, Draw], Image.Image]
Change = Callable[[Image.Image, float], Image.Image]

_CROP_TRIES = 10
_MAGNITUDES = 31


class AugmentImages:
    """A collator that changes the images of training batches at random, and makes batches by `collate`.

    Raises UserError for an image processor whose images are not stored in 8 bits.
    """

    def __init__(self, collate: Collate, preprocessor: ImagePreprocessor, augment: fields.Augment) -> None:
        if preprocessor.dtype is not np.uint8:
            message = "changes images of 8 bits, and this model's image processor has 32-bit numbers stored: leave it "
            raise UserError.of("training", "training.augment", f"{message}out, or choose another model.")
        self._collate, self._shape = collate, preprocessor.shape
        given = ((name, getattr(augment, name)) for name in STEPS)
        self._steps = {name: options for name, options in given if options is not None}

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not isinstance(features, SeededBatch):
            return self._collate(features)
        seed, epoch, *_ = features.seeds
        changed = [
            {**row, "pixel_values": self.change(row["pixel_values"], np.random.default_rng([seed, epoch, number]))}
            for row, number in zip(features, features.rows, strict=True)
        ]
        return self._collate(SeededBatch(changed, features.seeds, features.rows))

    def change(self, pixels: npt.NDArray[np.uint8], draw: Draw) -> npt.NDArray[np.uint8]:
        """(C·H·W) a stored image, changed."""
        image = Image.fromarray(pixels.reshape(self._shape).transpose(1, 2, 0))
        for name, options in self._steps.items():
            image = STEPS[name](image, options, draw)
        return np.asarray(image).transpose(2, 0, 1).ravel()


def _resized_crop(image: Image.Image, options: fields.ResizedCrop, draw: Draw) -> Image.Image:
    left, top, width, height = _draw_part(image.size, options, draw)
    return image.crop((left, top, left + width, top + height)).resize(image.size, Resampling.BILINEAR)


def _draw_part(size: tuple[int, int], options: fields.ResizedCrop, draw: Draw) -> tuple[int, int, int, int]:
    """Left, top, width and height. A part of extreme shape that does not fit is drawn again, and in the end the largest
    one in the middle is taken."""
    width, height = size
    lowest, highest = options.ratio
    for _ in range(_CROP_TRIES):
        area, ratio = width * height * _draw_share(options.scale, draw), _draw_ratio(options.ratio, draw)
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return int(draw.integers(width - wide + 1)), int(draw.integers(height - high + 1)), wide, high
    wide, high = width, height
    if width / height < lowest:
        high = min(height, round(width / lowest))
    elif width / height > highest:
        wide = min(width, round(height * highest))
    return (width - wide) // 2, (height - high) // 2, wide, high


def _draw_share(limits: Sequence[float], draw: Draw) -> float:
    least, most = limits
    return draw.uniform(least, most)


def _draw_ratio(limits: Sequence[float], draw: Draw) -> float:
    return math.exp(draw.uniform(*np.log(limits)))


def _crop(image: Image.Image, options: fields.Crop, draw: Draw) -> Image.Image:
    pixels, padding = np.asarray(image), options.padding
    padded = np.pad(pixels, ((padding, padding), (padding, padding), (0, 0)), options.padding_mode)
    top, left = draw.integers(2 * padding + 1, size=2)
    return Image.fromarray(padded[top : top + image.height, left : left + image.width])


def _flip(way: Transpose) -> Step:
    return lambda image, options, draw: image.transpose(way) if draw.random() < options.p else image


def _rotate(image: Image.Image, options: fields.Rotation, draw: Draw) -> Image.Image:
    return image.rotate(draw.uniform(-options.degrees, options.degrees))


def _jitter(image: Image.Image, options: fields.Jitter, draw: Draw) -> Image.Image:
    for place in draw.permutation(4):
        name = (*_ENHANCERS, "hue")[place]
        if not (most := getattr(options, name)):
            continue
        if name == "hue":
            image = _turn_hue(image, draw.uniform(-most, most))
        else:
            image = _ENHANCERS[name](image).enhance(draw.uniform(max(0.0, 1 - most), 1 + most))
    return image


_ENHANCERS: dict[str, Callable[[Image.Image], Any]] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


def _turn_hue(image: Image.Image, share: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.array(int(share * 255) % 256, np.uint8)  # wraps around
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


def _rand_augment(image: Image.Image, options: fields.SomeOf14, draw: Draw) -> Image.Image:
    for _ in range(options.num_ops):
        change, largest, is_signed = _CHANGES[int(draw.integers(len(_CHANGES)))]
        magnitude = largest(image) * options.magnitude / (_MAGNITUDES - 1)
        image = change(image, -magnitude if is_signed and draw.integers(2) else magnitude)
    return image


def _enhance(kind: Callable[[Image.Image], Any]) -> Change:
    return lambda image, magnitude: kind(image).enhance(1 + magnitude)


def _move(image: Image.Image, *matrix: float) -> Image.Image:
    """The image under an affine map, from places of the result to places of the image."""
    return image.transform(image.size, Transform.AFFINE, matrix)


def _posterize(image: Image.Image, magnitude: float) -> Image.Image:
    return ImageOps.posterize(image, 8 - round(magnitude))


def _solarize(image: Image.Image, magnitude: float) -> Image.Image:
    return ImageOps.solarize(image, 255 - magnitude)  # type: ignore[arg-type]


_CHANGES: Sequence[tuple[Change, Callable[[Image.Image], float], bool]] = (
    (lambda image, _: image, lambda image: 0.0, False),
    (lambda image, m: _move(image, 1, m, 0, 0, 1, 0), lambda image: 0.3, True),
    (lambda image, m: _move(image, 1, 0, 0, m, 1, 0), lambda image: 0.3, True),
    (lambda image, m: _move(image, 1, 0, -int(m), 0, 1, 0), lambda image: image.width * 150 / 331, True),
    (lambda image, m: _move(image, 1, 0, 0, 0, 1, -int(m)), lambda image: image.height * 150 / 331, True),
    (lambda image, m: image.rotate(m), lambda image: 30.0, True),
    (_enhance(ImageEnhance.Brightness), lambda image: 0.9, True),
    (_enhance(ImageEnhance.Color), lambda image: 0.9, True),
    (_enhance(ImageEnhance.Contrast), lambda image: 0.9, True),
    (_enhance(ImageEnhance.Sharpness), lambda image: 0.9, True),
    (_posterize, lambda image: 4.0, False),
    (_solarize, lambda image: 255.0, False),
    (lambda image, _: ImageOps.autocontrast(image), lambda image: 0.0, False),
    (lambda image, _: ImageOps.equalize(image), lambda image: 0.0, False),
)
"""Changes of RandAugment: each with its largest magnitude, and whether its direction is drawn."""


def _erase(image: Image.Image, options: fields.Erasing, draw: Draw) -> Image.Image:
    if draw.random() >= options.p:
        return image
    for _ in range(_CROP_TRIES):
        area = image.width * image.height * _draw_share(options.scale, draw)
        ratio = _draw_ratio(options.ratio, draw)
        high, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if high < image.height and wide < image.width:
            pixels = np.array(image)
            top, left = draw.integers(image.height - high + 1), draw.integers(image.width - wide + 1)
            pixels[top : top + high, left : left + wide] = options.value
            return Image.fromarray(pixels)
    return image


STEPS: dict[str, Step] = {
    "RandomResizedCrop": _resized_crop,
    "RandomCrop": _crop,
    "RandomHorizontalFlip": _flip(Transpose.FLIP_LEFT_RIGHT),
    "RandomVerticalFlip": _flip(Transpose.FLIP_TOP_BOTTOM),
    "RandomRotation": _rotate,
    "RandAugment": _rand_augment,
    "ColorJitter": _jitter,
    "RandomErasing": _erase,
}
"""By the name of the recipe's field, in order."""
