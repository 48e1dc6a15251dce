"""The stage mine_negatives: its key, and the blocks of texts that it embeds once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tasks.cache.garbage_collection import Needs, find_pieces
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.home import home as home_folder
from tasks.stages.mine_negatives import mine_negatives
from tests.arrow import read_arrow, write_arrow
from tests.task_types import build_world, recipe_of, write_rows
from tests.tasks.forward_passes import Forwards, count_forwards, stored_blocks
from tests.tasks.watching import Heard
from tests.training.tiny import WORDS
from training.recipe import Recipe, parse

DATA = Artifact(stage="load_data", key="d", digest="rows", parts={"train.arrow": "of train"})
MODEL = Artifact(stage="load_model", key="m", digest="model", parts={"model": "weights", "tokenizer": "tokenizer"})
BLOCK = 16
TEXTS = [f"{first} {second}" for first in WORDS["animal"] for second in WORDS["food"]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    write_rows("embedding", folder / "rows")
    build_world(recipe_of("embedding", folder / "rows"), folder)
    return folder / "base/output"


@pytest.fixture
def forwards(home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forwards]:
    """A home with the base model; programs of jobs run here, with small blocks."""
    home.mkdir(mode=0o700)
    shutil.copytree(base, MODEL.path)
    yield count_forwards(monkeypatch, "training.programs.mine_negatives.ROWS_IN_BLOCK", BLOCK)


def write_train(rows: list[tuple[str, str]]) -> None:
    batch = pa.RecordBatch.from_pydict(
        {name: list(column) for name, column in zip(("anchor", "positive"), zip(*rows, strict=True), strict=True)}
    )
    DATA.path.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(DATA.path / "train.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def pairs(count: int) -> list[tuple[str, str]]:
    return [(TEXTS[number], f"{TEXTS[number]} {TEXTS[-1 - number]}") for number in range(count)]


def recipe(**changes: Any) -> Recipe:
    values = recipe_of("embedding", Path("rows"))
    values["data"]["negatives"] = {"source": "base", **changes.pop("negatives", {})}
    values["model"] = {"source": "folder", "path": "base"}
    return parse(values, changes)


def mine(key: str, *listeners: Any, **changes: Any) -> dict[str, Any]:
    """The result of the stage. Its artifact and job have this key."""
    work = Work(key, home_folder() / "artifacts/mine_negatives" / key, "run", listeners, "mine_negatives")
    result: dict[str, Any] = mine_negatives.make(work, recipe(**changes), Lock(), DATA, MODEL)
    return result


def output(key: str) -> bytes:
    return (home_folder() / "artifacts/mine_negatives" / key / "train.arrow").read_bytes()


def test_an_appended_row_embeds_its_own_block_and_other_settings_embed_none(forwards: Forwards) -> None:
    write_train(pairs(12))
    first = mine("first")
    assert forwards.blocks == [BLOCK, 8] and (first["texts"], first["embedded"]) == (24, 24)
    rows = read_arrow(home_folder() / "artifacts/mine_negatives/first/train.arrow").to_pylist()
    assert all(len(row["negatives"]) == 3 for row in rows)
    assert not [row for row in rows if {row["anchor"], row["positive"]} & {*row["negatives"]}]

    forwards.blocks.clear()
    write_train(pairs(13))
    appended = mine("appended")
    assert forwards.blocks == [10] and (appended["texts"], appended["embedded"]) == (26, 10)
    bytes_with_blocks = output("appended")
    assert mine("narrow", negatives={"relative_margin": 0.05})["embedded"] == 0

    shutil.rmtree(home_folder() / "blocks")
    assert mine("without blocks")["embedded"] == 26
    assert output("without blocks") == bytes_with_blocks


def write_corpus(texts: list[str]) -> Artifact:
    """The rows with these further documents."""
    write_arrow(DATA.path / "corpus.arrow", pa.table({"positive": texts}))
    return DATA.model_copy(update={"parts": {**DATA.parts, "corpus.arrow": f"{len(texts)} texts"}})


@pytest.mark.parametrize("source", ["base", "bm25"])
def test_further_documents_are_negatives_too_and_are_embedded_in_blocks_of_their_own(
    source: str, forwards: Forwards
) -> None:
    chosen = {"negatives": {"source": source, "corpus": True}, "data.corpus": "passages.jsonl"}
    further = [f"{text} {text}" for text in TEXTS[:20]]

    def mined(key: str, *appended: str) -> dict[str, Any]:
        data = write_corpus([TEXTS[0], *further, *appended])  # the first one is that of a row
        work = Work(key, home_folder() / "artifacts/mine_negatives" / key, "run", (), "mine_negatives")
        work.out.mkdir(parents=True, exist_ok=True)
        model = MODEL if source == "base" else None
        result: dict[str, Any] = mine_negatives.make(work, recipe(**chosen), Lock(), data, model)
        return result

    write_train(pairs(4))
    first = mined("first")
    rows = read_arrow(home_folder() / "artifacts/mine_negatives/first/train.arrow").to_pylist()
    negatives = {text for row in rows for text in row["negatives"]}
    assert negatives & {*further} and negatives <= {*further, TEXTS[0], *(positive for _, positive in pairs(4))}
    assert not [row for row in rows if {row["anchor"], row["positive"]} & {*row["negatives"]}]
    if source == "base":
        assert first["texts"] == 8 + 21 and forwards.taken() == [8, BLOCK, 5]
        write_train(pairs(5))
        assert mined("appended row")["embedded"] == 10 and forwards.taken() == [10]
        assert mined("appended document", "another one")["embedded"] == 6 and forwards.taken() == [6]


def test_a_damaged_block_is_embedded_again_with_a_warning(forwards: Forwards) -> None:
    write_train(pairs(12))
    mine("first")
    damaged = stored_blocks()[0]
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes().replace(b"embeddings", b"embeddingz"))
    forwards.blocks.clear()
    shutil.rmtree(home_folder() / "jobs")
    heard = Heard()
    mine("second", heard)
    assert len(forwards.blocks) == 1 and output("second") == output("first")
    assert next(event["message"] for event in heard.events if event["kind"] == "warning").startswith("1 damaged block")
    assert all(block.stem.endswith(block.name[-70:-6]) for block in stored_blocks()) and len(stored_blocks()) == 2


def test_a_killed_program_keeps_its_finished_blocks(forwards: Forwards) -> None:
    write_train(pairs(24))
    forwards.kill_after = 2
    with pytest.raises(KeyboardInterrupt):
        mine("killed")
    shutil.rmtree(home_folder() / "blocks")  # a kill of the flow's process leaves those of the job alone
    forwards.kill_after = 1000
    assert mine("killed")["embedded"] == BLOCK and forwards.blocks == [BLOCK] * 3


def test_the_blocks_of_a_family_are_removed_with_its_last_artifact(forwards: Forwards) -> None:
    write_train(pairs(4))
    mine("first")

    def blocks(**needed_by: list[str]) -> list[Any]:
        return [piece for piece in find_pieces(Needs(needed_by, (), {})) if piece.path.parent.name == "blocks"]

    (kept,) = blocks(first=["small@champion"])
    assert kept.needed_by == ("small@champion",)
    (unneeded,) = blocks()
    assert not unneeded.needed_by and unneeded.path == stored_blocks()[0].parent


def test_neither_the_loss_nor_the_training_is_in_the_key(forwards: Forwards) -> None:
    write_train(pairs(4))

    def key(**changes: Any) -> str:
        given = {name.replace("__", "."): value for name, value in changes.items() if name != "negatives"}
        chosen = {"negatives": changes["negatives"]} if "negatives" in changes else {}
        made = recipe(**given, **chosen)
        model = MODEL if made.data.negatives and made.data.negatives.source == "base" else None
        return mine_negatives.key(mine_negatives.flat_inputs(made, Lock(), DATA, model)[0])

    same = {
        "training__learning_rate": 1e-4,
        "training__per_device_eval_batch_size": 8,
        "options__scale": 10.0,
        "options__matryoshka_dims": [8],
    }
    assert {key(**{name: value}) for name, value in same.items()} == {key()}
    others = [{"options__pooling": "cls"}, {"options__prompts": {"anchor": "a: "}}, {"tokens__max_length": 16}]
    assert len({key(), *(key(**other) for other in others), key(negatives={"range_min": 1})}) == 5
    by_words = {"negatives": {"source": "bm25"}}
    assert len({key(**by_words), *(key(**by_words, **other) for other in others)}) == 1, "words need no model"


def test_the_queries_of_an_evaluated_split_get_the_nearest_documents_of_the_split(home: Path) -> None:
    data = Artifact(stage="load_data", key="r", digest="rows", parts={"train.arrow": "t", "validation.arrow": "v"})
    data.path.mkdir(parents=True)
    for split, animals in (("train", WORDS["animal"]), ("validation", WORDS["tool"])):
        rows = [{"query": f"some {name}", "documents": [f"a {name}"], "labels": "[1.0]"} for name in animals]
        write_arrow(data.path / f"{split}.arrow", pa.Table.from_pylist(rows))
    values = recipe_of("reranking", Path("rows")) | {"options": {}}
    values["data"]["negatives"] = {"source": "bm25", "num_candidates": 3}
    work = Work("near", home / "artifacts/mine_negatives/near", "run", (), "mine_negatives")
    work.out.mkdir(parents=True)
    mine_negatives.make(work, parse(values), Lock(), data, None)
    found = read_arrow(work.out / "validation.arrow").to_pylist()
    assert [row["query"] for row in found] == [f"some {name}" for name in WORDS["tool"]]
    for row in found:
        assert row["documents"][0] == row["query"].replace("some", "a") and row["labels"] == "[1.0, 0, 0]"
        assert len({*row["documents"]}) == 3 and row["missed"] == []
