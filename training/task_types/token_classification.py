"""Token classification: a tag for each word of a text, such as named entities or parts of speech.

A row of the data set        {"tokens": ["Merkel", "visits", "Rome"], "ner_tags": ["B-PER", "O", "B-LOC"]}
token features               {"input_ids": [101, 21442, 2884, 7879, 4199, 102], "length": 6,
                              "first": [1, 3, 4], "label": [1, 0, 3], "targets": 3}
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B, T)}
                             labels of this row: [-100, 1, -100, 0, 3, -100]
the model's output           logits (B, T, L); a word's prediction is the tag of the largest one at its first token

Words without a token, because they are truncated or the tokenizer drops them (such as white space), are not trained on.
Their prediction is null, which metrics count as O.

B rows of a batch, T tokens, L tags, W words of all rows of a batch or split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_columns import flat_values, lists_like
from training.data.row_problems import shorten
from training.evaluation.constant_predictions import (
    Baseline,
    Constant,
    most_frequent,
    read_column,
    sample_evenly,
    smooth_counts,
)
from training.evaluation.tagged_words import Tagged
from training.evaluation.tags import OUTSIDE, find_row_spans, find_spans, flatten, is_iob2, respelt_iob2, type_of
from training.recipe.tables.metrics import TAGS, metrics_for
from training.task_types.sequence_level import label_names_config
from training.task_types.targets import HasTargets
from training.task_types.task_type import Column, LearnsFromTeacher
from training.tokenization.features import Features, list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadTags, TokenRows
    from training.recipe.column_types import Mask
    from training.tokenization.encoder import Encoded, Encoder


CHOOSING_ROWS = 5_000
"""The number of training rows that choose the best constant tag."""


class TokenClassification(LearnsFromTeacher, HasTargets):
    """A tag for each word."""

    teacher_outputs = "classes"
    auto_class = "AutoModelForTokenClassification"
    hub_task = "token-classification"
    pipeline = False  # the pipeline of transformers splits texts into other words
    card_sentence = "Gives each word of a {text} one of {labels}"
    columns: ClassVar = {"text": Column("texts"), "label": Column("labels")}
    checks: ClassVar = {"uneven_tags": "error", "iob2": "error"}
    prediction_type: ClassVar = TAGS
    metrics: ClassVar = metrics_for(TAGS)
    target_form = "classes"

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Rows with more or fewer tags than words; and, if all tags are of IOB2, rows with an I-X that continues no
        span."""
        words, tags = rows.column("text"), rows.column("label")
        lengths = [pc.list_value_length(column).to_numpy(zero_copy_only=False) for column in (words, tags)]
        is_uneven = lengths[0] != lengths[1]
        if is_uneven.any():
            first = int(is_uneven.argmax())
            example = _describe_uneven(words[first], tags[first])
            yield "uneven_tags", "has more or fewer tags than words", is_uneven, example
        broken_rows, example = _find_broken_spans(words.filter(~is_uneven), tags.filter(~is_uneven))
        if example:
            mask = np.zeros(len(is_uneven), bool)
            mask[~is_uneven] = broken_rows
            yield "iob2", "has an I- tag without a span before it", mask, example

    def label_order(self, labels: Sequence[str]) -> list[str] | None:
        """O, then by type: B-LOC, I-LOC, B-PER, I-PER."""
        if not is_iob2(labels):
            return None
        return sorted(labels, key=lambda tag: (tag != OUTSIDE, type_of(tag), tag))

    def incompatible_label(self, labels: Sequence[str]) -> tuple[str, str] | None:
        """Returns the first tag that is not of IOB2, if other tags are, or if it is one of IOB2 in another spelling."""
        for tag, spelt in respelt_iob2(labels).items():
            return tag, (
                f"marks the words of a span, but not as {spelt!r}, so each word would count as a span for itself: "
                "write B- before the first tag of each span and I- before its others (IOB2), and O for no span."
            )
        prefixed = next((label for label in labels if label.startswith(("B-", "I-"))), None)
        unprefixed = next((label for label in labels if not is_iob2([label])), None)
        if prefixed is None or unprefixed is None:
            return None
        return unprefixed, (
            f"and {prefixed!r} are of different schemes: either all tags are O, B-X and I-X, where B-X begins each "
            "span (IOB2), or none has such a prefix. Write them all in one scheme."
        )

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        return label_names_config(labels)

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """input_ids and length; `first`, the position of each word's first token, -1 if it has none; the tags, by word;
        and `targets`, the number of words with a token."""
        words = rows.column("text").to_pylist()
        encoded = encoder.encode_words(words)
        counts = np.fromiter(map(len, words), np.int64, len(words))
        first, rows_of_words = _first_tokens(encoded, counts), np.repeat(np.arange(len(words)), counts)
        wordless = (first < 0) & (encoded.lost[rows_of_words] == 0)
        columns = {
            "input_ids": list_column(encoded.ids, encoded.lengths),
            "length": encoded.lengths,
            "first": lists_like(rows.column("text"), pa.array(first)),
            "targets": np.bincount(rows_of_words[first >= 0], minlength=len(words)).astype(np.int32),
        }
        if "label" in rows.schema.names:
            columns["label"] = rows.column("label")
        flat = flat_values(rows.column("text"))
        dropped = flat.take(pa.array(np.flatnonzero(wordless))).to_pylist()
        return Features(pa.RecordBatch.from_pydict(columns), encoded.lost, wordless=dropped)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadTags:
        from training.batching.batches import PadTags

        return PadTags(tokenizer, multiple)

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The words with a token. Their loss is computed outside of the model, where it is NaN for a batch without
        such words."""
        from training.task_types.losses.target_losses import select_targets

        return select_targets(logits, labels)

    def label_counts(self, train: TokenRows, size: int) -> tuple[npt.NDArray[np.int64], int]:
        tags, first = (flat_values(train.table[name].combine_chunks()).to_numpy() for name in ("label", "first"))
        return np.bincount(tags[first >= 0], minlength=size), int((first >= 0).sum())

    def target_count(self, batch: Batch) -> int:
        from training.batching.batches import IGNORED

        labels = batch["labels"]  # with the outputs of a teacher, (B, T, 1 + L)
        return int(((labels if labels.dim() == 2 else labels[..., 0]) != IGNORED).sum())

    def outputs_of_teacher(self, outputs: ModelOutput, batch: Batch) -> pa.ListArray:
        """The L logits of each word with a token, word by word."""
        from training.batching.batches import IGNORED

        is_first = batch["labels"] != IGNORED
        logits = outputs["logits"][is_first].float().cpu().numpy()  # (W, L)
        return list_column(logits.reshape(-1), is_first.sum(dim=1).cpu().numpy() * logits.shape[1])

    def join_outputs(self, outputs: pa.Array, features: pa.RecordBatch) -> pa.Array:
        """The L logits of each word, nan for words without a token."""
        first = features.column("first")
        has_token = flat_values(first).to_numpy() >= 0
        found = flat_values(outputs).to_numpy().reshape(int(has_token.sum()), -1)
        by_word = np.full((len(has_token), found.shape[1]), np.nan, np.float32)
        by_word[has_token] = found
        return list_column(by_word.reshape(-1), pc.list_value_length(first).to_numpy() * found.shape[1])

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the index of a tag for each word with a token, and `probability`, that of the tag."""
        from training.batching.batches import IGNORED

        is_first = batch["labels"] != IGNORED
        logits = outputs["logits"][is_first].float().cpu()  # (W, L)
        predictions = logits.numpy().argmax(axis=-1)  # of equal logits, the lower index
        probabilities = logits.softmax(dim=-1).numpy()[np.arange(len(predictions)), predictions]
        lengths = is_first.sum(dim=1).cpu().numpy()
        return pa.RecordBatch.from_pydict(
            {"prediction": list_column(predictions, lengths), "probability": list_column(probabilities, lengths)}
        )

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """Lists by word, null for words without a token."""
        first = rows.table["first"].combine_chunks()
        has_token = flat_values(first).to_numpy() >= 0
        index = pa.array(np.cumsum(has_token) - 1, mask=~has_token)
        by_word = {
            name: lists_like(first, flat_values(predictions[name].combine_chunks()).take(index))
            for name in predictions.column_names
        }
        return rows.with_labels(pa.table(by_word))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Tagged:
        lists = {name: predictions[name].combine_chunks() for name in ("label", "prediction", "probability")}
        outside = labels.index(OUTSIDE) if OUTSIDE in labels else -1
        return Tagged(
            references=flat_values(lists["label"]).to_numpy(),
            predictions=flat_values(lists["prediction"]).fill_null(outside).to_numpy(),
            probabilities=flat_values(lists["probability"]).fill_null(np.nan).to_numpy().astype(np.float64),
            starts=_row_starts(lists["label"]),
            labels=labels,
        )

    def empty_predictions(self, labels: Sequence[str]) -> Tagged:
        empty = np.empty(0, np.int64)
        return Tagged(empty, empty, np.empty(0), np.zeros(1, np.int64), labels)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """One tag for every word, with its frequency in the training rows as probability. The best is chosen on
        CHOOSING_ROWS training rows at most."""
        tags = read_column(data / "train.arrow", "label").combine_chunks()
        counts = np.bincount(flat_values(tags).to_numpy(), minlength=len(labels))
        frequencies = smooth_counts(counts)

        def predict(tag: int, rows: Tagged, split: str) -> Tagged:
            words = len(rows.references)
            return replace(rows, predictions=np.full(words, tag), probabilities=np.full(words, frequencies[tag]))

        sample = tags.take(sample_evenly(len(tags), CHOOSING_ROWS))
        words, starts = flat_values(sample).to_numpy(), _row_starts(sample)
        train = Tagged(words, words, np.ones(len(words)), starts, labels)
        return Baseline([Constant(repr(labels[tag]), partial(predict, tag)) for tag in most_frequent(counts)], train)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`tags` of the words, null for words without a token; their `probabilities`; and the `spans` of the tags with
        `start`, the number of the first word, from 0, and `end`, that after the last."""
        span = pa.struct([("type", pa.string()), ("start", pa.int64()), ("end", pa.int64())])
        return {"tags": pa.list_(pa.string()), "probabilities": pa.list_(pa.float64()), "spans": pa.list_(span)}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        rows = zip(predictions["prediction"].to_pylist(), predictions["probability"].to_pylist(), strict=True)
        return [
            {
                "tags": [None if tag is None else labels[tag] for tag in tags],
                "probabilities": probabilities,
                "spans": [
                    {"type": name, "start": start, "end": end} for name, start, end in find_row_spans(labels, tags)
                ],
            }
            for tags, probabilities in rows
        ]

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The first and last word of each span, from 0, and its type."""
        spans = [(f"{span['start']}-{span['end'] - 1}", span["type"]) for span in record["spans"]]
        return [f"{words:>7}  {name}" for words, name in spans] or ["no span"]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the probabilities: rounding may decide between tags that are equally likely."""
        return super().same_prediction({"": given["probabilities"]}, {"": stored["probabilities"]}, tolerance)

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """Matches tags by name. A tag that only the other model has becomes null."""
        tags = predictions["prediction"].combine_chunks()
        new_index = pa.array([labels.index(name) if name in labels else None for name in theirs], pa.int64())
        column = predictions.column_names.index("prediction")
        return predictions.set_column(column, "prediction", lists_like(tags, new_index.take(flat_values(tags))))


def _describe_uneven(words: pa.ListScalar, tags: pa.ListScalar) -> str:
    if len(words) < len(tags):
        return f": {len(tags)} tags, {len(words)} words"
    return f": {shorten(words[len(tags)].as_py())}, word {len(tags) + 1} of {len(words)}, has none"


def _find_broken_spans(words: pa.Array, tags: pa.Array) -> tuple[Mask, str]:
    """Returns the mask of rows in which a span begins with I-X, and a description of the first such word; empty if
    there is none, or if not all tags are of IOB2."""
    by_word, rows = flatten(tags.to_pylist())
    names = sorted(set(by_word))
    broken = np.zeros(len(tags), bool)
    if not is_iob2(names):
        return broken, ""
    starts = find_spans(names, np.searchsorted(names, by_word), rows).starts.tolist() if names else []
    first_words = [start for start in starts if by_word[start].startswith("I")]
    broken[rows[first_words]] = True
    if not first_words:
        return broken, ""
    start = first_words[0]
    previous = by_word[start - 1] if start and rows[start - 1] == rows[start] else "no other"
    word = words.flatten()[start].as_py()
    return broken, f": {shorten(word)} is {by_word[start]} after {previous}"


def _first_tokens(encoded: Encoded, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """(W,) the position of each word's first token in its row, -1 if it has none, given the (N,) words of each row."""
    assert encoded.words is not None
    lengths = encoded.lengths.astype(np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)  # (tokens,)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    words = (np.cumsum(counts) - counts)[rows] + encoded.words
    first = np.full(int(counts.sum()), -1, np.int32)
    tokens = np.flatnonzero(encoded.words >= 0)[::-1]  # reversed, so that a word's first token is written last
    first[words[tokens]] = within[tokens]
    return first


def _row_starts(lists: pa.Array) -> npt.NDArray[np.int64]:
    """(N + 1,) the first word of each row, and the number of words."""
    return np.cumsum([0, *lists.value_lengths().to_pylist()])
