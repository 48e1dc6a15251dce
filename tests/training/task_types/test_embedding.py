"""Embeddings from pairs of texts: token rows, prompts, the search of an evaluation, BM25, whole runs of training."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from tests import task_types as tiny_tasks
from tests.raised import raised_problems
from tests.training import tiny
from tests.training.forks import curve, finish
from training import task_types
from training.batching.batches import PadTexts, TokenRows
from training.data.duplicates import hash_ids
from training.evaluation import metrics
from training.evaluation.rankings import rank
from training.models.loading import load_tokenizer
from training.models.repository_files import text_prompts
from training.recipe import parse
from training.recipe.rules.column_rules import source_columns
from training.task_types import embedding
from training.task_types.embedding import LossOfLabels, RetrievalSet
from training.task_types.text_embedding import normalize
from training.tokenization.encoder import load_fast_encoder

ROWS = pa.record_batch(
    {
        "anchor": ["cat", "dog", "cat"],
        "positive": ["Katze", "Hund", "eine Katze"],
        "negative": ["Hund", "", "Maus"],
        "negatives": [["Hut", ""], [], ["Hand"]],
    }
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tasks.make_world("embedding", tmp_path_factory.mktemp("world") / "home")


def test_a_row_has_the_tokens_of_its_texts_one_after_another_with_prompts_and_equal_texts_have_equal_ids(
    world: Path,
) -> None:
    task = task_types.load("embedding", {"prompts": {"anchor": "red ", "positive": "tall "}})
    folder = world / "base/output/tokenizer"
    encoder = load_fast_encoder(folder, 32)
    rows = task.features(encoder, ROWS).rows.to_pylist()
    texts = [
        ["red cat", "tall Katze", "tall Hund", "tall Hut"],
        ["red dog", "tall Hund"],
        ["red cat", "tall eine Katze", "tall Maus", "tall Hand"],
    ]
    for row, of_row in zip(rows, texts, strict=True):
        single = [encoder.encode([text], None).ids.tolist() for text in of_row]
        assert row["input_ids"] == [*chain(*single)] and row["text_lengths"] == [*map(len, single)]
        assert row["length"] == sum(row["text_lengths"])
    plain = [["cat", "Katze", "Hund", "Hut"], ["dog", "Hund"], ["cat", "eine Katze", "Maus", "Hand"]]
    assert [row["text_ids"] for row in rows] == [hash_ids(of_row).tolist() for of_row in plain]
    assert max(rows[0]["text_ids"]) < 2**53
    batch = PadTexts(load_tokenizer(folder), 1)(TokenRows(pa.Table.from_pylist(rows)).__getitems__([1, 0]))
    assert batch["input_ids"].shape[0] == 6 and batch["labels"].shape == (2, 5)
    assert batch["labels"][0].tolist()[1:] == [*map(float, rows[1]["text_ids"]), -1, -1]
    asked = task_types.load("embedding", {**task.options.model_dump(), "predicted_prompt": "positive"})
    ids = asked.features(encoder, ROWS.select(["anchor"])).rows["input_ids"][0].as_py()
    assert ids == encoder.encode(["tall cat"], None).ids.tolist()


def test_the_prompts_of_the_base_model_are_those_of_query_and_document(world: Path) -> None:
    encoder = load_fast_encoder(world / "base/output/tokenizer", 32)
    encoder.prompts = {"query": "red ", "passage": "tall "}
    task = task_types.load("embedding", {})
    given = task_types.load("embedding", {"prompts": {"anchor": "red ", "positive": "tall "}})
    assert task.features(encoder, ROWS).rows == given.features(encoder, ROWS).rows
    none = task_types.load("embedding", {"prompts": {}})
    assert none.features(encoder, ROWS).rows != task.features(encoder, ROWS).rows


def predictions(rows: list[list[str]], vectors: dict[str, list[float]]) -> pa.Table:
    """Stored predictions of rows of these texts."""
    return pa.table(
        {
            "embeddings": pa.array(
                [np.concatenate([vectors[text] for text in row]) for row in rows], pa.list_(pa.float32())
            ),
            "text_ids": pa.array([hash_ids(row).tolist() for row in rows], pa.list_(pa.int64())),
        }
    )


def test_an_evaluation_searches_the_distinct_documents_for_each_distinct_anchor() -> None:
    rows = [["a", "x", "y"], ["b", "y"], ["a", "z"], ["c", "a"]]
    search = RetrievalSet.of(hash_ids([text for row in rows for text in row]), np.array([*map(len, rows)]))
    texts = [text for row in rows for text in row]
    assert [texts[place] for place in search.queries] == ["a", "b", "c"] and search.query_rows.tolist() == [0, 1, 3]
    documents = [texts[place] for place in search.documents]
    assert documents == ["x", "y", "z", "a"]
    assert search.relevant.tolist() == [[0, 0], [0, 2], [1, 1], [2, 3]]
    assert search.left_out.tolist() == [[0, 3]]  # `a` is not searched for `a`
    vectors = {"a": [1.0, 0.0], "x": [2.0, 0.1], "y": [0.0, 3.0], "z": [0.5, 0.5], "b": [0.1, 1.0], "c": [1.0, 0.2]}
    task = task_types.load("embedding", {})
    found = task.metric_inputs(predictions(rows, vectors), [])
    assert found.ranks.tolist() == [1, 2, 1, 2]  # of x and z for a; y for b; a for c, behind x
    figures = metrics.compute(["mrr_at_10", "recall_at_1"], found)
    assert figures == pytest.approx({"mrr_at_10": (1 + 1 + 1 / 2) / 3, "recall_at_1": (1 / 2 + 1 + 0) / 3})
    assert metrics.compute([], task.empty_predictions([])) == {}


def test_bm25_ranks_the_same_queries_and_documents(tmp_path: Path) -> None:
    rows = pa.table(
        {"anchor": ["red cat", "tall dog"], "positive": ["a red cat sat", "dog"], "negatives": [["tall"], []]}
    )
    with pa.OSFile(str(tmp_path / "validation.arrow"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    task = task_types.load("embedding", {})
    baseline = task.baseline(tmp_path, tmp_path, tmp_path, [])
    assert baseline is not None
    (rival,) = baseline.rivals
    found = rival.predict(task.empty_predictions([]), "validation")
    assert rival.name == "BM25" and found.query_rows.tolist() == [0, 1] and found.documents.tolist() == [3, 3]
    assert found.ranks.tolist()[0] == 1
    with pa.OSFile(str(tmp_path / "corpus.arrow"), "wb") as file:
        more = pa.table({"positive": ["red red cat", "dog", "tall dog"]})
        with pa.ipc.new_file(file, more.schema) as writer:
            writer.write_table(more)
    found = rival.predict(task.empty_predictions([]), "validation")
    assert found.documents.tolist() == [5, 4]  # without the anchor itself, and what the rows have already
    assert found.ranks.tolist() == [2, 2]  # behind `red red cat`; `tall` has the score of `dog`


def test_documents_of_a_corpus_are_searched_block_by_block_as_if_rows_had_them(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = ["a", "b", *(f"d{number}" for number in range(30))]
    vectors = {text: draw.normal(size=4).tolist() for text in texts}
    vectors["d9"] = vectors["d1"]  # a tie with a positive, which counts against it
    vectors["d8"] = [float("nan")] * 4
    rows = [["a", "d0"], ["b", "d1"], ["a", "d2", "d3"]]
    corpus = [*texts[2:], "d5", "a"]  # repeated, in the rows already, and an anchor
    task = task_types.load("embedding", {})
    search = task.corpus_search(predictions(rows, vectors))  # type: ignore[attr-defined]
    for start in range(0, len(corpus), 7):
        search.add(predictions([[text] for text in corpus[start : start + 7]], vectors))
    found = task.metric_inputs(search.result(), [])
    whole = [*rows, *([text, text] for text in corpus)]  # the search of all documents as documents of rows
    ids = hash_ids([text for row in whole for text in row])
    asked = RetrievalSet.of(ids, np.array([*map(len, whole)]))
    unit = normalize(np.array([vectors[text] for row in whole for text in row], np.float32))
    is_asked = asked.relevant[:, 0] < 2
    queries, documents, pairs = unit[asked.queries[:2]], unit[asked.documents], asked.relevant[is_asked]
    skipped = np.array([[0, place] for place in range(len(documents)) if ids[asked.documents[place]] == ids[0]])
    pairs = pairs[[pair.tolist() != skipped[0].tolist() for pair in pairs]]
    expected = rank(queries, np.array([0, 1]), documents, pairs, left_out=skipped)
    assert found.ranks.tolist() == expected.ranks.tolist() and found.documents.tolist() == expected.documents.tolist()
    assert found.documents.tolist() == [30, 31] and found.query_rows.tolist() == [0, 1]


def test_of_texts_with_labels_the_other_texts_with_its_label_are_relevant(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, labels = ["a", "b", "c", "a", "d", "e"], np.array([0, 1, 0, 1, 1, 2])
    ids = hash_ids(texts)
    search = RetrievalSet.of(ids, np.ones(6, np.int64), labels)
    assert [texts[place] for place in search.documents] == [*"abcde"] and search.query_rows.tolist() == [0, 1, 2, 4, 5]
    relevant = {"a": {*"cbd"}, "b": {*"ad"}, "c": {"a"}, "d": {*"ab"}}  # `a` has both labels, and `e` no other text
    names = [*"abcde"]
    assert {(names[query], names[document]) for query, document in search.relevant} == {
        (query, document) for query, of_query in relevant.items() for document in of_query
    }
    assert len(search.relevant) == 8 and search.left_out.tolist() == [[n, n] for n in range(5)]
    monkeypatch.setattr(embedding, "MOST_RELEVANT", 7)  # half of the pairs of equal labels
    some = RetrievalSet.of(ids, np.ones(6, np.int64), labels)
    assert [texts[place] for place in some.queries] == [*"ace"] and len(some.documents) == 5
    assert sorted(some.relevant.tolist()) == [[0, 1], [0, 2], [0, 3], [1, 0]]
    assert some.left_out.tolist() == [[0, 0], [1, 2], [2, 4]]


OF_LABELS: dict[str, Any] = {"text": ["text"], "label": "label"}


@pytest.mark.slow
@pytest.mark.parametrize("loss", get_args(LossOfLabels))
def test_training_brings_texts_with_one_label_together(loss: str, tmp_path: Path) -> None:
    world = tmp_path / "world"
    tiny_tasks.write_rows("sequence-classification", world / "rows")
    values = tiny_tasks.recipe_of("sequence-classification", world / "rows")
    values |= {"task": "embedding", "options": {"loss": loss, "prompts": {"text": "a: "}}}
    values["evaluation"] = {"splits": ["validation"], "metrics": ["map_at_10"]}
    values["compute"] = {"strategy": "ddp", "num_processes": 1, "mixed_precision": "no"}
    tiny_tasks.build_world(values, world)
    job = tiny_tasks.write_fit_job(values, world, tmp_path / "job")
    outcome = finish(job)
    assert outcome.state == "finished", outcome
    figures = [point["eval_map_at_10"] for point in curve(job).values() if "eval_map_at_10" in point]
    task = task_types.load("embedding", values["options"])
    (rival,) = task.baseline(world / "data", tmp_path, tmp_path, []).rivals  # type: ignore[union-attr]
    words = metrics.compute(["map_at_10"], rival.predict(task.empty_predictions([]), "validation"))["map_at_10"]
    assert figures[-1] > max(figures[0], words) + 0.1, (figures, words)
    assert text_prompts(job / "output/model") == {"default": "a: "}


def columns_of(**values: Any) -> list[str]:
    data = {"source": "json", "path": "rows", **values.pop("data", {})}
    recipe = {"name": "a", "task": "embedding", "data": data, "evaluation": {"splits": ["validation"]}, **values}
    model = {"source": "scratch", "config": tiny.CONFIG}
    found = source_columns(parse({**recipe, "model": model, "tokens": {"max_length": 32}}))
    return [column.name for column in found.columns]


def test_negatives_are_optional_and_triplets_need_them() -> None:
    assert columns_of() == ["anchor", "positive"]
    named = {"anchor": "q", "positive": "p", "negatives": "n"}
    assert columns_of(data={"columns": named}) == ["anchor", "positive", "negatives"]
    triplets = {"loss": "triplet"}
    assert columns_of(options=triplets) == ["anchor", "positive", "negative"]
    assert columns_of(options=triplets, data={"columns": named}) == ["anchor", "positive", "negatives"]
    assert columns_of(options={"loss": "batch_hard_triplet"}, data=OF_LABELS) == ["text", "label"]
    for problem in raised_problems(columns_of, data=OF_LABELS):
        assert problem.where in ("data.text", "data.label")
        assert (
            "of options.loss multiple_negatives_ranking takes anchor, positive, negative (if there" in problem.message
        )


OTHERS: dict[str, Any] = {"symmetric": True, "matryoshka_dims": [32, 8], "normalize": True}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OTHERS | {"prompts": {"anchor": "a: ", "positive": "b: "}}])
def test_training_finds_translations(options: dict[str, Any], world: Path, tmp_path: Path) -> None:
    values = tiny_tasks.recipe_of("embedding", world / "rows", gradient_accumulation_steps=2, logging_steps=1)
    values |= {"options": options, "compute": {"strategy": "ddp", "num_processes": 1, "mixed_precision": "no"}}
    job = tiny_tasks.write_fit_job(values, world, tmp_path / "job")
    outcome = finish(job)
    assert outcome.state == "finished", outcome
    points = curve(job)
    figures = [point["eval_ndcg_at_10"] for point in points.values() if "eval_ndcg_at_10" in point]
    assert figures[-1] > 0.95 and figures[-1] > figures[0]
    assert points[max(points)]["eval_loss"] < points[min(points)]["train_loss"]
    prompts = {"query": "a: ", "document": "b: "} if options else {}
    assert text_prompts(job / "output/model") == prompts  # for trainings that start from it


def test_a_prompt_of_a_column_that_is_not_there_is_refused() -> None:
    (problem,) = raised_problems(task_types.load, "embedding", {"prompts": {"query": "a: "}})
    assert problem.where.startswith("options.prompts") and "'anchor', 'positive'" in problem.message


def test_a_prompt_of_texts_that_the_loss_does_not_read_is_refused() -> None:
    given = {"loss": "batch_all_triplet", "prompts": {"text": "a: ", "anchor": "b: "}, "predicted_prompt": "positive"}
    first, second = raised_problems(task_types.load, "embedding", given)
    message = "names {}, and rows of the loss batch_all_triplet have no such text: choose from text."
    assert (first.where, first.message) == ("options.prompts", message.format("anchor"))
    assert (second.where, second.message) == ("options.predicted_prompt", message.format("positive"))
    (problem,) = raised_problems(task_types.load, "embedding", {"loss": "triplet", "predicted_prompt": "text"})
    assert problem.message.endswith("choose from anchor, positive, negative, negatives.")
    assert task_types.load("embedding", {"loss": "batch_all_triplet", "predicted_prompt": "text"})
