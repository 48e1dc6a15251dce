"""Images are processed in blocks: what is added costs one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tests.arrow import read_arrow, write_arrow
from tests.training import programs_here
from tests.training.pictures import file_of, noise, stored
from training.jobs.blocks import BLOCKS
from training.programs import create_image_model, process_images

CONFIG = {"model_type": "resnet", "image_size": 8, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model with its image processor."""
    programs_here.run(create_image_model, tmp_path / "base", {}, config=CONFIG, seed=0)
    return tmp_path / "base/output"


def test_an_appended_image_costs_one_block_and_a_changed_label_none(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_images, "IMAGES_IN_BLOCK", 4)
    images, labels = [stored(file_of(noise(seed))) for seed in range(10)], [0, 1] * 5

    def run(name: str, before: str | None = None) -> dict[str, int]:
        table = pa.table({"image": images[: len(labels)], "label": labels})
        write_arrow(tmp_path / name / "data/train.arrow", table)
        if before is not None:  # as tasks/cache/blocks.py links those of earlier jobs
            shutil.copytree(tmp_path / before / BLOCKS, tmp_path / name / BLOCKS)
        inputs = {"data": tmp_path / name / "data", "tokenizer": base / "tokenizer"}
        return programs_here.run(process_images, tmp_path / name, inputs, task="image-classification", options={})

    del labels[9:]
    assert run("first")["computed"] == 9
    labels.append(1)
    assert run("appended", "first")["computed"] == 2  # of the last block
    labels[0] = 1
    assert run("relabelled", "appended")["computed"] == 0
    found = read_arrow(tmp_path / "relabelled/output/train.arrow")
    assert found["label"].to_pylist() == labels and found["pixel_values"].type == pa.list_(pa.uint8())
    assert len(found["pixel_values"][0]) == 3 * 8 * 8


def test_a_model_of_images_from_scratch_has_the_same_bytes_every_time(base: Path, tmp_path: Path) -> None:
    programs_here.run(create_image_model, tmp_path / "again", {}, config=CONFIG, seed=0)
    for name in ("model/model.safetensors", "model/config.json", "tokenizer/preprocessor_config.json"):
        assert (base / name).read_bytes() == (tmp_path / "again/output" / name).read_bytes()
    assert json.loads((base / "tokenizer/preprocessor_config.json").read_text())["size"] == {"height": 8, "width": 8}
