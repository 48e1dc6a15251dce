"""Multiple choice: the choice of a row that fits its context best.

A row of the data set        {"context": "She opens the hood and", "choices": ["looks inside.", "swims."], "label": 0},
                             or SWAG's: {"sent1": "She opens the hood.", "sent2": "She", "ending0": "looks inside.",
                             …, "ending3": "swims.", "label": 0}
token features               {"input_ids": [101, 2016, ..., 102, 101, ..., 102], "token_type_ids": [0, ..., 1],
                              "text_lengths": [12, 9], "length": 21, "label": [1.0, 0.0]}
a padded batch               PadCandidates in training/batching/batches.py
the model's output           logits (D, 1), then (B, L); the prediction is the place of the largest one, from 0

A row's tokens are those of its context with each choice, one pair after another, each cut at tokens.max_length: SWAG's
are pairs of sent1 and "sent2 ending", as in run_swag.py of transformers. Rows may have different numbers of choices.

B rows of a batch, N rows of a split, D choices of all rows, L choices of a row at most, T tokens of the longest pair.
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

from training.data.ipc_files import read_table
from training.data.row_problems import masks_by_reason
from training.evaluation.choices import Choices
from training.evaluation.constant_predictions import Baseline, Constant, Rival, most_frequent, smooth_counts
from training.problems import UserError
from training.recipe.tables.metrics import CHOICES, metrics_for
from training.task_types.targets import HasTargets, chooses_loss
from training.task_types.task_type import Column
from training.tokenization.candidates import encode_candidates
from training.tokenization.features import list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadCandidates, TokenRows
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features

ENDINGS = ("ending0", "ending1", "ending2", "ending3")


class MultipleChoice(HasTargets):
    """One of the choices of each row."""

    auto_class = "AutoModelForMultipleChoice"
    hub_task = "multiple-choice"
    pipeline = False  # transformers has none
    card_sentence = "Chooses the text that fits a context best"
    prediction_type: ClassVar = CHOICES
    target_form = "places"
    metrics: ClassVar = metrics_for(CHOICES)
    option_stages: ClassVar = {"load_data": ()}
    columns: ClassVar[Mapping[str, Column]] = {
        "context": Column("text"),
        "choices": Column("texts"),
        **{name: Column("text") for name in ("sent1", "sent2", *ENDINGS)},
        "label": Column("number"),
    }
    checks: ClassVar = {"choices": "error"}

    # Rows

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        """A context and a list of choices, or SWAG's columns."""
        sets = (("context", "choices", "label"), ("sent1", "sent2", *ENDINGS, "label"))
        return [{name: self.columns[name] for name in names} for names in sets]

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Rows with one choice, and labels that are not the place of a choice."""
        _, counts = _read_choices(rows)
        problems = map(_find_problem, rows.column("label").to_pylist(), counts.tolist())
        for mask, reason in masks_by_reason([*problems]):
            yield "choices", reason, mask

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """`label` is a list with 1 for the right choice and 0 for the others."""
        contexts = rows.column("sent1" if "sent1" in rows.schema.names else "context").to_pylist()
        choices, counts = _read_choices(rows)
        columns = dict[str, Any]()
        if "label" in rows.schema.names:
            labels = rows.column("label")
            if problem := next(filter(None, map(_find_problem, labels.to_pylist(), counts.tolist())), None):
                message = f"keeps a row that {problem}: set it to error, or to warning, which leaves such rows out."
                raise UserError.of("tokens", "data.checks.choices", message)
            right = np.zeros(len(choices), np.float32)
            right[np.cumsum(counts) - counts + labels.to_numpy().astype(np.int64)] = 1
            columns["label"] = list_column(right, counts)
        return encode_candidates(encoder, contexts, choices, counts, **columns)

    # Training

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadCandidates:
        from training.batching.batches import PadCandidates

        return PadCandidates(tokenizer, multiple)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """`logits` are (B, L), -inf where a row has fewer than L choices."""
        import torch
        from transformers.utils import ModelOutput

        # Each choice alone, (D, 1, T): transformers takes (B, L, T), in which all rows have as many choices.
        given = {name: tensor[:, None] for name, tensor in batch.items() if name not in ("labels", "documents")}
        logits, counts = model(**given)["logits"][:, 0], batch["documents"]  # (D,)
        there = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]  # (B, L)
        return ModelOutput(logits=logits.new_full(there.shape, -torch.inf).masked_scatter(there, logits))

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy among the choices of each row, the mean over rows; or another loss of each row."""
        return super().loss(training, labels, train, outside=outside) if chooses_loss(training) else _cross_entropy

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The labels as the place of the right choice, (B,)."""
        return logits, labels.nan_to_num(nan=0.0).argmax(dim=1)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`logits`, a list (float32) of those of the row's choices."""
        logits, counts = outputs["logits"].float().cpu().numpy(), batch["documents"].cpu().numpy()
        there = np.arange(logits.shape[1]) < counts[:, None]
        return pa.RecordBatch.from_pydict({"logits": list_column(logits[there], counts)})

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """With `label`, the place of the right choice."""
        if "label" not in rows.table.column_names:
            return predictions
        return predictions.add_column(0, "label", pa.array(_pad(rows.table["label"], 0.0)[0].argmax(axis=1)))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Choices:
        logits, counts = _pad(predictions["logits"], -np.inf)
        return Choices(predictions["label"].to_numpy(), logits.argmax(axis=1), _softmax(logits), counts)

    def empty_predictions(self, labels: Sequence[str]) -> Choices:
        nothing = np.empty(0, np.int64)
        return Choices(nothing, nothing, np.empty((0, 1)), nothing)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The same place in every row, or the choice with the most characters."""
        rows = read_table(data / "train.arrow")
        right, counts = rows["label"].to_numpy().astype(np.int64), _read_choices(rows)[1]
        frequencies = np.bincount(right, minlength=int(counts.max()))
        longest = _longest_choices(rows)
        hits = int(np.count_nonzero(longest == right))
        share = float(smooth_counts(np.array([hits, len(right) - hits]))[0])
        rivals: list[Rival] = [
            Constant(f"choice {place}", partial(_choose_place, place, smooth_counts(frequencies)))
            for place in most_frequent(frequencies)
        ]
        rivals.append(Rival("the longest choice", partial(_choose_longest, data, share)))
        return Baseline(rivals, Choices(right, right, np.zeros((len(right), len(frequencies))), counts))

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`choice`, its place from 0; its `probability`; and `probabilities`, those of all choices of the row."""
        return {"choice": pa.int64(), "probability": pa.float64(), "probabilities": pa.list_(pa.float64())}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        logits, counts = _pad(predictions["logits"], -np.inf)
        rows = zip(logits.argmax(axis=1).tolist(), _softmax(logits).tolist(), counts.tolist(), strict=True)
        return [
            {"choice": choice, "probability": row[choice], "probabilities": row[:count]} for choice, row, count in rows
        ]

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The choices with their probabilities, the likeliest first."""
        ordered = sorted(enumerate(record["probabilities"]), key=lambda item: -item[1])
        return [f"{probability:6.1%}  choice {place}" for place, probability in ordered]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the probabilities: rounding may change the choice between two that are equally likely."""
        own, theirs = ({"probabilities": row["probabilities"]} for row in (given, stored))
        return super().same_prediction(own, theirs, tolerance)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of (B, L) logits, and labels that are 1 for the right choice and nan where a row has fewer choices."""
    import torch

    return torch.nn.functional.cross_entropy(logits, labels.nan_to_num(nan=0.0).argmax(dim=1))


def _find_problem(label: float, count: int) -> str | None:
    if count < 2:
        return f"has {count} choice{'s' * (count != 1)}, and a row needs two or more"
    if not float(label).is_integer():
        return f"has the label {label:g}, which is no whole number: it is the place of the right choice, from 0"
    if not 0 <= label < count:
        return f"has the label {label:.0f}, and its {count} choices have the places 0 to {count - 1}"
    return None


def _read_choices(rows: pa.RecordBatch | pa.Table) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The choices of all rows, (D,), as they are paired with the contexts, and the number of each row's, (N,)."""
    if "choices" in rows.schema.names:
        lists = rows.column("choices").to_pylist()
        return [choice for row in lists for choice in row], np.array([*map(len, lists)], np.int64)
    columns = [rows.column(name).to_pylist() for name in ("sent2", *ENDINGS)]
    texts = [f"{begin} {ending}" for begin, *endings in zip(*columns, strict=True) for ending in endings]
    return texts, np.full(rows.num_rows, len(ENDINGS), np.int64)


