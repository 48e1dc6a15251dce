"""Images in rows: what is refused, and by which row; what is converted; where paths lead."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.arrow import read_arrow
from tests.training.pictures import data_url, file_of, noise, stored
from training.data.images import examine, open_image
from training.data.load_rows import load
from training.problems import UserError
from training.recipe import Data
from training.task_types import load as task_type_of

PHOTO = noise()
WHOLE = {kind: file_of(PHOTO, kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")}


def png_of_size(width: int, height: int) -> bytes:
    """A PNG of some bytes that says it has so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(one)) + kind + one + struct.pack(">I", zlib.crc32(kind + one)) for kind, one in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def animated(kind: str, **options: Any) -> bytes:
    return file_of(noise(1), kind, save_all=True, append_images=[noise(2), noise(3)], **options)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


BAD = {
    **{f"half-{kind}": (content[: len(content) // 2], "unreadable_image") for kind, content in WHOLE.items()},
    **{f"start-{kind}": (content[:12], "unreadable_image") for kind, content in WHOLE.items()},
    **{f"mark-{kind}": (flipped(content, 0), "unreadable_image") for kind, content in WHOLE.items()},
    "damaged-png": (flipped(WHOLE["PNG"], 60), "unreadable_image"),
    "no-end-jpeg": (WHOLE["JPEG"][:-40], "unreadable_image"),
    "text": (b"not an image at all", "unreadable_image"),
    "csv": (b"text,label\na,b\n", "unreadable_image"),
    "html": (b"<!DOCTYPE html><html>404</html>", "unreadable_image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unreadable_image"),
    "pdf": (b"%PDF-1.7 \x00\x01", "unreadable_image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable_image"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "unreadable_image"),
    "zip": (b"PK\x03\x04" + b"\0" * 30, "unreadable_image"),
    "byte": (b"\xff", "unreadable_image"),
    "zeros": (b"\0" * 400, "unreadable_image"),
    "random": (np.random.default_rng(5).bytes(500), "unreadable_image"),
    "heic": (b"\0\0\0\x18ftypheic" + b"\0" * 100, "unreadable_image"),
    "ppm": (b"P6 2 2 255\n" + b"\1" * 12, "unreadable_image"),
    "float-tiff": (file_of(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "unreadable_image"),
    "bomb": (png_of_size(60_000, 60_000), "huge_image"),
    "large": (png_of_size(12_000, 12_000), "huge_image"),
    "gif": (animated("GIF"), "animated_image"),
    "webp": (animated("WEBP"), "animated_image"),
    "apng": (animated("PNG"), "animated_image"),
    "tiff-pages": (animated("TIFF"), "animated_image"),
}
"""Files that are no images to learn from, and the check of each."""


def write_rows(folder: Path, images: list[Any], split: str = "train") -> Path:
    """A Parquet file of images, as the Hub has them."""
    rows = [
        {"image": {"bytes": one, "path": None}, "label": f"label {number % 2}"} for number, one in enumerate(images)
    ]
    folder.mkdir(exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(
        pa.Table.from_pylist(rows, pa.schema([("image", kind), ("label", pa.string())])), folder / f"{split}.parquet"
    )
    return folder


def read(folder: Path, source: str = "parquet", **fields: Any) -> Path:
    """Reads a folder's files as load_data does; gives the output."""
    data = Data(source=source, path=str(folder), label="label", **fields)
    files = {file.stem: [str(file)] for file in sorted(folder.glob(f"*.{source.replace('json', 'jsonl')}"))}
    load(data, task_type_of("image-classification"), files, folder / "out", image_folders=[str(folder)])
    return folder / "out"


def test_every_bad_image_is_named_by_its_row_and_none_ends_the_reading(tmp_path: Path) -> None:
    assert len(BAD) >= 40
    images = [file_of(noise(seed)) for seed in range(6)] + [content for content, _ in BAD.values()]
    rows = write_rows(tmp_path / "rows", images)
    with pytest.raises(UserError) as raised:
        read(rows)
    problems = [problem for problem in raised.value.problems if problem.level == "error"]
    assert {problem.check for problem in problems} == {"unreadable_image", "animated_image", "huge_image"}

    levels = dict.fromkeys(("unreadable_image", "animated_image", "huge_image"), "warning")
    out = read(rows, checks=levels, validation_size=0.5)
    assert sum(len(read_arrow(out / f"{split}.arrow")) for split in ("train", "validation")) == 6  # the whole ones


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_fails_its_check_and_says_why(name: str) -> None:
    content, check = BAD[name]
    found = examine(stored(content))
    assert found.check == check and found.problem.startswith("has ")


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_images_of_every_format_are_read(kind: str) -> None:
    assert examine(stored(WHOLE[kind])).check == "" and open_image(stored(WHOLE[kind])).size == PHOTO.size


def turned() -> bytes:
    exif = Image.Exif()
    exif[274] = 6  # the camera was turned: shown upright after a quarter turn
    return file_of(PHOTO, "JPEG", exif=exif)


CHANGED = {
    "EXIF": (turned(), "turned by its EXIF orientation"),
    "CMYK": (file_of(PHOTO.convert("CMYK"), "JPEG"), "in CMYK"),
    "16 bits": (file_of(Image.fromarray(np.full((3, 3), 40_000, np.uint16))), "of 16 bits"),
    "palette": (file_of(PHOTO.quantize(16)), "with a palette"),
    "alpha": (file_of(PHOTO.convert("RGBA")), "with transparency"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_image_that_is_converted_is_counted_as_such(name: str) -> None:
    content, words = CHANGED[name]
    found = examine(stored(content))
    assert not found.check and any(words in change for change in found.changes)
    assert open_image(stored(content)).mode == "RGB"


def test_photographs_are_turned_upright_and_16_bits_keep_their_brightness() -> None:
    assert open_image(stored(turned())).size == (PHOTO.height, PHOTO.width)
    assert open_image(stored(CHANGED["16 bits"][0])).getpixel((0, 0)) == (156, 156, 156)  # 40,000 of 65,536


def test_images_with_the_same_pixels_are_found_across_splits_whatever_their_files(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", [file_of(noise(seed)) for seed in range(6)])
    write_rows(rows, [file_of(noise(9)), file_of(noise(2), compress_level=0), file_of(noise(8))], "validation")
    out = read(rows)
    report = (out / "log/report.json").read_text()
    assert '"shared_rows"' in report and "validation.parquet row 2" in report


def test_one_class_only_is_an_error(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", [file_of(noise(seed)) for seed in range(6)])
    table = pq.read_table(rows / "train.parquet")
    pq.write_table(table.set_column(1, "label", pa.array(["cat"] * 6)), rows / "train.parquet")
    with pytest.raises(UserError) as raised:
        read(rows)
    assert "single_label" in {problem.check for problem in raised.value.problems}


def test_paths_start_from_the_folder_of_the_rows_and_lead_nowhere_else(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    (rows / "photos").mkdir(parents=True)
    for number in range(6):
        noise(number).save(rows / "photos" / f"{number}.png")
    noise(7).save(tmp_path / "outside.png")
    lines = [f"photos/{number}.png,{'ab'[number % 2]}" for number in range(6)]
    wrong = ["../outside.png", "photos/none.png", "https://example.org/a.png", str(tmp_path / "outside.png"), "photos"]
    (rows / "train.csv").write_text("\n".join(["image,label", *lines, *(f"{path},a" for path in wrong)]) + "\n")
    with pytest.raises(UserError) as raised:
        read(rows, "csv")
    messages = " ".join(str(problem) for problem in raised.value.problems if problem.check == "missing_image")
    assert "outside of the folder" in messages and "is not there" in messages and "at a URL" in messages
    out = read(rows, "csv", checks={"missing_image": "warning"}, validation_size=0.5)
    pixels = {open_image(one.as_py()).tobytes() for one in read_arrow(out / "train.arrow")["image"]}
    assert pixels and pixels < {noise(number).tobytes() for number in range(6)}


def test_rows_of_json_hold_the_base64_of_images_and_of_no_other_texts(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    data = Data(source="json", path="rows", label="label", validation_size=0.5)
    lines = [f'{{"image": "{data_url(noise(seed))}", "label": "{seed % 2}"}}' for seed in range(6)]
    (tmp_path / "rows/train.jsonl").write_text("\n".join([*lines, '{"image": "/etc/passwd", "label": "1"}']))
    files = {"train": [str(tmp_path / "rows/train.jsonl")]}
    with pytest.raises(UserError, match="not the base64 of an image"):
        load(data, task_type_of("image-classification"), files, tmp_path / "out")
    (tmp_path / "rows/train.jsonl").write_text("\n".join(lines))
    load(data, task_type_of("image-classification"), files, tmp_path / "out")
    assert open_image(read_arrow(tmp_path / "out/train.arrow")["image"][0].as_py()).size == PHOTO.size


def test_images_of_the_hub_are_read_as_it_has_them() -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    from training.data.casting import cast_blocks
    from training.data.hub_datasets import from_dataset
    from training.data.slice_columns import SliceColumns
    from training.recipe.source_columns import SourceColumns

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"])})
    rows = Dataset.from_dict({"image": [noise(1), noise(2)], "label": [0, 1]}, features=features)
    wanted = SourceColumns(Data(source="hub", path="a/b", label="label"), task_type_of("image-classification"))
    (cast,) = cast_blocks(from_dataset(rows, wanted, "a/b (train)", SliceColumns(wanted, Path("slices"))), wanted)
    found = cast.block.rows.to_pylist()
    assert [open_image(row["image"]).tobytes() for row in found] == [noise(1).tobytes(), noise(2).tobytes()]
    assert [row["label"] for row in found] == ["cat", "dog"]
