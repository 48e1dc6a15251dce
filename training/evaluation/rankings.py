"""Rankings: for each query, the ranks of its relevant documents among all documents, or among its candidates.

Search is exact. Of documents with equal scores, relevant ones come last: a model that gives all documents the same
score has the worst figures, not those of a random order, and no figure depends on the order of the documents. Scores
count as equal if they differ by rounding alone (TIE). A score that is no number is below all others.

Q queries, C documents, R relevant documents of all queries together, d dimensions of an embedding, N candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from training.data.vectors import rows_at_once
from training.evaluation.predictions import Floats, Predictions, Rows
from training.recipe.tables.metrics import RANKINGS

TIE = 1e-6
"""The difference up to which two scores of a query are equal, relative to its largest score: products of embeddings in
32-bit floats differ by less if the embeddings are equal."""
FEW_RELEVANT = 20
"""Relevant documents of a query up to which others are counted for each of them; for more, they are sorted once."""
WORST_RANK = np.iinfo(np.int32).max
"""The rank of a document that is not found."""

Scores = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Rankings(Predictions):
    """The ranks of the relevant documents of each query; each query has at least one."""

    query_rows: Rows  # (Q,) the split's row of each query, the first if there are several
    documents: Rows  # (Q,) the documents that are ranked for each query
    queries: Rows  # (R,) the query of each relevant document, from 0 to Q - 1, ascending
    ranks: Rows  # (R,) its rank from 1, ascending within a query
    relevance: Floats  # (R,) its relevance, above 0
    unjudged: int = field(default=0, kw_only=True)
    """The queries of the split without a relevant document, which have no entry."""

    prediction_type: ClassVar = RANKINGS
    row_score_name: ClassVar[str] = "ndcg_at_10"
    entries_name: ClassVar[Literal["rows", "queries"]] = "queries"

    @property
    def config_name(self) -> str:
        return "rankings"

    @property
    def description(self) -> str:
        return "a ranking of documents"

    def __len__(self) -> int:
        return len(self.query_rows)

    def rows_of(self, entries: Rows) -> Rows:
        """The first row of each query."""
        return self.query_rows[entries]

    def take(self, rows: Rows) -> Rankings:
        sizes = np.bincount(self.queries, minlength=len(self))
        taken = sizes[rows]
        starts, before = np.cumsum(sizes) - sizes, np.cumsum(taken) - taken
        places = np.repeat(starts[rows] - before, taken) + np.arange(taken.sum())
        queries = np.repeat(np.arange(len(rows)), taken)
        of_queries = self.query_rows[rows], self.documents[rows]
        return Rankings(*of_queries, queries, self.ranks[places], self.relevance[places], unjudged=self.unjudged)

    def concatenate(self, other: Rankings) -> Rankings:
        names = ("query_rows", "documents", "queries", "ranks", "relevance")
        first, second = ([getattr(one, name) for name in names] for one in (self, other))
        second[2] = second[2] + len(self)
        return Rankings(*map(np.concatenate, zip(first, second, strict=True)), unjudged=self.unjudged)

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """`queries`, `ranks` or `relevance`, (R,) each."""
        known = {"queries": self.queries, "ranks": self.ranks, "relevance": self.relevance}
        return None if listed else known.get(feature)

    @property
    def row_scores(self) -> Floats:
        """nDCG of the first ten documents."""
        return ndcg(self.queries, self.ranks, self.relevance, 10)

    def scores_by(self, metric: str) -> Floats:
        """The metric of each query; `row_scores` for a metric of the user's."""
        measure, _, first = metric.partition("_at_")
        if measure not in MEASURES:
            return self.row_scores
        return MEASURES[measure](self.queries, self.ranks, self.relevance, int(first))

    def worst_cases(self, other: Rankings) -> tuple[Rankings, Rankings]:
        """A query whose relevant document this model does not find, and the other model ranks first: the largest
        difference that any metric of rankings can have."""
        nothing = np.zeros(1, np.int64)
        return tuple(  # type: ignore[return-value]
            Rankings(nothing, nothing + WORST_RANK, nothing, nothing + rank, np.ones(1)) for rank in (WORST_RANK, 1)
        )

    @property
    def caveat(self) -> str | None:
        if not self.unjudged:
            return None
        return f"{self.unjudged:,} of {self.unjudged + len(self):,} queries have no relevant document, so no figures."

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        ranks = self.ranks[self.queries == row]
        count = f"{len(ranks):,} relevant document{'s' if len(ranks) > 1 else ''}"
        shown = ", ".join(f"{rank:,}" for rank in ranks[:5].tolist()) + (", …" if len(ranks) > 5 else "")
        return {
            "label": f"{count} of {self.documents[row]:,}",
            "prediction": f"rank {shown}",
            "ndcg_at_10": round(float(self.take(np.array([row])).row_scores[0]), 4),
        }


