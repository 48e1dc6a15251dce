"""What training starts from, where the recipe says: from the champion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.model import require_same_labels
from tasks.resolve import pin
from tasks.runtime.champions import rows_digest
from tasks.runtime.connection import MODEL_TAG, connect
from tasks.runtime.refs import Champion, Pins
from tasks.runtime.versions import ROWS_TAG, STARTED_FROM_TAG
from tests.made import LABELS, artifact
from training.problems import UserError
from training.recipe import Recipe, parse

OTHER = Champion(name="small", version="7", model="o" * 40, max_length=32)


def written(folder: Path, **fields: Any) -> dict[str, Any]:
    """A recipe whose base model is nowhere."""
    return {
        "name": "small",
        "kind": "sequence-classification",
        "data": {"source": "csv", "path": str(folder), "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": "nowhere", "start_from": "champion"},
        "release": {"registry": "small"},
        **fields,
    }


@pytest.fixture
def recipe(tracked: Path, tmp_path: Path) -> Recipe:
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text("text,label\na,good\nb,bad\n")
    return parse(written(folder))


def crown(**tags: str) -> str:
    """A new champion with these tags; gives its version."""
    client = connect()
    if not client.search_registered_models("name = 'small'"):
        client.create_registered_model("small")
    version = str(client.create_model_version("small", "file:///nowhere", tags=tags).version)
    client.set_registered_model_alias("small", "champion", version)
    return version


def test_training_starts_from_the_champion_and_the_base_model_is_not_looked_at(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):  # no champion yet: the base model is wanted
        pin(recipe)
    crown(**{MODEL_TAG: "m" * 40})
    pins = pin(recipe)
    assert pins.started_from == Champion(name="small", version="1", model="m" * 40, max_length=512)
    assert pins.notes == ["training starts from small/1, the champion"] and pins.model_files == {}


def test_a_champion_of_the_same_rows_is_no_change_and_one_of_other_rows_or_unknown_ones_is(
    recipe: Recipe, tmp_path: Path
) -> None:
    rows = rows_digest(recipe, pin(parse(written(tmp_path / "rows", model={"source": "scratch", "config": {
        "model_type": "bert", "vocab_size": 100}}))))  # fmt: skip
    own = {MODEL_TAG: "m" * 40, ROWS_TAG: rows, STARTED_FROM_TAG: OTHER.model_dump_json()}
    crown(**own)
    pins = pin(recipe)
    assert pins.started_from == OTHER
    assert pins.notes == ["small/1 has learnt from these rows: training starts from small/7, as it did"]

    crown(**{MODEL_TAG: "n" * 40})  # by other means, by hand: whatever it has learnt from
    assert str(pin(recipe).started_from) == "small/2"
    connect().set_registered_model_alias("small", "champion", "1")  # rolled back
    assert pin(recipe).started_from == OTHER
    (tmp_path / "rows" / "validation.csv").write_text("text,label\nc,good\nd,bad\n")  # nothing is learnt from them
    assert pin(recipe).started_from == OTHER
    (tmp_path / "rows" / "train.csv").write_text("text,label\na,good\nb,bad\nc,bad\n")
    assert str(pin(recipe).started_from) == "small/1"


def test_rows_are_the_same_wherever_their_files_lie(recipe: Recipe, tmp_path: Path) -> None:
    moved = (tmp_path / "rows").rename(tmp_path / "moved")
    crown(**{MODEL_TAG: "m" * 40})
    there = parse(written(moved))
    (tmp_path / "rows").symlink_to(moved)
    assert rows_digest(there, pin(there)) == rows_digest(recipe, pin(recipe))
    other = parse(written(moved), {"data.limit": 1})
    assert rows_digest(other, pin(other)) != rows_digest(recipe, pin(recipe))


def test_labels_that_the_champion_has_in_another_order_are_told_before_training(home: Path) -> None:
    home.mkdir(mode=0o700)
    data = artifact("load_data", {"labels.json": LABELS})
    config = {"id2label": {"0": "good", "1": "bad"}}
    model = artifact("load_model", {"model/config.json": json.dumps(config).encode()})
    with pytest.raises(UserError, match=r"small/7.* gives the labels good, bad, and the rows have bad, good: make"):
        require_same_labels(Pins(started_from=OTHER), data, model)
    require_same_labels(Pins(), data, model)


def test_only_a_recipe_with_a_registry_can_start_from_a_champion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.start_from: 'champion' is one of a registry: set release.registry"):
        parse(written(tmp_path, release={}))
