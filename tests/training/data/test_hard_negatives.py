"""Hard negatives: the choice among scores, held against a slow one, and the rows that get them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.arrow import read_arrow
from training import task_types
from training.data.hard_negatives import Corpus, QueryRows, find_negatives
from training.recipe.data_fields import Negatives

PAIRS = {"anchor": ["a", "b", "a", "x"], "positive": ["x", "y", "z", "w"]}


def rows_of(tmp_path: Path, task: str, rows: dict[str, Any]) -> QueryRows:
    batch = pa.RecordBatch.from_pydict(rows)
    with pa.OSFile(str(tmp_path / "train.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return QueryRows.read(task_types.load(task), tmp_path / "train.arrow")  # type: ignore[arg-type]


def settings(**values: Any) -> Negatives:
    return Negatives(source="base", **values)


def slowly(corpus: Corpus, scores: np.ndarray, chosen: Negatives) -> list[list[str]]:
    """The same by sorting everything."""
    found = []
    for (query, number), judged in zip(corpus.queries.items(), corpus.judged, strict=True):
        positive = min((scores[number, one] for one, belongs in judged.items() if belongs), default=None)
        left = [(-scores[number, place], place, text) for text, place in corpus.documents.items()]
        left = sorted(one for one in left if one[1] not in judged and one[2] != query)
        left = left[chosen.range_min : chosen.range_max]
        if positive is None:
            left = []
        if chosen.max_score is not None:
            left = [one for one in left if -one[0] <= chosen.max_score]
        if chosen.min_score is not None:
            left = [one for one in left if -one[0] >= chosen.min_score]
        if chosen.absolute_margin is not None:
            left = [one for one in left if -one[0] <= positive - chosen.absolute_margin]
        if chosen.relative_margin is not None:
            left = [one for one in left if -one[0] <= positive - abs(positive) * chosen.relative_margin]
        found.append([text for _, _, text in left[: chosen.num_negatives]])
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        settings(),
        settings(num_negatives=50),
        settings(range_min=2, num_negatives=2),
        settings(range_max=4),
        settings(range_min=1, range_max=6, relative_margin=0.1),
        settings(absolute_margin=0.2, min_score=-0.5),
        settings(max_score=0.3),
    ],
    ids=str,
)
def test_negatives_are_those_of_a_slow_search_ties_by_their_place(
    monkeypatch: pytest.MonkeyPatch, chosen: Negatives
) -> None:
    monkeypatch.setattr("training.data.vectors.MAX_SCORES", 100)  # several blocks of queries
    draw = np.random.default_rng(3)
    names = [f"text {number}" for number in range(20)]
    rows = [
        (names[draw.integers(12)], [(names[draw.integers(20)], bool(draw.random() < 0.8)) for _ in range(2)])
        for _ in range(30)
    ]
    corpus = Corpus.of(rows)
    scores = np.round(draw.uniform(-1, 1, (len(corpus.queries), len(corpus.documents))), 1)  # with many ties
    found = find_negatives(corpus, lambda first, last: scores[first:last].copy(), chosen)
    assert found == slowly(corpus, scores, chosen)
    assert any(found) and all(len(texts) <= chosen.num_negatives for texts in found)


def test_a_negative_is_neither_the_query_nor_a_document_of_an_equal_query(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "embedding", {**PAIRS, "negative": ["y", "", "", ""]})
    everything = find_negatives(rows.corpus, lambda first, last: np.ones((last - first, 4)), settings(num_negatives=9))
    # "a" has the positives x and z, and y as a negative of its own; "x" is itself a document
    assert dict(zip(rows.corpus.queries, everything, strict=True)) == {
        "a": ["w"],
        "b": ["x", "z", "w"],
        "x": ["y", "z"],
    }


def test_scores_that_are_no_numbers_give_no_negatives(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "embedding", PAIRS)
    assert not any(find_negatives(rows.corpus, lambda first, last: np.full((last - first, 4), math.nan), settings()))


def test_pairs_get_a_list_of_negatives_beside_their_own(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "embedding", {**PAIRS, "negatives": pa.array([["p"], [], [], []], pa.list_(pa.string()))})
    result = rows.write([["b1"], ["b2", "b3"], []], 2, tmp_path / "out.arrow")
    assert read_arrow(tmp_path / "out.arrow").to_pydict() == {
        **PAIRS,
        "negatives": [["p", "b1"], ["b2", "b3"], ["b1"], []],
    }
    assert (result.rows, result.negatives, result.without) == (4, 4, 3)


@pytest.mark.parametrize("listed", [True, False])
def test_rows_of_reranking_become_lists_of_candidates(tmp_path: Path, listed: bool) -> None:
    given = (
        {"query": ["q", "r"], "documents": [["d", "e"], ["f"]], "labels": ["[1, 0]", "[0]"]}
        if listed
        else {"query": ["q", "r"], "document": ["d", "f"], "label": [1.0, 0.0]}
    )
    rows = rows_of(tmp_path, "reranking", given)
    assert rows.corpus.judged[1] == {rows.corpus.documents["f"]: False}
    result = rows.write([["n"], ["m"]], 1, tmp_path / "out.arrow")
    found = read_arrow(tmp_path / "out.arrow").to_pydict()
    assert found["documents"] == [["d", "e", "n"] if listed else ["d", "n"], ["f"]], "no document of r belongs to it"
    assert [json.loads(labels) for labels in found["labels"]] == [[1, 0, 0] if listed else [1, 0], [0]]
    assert (result.negatives, result.without) == (1, 0)  # a row without a relevant document gets none by design
