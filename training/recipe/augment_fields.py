"""The section `training.augment` of a recipe: random changes of training images, with torchvision's names."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from training.recipe.field_types import Section

Range = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
"""The smallest and the largest value."""


class ResizedCrop(Section):
    """A random part of the image, enlarged to the whole size."""

    scale: Range = Field(default=[0.08, 1.0])
    """The share of the image's area that the part has."""
    ratio: Range = Field(default=[3 / 4, 4 / 3])
    """The width of the part by its height."""


class Crop(Section):
    """The image, moved by up to some pixels in each direction."""

    padding: int = Field(ge=1, le=4096)
    """The most pixels by which it moves."""
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"
    """The pixels that come in: black (constant), those of the edge repeated, or the image mirrored, without its edge
    (reflect) or with it (symmetric)."""


class Flip(Section):
    """The image mirrored."""

    p: float = Field(default=0.5, gt=0, le=1)
    """How often."""


class Rotation(Section):
    """The image turned about its center; its corners become black."""

    degrees: float = Field(gt=0, le=180)
    """The most by which it is turned, in both directions."""


class Jitter(Section):
    """The image's colors changed, each by a factor between 1 - x and 1 + x, in random order."""

    brightness: float = Field(default=0.0, ge=0)
    """The x of brightness."""
    contrast: float = Field(default=0.0, ge=0)
    """The x of contrast."""
    saturation: float = Field(default=0.0, ge=0)
    """The x of saturation: a factor of 0 makes the image gray."""
    hue: float = Field(default=0.0, ge=0, le=0.5)
    """The most by which hues turn, in both directions: 1 is the whole circle."""


class SomeOf14(Section):
    """Some of 14 changes of shape and color, drawn anew for each image (Cubuk et al., arXiv 1909.13719)."""

    num_ops: int = Field(default=2, ge=1, le=14)
    """Changes of one image."""
    magnitude: int = Field(default=9, ge=0, le=30)
    """How much each changes, of 30."""


class Erasing(Section):
    """A random rectangle of the image in one color (Zhong et al., arXiv 1708.04896)."""

    p: float = Field(default=0.5, gt=0, le=1)
    """How often."""
    scale: Range = Field(default=[0.02, 0.33])
    """The share of the image's area that the rectangle has."""
    ratio: Range = Field(default=[0.3, 3.3])
    """The height of the rectangle by its width."""
    value: int = Field(default=0, ge=0, le=255)
    """The color of its pixels: 0 is black, 255 white."""


class Augment(Section):
    """Random changes of training images, in the order of these fields. Names, meanings and defaults are those of
    torchvision.transforms."""

    module: ClassVar[str] = "training.batching.augmentation"
    """Imported by name, so that a change to it leaves trainings without augmentation valid."""

    RandomResizedCrop: ResizedCrop | None = None
    """A random part of the image, enlarged to the whole size; `{}` takes the defaults."""
    RandomCrop: Crop | None = None
    """Moves the image by up to `padding` pixels."""
    RandomHorizontalFlip: Flip | None = None
    """Mirrors the image: left is right. `{}` takes the defaults."""
    RandomVerticalFlip: Flip | None = None
    """Mirrors the image: top is bottom. `{}` takes the defaults."""
    RandomRotation: Rotation | None = None
    """Turns the image by up to `degrees`."""
    RandAugment: SomeOf14 | None = None
    """Some of 14 changes of shape and color; `{}` takes the defaults."""
    ColorJitter: Jitter | None = None
    """Changes brightness, contrast, saturation and hue."""
    RandomErasing: Erasing | None = None
    """Overwrites a rectangle of the image; `{}` takes the defaults."""
