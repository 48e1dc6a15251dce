"""Embeddings that are learned from pairs of a text and one that belongs to it, such as a question and its answer, or
from texts with labels.

A row of the data set        {"anchor": "capital of France", "positive": "Paris is …", "negative": "Lyon is …"}, with
                             one `negative`, a list of `negatives`, or neither; or for a loss of labels {"text": "How do
                             I reset my password?", "label": 3}

In an evaluation, the distinct anchors are queries, and all positives and negatives of the split are the documents that
are searched; those in a row with an anchor are relevant for it. Of texts with labels, each distinct text is a query,
and among the other texts those with its label are relevant. Token features, batches and embeddings:
training/task_types/text_embedding.py.

N rows of a split, M texts of all rows, Q queries, C documents.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import NonNegativeFloat, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from training.data.duplicates import hash_ids
from training.data.ipc_files import CORPUS, read_table
from training.data.vectors import rows_at_once
from training.evaluation.constant_predictions import Baseline, Rival
from training.evaluation.rankings import TIE, Others, Rankings, rank, rank_by
from training.models.repository_files import DEFAULT_PROMPT
from training.recipe.tables.metrics import RANKINGS, metrics_for
from training.task_types.losses import TEACHER, LossOfLabels
from training.task_types.task_type import Column, CorpusSearch, LearnsVectors, MinesNegatives, SearchesCorpus
from training.task_types.text_embedding import Embeddings, TextEmbedding
from training.tokenization.features import list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.task_types.task_type import Loss

ANCHOR, POSITIVE, NEGATIVE, NEGATIVES = "anchor", "positive", "negative", "negatives"
TEXT, LABEL = "text", "label"
AHEAD, FURTHER = "corpus_ahead", "corpus_documents"
"""The columns of predictions with, for each row, the documents of data.corpus that are ahead of its positive, and all
that were searched."""
MOST_RELEVANT = 5_000_000
"""Pairs of a query and a document with its label in an evaluation."""
NEEDED = (
    "The loss triplet needs one in each row, before data.negatives adds others: for rows without, set options.loss: "
    "multiple_negatives_ranking, for which mined negatives are enough."
)
PromptColumn: TypeAlias = Literal["anchor", "positive", "negative", "negatives", "text"]


class Embedding(TextEmbedding, LearnsVectors, MinesNegatives, SearchesCorpus):
    """Embeddings of texts, from pairs of texts that belong together or from texts with labels."""

    class Options(TextEmbedding.Options):
        """The options of embedding, under the names of sentence-transformers and with its defaults."""

        loss: Literal["multiple_negatives_ranking", "triplet"] | LossOfLabels = "multiple_negatives_ranking"
        """multiple_negatives_ranking: an anchor becomes more similar to its positive than to the other texts of its
        optimizer step, those of all micro-batches and processes. triplet: than to the negatives of its row. The others
        are for texts with labels: in the step, a text becomes nearer to those with its label than to those with
        others. batch_all_triplet: all of them. batch_hard_triplet, batch_hard_soft_margin_triplet: the farthest with
        its label and the nearest with another. batch_semi_hard_triplet: each with its label, and the nearest with
        another that is farther."""
        symmetric: bool = False
        """For multiple_negatives_ranking: whether each positive is compared with all anchors too."""
        margin: NonNegativeFloat = 5.0
        """For the triplet losses, except batch_hard_soft_margin_triplet: by how much the negative should be farther
        away."""
        distance_metric: Literal["cosine", "euclidean", "manhattan"] = "euclidean"
        """For the triplet losses: the distance of embeddings."""
        prompts: dict[PromptColumn, str] | None = None
        """A text before those of a column, such as {anchor: "query: ", positive: "passage: "}; negatives have that of
        positives unless they are named. null: the base model's own prompts, query and document; of `text` the default
        one."""
        predicted_prompt: PromptColumn | None = None
        """The column whose prompt is put before texts to predict. null: anchor, or text."""

        @field_validator("prompts", "predicted_prompt")
        @classmethod
        def _of_columns(cls, given: Any, others: ValidationInfo) -> Any:
            loss = others.data.get("loss")
            columns = (TEXT,) if loss in get_args(LossOfLabels) else (ANCHOR, POSITIVE, NEGATIVE, NEGATIVES)
            wrong = [name for name in ([given] if isinstance(given, str) else given or ()) if name not in columns]
            if wrong and loss:
                message = f"names {wrong[0]}, and rows of the loss {loss} have no such text: choose from "
                raise PydanticCustomError("column", message + ", ".join(columns))
            return given

    options: Options
    option_stages: ClassVar = {
        "load_data": ("loss",),
        "tokenize": ("prompts",),
        "mine_negatives": (),
        "embed": ("prompts", "pooling", "normalize"),
        "fit": (
            "prompts",
            *("loss", "scale", "symmetric", "margin", "distance_metric", "matryoshka_dims", "matryoshka_weights"),
            *("pooling", "normalize"),
        ),
        **dict.fromkeys(("evaluate", "predict", "score", "compare"), ()),
    }
    card_sentence = "Gives a text an embedding, by which texts that belong to it are found"
    columns: ClassVar[Mapping[str, Column]] = {
        ANCHOR: Column("text"),
        POSITIVE: Column("text", target=True),
        NEGATIVE: Column("text", target=True, optional=True, may_be_empty=True),
        NEGATIVES: Column("texts", target=True, optional=True, may_be_empty=True),
        TEXT: Column("text"),
        LABEL: Column("label"),
    }
    own_prompts: ClassVar = {
        ANCHOR: ("query",),
        **dict.fromkeys((POSITIVE, NEGATIVE, NEGATIVES), ("document", "passage", "corpus")),
        TEXT: (DEFAULT_PROMPT,),
    }
    prediction_type: ClassVar = RANKINGS
    metrics: ClassVar = metrics_for(RANKINGS)
    usual_metrics: ClassVar = ("ndcg_at_10",)
    teacher_outputs = "vectors"
    _teacher: tuple[int, float] | None = None
    """The dimensions and the weight of a teacher's vectors."""

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        if self.learns_labels:
            return [{name: self.columns[name] for name in (TEXT, LABEL)}]
        if self.options.loss != "triplet":
            return [{name: self.columns[name] for name in (ANCHOR, POSITIVE, NEGATIVE, NEGATIVES)}]
        pair = {name: self.columns[name] for name in (ANCHOR, POSITIVE)}
        return [
            pair | {NEGATIVE: Column("text", target=True, advice=NEEDED)},
            pair | {NEGATIVES: Column("texts", target=True, advice=NEEDED)},
        ]

    @property
    def learns_labels(self) -> bool:
        """Whether rows are texts with labels."""
        return self.options.loss in get_args(LossOfLabels)

    def label_column(self, rows: pa.RecordBatch) -> dict[str, Any]:
        return {LABEL: rows.column(LABEL)} if LABEL in rows.schema.names else {}

    def partners(self, rows: TokenRows) -> npt.NDArray[np.int64] | None:
        return rows.labels if self.learns_labels else None

    def texts(self, rows: pa.RecordBatch) -> list[list[tuple[str, str]]]:
        columns = [
            [[(name, text) for text in _listed(name, value)] for value in values]
            for name, values in (
                (name, rows[name].to_pylist()) for name in self.columns if name in rows.schema.names and name != LABEL
            )
        ]
        return [[text for of_column in row for text in of_column] for row in zip(*columns, strict=True)]

    def given_prompts(self) -> dict[str, str] | None:
        given = super().given_prompts()
        return given and {**dict.fromkeys((NEGATIVE, NEGATIVES), given.get(POSITIVE, "")), **given}

    # A teacher: its vector of each text is beside the embedding, (M, 2 D), and so in the loss of a whole step

    @property
    def teacher_columns(self) -> list[str]:
        return [*self.own_prompts]

    def outputs_of_teacher(self, outputs: ModelOutput, batch: Batch) -> pa.ListArray:
        """The embeddings of the row's texts, one after another."""
        vectors = outputs["logits"].float().cpu().numpy()
        counts = (batch["labels"][:, 1:] >= 0).sum(dim=1).cpu().numpy()
        return list_column(vectors.reshape(-1), counts * vectors.shape[1])

    def taught(self, dimensions: int, weight: float) -> Self:
        learning = copy.copy(self)
        learning._teacher = dimensions, weight
        return learning

    @property
    def step_function(self) -> Loss:
        from training.task_types.losses.distillation_loss import VectorDistillationLoss

        ordinary = super().step_function
        return ordinary if self._teacher is None else VectorDistillationLoss(ordinary, *self._teacher)

    def embed(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        import torch

        embeddings = super().embed(model, batch)
        return torch.cat([embeddings, batch[TEACHER]], dim=1) if TEACHER in batch else embeddings

    # Mined negatives

    @property
    def corpus_column(self) -> str | None:
        return None if self.learns_labels else POSITIVE

    @property
    def negative_sources(self) -> Sequence[str]:
        return () if self.learns_labels else ("bm25", "base", "registry")

    def judged_documents(self, rows: pa.RecordBatch) -> list[tuple[str, list[tuple[str, bool]]]]:
        return [
            (query, [(text, name == POSITIVE) for name, text in documents])
            for (_, query), *documents in self.texts(rows)
        ]

    def add_negatives(self, rows: pa.RecordBatch, negatives: Sequence[Sequence[str]]) -> pa.RecordBatch:
        """The texts are added to the column `negatives`."""
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        own = columns[NEGATIVES].to_pylist() if NEGATIVES in columns else [[]] * rows.num_rows
        lists = [[*texts, *more] for texts, more in zip(own, negatives, strict=True)]
        return pa.RecordBatch.from_pydict({**columns, NEGATIVES: pa.array(lists, pa.list_(pa.string()))})

    # Evaluation

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Rankings:
        found = Embeddings.of(predictions)
        vectors, search = found.normalized, RetrievalSet.of(found.ids, found.counts, _labels_of(predictions))
        queries, documents, others = vectors[search.queries], vectors[search.documents], None
        if AHEAD in predictions.column_names:
            ahead, further = (predictions[name].to_numpy() for name in (AHEAD, FURTHER))
            others = Others(ahead[search.relevant_rows], further[search.query_rows])
        return rank(queries, search.query_rows, documents, search.relevant, left_out=search.left_out, others=others)

    def corpus_search(self, predictions: pa.Table) -> CorpusSearch:
        return PairsInCorpus(predictions)

    def empty_predictions(self, labels: Sequence[str]) -> Rankings:
        return rank(np.empty((0, 1)), np.empty(0, np.int64), np.empty((0, 1)), np.empty((0, 2)))

    def rows_of_entries(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """The first row of each query with a relevant document."""
        _, search = self._search(rows)
        return search.query_rows[np.unique(search.relevant[:, 0])]

    def _search(self, rows: pa.Table) -> tuple[list[str], RetrievalSet]:
        """The texts of rows as load_data stores them, one after another, and the search among them."""
        by_row = [row for batch in rows.to_batches() for row in self.texts(batch)]
        texts = [text for row in by_row for _, text in row]
        counts = np.array([len(row) for row in by_row], np.int64)
        return texts, RetrievalSet.of(hash_ids(texts), counts, _labels_of(rows))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """BM25 on the same documents, those of data.corpus too."""
        from training.evaluation.bm25 import Bm25

        def predict(rows: Rankings, split: str) -> Rankings:
            texts, search = self._search(read_table(data / f"{split}.arrow"))
            documents = dict.fromkeys(texts[place] for place in search.documents)
            if (corpus := data / f"{CORPUS}.arrow").is_file():
                documents |= dict.fromkeys(read_table(corpus)[POSITIVE].to_pylist())
            words, queries = Bm25([*documents]), [texts[place] for place in search.queries]
            places = {text: place for place, text in enumerate(documents)}
            own = [(query, places[text]) for query, text in enumerate(queries) if text in places]
            further = [pair for pair in own if pair[1] >= len(search.documents)]
            return rank_by(
                lambda first, last: words.scores(queries[first:last]),
                len(documents),
                search.query_rows,
                search.relevant,
                left_out=np.concatenate([search.left_out, np.array(further, np.int64).reshape(-1, 2)]),
            )

        return Baseline([Rival("BM25", predict)])


def _labels_of(rows: pa.Table) -> npt.NDArray[np.int64] | None:
    """(N,) if rows have labels."""
    return rows[LABEL].to_numpy() if LABEL in rows.column_names else None


def _listed(name: str, value: str | list[str]) -> list[str]:
    """The texts of a value, without empty ones in place of negatives."""
    if name in (NEGATIVE, NEGATIVES):
        return [text for text in ([value] if isinstance(value, str) else value) if text]
    return [str(value)]


class PairsInCorpus(CorpusSearch):
    """The documents of a corpus that are ahead of the positive of each row. One that equals a document of the rows, or
    an anchor, is not counted for them."""

    def __init__(self, predictions: pa.Table) -> None:
        found = Embeddings.of(predictions)
        self._predictions = predictions
        self._anchors = found.normalized[found.starts]  # (N, D)
        scores = (self._anchors * found.normalized[found.starts + 1]).sum(axis=1)
        self._least = np.nan_to_num(scores, nan=-np.inf) - TIE  # (N,) cosines are 1 at most
        self._anchor_ids = found.ids[found.starts]
        self._known = np.delete(found.ids, found.starts)  # documents that are ranked already
        self._ahead, self._documents = (np.zeros(len(self._least), np.int64) for _ in range(2))

    def add(self, predictions: pa.Table) -> None:
        block = Embeddings.of(predictions)
        ids, first = np.unique(block.ids, return_index=True)
        is_new = ~np.isin(ids, self._known)
        ids, documents = ids[is_new], block.normalized[first[is_new]].T
        self._known = np.union1d(self._known, ids)
        size = rows_at_once(len(ids))
        for start in range(0, len(self._least), size):
            rows = slice(start, start + size)
            scores = np.nan_to_num(self._anchors[rows] @ documents, nan=-np.inf)
            other = self._anchor_ids[rows, None] != ids
            self._ahead[rows] += ((scores >= self._least[rows, None]) & other).sum(axis=1)
            self._documents[rows] += other.sum(axis=1)

    def result(self) -> pa.Table:
        """With the columns AHEAD and FURTHER."""
        return self._predictions.append_column(AHEAD, [self._ahead]).append_column(FURTHER, [self._documents])


@dataclass(frozen=True)
class RetrievalSet:
    """The distinct queries and documents among the texts of rows, as places among these, and which belong together."""

    queries: npt.NDArray[np.int64]  # (Q,) in the order of the rows
    query_rows: npt.NDArray[np.int64]  # (Q,) the first row of each
    documents: npt.NDArray[np.int64]  # (C,)
    relevant: npt.NDArray[np.int64]  # (R, 2) pairs of a query and a document, by their numbers
    relevant_rows: npt.NDArray[np.int64]  # (R,) a row that says so; of texts with labels, that of the query
    left_out: npt.NDArray[np.int64]  # (E, 2) a query and a document with the same text that is not relevant

    @classmethod
    def of(
        cls,
        ids: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64] | None = None,
    ) -> RetrievalSet:
        """From the numbers of the texts, (M,), and the texts of each row, (N,): anchor, positive, negatives; or one
        text, if rows have the `labels`, (N,)."""
        if labels is not None:
            return cls._of_labels(ids, labels)
        starts = np.cumsum(counts) - counts
        _, query_rows, query_of_row = _distinct(ids[starts])
        is_document = np.ones(len(ids), np.bool_)
        is_document[starts] = False
        places = np.flatnonzero(is_document)
        document_ids, first, document = _distinct(ids[places])
        number = np.empty(len(ids), np.int64)
        number[places] = document
        judged = np.stack([query_of_row, number[starts + 1]], axis=1)
        pairs, pair_rows = np.unique(judged, axis=0, return_index=True)
        _, query, same = np.intersect1d(ids[starts][query_rows], document_ids, return_indices=True)
        equal = np.stack([query, same], axis=1)
        is_relevant = np.isin(equal @ [len(document_ids), 1], pairs @ [len(document_ids), 1])
        return cls(starts[query_rows], query_rows, places[first], pairs, pair_rows, equal[~is_relevant])

    @classmethod
    def _of_labels(cls, ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> RetrievalSet:
        """Each distinct text is a document and a query, or if they have too many relevant documents together, every
        second, third, … text is a query. A text may have several labels."""
        _, first, number = _distinct(ids)
        label, text = np.unique(np.stack([labels, number], axis=1), axis=0).T
        _, starts, of_label, sizes = np.unique(label, return_index=True, return_inverse=True, return_counts=True)
        every = max(1, -(-int(np.square(sizes).sum()) // MOST_RELEVANT))
        asked = np.flatnonzero(text % every == 0)
        starts, sizes = starts[of_label[asked]], sizes[of_label[asked]]  # of each query with one of its labels
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        query, document = np.repeat(text[asked], sizes), text[np.repeat(starts, sizes) + within]
        pairs = np.stack([query // every, document], axis=1)[query != document]
        if len(text) > len(first):
            pairs = np.unique(pairs, axis=0)
        queries = np.arange(0, len(first), every)
        own = np.stack([np.arange(len(queries)), queries], axis=1)
        return cls(first[queries], first[queries], first, pairs, first[queries][pairs[:, 0]], own)


def _distinct(
    ids: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct numbers in the order in which they first occur, the place where each does, and of each place the
    number of its value."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return ids[first[order]], first[order], place[inverse]
