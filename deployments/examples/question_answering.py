"""Extractive question answering: the part of a text that answers a question. An example of a user's task type.

A row of the data set        {"question": "Who wrote it?", "context": "Ada wrote it in 1843.",
                              "answers": {"text": ["Ada"], "answer_start": [0]}}
token features               {"input_ids": [101, 2040, 2626, 2009, 1029, 102, 9604, 2626, ..., 102], "length": 14,
                              "context": [0, 0, 0, 0, 0, 0, 1, 1, ..., 0], "label": [6, 6], "row": 0}
                             one for each window of the context, if a row is longer than tokens.max_length
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "context": (B, T), "labels": (B, 2)}
the model's output           logits (B, 2, T), for the first and the last token of the answer; the prediction is the
                             text of the likeliest span of all windows of a row

`answers` have the form of SQuAD: texts, and the number of each text's first character in the context. The first answer
is the target of training; metrics compare predictions with the most similar one. A recipe names the class as
`task: question_answering:ExtractiveQA`; docs/how-to/own-task-type.md explains this file.

B rows of a batch (windows), T tokens, N rows of a split.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from training.evaluation.predictions import Predictions
from training.evaluation.text_statistics import split_words
from training.task_types.task_type import Column, TaskType

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadToLongest, TokenRows
    from training.recipe import Training
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features


class ExtractiveQA(TaskType):
    """A part of a context as the answer to a question."""

    # Declarations

    class Options(TaskType.Options):
        stride: int = Field(default=32, ge=0)
        """The tokens that two successive windows of a long context have in common."""
        max_answer_tokens: int = Field(default=30, ge=1)
        """The most tokens of an answer."""

    options: Options
    option_stages: ClassVar = {
        "tokenize": ("stride",),
        **dict.fromkeys(("load_data", "fit", "score", "compare"), ()),
    }
    columns: ClassVar = {
        "question": Column("text"),
        "context": Column("text"),
        "answers": Column("value", target=True),
    }
    checks: ClassVar = {"answers": "error", "answer_start": "error"}
    auto_class = "AutoModelForQuestionAnswering"
    hub_task = "question-answering"
    pipeline = False  # transformers has none any more
    card_sentence = "Finds the answer to a question in a {text}"
    metrics: ClassVar = ("f1", "exact_match")

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """An output for the first token of an answer, and one for the last."""
        return {"num_labels": 2}

    # Rows and their checks

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, npt.NDArray[np.bool_], str]]:
        """Rows without answers in the form of SQuAD; and answers that are not at their place in the context."""
        given = [json.loads(value) for value in rows.column("answers").to_pylist()]
        formless = np.array([not _is_squad(value) for value in given], bool)
        if formless.any():
            like = ' such as {"text": ["Ada"], "answer_start": [0]}'
            yield "answers", f"has no answers{like} in column 'answers'", formless, ""
        contexts = rows.column("context").to_pylist()
        odd = ["" if wrong else _odd(*row) for wrong, *row in zip(formless, contexts, given, strict=True)]
        if any(odd):
            misplaced = np.array([*map(bool, odd)])
            yield "answer_start", "has an answer that does not stand there", misplaced, next(filter(None, odd))

    # Tokens and batches

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """A feature row for each window: its tokens; `context`, 1 for tokens of the context; `starts` and `ends`, their
        characters in the context; `passage`, the window's part of the context, which starts at the character
        `passage_start`. For rows with answers also `label`, and the answers as JSON in `reference`."""
        import pyarrow as pa

        from training.tokenization.encoder import encode_windows
        from training.tokenization.features import Features, list_column

        contexts = rows.column("context").to_pylist()
        cut = encode_windows(encoder, rows.column("question").to_pylist(), contexts, self.options.stride)
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
            spans = map(_first_answer, answers.to_pylist())
            label = [_tokens_of(*window) for window in zip(cut.iterate_offsets(), spans, strict=True)]
            columns |= {"label": pa.array(label, pa.list_(pa.int64())), "reference": answers}
        return Features(pa.RecordBatch.from_pydict(columns), np.zeros(len(cut.pair), np.int64))

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """Pads to the longest window."""
        from training.batching.batches import PadToLongest

        pad = PadToLongest(tokenizer, multiple)
        pad.fill["context"] = 0
        pad.left = False  # labels count tokens from the left
        return pad

    # The model

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """logits (B, 2, T)."""
        import torch
        from transformers.utils import ModelOutput

        given = {name: tensor for name, tensor in batch.items() if name not in ("labels", "context")}
        outputs = model(**given)
        return ModelOutput(logits=torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=1))

    def loss(
        self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Cross entropy of the answer's first and last token; both are token 0 for windows without the answer."""
        import torch

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return loss

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """The likeliest span of each window: its first and last token, and its score, the sum of their logits."""
        import pyarrow as pa
        import torch

        begins, ends = outputs["logits"].float().unbind(dim=1)  # (B, T) each
        width, longest = begins.shape[1], self.options.max_answer_tokens
        band = torch.ones(width, width, dtype=torch.bool, device=begins.device).triu().tril(longest - 1)
        seen = batch["context"].bool()
        allowed = band & seen[:, :, None] & seen[:, None, :]  # (B, T, T), by first and last token
        scores = (begins[:, :, None] + ends[:, None, :]).masked_fill(~allowed, NO_ANSWER)
        best, place = scores.flatten(1).max(dim=1)
        columns = {"first": place // width, "last": place % width, "score": best.double()}
        return pa.RecordBatch.from_pydict({name: values.cpu().numpy() for name, values in columns.items()})

    # Answers

    def join_labels(self, answers: pa.Table, rows: TokenRows) -> pa.Table:
        """`answer`, the text of the likeliest span of all windows of a row; `start`, its first character in the
        context; its `score`."""
        import pyarrow as pa

        number, score = rows.table["row"].to_numpy(), answers["score"].to_numpy()
        by_score = np.lexsort([-score, number])  # a row's best window first
        best = by_score[np.unique(number[by_score], return_index=True)[1]]  # (N,)
        windows, chosen = rows.table.take(best), answers.take(best).to_pylist()
        columns: dict[str, list[Any]] = {"answer": [], "start": [], "score": [row["score"] for row in chosen]}
        of_windows = windows.select(["starts", "ends", "passage", "passage_start"]).to_pylist()
        for window, row in zip(of_windows, chosen, strict=True):
            start, end, before = window["starts"][row["first"]], window["ends"][row["last"]], window["passage_start"]
            columns["answer"].append(window["passage"][start - before : end - before].strip())
            columns["start"].append(start)
        found = pa.table(columns, schema=pa.schema(self.record_types(())))
        return found.add_column(0, "label", windows["reference"]) if "reference" in windows.column_names else found

    def metric_inputs(self, answers: pa.Table, labels: Sequence[str]) -> Answered:
        references = [json.loads(value)["text"] for value in answers["label"].to_pylist()]
        return Answered(np.fromiter(references, object, len(references)), answers["answer"].to_numpy())

    def empty_predictions(self, labels: Sequence[str]) -> Answered:
        return Answered(np.empty(0, object), np.empty(0, object))

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        import pyarrow as pa

        return {"answer": pa.string(), "start": pa.int64(), "score": pa.float64()}

    def to_records(self, answers: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        return list(answers.select(["answer", "start", "score"]).to_pylist())

    def lines(self, explained: Mapping[str, Any]) -> list[str]:
        """The text and its first character."""
        return [f"{explained['answer']}  (from character {explained['start']})"]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the score: either of two spans that are equally likely may be predicted."""
        return abs(given["score"] - stored["score"]) <= tolerance * max(1.0, abs(stored["score"]))


NO_ANSWER = -1e9
"""The score of a window without tokens of the context."""


@dataclass(frozen=True)
class Answered(Predictions):
    """The predicted answer to each question, and all true answers."""

    references: npt.NDArray[np.object_]  # (N,) list[str]
    predictions: npt.NDArray[np.object_]  # (N,) str

    means: ClassVar = ExtractiveQA.metrics
    row_score_name: ClassVar = "f1"

    @property
    def description(self) -> str:
        return "extractive question answering"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: npt.NDArray[np.int64]) -> Answered:
        return Answered(self.references[rows], self.predictions[rows])

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The scores of each row; the texts of predictions, and lists of the true answers."""
        if feature in self.means:
            return self.row_scores if feature == "f1" else self._best(exact_match)
        found = {"references": self.references, "predictions": self.predictions}.get(feature)
        return found if dtype == "string" and listed == (feature == "references") else None

    @cached_property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """F1."""
        return self._best(f1)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        right = " | ".join(dict.fromkeys(self.references[row]))
        return {"label": right, "prediction": self.predictions[row], "f1": round(float(self.row_scores[row]), 4)}

    def _best(self, figure: Callable[[str, str], float]) -> npt.NDArray[np.float64]:
        """(N,) the best score of a prediction with any of the true answers."""
        pairs = zip(self.predictions, self.references, strict=True)
        return np.array([max(figure(one, right) for right in every) for one, every in pairs], np.float64)


# The figures of SQuAD's evaluation script (Rajpurkar et al., arXiv:1606.05250), from 0 to 1, for texts in any script


def f1(prediction: str, right: str) -> float:
    """The harmonic mean of precision and recall of words."""
    ours, theirs = split_words(normal(prediction)), split_words(normal(right))
    if not ours and not theirs:
        return exact_match(prediction, right)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def exact_match(prediction: str, right: str) -> float:
    """1 if the normalized texts are equal."""
    return float(normal(prediction) == normal(right))


def normal(text: str) -> str:
    """The text in lower case, without punctuation and articles, with single spaces."""
    marks = {character for character in text if unicodedata.category(character)[0] == "P"} | {*string.punctuation}
    bare = text.lower().translate(dict.fromkeys(map(ord, marks)))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


# The form of answers


def _is_squad(value: Any) -> bool:
    """Whether the value has texts, and a whole number for each."""
    if not isinstance(value, dict):
        return False
    texts, starts = value.get("text"), value.get("answer_start")
    return (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts) > 0
        and all(isinstance(text, str) and text.strip() for text in texts)
        and all(type(start) is int and start >= 0 for start in starts)
    )


def _odd(context: str, answers: Any) -> str:
    """The first answer that is not at its place in the context, with the text at this place; empty if there is none."""
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        if (there := context[start : start + len(text)]) != text:
            return f": {text!r:.60} at character {start}, where the context has {there!r:.60}"
    return ""


def _first_answer(answers: str) -> tuple[int, int]:
    """The first character of the first answer and the one after its last, without white space."""
    given = json.loads(answers)
    text, start = given["text"][0], given["answer_start"][0]
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def _tokens_of(offsets: npt.NDArray[np.int32], span: tuple[int, int]) -> list[int]:
    """The first and the last token of an answer, given the characters of a window's tokens, -1 for tokens of no
    context; 0 and 0 if the window does not contain the whole answer."""
    start, end = span
    places = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
    if not len(places) or offsets[places[0], 0] > start or offsets[places[-1], 1] < end:
        return [0, 0]
    return [int(places[0]), int(places[-1])]
