"""Images in rows: where their files are, what is wrong with them, and their pixels.

A stored image is a text, the base64 of the file's bytes: what transformers' pipelines and MLflow's server take too. Its
content decides its format, not its name. Pixels are those of transformers' pipelines: turned upright by EXIF, in RGB
without alpha.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.file_systems import is_url
from training.data.row_problems import shorten
from training.local_files import open_local
from training.problems import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from training.data.arrow_columns import Wrong

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are read. PIL would start other programs for some of the others."""
LARGEST_FILE_BYTES = 32 * 2**20
MOST_PIXELS = 100_000_000
"""More take 300 MB of memory; files of some kilobytes can have billions."""
EXIF_ORIENTATION = 274
REMEMBERED = 4096
_DATA_URL = re.compile(r"data:[\w/+.-]*;base64,")


@dataclass(frozen=True)
class Examined:
    """What is known of a stored image without its pixels."""

    pixels: str = ""
    """By digest_of_pixels."""
    check: str = ""
    """The check by which it cannot be used."""
    problem: str = ""
    """Words that follow "row 7"."""
    changes: tuple[str, ...] = ()
    """How its pixels differ from those of the file, in words that follow "row 7"."""


class UnusableImage(ValueError):
    """An image that cannot be used: its check, and words that follow "row 7"."""

    def __init__(self, check: str, problem: str) -> None:
        super().__init__(problem)
        self.check, self.problem = check, problem


_examined: OrderedDict[bytes, Examined] = OrderedDict()
"""By the digest of the text: several checks look at the images of a block, and each is decoded once."""


def examine(image: str) -> Examined:
    """What is known of a stored image."""
    key = hashlib.blake2b(image.encode(), digest_size=16).digest()
    if key not in _examined:
        _examined[key] = _examine(image)
        if len(_examined) > REMEMBERED:
            _examined.popitem(last=False)
    return _examined[key]


def _examine(image: str) -> Examined:
    try:
        pixels, changes = _open(base64.b64decode(image))
    except UnusableImage as error:
        return Examined(check=error.check, problem=error.problem)
    return Examined(pixels=digest_of_pixels(pixels), changes=changes)


def digest_of_pixels(image: Image) -> str:
    """A digest of an image's size and pixels, hex."""
    return hashlib.blake2b(f"{image.size}".encode() + image.tobytes(), digest_size=16).hexdigest()


def open_image(image: str) -> Image:
    """The pixels of a stored image in RGB. Raises UnusableImage."""
    return _open(base64.b64decode(image))[0]


