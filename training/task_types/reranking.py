"""Reranking: a score for a document that may answer a query, by which the candidates of the query are sorted.

A row of the data set        {"query": "capital of France", "document": "Paris is …", "label": 1.0}, or a query with all
                             of its candidates: {"query": …, "documents": ["Paris is …", "Rome is …"], "labels": [1, 0]}
token features               {"input_ids": [101, 3007, ..., 102, 101, ..., 102], "token_type_ids": [0, ..., 1],
                              "text_lengths": [12, 9], "label": [1.0, 0.0], "query": 81, "length": 21, "targets": 2}
a padded batch               PadCandidates in training/batching/batches.py
the model's output           logits (D, 1), then (B, L); a score is a logit, or its sigmoid for binary_cross_entropy

The tokens of a row are those of the query with each document, one pair after another, each cut at tokens.max_length.
`query` is a hash of the query's text: in metrics, all rows with one text are one query. If a search has found the
candidates of an evaluated split, they are those of the query's first row, in the order of the search, and `missed` are
the labels of its relevant documents that are not among them. With options.rank_fusion, a score has
logit - rank_weight * ln(rank in the search) in place of the logit.

B rows of a batch, D documents of all of them, L documents of a row at most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import PositiveFloat

from training.data.casting import LARGEST_NUMBER
from training.data.duplicates import hash_ids
from training.data.ipc_files import read_table
from training.data.row_problems import masks_by_reason
from training.evaluation.constant_predictions import Baseline, Rival
from training.evaluation.rankings import Rankings, rank_candidates
from training.models.repository_files import read_json
from training.recipe.tables.metrics import RANKINGS, metrics_for
from training.task_types.task_type import Calibrated, Column, MinesNegatives
from training.tokenization.candidates import encode_candidates
from training.tokenization.features import Features, list_column

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadCandidates, TokenRows
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder

LossName: TypeAlias = Literal["binary_cross_entropy", "mse", "list_net", "lambda"]
_OF_LISTS = ("list_net", "lambda")
"""Losses that compare the candidates of a query, which therefore are in one row."""
MISSED = "missed"
RANK_WEIGHT = "rank_weight"
"""The name of the weight in the model's config and, as JSON, in the schema metadata of predictions."""
_RANK_WEIGHTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""The weights that are tried, in standard deviations of the logits. With the largest, ranks count more than most
differences between logits."""


class Reranking(MinesNegatives, Calibrated):
    """A score of a document for a query."""

    class Options(MinesNegatives.Options):
        """The options of reranking, under the names of sentence-transformers' losses."""

        loss: LossName = "binary_cross_entropy"
        """binary_cross_entropy: labels from 0 to 1, as probabilities. mse: labels that are scores, such as those of a
        larger model. lambda (LambdaLoss) and list_net (ListNet) learn the order of the candidates of a query, which are
        in one row."""
        pos_weight: PositiveFloat | None = None
        """The weight of relevant documents in binary_cross_entropy, such as the number of others for each of them.
        null: 1."""
        rank_fusion: bool = False
        """Whether candidates are sorted by logit - weight * ln(rank in the search). It needs
        data.negatives.num_candidates. After training, the weight with the best ndcg_at_10 of validation is chosen. New
        rows must have their documents in the order of the same search."""

    options: Options
    option_stages: ClassVar = {
        "load_data": ("loss",),
        "tokenize": ("loss",),
        "mine_negatives": (),
        **dict.fromkeys(("evaluate", "predict", "score", "compare"), ()),
    }
    auto_class = "AutoModelForSequenceClassification"
    hub_task = "text-ranking"
    pipeline = False  # that of transformers takes one text
    card_sentence = "Gives a document a score for a query"
    prediction_type: ClassVar = RANKINGS
    metrics: ClassVar[Sequence[str]] = metrics_for(RANKINGS)
    usual_metrics = ("ndcg_at_10", "mrr_at_10")
    columns: ClassVar[Mapping[str, Column]] = {
        "query": Column("text"),
        "document": Column("text"),
        "label": Column("number"),
        "documents": Column("texts"),
        "labels": Column("value", target=True),
    }
    checks: ClassVar = {"candidates": "error"}

    # Rows

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        """A document a row, unless the loss compares documents; or a list of them."""
        sets = [("query", "document", "label"), ("query", "documents", "labels")]
        chosen = sets[1:] if self.options.loss in _OF_LISTS else sets
        return [{name: self.columns[name] for name in names} for names in chosen]

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Labels that are no numbers or not one for each document, or that the loss cannot learn."""
        labels, (_, counts) = _read_labels(rows), _documents(rows)
        problems = [self._find_problem(*row) for row in zip(labels, counts.tolist(), strict=True)]
        for mask, reason in masks_by_reason(problems):
            yield "candidates", f"has labels that cannot be learned ({reason})", mask

    def _find_problem(self, labels: Any, count: int) -> str | None:
        if not isinstance(labels, list) or not all(map(_is_number, labels)):
            return "'labels' is no list of numbers"
        if len(labels) != count:
            return "'documents' and 'labels' have different lengths"
        if self.options.loss == "binary_cross_entropy" and not all(0 <= label <= 1 for label in labels):
            return "options.loss binary_cross_entropy takes labels from 0 to 1; mse takes scores, and lambda grades"
        return None

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        queries, (documents, counts) = rows.column("query").to_pylist(), _documents(rows)
        columns: dict[str, Any] = {"query": hash_ids(queries)}
        if MISSED in rows.schema.names:
            columns[MISSED] = rows.column(MISSED)
        if "label" in rows.schema.names or "labels" in rows.schema.names:
            labels = _read_labels(rows)
            columns["label"] = pa.array(labels, pa.list_(pa.float32()))
            columns["targets"] = np.array([self._count_targets(row) for row in labels], np.int32)
        return encode_candidates(encoder, queries, documents, counts, **columns)

    # Mined negatives

    @property
    def negative_sources(self) -> Sequence[str]:
        """A document that is found has the label 0, which is no score of a larger model."""
        return () if self.options.loss == "mse" else ("bm25", "registry")

    def judged_documents(self, rows: pa.RecordBatch) -> list[tuple[str, list[tuple[str, bool]]]]:
        documents, counts = _documents(rows)
        parts = np.split(np.array(documents, object), np.cumsum(counts)[:-1])
        return [
            (query, [(document, label > 0) for document, label in zip(part, labels, strict=True)])
            for query, part, labels in zip(rows["query"].to_pylist(), parts, _read_labels(rows), strict=True)
        ]

    def add_negatives(self, rows: pa.RecordBatch, negatives: Sequence[Sequence[str]]) -> pa.RecordBatch:
        """Each row becomes a list of candidates; the documents that are added have the label 0."""
        judged = self.judged_documents(rows)
        documents = [
            [*(document for document, _ in own), *more] for (_, own), more in zip(judged, negatives, strict=True)
        ]
        labels = [
            json.dumps([*own, *([0] * len(more))]) for own, more in zip(_read_labels(rows), negatives, strict=True)
        ]
        columns = {"query": rows["query"], "documents": pa.array(documents, pa.list_(pa.string())), "labels": labels}
        return pa.RecordBatch.from_pydict(columns)

    takes_candidates: ClassVar = True

    def with_candidates(
        self, batches: Sequence[pa.RecordBatch], found: Mapping[str, Sequence[str]]
    ) -> list[pa.RecordBatch]:
        """Rows as lists with the column `missed`; later rows of a query stay as they are, and do not count."""
        by_row = [
            (query, [*zip((text for text, _ in documents), labels, strict=True)])
            for batch in batches
            for (query, documents), labels in zip(self.judged_documents(batch), _read_labels(batch), strict=True)
        ]
        graded: dict[str, dict[str, float]] = {}
        for query, documents in by_row:
            of_query = graded.setdefault(query, {})
            for text, label in documents:
                of_query[text] = max(label, of_query.get(text, 0))
        rows, seen = list[dict[str, Any]](), set[str]()
        for query, documents in by_row:
            missed = list[float]()
            if query not in seen and found[query]:
                grades, texts = graded[query], [*found[query]]
                documents = [(text, grades.get(text, 0)) for text in texts]
                missed = [label for text, label in grades.items() if label > 0 and text not in {*texts}]
            seen.add(query)
            labels = json.dumps([label for _, label in documents])
            rows.append(
                {"query": query, "documents": [text for text, _ in documents], "labels": labels, MISSED: missed}
            )
        kinds = {"documents": pa.list_(pa.string()), MISSED: pa.list_(pa.float32())}
        schema = pa.schema([(name, kinds.get(name, pa.string())) for name in ("query", "documents", "labels", MISSED)])
        return [pa.RecordBatch.from_pylist(rows, schema)]

    def _count_targets(self, labels: Sequence[float]) -> int:
        """The targets of a row, as those of a batch."""
        if self.options.loss == "list_net":
            return 1
        if self.options.loss == "lambda":
            given = np.array(labels, np.float32)
            return int(np.count_nonzero(given[:, None] > given[None, :]))
        return len(labels)

    # Training

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Forgets the weight of an earlier training."""
        if hasattr(model.config, RANK_WEIGHT):
            model.config.update({RANK_WEIGHT: 0.0})

    @property
    def is_calibrated(self) -> bool:
        return self.options.rank_fusion

    def calibrate(self, predictions: pa.Table, labels: Sequence[str]) -> dict[str, Any]:
        """The weight with the best nDCG of the first ten documents; the lowest of equally good ones."""
        logits, places = _logits_and_places(predictions)
        spread = np.std(logits[np.isfinite(logits)]) if len(logits) else 0.0
        weights = [float(f"{spread * weight:.4g}") for weight in _RANK_WEIGHTS]
        scores = [_rank(predictions, logits - weight * np.log1p(places)).row_scores for weight in weights]
        return {RANK_WEIGHT: weights[int(np.argmax([found.sum() for found in scores]))]}

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """One output, and the function of it that is the score, as sentence-transformers' CrossEncoder reads it."""
        activation = "activation.Sigmoid" if self._gives_probabilities else "linear.Identity"
        return {"num_labels": 1, "sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}

    @property
    def _gives_probabilities(self) -> bool:
        return self.options.loss == "binary_cross_entropy"

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadCandidates:
        from training.batching.batches import PadCandidates

        return PadCandidates(tokenizer, multiple)

    def target_count(self, batch: Batch) -> int:
        from training.task_types.losses.ranking_loss import targets

        return int(targets(self.options.loss, batch["labels"]).sum())

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """`logits` are (B, L), 0 where a row has fewer than L documents."""
        import torch
        from transformers.utils import ModelOutput

        given = {name: tensor for name, tensor in batch.items() if name not in ("labels", "documents")}
        logits, counts = model(**given)["logits"][:, 0], batch["documents"]  # (D,)
        there = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]  # (B, L)
        return ModelOutput(logits=logits.new_zeros(there.shape).masked_scatter(there, logits))

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        from training.task_types.losses.ranking_loss import RankingLoss

        return RankingLoss(self.options.loss, self.options.pos_weight)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`logits`, a list (float32) of those of the row's documents."""
        logits, counts = outputs["logits"].float().cpu().numpy(), batch["documents"].cpu().numpy()
        there = np.arange(logits.shape[1]) < counts[:, None]
        weight = json.dumps(getattr(model.config, RANK_WEIGHT, 0.0))
        return pa.RecordBatch.from_pydict(
            {"logits": list_column(logits[there], counts)}, metadata={RANK_WEIGHT: weight}
        )

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """With the labels, the `query`, and `missed` if a search has found the candidates."""
        for name in ("query", MISSED):
            if name in rows.table.column_names:
                predictions = predictions.append_column(name, rows.table[name])
        return rows.with_labels(predictions)

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Rankings:
        """By the logits alone, unless a search has found the candidates: the order of a file may have the relevant ones
        first."""
        searched = MISSED in predictions.column_names
        return _rank(predictions, _fuse(predictions) if searched else _logits_and_places(predictions)[0])

    def empty_predictions(self, labels: Sequence[str]) -> Rankings:
        nothing = np.empty(0)
        return rank_candidates(nothing, nothing, nothing, np.empty(0, np.int64))

    def rows_of_entries(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """The first row of each query with a relevant document."""
        queries, documents, labels, row = _candidates(rows)
        return rank_candidates(hash_ids(queries)[row], np.zeros(len(documents)), labels, row).query_rows

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """BM25; the order of the search if one has found the candidates."""
        files = [tokens / f"{split}.arrow" for split in ("validation", "test")]
        if any(MISSED in read_table(file).column_names for file in files if file.is_file()):
            return Baseline([Rival("the search that found the candidates", partial(_rank_by_place, tokens))])
        return Baseline([Rival("BM25", partial(_rank_by_words, data))])

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`score`, of a list of documents that of the best; and `ranking`, the documents of a row by their scores, the
        best first, each with its place in the row, from 0."""
        ranked = pa.struct([("document", pa.int64()), ("score", pa.float64())])
        return {"score": pa.float64(), "ranking": pa.list_(ranked)}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        ends = np.cumsum(predictions["logits"].combine_chunks().value_lengths().to_numpy())
        records = []
        for fused in np.split(_fuse(predictions), ends)[: len(ends)]:
            order = np.argsort(-fused, kind="stable").tolist()
            ranking = [{"document": place, "score": self._score(float(fused[place]))} for place in order]
            records.append({"score": ranking[0]["score"], "ranking": ranking})
        return records

    def _score(self, logit: float) -> float:
        if not self._gives_probabilities:
            return logit
        return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The score, or those of a list's documents, the best first."""
        if len(record["ranking"]) == 1:
            return [f"{record['score']:.4f}"]
        return [f"{one['score']:9.4f}  document {one['document']}" for one in record["ranking"]]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the scores of each document; the tolerance is relative to the largest one."""
        own, theirs = ({str(one["document"]): one["score"] for one in row["ranking"]} for row in (given, stored))
        return super().same_prediction(own, theirs, tolerance * max(1.0, *map(abs, theirs.values())))

    def published_files(self, folder: Path, max_length: int) -> dict[str, str]:
        """The tokenizer's settings with this length, at which sentence-transformers then cuts too."""
        settings = read_json(folder / "tokenizer_config.json") | {"model_max_length": max_length}
        return {"tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}


def _documents(rows: pa.RecordBatch) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The documents of all rows, one after another, and the number of each row, (N,)."""
    if "document" in rows.schema.names:
        return rows.column("document").to_pylist(), np.ones(rows.num_rows, np.int64)
    lists = rows.column("documents")
    return lists.flatten().to_pylist(), lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def _read_labels(rows: pa.RecordBatch) -> list[Any]:
    """The labels of each row's documents: a list, or another JSON value of rows that are not checked yet."""
    if "labels" in rows.schema.names:
        return [json.loads(labels) for labels in rows.column("labels").to_pylist()]
    return [[label] for label in rows.column("label").to_pylist()]


def _candidates(rows: pa.Table) -> tuple[list[str], list[str], list[Any], npt.NDArray[np.int64]]:
    """The queries of rows as load_data stores them; their documents, one after another, with the label and the row of
    each."""
    queries, documents, labels, counts = list[str](), list[str](), list[Any](), [np.empty(0, np.int64)]
    for batch in rows.to_batches():
        found, of_batch = _documents(batch)
        queries += batch.column("query").to_pylist()
        documents += found
        labels += [label for of_row in _read_labels(batch) for label in of_row]
        counts.append(of_batch)
    return queries, documents, labels, np.repeat(np.arange(len(queries)), np.concatenate(counts))


def _is_number(value: Any) -> bool:
    """Whether it is a number that a model computes with."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER


def _logits_and_places(predictions: pa.Table) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The logits of all documents, one after another, and the place of each in its row, from 0."""
    lists = predictions["logits"].combine_chunks()
    return lists.flatten().to_numpy().astype(np.float64), _places(lists.value_lengths().to_numpy())


def _fuse(predictions: pa.Table) -> npt.NDArray[np.float64]:
    """Logit - weight * ln(rank in the search) of all documents, one after another."""
    logits, places = _logits_and_places(predictions)
    return logits - json.loads(predictions.schema.metadata[RANK_WEIGHT.encode()]) * np.log1p(places)


def _places(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """From 0 in each row, given the documents of each."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _rank(rows: pa.Table, scores: npt.NDArray[Any]) -> Rankings:
    """The rankings by the scores of all documents, one after another; rows have `label` and `query`."""
    labels, queries = rows["label"].combine_chunks(), rows["query"].to_numpy()
    row = np.repeat(np.arange(len(rows)), labels.value_lengths().to_numpy())
    relevance = labels.flatten().to_numpy()
    if MISSED not in rows.column_names:
        return rank_candidates(queries[row], scores, relevance, row)
    lists = rows[MISSED].combine_chunks()
    of_missed = np.repeat(np.arange(len(rows)), lists.value_lengths().to_numpy())
    _, first = np.unique(queries, return_index=True)
    counts = np.isin(row, first)  # later rows of a query have no candidates of their own
    places = np.concatenate([row[counts], of_missed])
    return rank_candidates(
        queries[places],
        np.concatenate([scores[counts], np.zeros(len(of_missed))]),
        np.concatenate([relevance[counts], lists.flatten().to_numpy()]),
        places,
        np.arange(len(places)) >= np.count_nonzero(counts),
    )


def _rank_by_place(tokens: Path, rows: Rankings, split: str) -> Rankings:
    """The candidates in the order of the search."""
    table = read_table(tokens / f"{split}.arrow")
    return _rank(table, -_places(table["label"].combine_chunks().value_lengths().to_numpy()).astype(np.float64))


def _rank_by_words(data: Path, rows: Rankings, split: str) -> Rankings:
    """The candidates of each query of a split by BM25 among all documents of the split, which load_data has stored in
    the folder `data`."""
    from training.evaluation.bm25 import Bm25

    queries, documents, labels, row = _candidates(read_table(data / f"{split}.arrow"))
    places = {document: place for place, document in enumerate(dict.fromkeys(documents))}
    scores = Bm25([*places]).score_pairs(
        [queries[number] for number in row.tolist()], np.array([places[document] for document in documents])
    )
    return rank_candidates(hash_ids(queries)[row], scores, labels, row)
