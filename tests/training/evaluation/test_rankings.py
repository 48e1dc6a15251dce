"""Rankings of documents by their scores, and the metrics of them, against a slow computation of each query."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import ndcg_score

from tests.arrow import write_arrow, write_kept
from training.data import vectors
from training.data.ipc_files import groups_file
from training.evaluation import metrics, rankings, slices
from training.evaluation.bootstrap import draws
from training.evaluation.metrics.resampling import figures
from training.evaluation.rankings import Rankings, rank, rank_by, rank_candidates
from training.evaluation.row_groups import Groups
from training.programs.compare import sample_disagreements
from training.programs.score import sample_worst_rows
from training.recipe.tables.metrics import RANKINGS, metrics_for
from training.task_types.reranking import Reranking

METRICS = metrics_for(RANKINGS)
Relevance = list[dict[int, float]]
"""By query, the relevance of documents."""


def slow_values(scores: Any, relevance: Relevance) -> dict[str, list[float]]:
    """Every metric of each query with a relevant document: documents are sorted by score, less relevant ones first."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for of_query, relevant in zip(np.asarray(scores).tolist(), relevance, strict=True):
        if not relevant:
            continue
        order = sorted(range(len(of_query)), key=lambda d: (-of_query[d], relevant.get(d, 0.0)))
        gains, best = [relevant.get(d, 0.0) for d in order], sorted(relevant.values(), reverse=True)
        for name in METRICS:
            measure, k = name.split("_at_")[0], int(name.split("_at_")[1])
            hits = [place for place, gain in enumerate(gains[:k], start=1) if gain]
            found[name].append(
                {
                    "ndcg": discounted(gains[:k]) / discounted(best[:k]),
                    "mrr": 1 / hits[0] if hits else 0.0,
                    "recall": len(hits) / len(relevant),
                    "map": sum(n / place for n, place in enumerate(hits, start=1)) / min(k, len(relevant)),
                }[measure]
            )
    return found


def discounted(gains: list[float]) -> float:
    return sum(gain / math.log2(place + 1) for place, gain in enumerate(gains, start=1))


def searched(queries: int, documents: int, *, graded: bool, equal: bool, seed: int = 0) -> tuple[Any, Any, Relevance]:
    """Embeddings of queries and documents; some queries have several relevant documents, one has none. If `equal`,
    scores are whole numbers, many of them equal."""
    draw = np.random.default_rng(seed)
    size = 3 if equal else 16
    vectors = [draw.normal(size=(number, size)).astype(np.float32) for number in (queries, documents)]
    if equal:
        vectors = [np.round(one) for one in vectors]
    relevance: Relevance = [{} for _ in range(queries)]
    for query in range(1, queries):
        for document in draw.choice(documents, size=int(draw.integers(1, 6)), replace=False).tolist():
            relevance[query][document] = float(draw.integers(1, 4)) if graded else 1.0
    return *vectors, relevance


def pairs_of(relevance: Relevance) -> tuple[list[tuple[int, int]], list[float]]:
    pairs = [(query, document) for query, relevant in enumerate(relevance) for document in relevant]
    return pairs, [relevance[query][document] for query, document in pairs]


