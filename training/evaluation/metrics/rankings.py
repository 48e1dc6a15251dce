"""Metrics of rankings: the mean over queries of a value of their first k documents; k is the number in the name. As
sentence-transformers' InformationRetrievalEvaluator for relevance of 0 and 1, but for documents of equal scores: of
these, relevant ones come last (training/evaluation/rankings.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from datasets import Value

from training.evaluation import rankings
from training.evaluation.metrics.definition import MeanMetric
from training.evaluation.predictions import Floats


class _OfQueries(MeanMetric):
    _given: ClassVar[dict[str, Any]] = {
        "queries": Value("int64"),
        "ranks": Value("int64"),
        "relevance": Value("float64"),
    }
    k: ClassVar[int]
    of_queries: ClassVar[Callable[..., Floats]]

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        return type(self).of_queries(**inputs, k=self.k)


class Ndcg(_OfQueries):
    """The normalized discounted cumulative gain of the first documents: the sum of their relevance, each divided by the
    binary logarithm of its rank plus 1, as a share of that of the best order (Järvelin and Kekäläinen, 2002). The mean
    over queries. From 0 to 1, as scikit-learn's ndcg_score."""

    of_queries = staticmethod(rankings.ndcg)


class Mrr(_OfQueries):
    """The mean over queries of 1 divided by the rank of the first relevant document, 0 if it is not among the first
    documents. From 0 to 1."""

    of_queries = staticmethod(rankings.reciprocal_rank)


class Recall(_OfQueries):
    """The share of a query's relevant documents that are among the first ones. The mean over queries. From 0 to 1."""

    of_queries = staticmethod(rankings.recall)


class Map(_OfQueries):
    """The mean average precision: the share of relevant documents down to the rank of each relevant one among the first
    documents, summed and divided by the number of relevant documents, or by the number of first ones if that is lower.
    The mean over queries. From 0 to 1."""

    of_queries = staticmethod(rankings.average_precision)
