"""Token classification: each word of a text gets one of the tags, such as names of people and places, or parts of
speech.

A row of the data set        {"tokens": ["Merkel", "visits", "Rome"], "ner_tags": ["B-PER", "O", "B-LOC"]}
becomes token features       {"input_ids": [101, 21442, 2884, 7879, 4199, 102], "length": 6,
                              "first": [1, 3, 4], "label": [1, 0, 3], "targets": 3}
and, padded in a batch,      {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B, T)}
                             labels of this row: [-100, 1, -100, 0, 3, -100]
the model outputs            logits (B, T, L), and a word's prediction is the tag of the largest one at its first token.

A word without a token, as white space and what the tokenizer drops are, or all of whose tokens are cut off, is not
learnt from; it has no prediction (null), and counts as O where its tag is told.

B rows of a batch, T tokens, L tags, W words of all rows of a batch or split one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from training.evaluation.tags import OUTSIDE, is_iob2, of_row, spans, type_of
from training.recipe.tables.metrics import TAGS, metrics_for
from training.task_types.task_type import Column, TaskType

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadTags, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.tagged_words import Tagged
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.losses import Loss
    from training.tokenization.encoder import Encoded, Encoder
    from training.tokenization.features import Features


CHOOSING_ROWS = 5_000
"""The number of training rows that choose the best constant tag."""


class TokenClassification(TaskType):
    """A tag for each word."""

    auto_class = "AutoModelForTokenClassification"
    hub_task = "token-classification"
    pipeline = False  # the pipeline of transformers splits texts into words by itself
    card_sentence = "Gives each word of a {text} one of {labels}"
    columns: ClassVar = {"text": Column("texts"), "label": Column("labels")}
    checks: ClassVar = {"uneven_tags": "error", "iob2": "error"}
    prediction_type: ClassVar = TAGS
    metrics: ClassVar = metrics_for(TAGS)
    loss_fields: ClassVar = ("loss", "focal_gamma", "class_weights", "label_smoothing_factor")

    def faults(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Rows with more or fewer tags than words; and, if all tags are of IOB2, each I-X that continues no span."""
        import pyarrow.compute as pc

        words, tags = rows.column("text"), rows.column("label")
        lengths = [pc.list_value_length(column).to_numpy(zero_copy_only=False) for column in (words, tags)]
        uneven = lengths[0] != lengths[1]
        if uneven.any():
            first = int(uneven.argmax())
            yield "uneven_tags", "has more or fewer tags than words", uneven, _odd(words[first], tags[first])
        broken, told = _broken(words.filter(~uneven), tags.filter(~uneven))
        if told:
            wrong = uneven.copy()
            wrong[~uneven], wrong[uneven] = broken, False
            yield "iob2", "has a word inside a span that no word begins", wrong, told

    def label_order(self, labels: Sequence[str]) -> list[str] | None:
        """O, then by type: B-LOC, I-LOC, B-PER, I-PER."""
        if not is_iob2(labels):
            return None
        return sorted(labels, key=lambda tag: (tag != OUTSIDE, type_of(tag), tag))

    def incompatible_label(self, labels: Sequence[str]) -> tuple[str, str] | None:
        """The first tag that is not of IOB2 if others are."""
        prefixed = next((label for label in labels if label.startswith(("B-", "I-"))), None)
        odd = next((label for label in labels if not is_iob2([label])), None)
        if prefixed is None or odd is None:
            return None
        return odd, (
            f"and {prefixed!r} are not of one sort: tags are O, B-X and I-X, where B-X begins each span (IOB2), or "
            "none of them has such a prefix. Write them all in one way."
        )

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """The labels' names."""
        from training.task_types.sequence_level import label_names_config

        return label_names_config(labels)

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """input_ids and length; `first`, the place of each word's first token, -1 where it has none; the tags as the
        rows have them, by word; and `targets`, how many words have a token."""
        import numpy as np
        import pyarrow as pa

        from training.data.lists import lists_like
        from training.tokenization.features import Features, lists

        words = rows.column("text").to_pylist()
        encoded = encoder.encode_words(words)
        counts = np.fromiter(map(len, words), np.int64, len(words))
        first = _first_tokens(encoded, counts)
        columns = {
            "input_ids": lists(encoded, encoded.ids),
            "length": encoded.lengths,
            "first": lists_like(rows.column("text"), pa.array(first)),
            "targets": np.bincount(np.repeat(np.arange(len(words)), counts)[first >= 0], minlength=len(words)),
        }
        columns["targets"] = columns["targets"].astype(np.int32)
        if "label" in rows.schema.names:
            columns["label"] = rows.column("label")
        return Features(pa.RecordBatch.from_pydict(columns), encoded.lost)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadTags:
        """Pads to the longest row, labels with -100."""
        from training.batching.batches import PadTags

        return PadTags(tokenizer, multiple)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss:
        """Cross entropy, focal or the author's own, perhaps weighted by tag, of the words that have a token. Never the
        model's own, which is no number where a batch has no such word."""
        from training.batching.batches import IGNORED
        from training.task_types.losses import classification as losses

        of_words = losses.make_loss(training, labels, _learnt(train), outside=True)
        assert of_words is not None

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            there = labels != IGNORED
            chosen = logits[there]  # (W, L)
            return of_words(chosen, labels[there]) if len(chosen) else chosen.sum()

        return loss

    def target_count(self, batch: Batch) -> int:
        """The number of words that have a token."""
        from training.batching.batches import IGNORED

        return int((batch["labels"] != IGNORED).sum())

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the index of a tag for each word that has a token, and `probability`, the tag's."""
        import numpy as np
        import pyarrow as pa

        from training.batching.batches import IGNORED

        there = batch["labels"] != IGNORED
        logits = outputs["logits"][there].float().cpu()  # (W, L)
        predictions = logits.numpy().argmax(axis=-1)  # the lower index where two are equal
        probabilities = logits.softmax(dim=-1).numpy()[np.arange(len(predictions)), predictions]
        ends = there.sum(dim=1).cumsum(dim=0).cpu().numpy()
        offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
        columns = {"prediction": predictions, "probability": probabilities}
        return pa.RecordBatch.from_pydict(
            {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
        )

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """Lists by word, null for words without a token."""
        import numpy as np
        import pyarrow as pa

        from training.data.lists import flat_values, lists_like

        first = rows.table["first"].combine_chunks()
        there = flat_values(first).to_numpy() >= 0
        place = pa.array(np.cumsum(there) - 1, mask=~there)
        given = {name: flat_values(predictions[name].combine_chunks()) for name in predictions.column_names}
        return rows.labelled(pa.table({name: lists_like(first, values.take(place)) for name, values in given.items()}))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Tagged:
        import numpy as np

        from training.data.lists import flat_values
        from training.evaluation.tagged_words import Tagged

        lists = {name: predictions[name].combine_chunks() for name in ("label", "prediction", "probability")}
        none = labels.index(OUTSIDE) if OUTSIDE in labels else -1
        return Tagged(
            references=flat_values(lists["label"]).to_numpy(),
            predictions=flat_values(lists["prediction"]).fill_null(none).to_numpy(),
            probabilities=flat_values(lists["probability"]).fill_null(np.nan).to_numpy().astype(np.float64),
            starts=np.concatenate([[0], np.cumsum(_lengths(lists["label"]))]),
            labels=labels,
        )

    def empty_predictions(self, labels: Sequence[str]) -> Tagged:
        import numpy as np

        from training.evaluation.tagged_words import Tagged

        none = np.empty(0, np.int64)
        return Tagged(none, none, np.empty(0), np.zeros(1, np.int64), labels)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """One tag for every word, with its share of the training words as probability. The best is chosen on
        CHOOSING_ROWS training rows at most."""
        from dataclasses import replace
        from functools import partial

        import numpy as np

        from training.data.lists import flat_values
        from training.evaluation.constant_predictions import Baseline, Constant, column, evenly, most_frequent, smoothed
        from training.evaluation.tagged_words import Tagged

        tags = column(data / "train.arrow", "label").combine_chunks()
        counts = np.bincount(flat_values(tags).to_numpy(), minlength=len(labels))
        given = smoothed(counts)

        def answered(tag: int, rows: Tagged, split: str) -> Tagged:
            words = len(rows.references)
            return replace(rows, predictions=np.full(words, tag), probabilities=np.full(words, given[tag]))

        some = tags.take(evenly(len(tags), CHOOSING_ROWS))
        words, starts = flat_values(some).to_numpy(), np.concatenate([[0], np.cumsum(_lengths(some))])
        train = Tagged(words, words, np.ones(len(words)), starts, labels)
        return Baseline([Constant(repr(labels[tag]), partial(answered, tag)) for tag in most_frequent(counts)], train)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`tags` of the words, null for one that the model did not see; their `probabilities`; and the `spans` that the
        tags mean: `start`, the place of the first word counted from 0, and `end`, that behind the last."""
        import pyarrow as pa

        span = pa.struct([("type", pa.string()), ("start", pa.int64()), ("end", pa.int64())])
        return {"tags": pa.list_(pa.string()), "probabilities": pa.list_(pa.float64()), "spans": pa.list_(span)}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        given = zip(predictions["prediction"].to_pylist(), predictions["probability"].to_pylist(), strict=True)
        return [
            {
                "tags": [None if tag is None else labels[tag] for tag in tags],
                "probabilities": probabilities,
                "spans": [
                    {"type": task_type, "start": start, "end": end} for task_type, start, end in of_row(labels, tags)
                ],
            }
            for tags, probabilities in given
        ]

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The spans: from which word to which, counted from 0, and the type."""
        flat_values = [(f"{span['start']}-{span['end'] - 1}", span["type"]) for span in record["spans"]]
        return [f"{words:>7}  {task_type}" for words, task_type in flat_values] or ["no span"]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the probabilities alone: either of two equally likely tags may be predicted."""
        return super().same_prediction({"": given["probabilities"]}, {"": stored["probabilities"]}, tolerance)

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """Matches tags by name. A tag that only the model has becomes null."""
        import pyarrow as pa

        from training.data.lists import flat_values, lists_like

        given = predictions["prediction"].combine_chunks()
        places = pa.array([labels.index(name) if name in labels else None for name in theirs], pa.int64())
        column = predictions.column_names.index("prediction")
        return predictions.set_column(column, "prediction", lists_like(given, places.take(flat_values(given))))


def _odd(words: pa.ListScalar, tags: pa.ListScalar) -> str:
    """The surplus words or tags of a row."""
    from training.data.faults import shortened

    if len(words) < len(tags):
        return f": {len(tags)} tags, {len(words)} words"
    return f": {shortened(words[len(tags)].as_py())}, word {len(tags) + 1} of {len(words)}, has none"


def _broken(words: pa.Array, tags: pa.Array) -> tuple[Mask, str]:
    """The rows in which a span begins with I-X; and the first such word, nothing where there is none, or where not all
    tags are of IOB2."""
    import numpy as np

    from training.data.faults import shortened
    from training.evaluation.tags import flattened

    given, rows = flattened(tags.to_pylist())
    names = sorted(set(given))
    wrong = np.zeros(len(tags), bool)
    if not is_iob2(names):
        return wrong, ""
    places = {name: place for place, name in enumerate(names)}
    begun = spans(names, np.array([places[tag] for tag in given], np.int64), rows).starts
    inside = [place for place in begun.tolist() if given[place].startswith("I")]
    wrong[rows[inside]] = True
    if not inside:
        return wrong, ""
    place = inside[0]
    after = given[place - 1] if place and rows[place - 1] == rows[place] else "no other"
    word = words.flatten()[place].as_py()
    return wrong, f": {shortened(word)} is {given[place]} after {after}"


def _first_tokens(encoded: Encoded, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """(W,) the place in its row of each word's first token, -1 where it has none, given the words of each row."""
    import numpy as np

    assert encoded.words is not None
    lengths = encoded.lengths.astype(np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)  # (tokens,)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    words = (np.cumsum(counts) - counts)[rows] + encoded.words
    first = np.full(int(counts.sum()), -1, np.int32)
    tokens = np.flatnonzero(encoded.words >= 0)[::-1]  # of several of a word, the first is written last
    first[words[tokens]] = within[tokens]
    return first


def _learnt(train: TokenRows) -> npt.NDArray[np.int64]:
    """(W,) the tags of all training words that have a token."""
    from training.data.lists import flat_values

    tags, first = (flat_values(train.table[name].combine_chunks()).to_numpy() for name in ("label", "first"))
    learnt: npt.NDArray[np.int64] = tags[first >= 0]
    return learnt


def _lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    import pyarrow.compute as pc

    lengths: npt.NDArray[np.int64] = pc.list_value_length(lists).to_numpy().astype("int64")
    return lengths
