"""The stage reference_logprobs: the log-probabilities of the base model are computed once for each block of rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.home import home as home_folder
from tasks.stages.predict import reference_logprobs
from tests.arrow import read_arrow
from tests.task_types import build_world, recipe_of, write_rows
from tests.tasks.forward_passes import Forwards, count_forwards, stored_blocks
from training.recipe import parse

BLOCK = 16
MODEL = Artifact(stage="load_model", key="m", digest="model", parts={"model": "weights", "tokenizer": "tokenizer"})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of preferences, and a base model with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    write_rows("preference", folder / "rows")
    return build_world(recipe_of("preference", folder / "rows"), folder)


@pytest.fixture
def forwards(home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """A home with the base model; programs of jobs run here, with small blocks."""
    home.mkdir(mode=0o700)
    shutil.copytree(base / "base/output", MODEL.path)
    return count_forwards(monkeypatch, "training.programs.reference_logprobs.ROWS_IN_BLOCK", BLOCK)


def write_tokens(base: Path, **rows: int) -> Artifact:
    """The tokens of so many pairs of each split, with other digests for other numbers of rows."""
    tokens = read_arrow(base / "tokenized/train.arrow")
    parts = {f"{split}.arrow": f"{count} of {split}" for split, count in rows.items()}
    artifact = Artifact(stage="tokenize", key="-".join(parts.values()).replace(" ", "_"), digest="-", parts=parts)
    artifact.path.mkdir(parents=True)
    for split, count in rows.items():
        some = tokens.slice(0, count) if split == "train" else tokens.slice(50, count)
        with pa.OSFile(str(artifact.path / f"{split}.arrow"), "wb") as file, pa.ipc.new_file(file, some.schema) as out:
            out.write_table(some)
    return artifact


def compute(key: str, tokens: Artifact, **changes: Any) -> dict[str, Any]:
    """The result of the stage. Its artifact and job have this key."""
    recipe = parse(recipe_of("preference", Path("rows")), {name.replace("__", "."): of for name, of in changes.items()})
    work = Work(key, home_folder() / "artifacts/reference_logprobs" / key, "run", (), "reference_logprobs")
    result: dict[str, Any] = reference_logprobs.make(work, recipe, Lock(), MODEL, tokens)
    return result


def output(key: str, split: str = "train") -> Path:
    return home_folder() / "artifacts/reference_logprobs" / key / f"{split}.arrow"


def test_an_appended_pair_costs_one_block_and_another_loss_or_split_none(forwards: Forwards, base: Path) -> None:
    first = compute("first", write_tokens(base, train=40, validation=10))
    assert forwards.taken() == [16, 16, 8, 10] and (first["rows"], first["computed"]) == (50, 50)

    tokens = write_tokens(base, train=41, validation=10)
    appended = compute("appended", tokens)
    assert forwards.taken() == [9] and (appended["rows"], appended["computed"]) == (51, 9)
    for changes in ({"options__beta": 0.5, "options__loss": "ipo"}, {"training__seed": 7}):
        assert compute("other", tokens, **changes)["computed"] == 0
    assert compute("more splits", write_tokens(base, train=41, validation=10, test=10))["computed"] == 0
    assert not forwards.taken()
    assert compute("larger batches", tokens, training__per_device_eval_batch_size=2)["computed"] == 51

    shutil.rmtree(home_folder() / "blocks")
    assert compute("without blocks", tokens)["computed"] == 51
    for split in ("train", "validation"):
        assert output("without blocks", split).read_bytes() == output("appended", split).read_bytes()


def test_a_killed_program_keeps_its_finished_blocks(forwards: Forwards, base: Path) -> None:
    tokens = write_tokens(base, train=40)
    forwards.kill_after = 2
    with pytest.raises(KeyboardInterrupt):
        compute("killed", tokens)
    forwards.kill_after = 1000
    assert compute("killed", tokens)["computed"] == 8 and forwards.blocks == [16, 16, 8]
    assert len(stored_blocks()) == 3


def test_equal_rows_of_two_splits_are_one_block(forwards: Forwards, base: Path) -> None:
    tokens = write_tokens(base, train=8)
    shutil.copyfile(tokens.path / "train.arrow", tokens.path / "validation.arrow")
    parts = {"train.arrow": "8 of train", "validation.arrow": "8 of train"}
    assert compute("twice", tokens.model_copy(update={"parts": parts}))["computed"] == 8
    assert output("twice").read_bytes() == output("twice", "validation").read_bytes()
