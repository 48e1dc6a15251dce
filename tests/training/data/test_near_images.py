"""Nearly equal images in several splits are found, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from tests.raised import raised_problems
from tests.training.data.test_images import read, write_rows
from tests.training.data.test_load import report_of
from tests.training.pictures import file_of, stored
from training.data.near_images import find_like_images


def photo(seed: int) -> Image.Image:
    """Smooth colors, as in a photograph."""
    levels = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), np.uint8)
    return Image.fromarray(levels).resize((160, 120), Image.Resampling.BICUBIC)


def compressed(image: Image.Image) -> Image.Image:
    return Image.open(BytesIO(file_of(image, "JPEG", quality=30)))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": compressed,
    "scaled": lambda image: image.resize((70, 50)),
    "gray": lambda image: image.convert("L"),
    "paler": lambda image: ImageEnhance.Contrast(image).enhance(0.6),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_photograph_is_like_the_first_one_and_like_no_other(change: str) -> None:
    first = [photo(seed) for seed in range(20)]
    changed = [stored(file_of(CHANGES[change](image))) for image in first]
    assert find_like_images(changed, map(stored, map(file_of, first))).all()
    others = [stored(file_of(photo(seed))) for seed in range(100, 200)]
    assert not find_like_images(changed, others).any()


def test_a_split_without_usable_images_has_the_report_of_that(tmp_path: Path) -> None:
    write_rows(tmp_path, [file_of(photo(seed)) for seed in range(3)])
    write_rows(tmp_path, [b"no image"], "validation")
    problems = raised_problems(read, tmp_path, checks={"near_duplicates": "warning", "unreadable_image": "warning"})
    assert "no_rows" in {problem.check for problem in problems}


def test_the_rows_of_another_split_that_a_split_repeats_nearly_are_counted_and_the_first_is_named(
    tmp_path: Path,
) -> None:
    train = [photo(seed) for seed in range(6)]
    later = [photo(50), compressed(train[4]), train[2], train[1].resize((80, 60)), Image.new("RGB", (9, 9), "white")]
    write_rows(tmp_path, [*map(file_of, train), file_of(Image.new("RGB", (30, 9), "white"))])
    write_rows(tmp_path, [*map(file_of, later)], "validation")
    problems = report_of(read(tmp_path, checks={"near_duplicates": "warning"}))["problems"]
    (found,) = (one for one in problems if one["check"] == "near_duplicates")
    assert found["where"].endswith("validation.parquet row 2")
    # Equal pixels are those of another check, and images of one color are not alike.
    assert found["message"].startswith("2 rows of validation are nearly equal to rows of train (this one to row 5 of ")
    assert "with a correlation of 0.9" in found["message"] or "with a correlation of 1.0" in found["message"]
    assert "near_duplicates" not in {one["check"] for one in report_of(read(tmp_path))["problems"]}
