"""Pictures that tests draw, and their files."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

PLACES = {"top": (2, 6), "left": (8, 1), "bottom": (11, 9)}


def square(place: str, draw: random.Random, size: int = 16) -> Image.Image:
    """A bright square at the place, in the dark."""
    return squares({place: draw.randrange(180, 256)}, draw, size)


def squares(levels: Mapping[str, int], draw: random.Random, size: int = 16) -> Image.Image:
    """Squares of these levels by place, in the dark."""
    pixels = np.random.default_rng(draw.randrange(2**32)).integers(0, 60, (size, size, 3), np.uint8)
    for place, level in levels.items():
        row, column = PLACES[place]
        pixels[row : row + 4, column : column + 4] = level
    return Image.fromarray(pixels)


def noise(seed: int = 0, width: int = 20, height: int = 12) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of the image's file."""
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def stored(content: bytes) -> str:
    """A file as rows store it."""
    return base64.b64encode(content).decode()


def data_url(image: Image.Image) -> str:
    """The image as a text that rows of JSON may have."""
    return f"data:image/png;base64,{stored(file_of(image))}"
