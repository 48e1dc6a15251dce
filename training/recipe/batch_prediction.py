"""The parameters of a batch prediction: the model, the rows, and the place of the predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from training.problems import Problem, UserError
from training.recipe.error_messages import describe, find_templates
from training.recipe.field_types import VERSION_NAME, AutoOrCount, CodeName, Section, Text, split_version_name
from training.recipe.tables.formats import FORMATS

SINGLE_FILES = tuple(suffix for source in FORMATS.values() for suffix in source.predicted)
"""The suffixes of an output that is one file."""
SHARD_ROWS, SHARD_TEXTS = 4096, 256
"""`auto` for `shard_rows`: the rows of a shard, and those for models that generate texts, which takes longer."""


class BatchPrediction(Section):
    """Predictions for the rows of files."""

    model: Text
    """The registered model: NAME for its champion, NAME@ALIAS or NAME/VERSION. It is pinned to a version when the run
    begins."""
    input: list[Text] = Field(min_length=1)
    """The rows: files, folders, globs, and URLs of these, in the formats of training data, or .txt with a text a
    line. The columns have the names that they had in the model's training data."""
    output: Text
    """A folder, here or at a URL, which gets a file for each shard, and last the manifest `_SUCCESS`; or one file,
    whose name ends in .parquet, .csv, .tsv or .jsonl."""
    format: Literal["parquet", "csv", "jsonl", "openai"] | None = None
    """The format of the files in a folder: parquet, csv, jsonl (JSON lines), or openai (the output file of OpenAI's
    batches, for assistants). Null: parquet, or the format of a single file's suffix."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Fields of the recipe's `data` by which these rows are read, such as `{delimiter: ";"}` for files unlike the
    training data. All other fields are those of the version's recipe."""
    keep: list[Text] | None = None
    """The columns of the input that travel along (null: those that the model reads, and `id`)."""
    id: Text | None = None
    """A column with a different value in each row of all files; duplicates end the run before anything is predicted."""
    escape_formulas: bool = False
    """Whether texts in CSV that begin with `=`, `+`, `-`, `@`, a tab or a carriage return get a `'` in front, so that
    no spreadsheet runs them as a formula. They are then no longer the texts of the input."""
    prompt: Text | None = None
    """For embeddings: the column of the training data whose prompt is put before each text, such as positive for
    documents (null: options.predicted_prompt of the version's recipe, or the first column)."""
    embedding_type: Literal["float32", "float16", "binary"] = "float32"
    """The numbers of embeddings in Parquet: float32; float16, half as large; or binary, a bit a dimension, 32 times
    smaller: `ubinary` of sentence-transformers."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """The share of rows that may be unusable: they get an `error` and no prediction. More of them end the run before
    anything is predicted."""
    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Rows in one forward pass. If memory runs out, batches are halved."""
    shard_rows: AutoOrCount = "auto"
    """Rows of a shard, which is predicted and stored as a whole; auto: 4,096, or 256 for models that generate texts.
    Rows that are appended to a file only change its last shard."""
    processes: AutoOrCount = "auto"
    """Programs that predict at once, among which this machine's GPUs are divided; auto: one for each GPU, or one."""
    cluster: Literal["ray"] | None = None
    """Where the programs run: on a Ray cluster, each with a core, and a GPU if this machine has one; or on this machine
    (null)."""
    cluster_address: str | None = Field(default=None, pattern=r"^\S+:\d{1,5}$")
    """`host:port` of the cluster (null: RAY_ADDRESS, and without it a cluster of this machine alone)."""
    drift: bool = True
    """Whether the new rows are compared with the version's validation rows, as by `finetune drift`, with the thresholds
    of its recipe (`release.drift`). New are rows that no earlier run into this output has compared; fewer than
    `min_rows` wait for more."""
    task: CodeName | None = None
    """`module:Class` of the model's task type if it is your own; its code is run."""

    @property
    def name(self) -> str:
        """The name of the registered model, without alias and version."""
        return split_version_name(self.model).name

    @property
    def alias(self) -> str:
        """The alias in `model`; empty without one."""
        return split_version_name(self.model).alias

    @property
    def version(self) -> str:
        """The version in `model`; empty without one."""
        return split_version_name(self.model).version

    @property
    def is_single_file(self) -> bool:
        """Whether the output is one file."""
        return self.output.endswith(SINGLE_FILES)


def parse_batch_prediction(values: Any) -> BatchPrediction:
    """The parameters that `values` spell. Raises UserError with every mistake found, one problem a field."""
    if not isinstance(values, Mapping):
        raise UserError.of("option", "prediction", f"{values!r} is not a mapping of fields.")
    problems = find_templates(values)
    try:
        found = BatchPrediction.model_validate(dict(values))
    except ValidationError as error:
        problems += [describe(detail, BatchPrediction) for detail in error.errors(include_url=False)]
        raise UserError({problem.where: problem for problem in reversed(problems)}.values()) from error
    problems += _find_contradictions(found)
    if problems:
        raise UserError(problems)
    return found


def _find_contradictions(found: BatchPrediction) -> list[Problem]:
    problems = []

    def add(where: str, message: str) -> None:
        problems.append(Problem(kind="option", where=where, message=message))

    if not VERSION_NAME.fullmatch(found.model):
        add("model", f"{found.model!r} is no registered model: write NAME, NAME@ALIAS or NAME/VERSION.")
    if found.is_single_file and found.format not in (None, "openai"):
        add("format", f"{found.format!r} is for a folder: leave it out, because the suffix of {found.output} decides.")
    if found.format == "openai" and found.is_single_file and not found.output.endswith(".jsonl"):
        add("output", f"{found.output!r} is no place for openai: name a folder, or a file that ends in .jsonl.")
    if found.escape_formulas and found.format != "csv" and not found.output.endswith((".csv", ".tsv")):
        add("escape_formulas", "is for CSV, which spreadsheets open: leave it out, or write .csv files.")
    if found.embedding_type != "float32" and not (
        found.output.endswith(".parquet") if found.is_single_file else found.format in (None, "parquet")
    ):
        add("embedding_type", f"{found.embedding_type!r} is for Parquet: leave it out, or write .parquet files.")
    if found.cluster is not None and found.processes == "auto":
        add("processes", "'auto' counts the GPUs of this machine, not of a cluster: give the number of programs.")
    if found.cluster is None and found.cluster_address is not None:
        add("cluster_address", "is for a cluster: set cluster to ray, or leave this out.")
    if found.task is not None and ":" not in found.task:
        add("task", f"{found.task!r} is no code of yours: write module:Class, or leave it out.")
    return problems
