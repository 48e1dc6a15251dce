"""What a task type is: all in which one task type differs from another, from the columns of its rows to its answers.

Light to import, like every module of a task type at its top: recipes are checked against a task type before anything
is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.recipe.column_types import Column
from training.recipe.task_specification import TaskSpecification

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadToLongest, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import Predictions
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.losses import Loss
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features

__all__ = ["Column", "TaskType"]


class TaskType(TaskSpecification, ABC):
    """A task type, with the options of a recipe. Without state: every process makes its own. What it wants of its rows:
    RowSpecification."""

    learned_options: ClassVar[Sequence[str]] = ()
    """Those that say how a model is asked. It has learnt to be asked so: a champion is asked with its own."""

    pipeline: ClassVar[bool] = True
    """Whether MLflow serves the pipeline that transformers has for the task. If not, it serves the records of
    `to_records`."""

    serves: ClassVar[Mapping[str, str]] = {}
    """What MLflow's server gives of a row: its columns, and what MLflow calls their types."""
    libraries: ClassVar[Sequence[str]] = ()
    """Distributions that its token features hang on, beside tokenizers and pyarrow."""

    @abstractmethod
    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """What the model's config says about the labels, given by name in the order of their indices."""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The token features of rows as load_data stores them; what the model shall say is missing where it is asked.
        By default those of their texts. There may be several a row, with a column `row`, of which `join_labels` makes
        one answer."""
        from training.tokenization.features import of_texts

        return of_texts(encoder, rows)

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What is stored of a split and made into batches, given the features of its rows, block by block: by default
        these as they are. There may be several a row: then with a column `row` (int64), which numbers the rows from 0,
        in their order, and `join_labels` makes one answer of theirs; or many in one, which can only be trained on. At
        least one batch."""
        return features

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Makes a model ready to be trained, where loading is not enough: has its config say what it must know of its
        tokenizer, and tries it. Raises UserError where it cannot be trained so."""

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """What makes token features into the tensors that the model takes, T a multiple of this."""

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """The loss that the recipe's training section asks for; None for the model's own. What a model computes inside
        may be in a lower precision where it is shared: then it is `outside`, if it can be."""
        return None

    def target_count(self, batch: Batch) -> int:
        """How many targets a batch's loss is the mean of: by default a row has one. Where it is otherwise, `features`
        give each row's number of them as a column `targets` (int32), which steps are weighed by; a row of 0 counts for
        nothing."""
        return len(batch["labels"])

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """The forward pass, of a prediction and where the loss is computed outside of the model: without a loss."""
        outputs: ModelOutput = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        return outputs

    @abstractmethod
    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """What the model makes of the B rows of a batch, a line a row, given what came of the forward pass: what is
        stored of a prediction, under names other than `row`, `label` and `tokens`."""

    def join_labels(self, answers: pa.Table, rows: TokenRows) -> pa.Table:
        """Answers to all of the rows, in order, as they are stored: by what the rows are made of rather than by their
        tokens, and with the `label` of each in front, where rows have one."""
        return rows.labelled(answers)

    def decode(self, answers: pa.Table, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
        """Answers as they are stored: texts where the model's are token ids. By default as they are."""
        return answers

    def faults_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """What is wrong with rows that a person asks about, which need not have what the model shall say: one of the
        `columns`, words that follow "row 7", such as "has no conversation", a truth for each row, and words that follow
        those and are of the first such row, or none. Called before a model is loaded. By default nothing is wrong."""
        return iter(())

    def predictions_on_request(
        self,
        answers: pa.Table,
        rows: pa.RecordBatch,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
    ) -> pa.Table:
        """The answers to rows that a person asks about, which may hold more than those to a split that is evaluated,
        such as how a text goes on. By default the same."""
        return answers

    @abstractmethod
    def metric_inputs(self, answers: pa.Table, labels: Sequence[str]) -> Predictions:
        """Rows as metrics want them, from answers as `join_labels` gives them."""

    @abstractmethod
    def empty_predictions(self, labels: Sequence[str]) -> Predictions:
        """No rows, as metrics want them."""

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline | None:
        """Constant answers; a first model must beat the best of them. Learned from the training rows.

        `data` and `tokens` hold SPLIT.arrow as load_data and tokenize store it; `model` is the trained model's folder,
        for its vocabulary and tokenizer alone. None, the default: a first model is compared with nothing.
        """
        return None

    def labels_of(self, config: PreTrainedConfig) -> list[str]:
        """The names of a trained model's labels, in the order of its outputs; none for a task type without."""
        return [config.id2label[place] for place in range(config.num_labels)]

    @abstractmethod
    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """What a person is told of an answer, and a file of rows gets as columns: names and types. CSV gets those that
        are not nested."""

    @abstractmethod
    def to_records(self, answers: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Answers as a person is told of them: plain values, by the names of `record_types`."""

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Whether two such answers are the same but for rounding: numbers differ by no more than this."""
        return _alike(given, stored, tolerance)

    def same_served(self, served: Any, stored: Sequence[Mapping[str, Any]], tolerance: float) -> bool:
        """Whether what MLflow's server gives is the same as such answers. By default, of a pipeline, whether it gives
        one a row."""
        if self.pipeline:
            return len(served) == len(stored)
        return all(self.same_prediction(given, answer, tolerance) for given, answer in zip(served, stored, strict=True))

    def lines(self, explained: Mapping[str, Any]) -> list[str]:
        """Such an answer in a terminal."""
        return [f"{name}: {value}" for name, value in explained.items()]

    def published_files(self, folder: Path) -> dict[str, str]:
        """Files of text, by name, that the exported model in `folder` has in place of its own, or beside them, where it
        is published: what only says how it answers, and is not learnt. By default none."""
        return {}

    def remap_labels(self, answers: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """The answers, and `label` beside them, of a model that was made for the labels `theirs`, as those of one that
        was made for `labels`."""
        return answers

    def calibrate(self, predicted: Predictions) -> dict[str, Any]:
        """What the model's config is to say of how its answers are read, such as thresholds, as these rows have it:
        those of the validation split by the weights that are exported, and nobody while it trains. By default nothing,
        and then nothing is predicted for it."""
        return {}


def _alike(given: Any, stored: Any, tolerance: float) -> bool:
    if isinstance(stored, float):
        return isinstance(given, float) and abs(given - stored) <= tolerance
    if isinstance(stored, Mapping):
        return given.keys() == stored.keys() and all(_alike(given[name], stored[name], tolerance) for name in stored)
    if isinstance(stored, list):
        return len(given) == len(stored) and all(map(_alike, given, stored, [tolerance] * len(stored)))
    return bool(given == stored)
