"""The interface of a task type: five steps from stored rows to the records that people and servers get.

    rows ─ RowsToFeatures ▶ token features ─ FeaturesToBatches ▶ batches ─ BatchesToLoss ▶ loss, logits
    logits ─ OutputsToPredictions ▶ predictions ─ PredictionsToRecords ▶ records

A task type implements the abstract methods of these steps; all others have defaults, and most task types never override
those of OptionalHooks. The classes at the end of this file are for what only some have. A task type declares the
columns of its rows as in RowSpecification, and its options, metrics and names as in TaskSpecification (in
training.recipe).

This module and the top level of a task type's module import no torch or transformers, because recipes are
checked against them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.problems import UserError
from training.recipe.column_types import Column
from training.recipe.task_specification import TaskSpecification
from training.tokenization.features import encode_texts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadToLongest, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import Predictions
    from training.problems import Problem
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features

__all__ = [
    "AnswersPrompts",
    "AnswersTurns",
    "BaseReference",
    "Calibrated",
    "Column",
    "CorpusSearch",
    "FittedHead",
    "GeneratesAnswers",
    "LearnsFromTeacher",
    "LearnsTokens",
    "LearnsVectors",
    "Loss",
    "MinesNegatives",
    "SearchesCorpus",
    "TaskType",
    "WholeStep",
    "WritesTargets",
]

Loss: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""A function of logits and labels."""


class RowsToFeatures:
    """Step 1: rows to token features."""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The token features of rows as load_data stores them; rows to predict have no target columns.

        The default encodes `text` and `text_pair`. A row may have several feature rows: a column `row` then has its
        number, and `join_labels` joins their predictions.
        """
        return encode_texts(encoder, rows)


class FeaturesToBatches(ABC):
    """Step 2: token features to batches of tensors."""

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """The function from token features to a batch, padded to a multiple of `multiple` tokens."""

    def target_count(self, batch: Batch) -> int:
        """The number of targets that the batch's loss is the mean of, by default one for each row.

        If it is overridden, the features have a column `targets` (int32), the number of targets of each row. Steps are
        weighted by it; a row with 0 targets does not count.
        """
        return len(batch["labels"])


class BatchesToLoss:
    """Step 3: batches to logits and their loss."""

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """The fields of the model's config that the task sets. `labels` are names, in the order of their indices."""
        return {}

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """The forward pass without a loss, for predictions and for a loss that is computed outside of the model."""
        outputs: ModelOutput = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        return outputs

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """The loss that the recipe's training section selects; None for the loss that the model computes itself.

        `outside` requests a loss outside of the model: a sharded model may compute its own in a lower precision.
        """
        return None


class OutputsToPredictions(ABC):
    """Step 4: the model's outputs to predictions, as they are stored and as metrics read them."""

    @abstractmethod
    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """The predictions for the B feature rows of a batch, from the outputs of `forward`. Columns are not named
        `row`, `label` or `tokens`."""

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """The predictions for all rows of a split as they are stored: one for each row of the data, not for each
        feature row, with the row's `label` as the first column if it has one."""
        return rows.with_labels(predictions)

    @abstractmethod
    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Predictions:
        """The result of `join_labels` as metrics read it."""

    @abstractmethod
    def empty_predictions(self, labels: Sequence[str]) -> Predictions:
        """The result of `metric_inputs` for no rows."""


class PredictionsToRecords(ABC):
    """Step 5: predictions to records, which people and servers get."""

    @abstractmethod
    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """The names and types of a record's fields, which `finetune predict` adds to files; to CSV files only those
        that are not nested."""

    @abstractmethod
    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        """The predictions as plain values with the names of `record_types`."""

    def to_table(self, predictions: pa.Table, labels: Sequence[str]) -> pa.Table:
        """The same records as columns."""
        schema = pa.schema(list(self.record_types(labels).items()))
        return pa.Table.from_pylist(self.to_records(predictions, labels), schema)

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The lines of a record in a terminal."""
        return [f"{name}: {value}" for name, value in record.items()]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Whether two records are equal up to rounding: no two numbers differ by more than `tolerance`."""
        return _equal(given, stored, tolerance)

    pipeline: ClassVar[bool] = True
    """Whether MLflow serves the pipeline of transformers for the task. If not, it serves the records."""

    serves: ClassVar[Mapping[str, str]] = {}
    """The columns of MLflow's signature for the pipeline's output, and MLflow's types of them."""

    def same_served(self, served: Any, stored: Sequence[Mapping[str, Any]], tolerance: float) -> bool:
        """Whether the output of the pipeline, as MLflow serves it, agrees with the stored records. The default compares
        only the numbers of rows."""
        return len(served) == len(stored)

    def same_records(
        self, served: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], tolerance: float
    ) -> bool:
        """Whether the records of a model that MLflow serves without a pipeline agree with the stored ones."""
        return all(self.same_prediction(given, record, tolerance) for given, record in zip(served, stored, strict=True))


