"""Extractive question answering: the part of a text that answers a question.

A row of the data set        {"question": "Who wrote it?", "context": "Ada wrote it in 1843.",
                              "answers": {"text": ["Ada"], "answer_start": [0]}}
token features               {"input_ids": [101, 2040, 2626, 2009, 1029, 102, 9604, 2626, ..., 102], "length": 14,
                              "context": [0, 0, 0, 0, 0, 0, 1, 1, ..., 0], "label": [6, 6], "row": 0}
                             one for each window of the context, if a row is longer than tokens.max_length
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "context": (B, T), "labels": (B, 2)}
the model's output           logits (B, 2, T), for the first and the last token of the answer; the prediction is the
                             text of the likeliest span of all windows of a row

`answers` have the form of SQuAD: texts, and the number of each text's first character in the context; or a list of
objects with both. The first answer is the target of training; metrics compare predictions with the most similar one.

With options.no_answer a question may have none, as in SQuAD 2.0. The model then points to token 0, and a row has no
answer if the lowest score of token 0 in its windows is larger than that of its likeliest span, by more than a
threshold: as run_qa.py of transformers decides it.

B rows of a batch (windows), T tokens, W tokens of an answer at most, N rows of a split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from training.data.row_problems import masks_by_reason
from training.evaluation.constant_predictions import Baseline, Constant, Rival, read_column
from training.evaluation.extracted_answers import ExtractedAnswers, choose_none, choose_sentences
from training.task_types.targets import HasTargets, chooses_loss
from training.task_types.task_type import Column, TaskType
from training.tokenization.features import Features, list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadToLongest, TokenRows
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder

NO_CONTEXT = -1e9
"""The score of the best span in a window without tokens of the context."""


class QuestionAnswering(HasTargets):
    """A part of a context as the answer to a question."""

    class Options(TaskType.Options):
        """The options of question-answering."""

        stride: int | None = Field(default=None, ge=0)
        """The tokens that two successive windows of a long context have in common; null: a third of tokens.max_length,
        such as 128 of 384."""
        max_answer_tokens: int = Field(default=30, ge=1)
        """The most tokens of an answer."""
        no_answer: bool = False
        """Whether a question may have no answer in its context: `answers` then have no text, as in SQuAD 2.0, and the
        model may give none."""
        no_answer_threshold: float = 0.0
        """The model gives no answer if the score of none is larger than that of the likeliest answer by more than
        this: null_score_diff_threshold of transformers."""

    options: Options
    option_stages: ClassVar = {
        "load_data": ("no_answer",),
        "tokenize": ("stride", "no_answer"),
        "fit": (),
        **dict.fromkeys(("evaluate", "predict"), ("max_answer_tokens", "no_answer", "no_answer_threshold")),
        "score": ("no_answer",),
        "compare": ("no_answer",),
    }
    columns: ClassVar[Mapping[str, Column]] = {
        "question": Column("text"),
        "context": Column("text"),
        "answers": Column("value", target=True),
    }
    checks: ClassVar = {"answers": "error", "answer_start": "error"}
    auto_class = "AutoModelForQuestionAnswering"
    hub_task = "question-answering"
    pipeline = False  # transformers has none any more
    card_sentence = "Finds the answer to a question in a {text}"
    metrics: ClassVar = ExtractedAnswers.means
    target_form = "places"

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """An output for the first token of an answer, and one for the last."""
        return {"num_labels": 2}

    # Rows

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        """With options.no_answer, `answers` may be empty."""
        answers = replace(self.columns["answers"], may_be_empty=self.options.no_answer)
        return [{**self.columns, "answers": answers}]

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask] | tuple[str, str, Mask, str]]:
        """Rows without answers in the form of SQuAD; and answers that are not at their place in the context."""
        given = [_read_answers(value) for value in rows.column("answers").to_pylist()]
        for mask, reason in masks_by_reason([self._missing_answer(answers) for answers in given]):
            yield "answers", reason, mask
        contexts = rows.column("context").to_pylist()
        misplaced = [*map(_misplaced_answer, contexts, given)]
        if first := next(filter(None, misplaced), None):
            yield "answer_start", "has an answer that does not stand there", np.array([*map(bool, misplaced)]), first

    def _missing_answer(self, answers: list[Answer] | None) -> str | None:
        if answers is None:
            return 'has no answers such as {"text": ["Ada"], "answer_start": [0]} in column \'answers\''
        if not answers and not self.options.no_answer:
            return "has no answer in column 'answers': set options.no_answer: true if a question may have none"
        return None

    # Tokens and batches

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """A feature row for each window: its tokens; `context`, 1 for tokens of the context; `starts` and `ends`, their
        characters in the context; `passage`, the window's part of the context, which starts at the character
        `passage_start`. For rows with answers also `label`, and the answers as JSON in `reference`. The tokens that are
        lost are those of a question that leaves no room for a window."""
        from training.tokenization.encoder import encode_windows

        contexts = rows.column("context").to_pylist()
        stride = encoder.max_length // 3 if self.options.stride is None else self.options.stride
        cut, lost = encode_windows(encoder, rows.column("question").to_pylist(), contexts, stride)
        bounds = [(places[places >= 0].min(initial=2**31 - 1), places.max()) for places in cut.iterate_offsets()]
        columns: dict[str, Any] = {
            "input_ids": list_column(cut.ids, cut.lengths),
            "token_type_ids": list_column(cut.types, cut.lengths),
            "length": cut.lengths,
            "row": cut.pair,
            "context": list_column(cut.second.astype(np.int8), cut.lengths),
            "starts": list_column(cut.offsets[:, 0], cut.lengths),
            "ends": list_column(cut.offsets[:, 1], cut.lengths),
            "passage": [contexts[pair][slice(*both)] for pair, both in zip(cut.pair, bounds, strict=True)],
            "passage_start": np.array([start for start, _ in bounds], np.int32),
        }
        if "answers" in rows.schema.names:
            answers = rows.column("answers").take(pa.array(cut.pair))
            spans = map(_first_span, answers.to_pylist())
            label = [_tokens_of(*window) for window in zip(cut.iterate_offsets(), spans, strict=True)]
            columns |= {"label": pa.array(label, pa.list_(pa.int64())), "reference": answers}
        is_first = np.diff(cut.pair, prepend=-1) > 0
        return Features(pa.RecordBatch.from_pydict(columns), np.where(is_first, lost[cut.pair], 0))

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """Pads to the longest window."""
        from training.batching.batches import PadToLongest

        pad = PadToLongest(tokenizer, multiple)
        pad.fill["context"] = 0
        pad.left = False  # labels count tokens from the left
        return pad

    # The model

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """logits (B, 2, T), -inf for padding in a batch with labels: no loss depends on the longest window."""
        import torch
        from transformers.utils import ModelOutput

        given = {name: tensor for name, tensor in batch.items() if name not in ("labels", "context")}
        outputs = model(**given)
        logits = torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=1)
        if "labels" in batch:
            logits = logits.masked_fill(~batch["attention_mask"].bool()[:, None], -torch.inf)
        return ModelOutput(logits=logits)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy of the answer's first and last token; both are token 0 for windows without the answer. Or
        another loss of both."""
        return super().loss(training, labels, train, outside=outside) if chooses_loss(training) else _cross_entropy

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two for each window: logits (2 B, T) of all tokens of the batch, and labels (2 B,)."""
        return logits.flatten(0, 1), labels.flatten()

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """The likeliest span of each window: its first and last token, and its score, the sum of their logits. With
        options.no_answer also `none`, the score of no answer."""
        import torch

        begins, ends = outputs["logits"].float().unbind(dim=1)  # (B, T) each
        outside, longest = ~batch["context"].bool(), min(self.options.max_answer_tokens, begins.shape[1])
        last = torch.nn.functional.pad(ends.masked_fill(outside, -torch.inf), (0, longest - 1), value=-torch.inf)
        scores = begins.masked_fill(outside, -torch.inf)[:, :, None] + last.unfold(1, longest, 1)  # (B, T, W)
        best, place = scores.flatten(1).max(dim=1)
        columns = {"first": place // longest, "last": place // longest + place % longest}
        columns["score"] = best.double().clamp_min(NO_CONTEXT)
        if self.options.no_answer:
            columns["none"] = (begins[:, 0] + ends[:, 0]).double()
        return pa.RecordBatch.from_pydict({name: values.cpu().numpy() for name, values in columns.items()})

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """`answer`, the text of the likeliest span of all windows of a row; `start`, its first character in the
        context; its `score`; and with options.no_answer the `no_answer_score`, by which that of no answer is larger:
        above the threshold the answer is empty, and `start` null."""
        number, score = rows.table["row"].to_numpy(), predictions["score"].to_numpy()
        by_score = np.lexsort([-score, number])  # a row's best window first
        firsts = np.unique(number[by_score], return_index=True)[1]
        best = by_score[firsts]  # (N,)
        windows, chosen = rows.table.take(best), predictions.take(best).to_pylist()
        columns: dict[str, list[Any]] = {"answer": [], "start": [], "score": [row["score"] for row in chosen]}
        of_windows = windows.select(["starts", "ends", "passage", "passage_start"]).to_pylist()
        for window, row in zip(of_windows, chosen, strict=True):
            start, end, before = window["starts"][row["first"]], window["ends"][row["last"]], window["passage_start"]
            text = window["passage"][start - before : end - before] if row["score"] > NO_CONTEXT else ""
            columns["answer"].append(text.strip())  # the first token of some tokenizers begins with a space
            columns["start"].append(start + len(text) - len(text.lstrip()) if text else None)
        if self.options.no_answer:
            lowest = np.minimum.reduceat(predictions["none"].to_numpy()[by_score], firsts)  # (N,) of a row's windows
            columns["no_answer_score"] = (lowest - score[best]).tolist()
            for row, larger in enumerate(columns["no_answer_score"]):
                if larger > self.options.no_answer_threshold:
                    columns["answer"][row], columns["start"][row] = "", None
        found = pa.table(columns, schema=pa.schema(self.record_types(())))
        return found.add_column(0, "label", windows["reference"]) if "reference" in windows.column_names else found

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> ExtractedAnswers:
        right = _texts_of(predictions["label"])
        return ExtractedAnswers(right, predictions["answer"].to_numpy())

    def empty_predictions(self, labels: Sequence[str]) -> ExtractedAnswers:
        return ExtractedAnswers(np.empty(0, object), np.empty(0, object))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The sentence of the context that has most of the question's words; or no answer at all."""
        rivals: list[Rival] = [Rival("the sentence with most words of the question", partial(choose_sentences, data))]
        if self.options.no_answer:
            rivals.append(Constant("none", choose_none))
        train = _texts_of(read_column(data / "train.arrow", "answers"))
        return Baseline(rivals, ExtractedAnswers(train, np.full(len(train), "", object)))

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """The columns of `join_labels`."""
        types = {"answer": pa.string(), "start": pa.int64(), "score": pa.float64()}
        return types | ({"no_answer_score": pa.float64()} if self.options.no_answer else {})

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        return list(predictions.select([*self.record_types(labels)]).to_pylist())

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The text and its first character."""
        if record["start"] is None:
            return ["no answer"]
        return [f"{record['answer']}  (from character {record['start']})"]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the score: either of two spans that are equally likely may be predicted."""
        return abs(given["score"] - stored["score"]) <= tolerance * max(1.0, abs(stored["score"]))


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of (B, 2, T) logits and the (B, 2) places of tokens."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