@pytest.mark.parametrize("equal", [False, True], ids=["distinct scores", "equal scores"])
@pytest.mark.parametrize("graded", [False, True], ids=["relevant or not", "graded"])
def test_metrics_of_a_search_equal_those_of_a_sorted_list(
    equal: bool, graded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, documents, relevance = searched(40, 150, graded=graded, equal=equal)
    pairs, graded_pairs = pairs_of(relevance)
    shuffled = np.random.default_rng(1).permutation(len(pairs))
    given = np.array(pairs)[shuffled], np.array(graded_pairs)[shuffled]
    found = rank(queries, np.arange(40), documents, *given)
    expected = slow_values(queries.astype(np.float64) @ documents.T.astype(np.float64), relevance)
    for name in METRICS:
        assert found.scores_by(name) == pytest.approx(expected[name], abs=1e-12), name
    assert metrics.compute(METRICS, found) == pytest.approx({name: np.mean(expected[name]) for name in METRICS})
    assert found.query_rows.tolist() == [*range(1, 40)] and found.unjudged == 1
    assert found.caveat == "1 of 40 queries have no relevant document, so no figures."
    monkeypatch.setattr(vectors, "MAX_SCORES", 400)  # two queries at a time
    monkeypatch.setattr(rankings, "FEW_RELEVANT", 2)
    again = rank(queries, np.arange(40), documents, *given)
    assert np.array_equal(again.ranks, found.ranks) and np.array_equal(again.queries, found.queries)


def test_ndcg_of_graded_relevance_is_that_of_scikit_learn() -> None:
    queries, documents, relevance = searched(30, 60, graded=True, equal=False)
    found, true = rank(queries, np.arange(30), documents, *pairs_of(relevance)), np.zeros((30, 60))
    for query, relevant in enumerate(relevance):
        true[query, [*relevant]] = [*relevant.values()]
    scores = queries @ documents.T
    for k in (1, 3, 10):
        assert metrics.compute([f"ndcg_at_{k}"], found)[f"ndcg_at_{k}"] == pytest.approx(
            ndcg_score(true[1:], scores[1:], k=k)
        )


@pytest.mark.parametrize("equal", [False, True], ids=["distinct scores", "equal scores"])
def test_candidates_of_a_query_are_ranked_among_themselves_in_whatever_order_they_are_given(equal: bool) -> None:
    draw = np.random.default_rng(2)
    queries = draw.permutation(np.repeat(draw.integers(0, 2**53, 30), draw.integers(1, 12, 30)))
    scores = draw.integers(0, 4, len(queries)).astype(float) if equal else draw.normal(size=len(queries))
    graded = draw.integers(-1, 3, len(queries)).astype(float)
    found = rank_candidates(queries, scores, graded, np.arange(len(queries)))
    expected: dict[str, list[float]] = {name: [] for name in METRICS}
    first, sizes = [], []
    for query in dict.fromkeys(queries.tolist()):
        places = np.flatnonzero(queries == query)
        relevant = {at: grade for at, grade in enumerate(graded[places].tolist()) if grade > 0}
        if relevant:
            first.append(places[0])
            sizes.append(len(places))
            for name, values in slow_values(scores[places][None], [relevant]).items():
                expected[name] += values
    assert found.query_rows.tolist() == first and found.documents.tolist() == sizes
    for name in METRICS:
        assert found.scores_by(name) == pytest.approx(expected[name], abs=1e-12), name


def test_a_model_without_a_preference_finds_nothing_first_not_even_up_to_rounding() -> None:
    draw = np.random.default_rng(3)
    constant = draw.normal(size=(1, 384)).astype(np.float32)
    constant /= np.linalg.norm(constant)
    nearly = constant * (1 + 1e-8 * draw.normal(size=(2000, 1))).astype(np.float32)
    pairs = np.stack([np.arange(50), draw.integers(0, 2000, 50)], axis=1)
    found = rank(np.repeat(constant, 50, axis=0), np.arange(50), nearly, pairs)
    assert set(found.ranks.tolist()) == {2000} and metrics.compute(["ndcg_at_100"], found) == {"ndcg_at_100": 0}
    candidates = rank_candidates([0] * 4, np.array([-11.3, -11.3 + 1e-7, -11.3, -11.3]), [1, 0, 0, 0], np.arange(4))
    assert candidates.ranks.tolist() == [4]


def test_scores_that_are_no_numbers_are_last() -> None:
    queries, documents = np.ones((2, 4), np.float32), np.ones((5, 4), np.float32)
    queries[1], documents[3] = np.nan, np.nan
    assert rank(queries, np.arange(2), documents, [(0, 3), (1, 0)]).ranks.tolist() == [5, 5]
    assert rank_candidates([0, 0], np.array([np.nan, -5.0]), [1, 0], np.arange(2)).ranks.tolist() == [2]


def test_a_document_that_is_left_out_for_a_query_is_ranked_for_others_only() -> None:
    texts = np.eye(3, dtype=np.float32)
    near = texts @ np.array([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]], np.float32)
    pairs = [(0, 1), (1, 0)]
    assert rank(texts[:2], np.arange(2), near, pairs).ranks.tolist() == [2, 2]
    found = rank(texts[:2], np.arange(2), near, pairs, left_out=[(0, 0), (1, 1)])
    assert found.ranks.tolist() == [1, 1] and found.documents.tolist() == [2, 2]


