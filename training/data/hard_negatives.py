"""Hard negatives: documents that are near to a query and do not belong to it, from scores of all documents.

The candidates of a query are the documents of all rows, and perhaps those of a corpus, except those that a row has with
the query, whether they belong to it or not, and a document that is the query's own text. Documents with equal scores
are taken in the order of the rows and then of the corpus, so the result depends on texts and scores alone.

N rows, Q distinct queries, C distinct documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.data.ipc_files import CORPUS, read_batches, write_table
from training.data.vectors import rows_at_once
from training.jobs.protocol import Result

if TYPE_CHECKING:
    from training.recipe.data_fields import Negatives

Judged = tuple[str, Sequence[tuple[str, bool]]]
"""The query of a row, and its documents, each with whether it belongs to the query."""
Scores = Callable[[int, int], npt.NDArray[np.floating[Any]]]
"""Returns the scores (q, C) of all documents for the queries from a first one to the one before a last one."""
DECIMALS = 6
"""The decimals of a score that count: equal embeddings differ by rounding."""


class TakesNegatives(Protocol):
    """The part of a task type that reads and writes the rows: see training.task_types.task_type.MinesNegatives."""

    def judged_documents(self, rows: pa.RecordBatch) -> Sequence[Judged]: ...

    def add_negatives(self, rows: pa.RecordBatch, negatives: Sequence[Sequence[str]]) -> pa.RecordBatch: ...

    def with_candidates(
        self, batches: Sequence[pa.RecordBatch], found: Mapping[str, Sequence[str]]
    ) -> list[pa.RecordBatch]: ...


class MineResult(Result):
    """The negatives that were added."""

    rows: int
    """All training rows."""
    negatives: int
    """The documents that were added to rows, together."""
    without: int
    """Of the rows with a document that belongs to the query, those to which fewer than num_negatives were added."""
    texts: int | None = None
    """The distinct texts that have embeddings; None for bm25."""
    embedded: int = 0
    """Those of them that this run has embedded; it found the embeddings of the others."""


@dataclass
class Corpus:
    """The distinct queries and documents of rows, numbered in the order of the rows, and then those of further
    documents."""

    queries: dict[str, int] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    order: list[tuple[str, bool]] = field(default_factory=list)
    """Each text of the rows with whether it is a document, in the order of the rows: rows that are appended change no
    earlier place."""
    judged: list[dict[int, bool]] = field(default_factory=list)
    """Of each query the documents that a row has with it, and whether one says that they belong to it."""

    @classmethod
    def of(cls, rows: Iterable[Judged]) -> Corpus:
        corpus = cls()
        for query, documents in rows:
            if query not in corpus.queries:
                corpus.queries[query] = len(corpus.queries)
                corpus.order.append((query, False))
                corpus.judged.append({})
            of_query = corpus.judged[corpus.queries[query]]
            for document, belongs in documents:
                if document not in corpus.documents:
                    corpus.documents[document] = len(corpus.documents)
                    corpus.order.append((document, True))
                number = corpus.documents[document]
                of_query[number] = belongs or of_query.get(number, False)
        return corpus

    def add_documents(self, texts: Sequence[str]) -> list[int]:
        """Adds the texts that are not yet among the documents. Returns their places in `texts`."""
        new = []
        for place, text in enumerate(texts):
            if text not in self.documents:
                self.documents[text] = len(self.documents)
                new.append(place)
        return new


def read_documents(data: Path) -> list[str]:
    """The distinct texts of data.corpus in the folder of load_data, in their order; none without the file."""
    file = data / f"{CORPUS}.arrow"
    if not file.is_file():
        return []
    return list(
        dict.fromkeys(text for batch in read_batches(file, mapped=False) for text in batch.column(0).to_pylist())
    )


@dataclass(frozen=True)
class QueryRows:
    """The rows of a split, as load_data stores them."""

    task_type: TakesNegatives
    batches: Sequence[pa.RecordBatch]
    judged: Sequence[Sequence[Judged]]
    """Of each batch."""
    corpus: Corpus

    @classmethod
    def read(cls, task_type: TakesNegatives, file: Path) -> QueryRows:
        batches = list(read_batches(file))
        judged = [task_type.judged_documents(batch) for batch in batches]
        return cls(task_type, batches, judged, Corpus.of(row for of_batch in judged for row in of_batch))

    def write_candidates(self, found: Sequence[Sequence[str]], file: Path) -> None:
        """Stores the rows of an evaluated split with the documents that were found for their queries (Q,)."""
        by_query = dict(zip(self.corpus.queries, found, strict=True))
        rows = self.task_type.with_candidates(self.batches, by_query)
        write_table(file, rows, rows[0].schema)

    def write(self, found: Sequence[Sequence[str]], wanted: int, file: Path) -> MineResult:
        """Stores the rows with the negatives of their queries (Q,), of which `wanted` were looked for. A row without a
        document that belongs to its query gets none."""
        rows, added, without = list[pa.RecordBatch](), 0, 0
        for batch, judged in zip(self.batches, self.judged, strict=True):
            negatives = [
                found[self.corpus.queries[query]] if any(belongs for _, belongs in documents) else []
                for query, documents in judged
            ]
            rows.append(self.task_type.add_negatives(batch, negatives))
            added += sum(map(len, negatives))
            without += sum(
                len(texts) < wanted
                for texts, (_, documents) in zip(negatives, judged, strict=True)
                if any(belongs for _, belongs in documents)
            )
        write_table(file, rows, rows[0].schema)
        return MineResult(rows=sum(map(len, rows)), negatives=added, without=without)


def find_negatives(
    corpus: Corpus, scores: Scores, settings: Negatives, report: Callable[[int, int], None] = lambda done, total: None
) -> list[list[str]]:
    """The negatives of each query (Q,), the nearest first; none for a query to which no document belongs.

    `report` is called with the number of queries that are done, and of all.
    """
    texts, queries, found = [*corpus.documents], [*corpus.queries], list[list[str]]()
    for first, last, of_block in _score_blocks(corpus, scores):
        for query, judged, of_query in zip(queries[first:last], corpus.judged[first:last], of_block, strict=True):
            lowest = min((of_query[document] for document, belongs in judged.items() if belongs), default=None)
            of_query[[*judged]] = -math.inf
            if (own := corpus.documents.get(query)) is not None:
                of_query[own] = -math.inf
            chosen = [] if lowest is None else _choose(of_query, float(lowest), settings)
            found.append([texts[document] for document in chosen])
        report(last, len(queries))
    return found


def find_candidates(corpus: Corpus, scores: Scores, number: int) -> list[list[str]]:
    """The nearest documents of each query (Q,), at most `number`, the nearest first, without its own text. Of documents
    with equal scores, those that belong to the query come last."""
    texts, queries, found = [*corpus.documents], [*corpus.queries], list[list[str]]()
    for first, last, of_block in _score_blocks(corpus, scores):
        for query, judged, of_query in zip(queries[first:last], corpus.judged[first:last], of_block, strict=True):
            if (own := corpus.documents.get(query)) is not None and not judged.get(own):
                of_query[own] = -math.inf
            belongs = np.zeros(len(texts), np.bool_)
            belongs[[document for document, is_relevant in judged.items() if is_relevant]] = True
            places = np.flatnonzero(of_query >= np.sort(of_query)[-number:][0])
            places = places[np.lexsort((places, belongs[places], -of_query[places]))][:number]
            found.append([texts[place] for place in places if of_query[place] > -math.inf])
    return found


def _score_blocks(corpus: Corpus, scores: Scores) -> Iterator[tuple[int, int, npt.NDArray[np.float64]]]:
    """Yields the scores (q, C) that count of the queries from a first one to the one before a last one; minus infinity
    for nan."""
    number, at_once = len(corpus.queries), rows_at_once(len(corpus.documents))
    for first in range(0, number, at_once):
        last = min(first + at_once, number)
        found = scores(first, last).astype(np.float64).round(DECIMALS)
        found[np.isnan(found)] = -math.inf
        yield first, last, found


def _choose(scores: npt.NDArray[np.float64], positive: float, settings: Negatives) -> list[int]:
    """The places of the negatives among the scores (C,), which are changed; `positive` is the score of a document that
    belongs to the query."""
    if settings.range_max is not None:
        within = _highest(scores, settings.range_max)
        others = np.ones(len(scores), np.bool_)
        others[within] = False
        scores[others] = -math.inf
    scores[_highest(scores, settings.range_min)] = -math.inf
    limits = [settings.max_score]
    if settings.absolute_margin is not None:
        limits.append(positive - settings.absolute_margin)
    if settings.relative_margin is not None:
        limits.append(positive - abs(positive) * settings.relative_margin)
    scores[scores > min((limit for limit in limits if limit is not None), default=math.inf)] = -math.inf
    if settings.min_score is not None:
        scores[scores < settings.min_score] = -math.inf
    return _highest(scores, settings.num_negatives).tolist()


def _highest(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """The places of the highest scores, the highest first, of equal ones the first ones. Minus infinity is none."""
    count = min(count, int(np.count_nonzero(scores > -math.inf)))
    if count == 0:
        return np.empty(0, np.int64)
    lowest = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > lowest)
    places = np.concatenate([above, np.flatnonzero(scores == lowest)[: count - len(above)]])
    return places[np.lexsort((places, -scores[places]))]