# Measures: (Q,) the value of each query, of its documents with a rank up to k


def ndcg(queries: Rows, ranks: Rows, relevance: Floats, k: int) -> Floats:
    gains = np.where(ranks <= k, relevance / np.log2(1.0 + ranks), 0.0)
    best = relevance[np.lexsort((-relevance, queries))]
    places = _places(queries)
    ideal = np.where(places < k, best / np.log2(2.0 + places), 0.0)
    return _sums(queries, gains) / _sums(queries, ideal)


def reciprocal_rank(queries: Rows, ranks: Rows, relevance: Floats, k: int) -> Floats:
    return _sums(queries, np.where((_places(queries) == 0) & (ranks <= k), 1.0 / ranks, 0.0))


def recall(queries: Rows, ranks: Rows, relevance: Floats, k: int) -> Floats:
    return _sums(queries, ranks <= k) / _sums(queries, np.ones(len(ranks)))


def average_precision(queries: Rows, ranks: Rows, relevance: Floats, k: int) -> Floats:
    precisions = np.where(ranks <= k, (1.0 + _places(queries)) / ranks, 0.0)
    return _sums(queries, precisions) / np.minimum(_sums(queries, np.ones(len(ranks))), k)


MEASURES: Mapping[str, Callable[[Rows, Rows, Floats, int], Floats]] = {
    "ndcg": ndcg,
    "mrr": reciprocal_rank,
    "recall": recall,
    "map": average_precision,
}


def _sums(queries: Rows, values: npt.ArrayLike) -> Floats:
    """(Q,) the sums of (R,) values by query."""
    return np.bincount(queries, np.asarray(values, np.float64)).astype(np.float64)


def _places(queries: Rows) -> Rows:
    """(R,) the place of each value among those of its query, from 0."""
    return np.arange(len(queries)) - np.searchsorted(queries, queries)


# Rankings by scores


@dataclass(frozen=True)
class Others:
    """Documents that are ranked elsewhere, block by block."""

    ahead: Rows  # (R,) those with at least the score of each relevant document
    documents: Rows  # (Q,) those of each query


def rank(
    queries: Scores,
    query_rows: Rows,
    documents: Scores,
    relevant: npt.ArrayLike,
    relevance: npt.ArrayLike | None = None,
    left_out: npt.ArrayLike | None = None,
    others: Others | None = None,
) -> Rankings:
    """Ranks all documents for each query by the products of their embeddings, which are cosines if these are
    normalized.

    Args:
        queries: (Q, d) embeddings of distinct queries.
        query_rows: (Q,) the split's row of each query, the first if there are several.
        documents: (C, d) embeddings of distinct documents.
        relevant: (R, 2) pairs of a query and a document that is relevant to it, as their places.
        relevance: (R,) the relevance of each of these; None: 1. A pair whose relevance is not above 0 is not relevant.
        left_out: (E, 2) pairs of a query and a document that is not ranked for it, such as a document that is the
            query's own text.
        others: further documents, none of which is relevant.
    """
    transposed = documents.T

    def scores(first: int, last: int) -> Scores:
        return queries[first:last] @ transposed

    return rank_by(scores, len(documents), query_rows, relevant, relevance, left_out, others)


def rank_by(
    scores: Callable[[int, int], Scores],
    documents: int,
    query_rows: Rows,
    relevant: npt.ArrayLike,
    relevance: npt.ArrayLike | None = None,
    left_out: npt.ArrayLike | None = None,
    others: Others | None = None,
) -> Rankings:
    """The same by other scores: `scores` returns those of all documents for the queries from a first one to the one
    before a last one, (q, C), in an array of its own. `documents` is C."""
    pairs, graded, taken = _sort_pairs(relevant, relevance)
    skipped, *_ = _sort_pairs(np.empty((0, 2)) if left_out is None else left_out, None)
    ranks, number, block = np.empty(len(pairs), np.int64), len(query_rows), rows_at_once(documents)
    for first in range(0, number, block):
        last = min(first + block, number)
        of_block = scores(first, last)
        without = skipped[slice(*np.searchsorted(skipped[:, 0], (first, last)))]
        of_block[without[:, 0] - first, without[:, 1]] = -np.inf
        of_block[np.isnan(of_block)] = -np.inf
        ends = np.searchsorted(pairs[:, 0], np.arange(first, last + 1))
        for of_query, start, end in zip(of_block, ends, ends[1:], strict=False):
            if end > start:
                ranks[start:end] = _rank_last(of_query, pairs[start:end, 1], graded[start:end])
    ranked = np.full(number, documents) - np.bincount(skipped[:, 0], minlength=number)
    if others is not None:
        ranks, ranked = ranks + others.ahead[taken], ranked + others.documents
    return _rankings(query_rows, ranked, pairs[:, 0], ranks, graded)


