"""Search for nearly equal images, by the correlation of their gray levels at 16 by 16 pixels.

A photograph that was scaled, compressed again, blurred, or made gray or paler keeps nearly all of its correlation with
the first one; of two others it is below 0.9. One that was turned, mirrored or cut is not found. Small drawings on a
plain ground are like each other: of 900 handwritten digits, one in a hundred is at LEAST_CORRELATION with another one.

Memory: a kilobyte of each image of the later split. Each image is decoded once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from training.data.duplicates import DuplicateTexts
from training.data.images import digest_of_pixels, open_image
from training.data.near_duplicates import NearDuplicates

LEAST_CORRELATION = 0.98
SIDE = 16
"""Pixels a side at which images are compared."""
_MOST_PAIRS, _MOST_IMAGES = 2**24, 4096
"""Pairs, and images of the earlier split, that are compared at a time: at most 64 MB for the correlations."""


class _Outlines(NamedTuple):
    levels: npt.NDArray[np.float32]
    """(N, SIDE · SIDE) gray levels, of mean 0 and length 1; zeros for an image of one level."""
    digests: list[str]
    """Of all pixels."""


def find_near_images(rows: DuplicateTexts, earlier: str, later: str) -> NearDuplicates | None:
    """Returns the rows of the later split whose image is nearly equal to one of the earlier split, without those whose
    pixels are equal to one."""
    own = _outline(image for (image,) in rows.inputs_of(later))
    best, place, equal, first = np.zeros(len(own.digests), np.float32), np.zeros(len(own.digests), np.int64), set(), 0
    for others in _blocks((image for (image,) in rows.inputs_of(earlier)), len(own.digests)):
        correlations = others.levels @ own.levels.T
        found = correlations.argmax(axis=0)
        highest = np.take_along_axis(correlations, found[None], axis=0)[0]
        place = np.where(highest > best, first + found, place)
        best = np.maximum(best, highest)
        equal |= {*others.digests} & {*own.digests}
        first += len(others.digests)
    near = (best >= LEAST_CORRELATION) & np.array([digest not in equal for digest in own.digests], np.bool_)
    if not near.any():
        return None
    at = int(np.flatnonzero(near)[0])
    places = rows.place(later, at), rows.place(earlier, int(place[at]))
    return NearDuplicates(int(near.sum()), places, f"with a correlation of {best[at]:.3f}")


def find_like_images(images: Iterable[str], others: Iterable[str]) -> npt.NDArray[np.bool_]:
    """(N,) whether each stored image is nearly equal, or equal, to one of the others."""
    own = _outline(images)
    found = np.zeros(len(own.digests), np.bool_)
    for block in _blocks(others, len(found)):
        found |= (own.levels @ block.levels.T >= LEAST_CORRELATION).any(axis=1)
        found |= np.isin(own.digests, block.digests)
    return found


def _blocks(images: Iterable[str], beside: int) -> Iterator[_Outlines]:
    """Yields the outlines of images, as many at a time as can be compared with `beside` others."""
    remaining = iter(images)
    while part := [*islice(remaining, max(1, min(_MOST_IMAGES, _MOST_PAIRS // max(1, beside))))]:
        yield _outline(part)


def _outline(images: Iterable[str]) -> _Outlines:
    from PIL.Image import Resampling

    levels, digests = [np.zeros((0, SIDE * SIDE), np.float32)], list[str]()
    for image in map(open_image, images):
        digests.append(digest_of_pixels(image))
        gray = np.asarray(image.convert("L").resize((SIDE, SIDE), Resampling.BOX), np.float32).reshape(1, -1)
        gray -= gray.mean()
        levels.append(gray / max(float(np.linalg.norm(gray)), 1.0))
    return _Outlines(np.concatenate(levels), digests)