def _open(content: bytes) -> tuple[Image, tuple[str, ...]]:
    """The upright image in RGB, and how it differs from that of the file."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not content:
        raise UnusableImage("unreadable_image", "has an empty image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened: Image.Image = Image.open(BytesIO(content), formats=_FORMATS)
            if opened.width * opened.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)  # previews beside a photograph
            if frames > 1:
                raise UnusableImage("animated_image", "has an image of several frames")
            changes = [*_changes(opened)]
            return ImageOps.exif_transpose(_eight_bits(opened)).convert("RGB"), tuple(changes)
    except UnusableImage:
        raise
    except Image.DecompressionBombError as error:
        problem = f"has an image of more than {MOST_PIXELS // 10**6} million pixels"
        raise UnusableImage("huge_image", problem) from error
    except UnidentifiedImageError as error:
        message = f"has {_kind(content)}, where one of {', '.join(_FORMATS)} belongs"
        raise UnusableImage("unreadable_image", message) from error
    except Exception as error:  # decoders fail in many ways on damaged files
        raise UnusableImage("unreadable_image", "has a damaged or truncated image") from error


def _kind(content: bytes) -> str:
    """What bytes are that are no image."""
    start = content[:256].lstrip().lower()
    known = {b"<!doctype html": "a web page", b"<html": "a web page", b"%pdf": "a PDF", b"<svg": "an SVG"}
    known |= {b"<?xml": "an XML file", b"pk\x03\x04": "a ZIP file", b"version https://git-lfs": "a pointer of Git LFS"}
    if found := next((kind for mark, kind in known.items() if start.startswith(mark)), None):
        return found
    return "a text" if b"\0" not in content[:256] and content[:256].isascii() else "a file of another format"


def _changes(image: Image) -> list[str]:
    changes = []
    if image.getexif().get(EXIF_ORIENTATION, 1) != 1:
        changes.append("has an image that is turned by its EXIF orientation")
    if image.mode in ("CMYK", "YCCK", "LAB"):
        changes.append(f"has an image in {image.mode}, which becomes RGB")
    elif image.mode.startswith(("I", "F")):
        changes.append("has an image of 16 bits, which becomes one of 8")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        changes.append("has an image with transparency, which is dropped")
    elif image.mode == "P":
        changes.append("has an image with a palette, which becomes RGB")
    return changes


def _eight_bits(image: Image) -> Image:
    """An image whose gray levels have 16 bits in 8: PIL alone would make all above 255 white."""
    from PIL import Image

    if image.mode == "F":
        raise UnusableImage("unreadable_image", "has an image of floating-point numbers, whose range is unknown")
    if not image.mode.startswith("I"):
        image.load()
        return image
    levels = np.clip(np.asarray(image).astype(np.int64), 0, 2**16 - 1) >> 8
    shrunk = Image.fromarray(levels.astype(np.uint8))
    shrunk.info, orientation = image.info, image.getexif().get(EXIF_ORIENTATION)
    if orientation:
        shrunk.getexif()[EXIF_ORIENTATION] = orientation
    return shrunk


# Reading


def read_images(column: pa.Array, name: str, folder: str | None) -> tuple[pa.Array, Wrong]:
    """The images of a column as they are stored, null for those that cannot be read, and the problems of these.

    Values are paths that start from `folder`, bytes, and objects of `bytes` and `path`; without a folder, texts are the
    base64 of a file.
    """
    found, wrong = [], dict[int, tuple[str, str, str]]()
    for place, value in enumerate(column.to_pylist()):
        try:
            found.append(_read(value, folder))
        except UnusableImage as error:
            found.append(None)
            value = value.get("path") if isinstance(value, dict) else value
            shown = value.decode(errors="replace") if isinstance(value, bytes) else value
            wrong[place] = (error.check, f"{error.problem} in column {name!r}", f": {shorten(shown)}")
    return pa.array(found, pa.string()), wrong


def _read(value: Any, folder: str | None) -> str | None:
    if isinstance(value, dict):
        if value.get("bytes"):
            return _stored(value["bytes"])
        value = value.get("path")
    if isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:  # no path, but the file itself
            return _stored(value)
        value = text
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        raise UnusableImage("type", f"holds {type(value).__name__} where an image belongs")
    if (url := _DATA_URL.match(value)) or folder is None:
        return _normal(value[url.end() :] if url else value)
    return read_file(value, folder)


def _normal(text: str) -> str:
    """The base64 of a request as it is stored."""
    try:
        return _stored(base64.b64decode("".join(text.split()), validate=True))
    except binascii.Error as error:
        raise UnusableImage("type", "holds a text that is not the base64 of an image file") from error


def read_file(path: str, folder: str) -> str:
    """The image at a path that starts from a folder, as it is stored. Raises UnusableImage."""
    if is_url(path):
        raise UnusableImage("missing_image", "names an image at a URL, and images are read from files of this machine")
    file = os.path.abspath(os.path.join(folder, os.path.expanduser(path)))
    if not file.startswith(os.path.abspath(folder).rstrip("/") + "/"):
        raise UnusableImage("missing_image", "names an image outside of the folder of the rows")
    try:
        with open(open_local(file), "rb") as opened:
            return _stored(opened.read(LARGEST_FILE_BYTES + 1))
    except UserError as error:
        raise UnusableImage("missing_image", f"names a file that is not read ({error.problems[0].message})") from error
    except OSError as error:
        raise UnusableImage("missing_image", f"names an image that is not there ({error.strerror})") from error


def _stored(content: bytes) -> str:
    if len(content) > LARGEST_FILE_BYTES:
        raise UnusableImage("huge_image", f"has an image file of more than {LARGEST_FILE_BYTES >> 20} MiB")
    return base64.b64encode(content).decode()