def rank_candidates(
    queries: npt.ArrayLike,
    scores: Scores,
    relevance: npt.ArrayLike,
    rows: Rows,
    missed: npt.NDArray[np.bool_] | None = None,
) -> Rankings:
    """Ranks the candidates of each query among themselves.

    Args:
        queries: (N,) the query of each candidate, by any number; its candidates need not stand together.
        scores: (N,) the score of each candidate.
        relevance: (N,) the relevance of each candidate; one that is not above 0 is not relevant.
        rows: (N,) the split's row of each candidate, ascending within a query.
        missed: (N,) whether it is no candidate, but a relevant document that the search has not found: its rank is
            WORST_RANK. Every query has a candidate, before those that are missed. None: all are candidates.
    """
    if missed is not None:
        scores = np.where(missed, -np.inf, scores)
    _, first, numbers = np.unique(np.asarray(queries), return_index=True, return_inverse=True)
    query = np.argsort(np.argsort(first))[numbers]  # in the order of the rows, whatever the queries' numbers are
    graded, values = np.asarray(relevance, np.float64), np.nan_to_num(scores, copy=True, nan=-np.inf, neginf=-np.inf)
    largest = np.zeros(len(first))
    np.maximum.at(largest, query, np.where(np.isfinite(values), np.abs(values), 0.0))
    order = np.lexsort((-values, query))
    with np.errstate(invalid="ignore"):
        lower = values[order][:-1] - values[order][1:] > TIE * largest[query[order][1:]]
    tied = np.cumsum(np.concatenate([[True], lower | (np.diff(query[order]) > 0)])[: len(order)])
    order = order[np.lexsort((graded[order], tied))]
    ranks = _places(query[order]) + 1
    if missed is not None:
        ranks[missed[order]] = WORST_RANK
    is_relevant = graded[order] > 0
    ranked = query if missed is None else query[~missed]
    relevant, sizes = order[is_relevant], np.bincount(ranked, minlength=len(first))
    return _rankings(rows[np.sort(first)], sizes, query[relevant], ranks[is_relevant], graded[relevant])


def _sort_pairs(pairs: npt.ArrayLike, relevance: npt.ArrayLike | None) -> tuple[Rows, Floats, Rows]:
    """The pairs whose relevance is above 0, by query; their relevance, and their places."""
    found = np.asarray(pairs, np.int64).reshape(-1, 2)
    graded = np.ones(len(found)) if relevance is None else np.asarray(relevance, np.float64)
    order = np.argsort(found[:, 0], kind="stable")
    order = order[graded[order] > 0]
    return found[order], graded[order], order


def _rank_last(scores: Scores, relevant: Rows, relevance: Floats) -> Rows:
    """The rank of each relevant document, given the scores of all documents of a query: behind documents of equal
    scores that are not relevant, or less so."""
    tie = TIE * float(np.abs(scores).max(where=np.isfinite(scores), initial=0.0))
    order = np.argsort(-scores[relevant], kind="stable")
    own = scores[relevant[order]]
    with np.errstate(invalid="ignore"):
        lower = own[:-1] - own[1:] > tie  # False between two of minus infinity
    tied = np.cumsum(np.concatenate([[False], lower]))  # relevant documents of one number have equal scores
    order = order[np.lexsort((relevance[order], tied))]
    lowest = own[np.flatnonzero(np.diff(tied, append=tied[-1] + 1))]
    others = np.ones(len(scores), np.bool_)
    others[relevant] = False
    if len(lowest) <= FEW_RELEVANT:
        ahead = np.array([np.count_nonzero((scores >= score - tie) & others) for score in lowest])
    else:
        ahead = np.count_nonzero(others) - np.searchsorted(np.sort(scores[others]), lowest - tie)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = ahead[tied] + np.arange(len(order)) + 1
    return ranks


def _rankings(query_rows: Rows, documents: Rows, queries: Rows, ranks: Rows, relevance: Floats) -> Rankings:
    """The rankings of the queries with a relevant document, from the ranks of these in any order within a query."""
    judged, numbers = np.unique(queries, return_inverse=True)
    order = np.lexsort((ranks, numbers))
    unjudged = len(query_rows) - len(judged)
    of_queries = np.asarray(query_rows)[judged], documents[judged]
    return Rankings(*of_queries, numbers[order], ranks[order], relevance[order], unjudged=unjudged)