def test_memory_of_a_search_does_not_grow_with_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(vectors, "MAX_SCORES", 10_000)

    def scores(first: int, last: int) -> Any:
        sizes.append((last - first) * 3_000)
        return np.random.default_rng(first).random((last - first, 3_000))

    rank_by(scores, 3_000, np.arange(100), [(query, query) for query in range(100)])
    assert max(sizes) <= 10_000 and sum(sizes) == 300_000


def test_figures_of_drawn_queries_are_those_of_these_queries() -> None:
    queries, documents, relevance = searched(24, 80, graded=True, equal=False)
    of = rank(queries, np.arange(24), documents, *pairs_of(relevance))
    (counts,) = draws(len(of), 12, seed=3)
    for name, figure in figures(METRICS, of).items():
        expected = [metrics.compute([name], of.take(np.repeat(np.arange(23), count)))[name] for count in counts]
        np.testing.assert_allclose(figure(counts), expected, rtol=0, atol=1e-12, err_msg=name)


def test_two_models_queries_are_pooled_with_the_worst_case_of_every_metric() -> None:
    queries, documents, relevance = searched(10, 40, graded=True, equal=False)
    of = rank(queries, np.arange(10), documents, *pairs_of(relevance))
    pooled = of.concatenate(of.take(np.array([3, 0])))
    assert len(pooled) == 11 and pooled.ranks.tolist() == [
        *of.ranks.tolist(),
        *of.ranks[of.queries == 3].tolist(),
        *of.ranks[of.queries == 0].tolist(),
    ]
    worst, best = of.worst_cases(of)
    for name in METRICS:
        assert (worst.scores_by(name)[0], best.scores_by(name)[0]) == (0, 1)
    assert math.isnan(metrics.compute(METRICS, of.take(np.empty(0, np.int64)))["ndcg_at_10"])


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Path, Rankings]:
    """Six rows of three queries with two candidates each, as load_data stores them, and a ranking: the second query's
    relevant candidate is last."""
    queries = ["cat", "dog", "dog", "cat", "cow", "cow"]
    write_arrow(tmp_path / "test.arrow", pa.table({"query": queries, "label": [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]}))
    write_arrow(tmp_path / groups_file("test"), pa.table({"group": pa.array([7, 5, 5, 7, 7, 7], pa.int64())}))
    write_kept(tmp_path, "test", {"sort": ["pet", "pet", "wild", "wild", "farm", "farm"]})
    numbers = np.array([1, 2, 2, 1, 3, 3])
    scores = np.array([0.9, 0.8, 0.1, 0.2, 0.9, 0.1])
    return tmp_path, rank_candidates(numbers, scores, [1, 0, 1, 0, 1, 0], np.arange(6))


def test_a_query_has_the_group_and_the_slices_of_its_first_row(asked: tuple[Path, Rankings]) -> None:
    data, found = asked
    assert found.query_rows.tolist() == [0, 1, 4]
    groups = Groups.read(data, "test", found)
    assert groups is not None and groups.numbers.tolist() == [1, 0, 1]
    sorts = slices.of_entries(slices.of_column(data / "test.slices.arrow", "sort"), found)
    assert {name: queries.tolist() for name, queries in sorts.items()} == {"farm": [2], "pet": [0, 1]}
    assert slices.of_entries({}, found) == {}


def test_samples_show_the_first_row_of_a_query_and_the_ranks_of_its_documents(asked: tuple[Path, Rankings]) -> None:
    data, found = asked
    worst, *_ = sample_worst_rows(Reranking(), "test", found, data / "test.arrow", data)
    assert worst == {
        **{"split": "test", "row": 1, "query": "dog", "label": "1 relevant document of 2", "prediction": "rank 2"},
        "ndcg_at_10": 0.6309,
    }
    better = rank_candidates(np.array([1, 2, 2, 1, 3, 3]), np.arange(6), [1, 0, 1, 0, 1, 0], np.arange(6))
    lost, also_lost, gained = sample_disagreements(better, found, "mrr_at_1", data / "test.arrow")
    assert [(one["change"], one["row"], one["query"]) for one in (lost, also_lost, gained)] == [
        ("lost", 0, "cat"),
        ("lost", 4, "cow"),
        ("gained", 1, "dog"),
    ]
    assert (gained["prediction"], gained["champion"]) == ("rank 1", "rank 2")
