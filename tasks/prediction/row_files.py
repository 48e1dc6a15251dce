"""The files of rows of a batch prediction, read with the columns of the model and those that travel along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tasks.prediction.scan import Shard
from tasks.registry.prediction_job import ModelSpec
from training import task_types
from training.data.batch_requests import ID
from training.data.file_systems import display_name
from training.data.prediction_files import GENERATED, STAMPS, predicted_names
from training.data.prediction_rows import RowReader, Rows, digest_all
from training.problems import UserError
from training.recipe import BatchPrediction
from training.recipe.batch_prediction import SHARD_ROWS, SHARD_TEXTS


class RowFiles:
    """Reads files for a prediction by a model. Raises UserError if they do not fit each other."""

    def __init__(self, prediction: BatchPrediction, model: ModelSpec) -> None:
        task_type = task_types.load(**model.task)
        kept = prediction.keep if prediction.keep is not None else [*model.columns.values()]
        if prediction.format == "openai":
            _require_assistant(prediction, model, task_type.record_types([]))
            kept = [ID]
        self.id = ID if prediction.format == "openai" else prediction.id
        """The column that must have another value in each row; None without one."""
        self.kept = list(dict.fromkeys([*([self.id] if self.id else []), *kept]))
        """The columns that travel along."""
        self._version, self._options = f"{model.name} version {model.version}", task_type.options
        self.reader = RowReader(task_type, model.columns, self.kept, model.rules)
        auto = SHARD_TEXTS if task_type.generates_text else SHARD_ROWS
        self.shard_rows = auto if prediction.shard_rows == "auto" else int(prediction.shard_rows)
        taken = {*STAMPS, *predicted_names(task_type.record_types([]), self.kept).values()}
        if names := [name for name in self.kept if name in taken]:
            message = f"{', '.join(names)} would be twice in the output: rename it in the input, or leave it out."
            raise UserError.of("option", "keep", message)

    def warnings(self) -> list[str]:
        """A warning about fields of requests that are not used, if the rows read so far have any."""
        if not self.reader.ignored_fields:
            return []
        names, most = ", ".join(sorted(self.reader.ignored_fields)), getattr(self._options, "max_new_tokens", 0)
        warning = f"{names} of the requests: not used. {self._version} answers by the options of its recipe: the "
        return [f"{warning}likeliest text, of at most {most} tokens."]

    def read(
        self, shards: Sequence[Shard], wanted: Callable[[Shard], bool]
    ) -> Iterator[tuple[Shard, Callable[[], Rows]]]:
        """Yields the wanted shards, each with a function that reads its rows; call it before the next shard.

        A file without wanted shards is not read. The function raises UserError if the rows have changed.
        """
        for file, of_file in groupby(shards, lambda shard: shard.file):
            yield from _Reading(file, self.reader.shards(file, self.shard_rows)).of([*of_file], wanted)


class _Reading:
    """One pass over a file."""

    def __init__(self, file: str, parts: Iterator[Rows]) -> None:
        self._file, self._parts, self._next = file, parts, 0

    def of(
        self, shards: Sequence[Shard], wanted: Callable[[Shard], bool]
    ) -> Iterator[tuple[Shard, Callable[[], Rows]]]:
        for shard in shards:
            if wanted(shard):
                yield shard, lambda shard=shard: self._rows(shard)  # type: ignore[misc]

    def _rows(self, shard: Shard) -> Rows:
        rows = None
        while self._next <= shard.number:
            rows = next(self._parts, None)
            self._next += 1
        if rows is None or digest_all(rows) != shard.content:
            message = "has changed since this run began: start another one."
            raise UserError.of("data", display_name(self._file), message)
        return rows


def _require_assistant(prediction: BatchPrediction, model: ModelSpec, predicted: object) -> None:
    """Raises UserError if the model does not answer conversations."""
    if "messages" not in model.columns or GENERATED not in predicted:  # type: ignore[operator]
        message = f"'openai' is for assistants, which answer conversations, and {model.name} is a model for "
        message += f"{model.task['task']} of {', '.join(model.columns)}: choose from parquet, csv, jsonl."
        raise UserError.of("option", "format", message)
    if prediction.keep is not None or prediction.id not in (None, ID):
        message = f"'openai' has the column {ID} alone: leave out keep and id."
        raise UserError.of("option", "format", message)