class OptionalHooks:
    """Hooks that most task types leave at their defaults, in the order of the steps."""

    columns: ClassVar[Mapping[str, Column]]

    # Training

    def preprocessor(self, folder: Path) -> Any | None:
        """What prepares rows in the place of a tokenizer, such as the image processor in `folder`: `features` gets it
        as the encoder, and `collator` as the tokenizer. None, the default: the folder has a tokenizer."""
        return None

    libraries: ClassVar[Sequence[str]] = ()
    """Distributions whose versions change the token features, besides tokenizers and pyarrow."""

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The stored form of a split's token features, at least one block. The default stores them unchanged.

        A row may have several stored rows: a column `row` (int64) then has its number from 0, in order. Or one stored
        row holds several rows (packing): such a split can only be trained on.
        """
        return features

    def is_rendered(self, rows: pa.RecordBatch) -> Mask:
        """(N,) whether a chat template writes the text of a row, so that special tokens in its messages are text."""
        return np.zeros(rows.num_rows, np.bool_)

    def tokenizer_problems(self, encoder: Encoder, columns: Collection[str]) -> Iterable[Problem]:
        """Problems of a tokenizer, or of its chat template, for rows with these columns. Warnings are reported."""
        return ()

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prepares a loaded model for training, such as config fields that depend on the tokenizer. Raises UserError if
        the model cannot be trained for this task."""

    # Evaluation

    def cut_texts(self, predictions: pa.Table, model: PreTrainedModel) -> int:
        """The texts among the predictions, before `decode`, that were cut at options.max_new_tokens."""
        return 0

    def decode(self, predictions: pa.Table, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
        """The predictions as they are stored, with texts in place of token ids."""
        return predictions

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline | None:
        """The rivals of a first model, which must beat the best of them: constant predictions, learned from the
        training rows, or a method without training. None, the default, if there are none.

        `data` and `tokens` hold SPLIT.arrow as load_data and tokenize store it; `model` is the trained model's folder,
        used for its vocabulary and tokenizer.
        """
        return None

    def rows_of_entries(self, rows: pa.Table) -> npt.NDArray[np.int64] | None:
        """The row of each entry of a split's predictions, from its rows as load_data stores them: `rows_of` of
        Predictions, without predictions. None, the default: each row is an entry."""
        return None

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """The predictions (with the column `label`) of a model with the labels `theirs`, for the labels `labels`."""
        return predictions

    learned_options: ClassVar[Sequence[str]] = ()
    """Options that a model is trained with, such as a prefix of its inputs: a champion is evaluated with its own."""

    def labels_of(self, config: PreTrainedConfig) -> list[str]:
        """The names of a trained model's labels in the order of its outputs; empty without a column of labels."""
        if not any(column.form in ("label", "labels") for column in self.columns.values()):
            return []
        return [config.id2label[place] for place in range(config.num_labels)]

    # Requests: `finetune predict` and MLflow's server

    def row_problems_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """The problems of rows to predict, found before a model is loaded.

        Each is one of `columns`; words that follow "row 7", such as "has no conversation"; a mask of the rows; and
        words on the first of them, which follow the others.
        """
        return iter(())

    def without_answers(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows without answers that rows to predict may lack, so that drift reports compare like with like."""
        return rows

    def predictions_on_request(
        self,
        predictions: pa.Table,
        rows: pa.RecordBatch,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
    ) -> pa.Table:
        """The predictions for rows outside of an evaluation, with additional columns such as generated text."""
        return predictions

    def exported_files(self, folder: Path) -> dict[str, str]:
        """Text files, by name, that the exported model in `folder` gets: settings that it was trained with."""
        return {}

    def published_files(self, folder: Path, max_length: int) -> dict[str, str]:
        """Text files, by name, that are published with the exported model in `folder` or replace its files. They hold
        settings of its use, not learned values. `max_length` is the number of tokens at which texts are cut."""
        return {}


class TaskType(
    TaskSpecification,
    RowsToFeatures,
    FeaturesToBatches,
    BatchesToLoss,
    OutputsToPredictions,
    PredictionsToRecords,
    OptionalHooks,
):
    """A task type with its options. It has no other state: every process makes its own instance."""


# What only some task types have: a class of theirs names it as a further base.


class Calibrated(TaskType):
    """A model whose config has values that are fitted to the predictions of validation rows, such as thresholds."""

    @property
    def is_calibrated(self) -> bool:
        """Whether these options need such values."""
        return True

    @abstractmethod
    def calibrate(self, predictions: pa.Table, labels: Sequence[str]) -> dict[str, Any]:
        """These fields of the config. `predictions` are those of the exported weights for the validation split, as for
        `metric_inputs`."""


class FittedHead(TaskType):
    """A model that is trained without its head, which is fitted to the embeddings of the training rows afterwards. Its
    `prepare` removes the head, by training.models.classifier_inputs."""

    @abstractmethod
    def fit_head(
        self, embeddings: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], count: int, *, with_bias: bool
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The weights (L, H) and biases (L,) of a head for `count` labels, from (N, H) embeddings, the inputs of the
        head, and the (N,) labels of the rows. The biases are 0 without `with_bias`."""


class BaseReference(TaskType):
    """A loss that compares with the base model: the stage reference_logprobs computes its part once, before
    training."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the loss that the options select reads columns of token rows that are computed with the base
        model."""

    @abstractmethod
    def reference_columns(self, predictions: pa.Table) -> Mapping[str, pa.ChunkedArray]:
        """These columns, one value a row, from the predictions of the base model for the token rows. Their names begin
        with `reference_`."""

    def share_reference(self, predictions: pa.Table, others: pa.Table) -> pa.Table:
        """The predictions with the reference of other predictions of the same rows: rewards of two models are
        comparable only from one reference."""
        for name in others.column_names:
            if name.startswith("reference_") and name not in predictions.column_names:
                predictions = predictions.append_column(name, others[name])
        return predictions


class LearnsFromTeacher(TaskType):
    """A loss that also compares with the outputs of a teacher, which the stage teacher_outputs computes once, before
    training: a task type with `teacher_outputs`."""

    @property
    def teacher_columns(self) -> list[str]:
        """The columns of rows that a teacher reads, if they are there."""
        return [name for name, column in self.columns.items() if not column.target and name != "label"]

    @abstractmethod
    def outputs_of_teacher(self, outputs: ModelOutput, batch: Batch) -> pa.ListArray:
        """The numbers of each feature row that are stored, from a teacher's outputs of `forward`."""

    def join_outputs(self, outputs: pa.Array, features: pa.RecordBatch) -> pa.Array:
        """The numbers of each row of the data, from those of its feature rows; by default the same."""
        return outputs


class LearnsVectors(LearnsFromTeacher):
    """The same for embeddings: a task type whose `teacher_outputs` are "vectors"."""

    @abstractmethod
    def taught(self, dimensions: int, weight: float) -> Self:
        """The task type for batches with a teacher's vectors of so many dimensions, whose loss compares with them."""

    @staticmethod
    def require_dimensions(teacher: str, theirs: int, own: int) -> None:
        """Raises UserError if the teacher's vectors have other dimensions than the embeddings of the model."""
        if theirs != own:
            message = f"the vectors of {teacher} have {theirs} dimensions, and the model's embeddings {own}: name a "
            message += f"teacher with {own}, or a model with {theirs} (its hidden_size)."
            raise UserError.of("training", "training.teacher.path", message)


class LearnsTokens(TaskType):
    """The same for a language model, which learns from a teacher's distribution of each target token: a task type whose
    `teacher_outputs` are "tokens"."""

    causal: ClassVar[bool]
    """Whether the logits at a token are for the next token."""

    @abstractmethod
    def target_ids(self, batch: Batch) -> torch.Tensor:
        """(B, T) the token that the logits at each place are for, or IGNORED; of a batch with a teacher too."""


class WritesTargets(TaskType):
    """Rows whose targets a teacher can write: a task type with `teacher_writes`."""

    def unanswered(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows, as load_data stores them, without the targets that the teacher writes. Raises UserError for rows
        that it cannot answer."""
        inputs = [name for name, column in self.columns.items() if not column.target]
        return rows.select([name for name in rows.schema.names if name in inputs])

    @abstractmethod
    def write_targets(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, rows: pa.RecordBatch
    ) -> tuple[list[str], list[bool]]:
        """The text that the model writes for each of such rows, and whether it was cut at options.max_new_tokens."""

    @abstractmethod
    def with_targets(self, rows: pa.RecordBatch, texts: Sequence[str]) -> pa.RecordBatch:
        """The rows, as load_data stores them, with these texts as their targets."""


class WholeStep(TaskType):
    """A loss that depends on all rows of an optimizer step together: engines prepare the micro-batches of a step before
    its first backward pass. Without it, as in evaluations, the loss is that of a batch's own rows."""

    @abstractmethod
    def prepare_step(
        self, model: PreTrainedModel, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
    ) -> list[Batch]:
        """This rank's micro-batches, with what `forward` and `loss` read of the whole step: their mean over all
        micro-batches and ranks, weighted by `target_count`, is the loss of the step.

        The batches are on the model's device, and the model is in training mode. Every rank calls it; `gather` returns
        a value of every rank, on every rank.
        """

    def partners(self, rows: TokenRows) -> npt.NDArray[np.int64] | None:
        """(N,) a number of each training row: rows with equal ones share optimizer steps in twos. None, the default, if
        it does not matter which rows share a step."""
        return None


class MinesNegatives(TaskType):
    """Rows of queries and documents, to which the stage mine_negatives adds documents that do not belong to them. The
    property `negative_sources` names the values of data.negatives.source that they take."""

    @abstractmethod
    def judged_documents(self, rows: pa.RecordBatch) -> list[tuple[str, list[tuple[str, bool]]]]:
        """The query of each row, as load_data stores it, and its documents, each with whether it belongs to the
        query."""

    def with_candidates(
        self, batches: Sequence[pa.RecordBatch], found: Mapping[str, Sequence[str]]
    ) -> list[pa.RecordBatch]:
        """The rows of an evaluated split, in which the first row of each query has the documents that a search has
        found for it, the nearest first: for task types with `takes_candidates`."""
        raise NotImplementedError

    @abstractmethod
    def add_negatives(self, rows: pa.RecordBatch, negatives: Sequence[Sequence[str]]) -> pa.RecordBatch:
        """The rows with more documents that do not belong to their queries: those of each row."""


class SearchesCorpus(TaskType):
    """Rankings among the documents of data.corpus too, which are in the token file of that name."""

    @abstractmethod
    def corpus_search(self, predictions: pa.Table) -> CorpusSearch:
        """The search of the documents for the rows with these predictions."""


class CorpusSearch(ABC):
    """The search of a corpus, block by block."""

    @abstractmethod
    def add(self, predictions: pa.Table) -> None:
        """Searches a block of documents, by their predictions."""

    @abstractmethod
    def result(self) -> pa.Table:
        """The predictions for the rows, with what metrics read of the corpus."""


class GeneratesAnswers(TaskType):
    """Generated answers in some rows of an evaluated split, for `answer_metrics`."""

    @abstractmethod
    def answer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[npt.NDArray[np.int32]]
    ) -> list[tuple[str, int]]:
        """The answer to each prompt, and the number of its tokens, at most options.max_new_tokens."""


class AnswersPrompts(GeneratesAnswers):
    """Answers to the prompts of rows, for `answer_metrics` and evaluation.judge: a task type whose `answers` are
    "prompts"."""

    @abstractmethod
    def prompt_of(self, row: Mapping[str, Any]) -> npt.NDArray[np.int32]:
        """The tokens of the prompt of a token row."""

    @abstractmethod
    def set_end_tokens(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the tokens that end the texts of a base model, which is not prepared for training."""


class AnswersTurns(GeneratesAnswers):
    """Answers in place of the messages of a row's assistant: a task type whose `answers` are "turns"."""

    turns_column: ClassVar[str]
    """The column of predictions with the answers of a row, a text; null for other rows."""

    @abstractmethod
    def rows_with_turns(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """The numbers of the rows with such messages, ascending."""

    @abstractmethod
    def load_turn_encoder(self, folder: Path) -> Encoder:
        """The encoder of the prompts, which truncates none, with the tokenizer of a trained model's folder."""

    @abstractmethod
    def turn_prompts(self, encoder: Encoder, row: Mapping[str, Any]) -> list[npt.NDArray[np.int32]]:
        """The tokens before each of these messages of a row."""

    @abstractmethod
    def write_turns(self, row: Mapping[str, Any], answers: Sequence[str]) -> str:
        """A row's answers as they are stored, with all that metrics read beside them."""


def _equal(given: Any, stored: Any, tolerance: float) -> bool:
    if isinstance(stored, float):
        return isinstance(given, float) and abs(given - stored) <= tolerance
    if isinstance(stored, Mapping):
        return given.keys() == stored.keys() and all(_equal(given[name], stored[name], tolerance) for name in stored)
    if isinstance(stored, list):
        return len(given) == len(stored) and all(map(_equal, given, stored, [tolerance] * len(stored)))
    return bool(given == stored)