def _pad(lists: pa.ChunkedArray, fill: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """(N, L) the numbers of lists, and (N,) their lengths."""
    column = lists.combine_chunks()
    counts = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    there = np.arange(counts.max(initial=1)) < counts[:, None]
    padded = np.full(there.shape, fill)
    padded[there] = column.flatten().to_numpy(zero_copy_only=False)
    return padded, counts


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(N, L) the probabilities of the choices, 0 where there is none."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


def _longest_choices(rows: pa.Table) -> npt.NDArray[np.int64]:
    """(N,) the place of each row's choice with the most characters, the first of equal ones."""
    choices, counts = _read_choices(rows)
    lengths = list_column(np.array([*map(len, choices)], np.int64), counts)
    return np.asarray(_pad(pa.chunked_array([lengths]), -1.0)[0].argmax(axis=1))


def _choose_place(place: int, shares: npt.NDArray[np.float64], rows: Choices, split: str) -> Choices:
    """This place in each row, or the last of its choices; the probabilities are the shares of the places."""
    width = rows.probabilities.shape[1]
    known = np.append(shares, np.full(width, shares.min()))[:width]
    weights = np.where(np.arange(width) < rows.counts[:, None], known, 0.0)
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    return replace(rows, predictions=np.minimum(place, rows.counts - 1), probabilities=probabilities)


def _choose_longest(data: Path, share: float, rows: Choices, split: str) -> Choices:
    """The longest choice of each row of a split, with this probability; the others are equally likely."""
    longest = _longest_choices(read_table(data / f"{split}.arrow"))
    there = np.arange(rows.probabilities.shape[1]) < rows.counts[:, None]
    probabilities = np.where(there, (1 - share) / (rows.counts - 1)[:, None], 0.0)
    probabilities[np.arange(len(rows)), longest] = share
    return replace(rows, predictions=longest, probabilities=probabilities)