# Answers


class Answer(NamedTuple):
    """A part of a context."""

    text: str
    start: int
    """The number of its first character."""


def _read_answers(value: str | None) -> list[Answer] | None:
    """The answers in the JSON of a row; None if they do not have the form of SQuAD."""
    answers = [] if value is None else json.loads(value)
    if isinstance(answers, list):
        found = [(one.get("text"), one.get("answer_start")) if isinstance(one, dict) else (None, 0) for one in answers]
    elif isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            return None
        found = [*zip(texts, starts, strict=True)]
    else:
        return None
    right = all(isinstance(text, str) and text.strip() and type(start) is int and start >= 0 for text, start in found)
    return [Answer(*one) for one in found] if right else None


def _misplaced_answer(context: str, answers: list[Answer] | None) -> str | None:
    """The first answer that is not at its place in the context, with the text at this place; None if there is none."""
    for text, start in answers or ():
        if (there := context[start : start + len(text)]) != text:
            return f": {text!r:.60} at character {start}, where the context has {there!r:.60}"
    return None


def _first_span(value: str | None) -> tuple[int, int] | None:
    """The first character of the first answer and the one after its last, without white space; None without answers."""
    for text, start in _read_answers(value) or ():
        begin = start + len(text) - len(text.lstrip())
        return begin, begin + len(text.strip())
    return None


def _tokens_of(offsets: npt.NDArray[np.int32], span: tuple[int, int] | None) -> list[int]:
    """The first and the last token of an answer, given the characters of a window's tokens, -1 for tokens of no
    context; 0 and 0 if there is none, or the window does not contain the whole answer."""
    start, end = span or (0, 0)
    places = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
    if not len(places) or offsets[places[0], 0] > start or offsets[places[-1], 1] < end:
        return [0, 0]
    return [int(places[0]), int(places[-1])]


def _texts_of(column: pa.ChunkedArray) -> npt.NDArray[np.object_]:
    """(N,) the texts of each row's answers."""
    texts = [[answer.text for answer in _read_answers(value) or ()] for value in column.to_pylist()]
    return np.fromiter(texts, object, len(texts))
