"""Rows to predict: files read by the readers and rules of training, with an error in place of the inputs of an unusable
row.

Every format of files in training/recipe/tables/formats.py is read, and .txt: a text a line, or one text for a model
that was trained on folders of texts. The rows of a file keep their order, and each is yielded once: a row that cannot
be read at all has nothing but its number and its error. What training refuses in a row is the row's error; what
training warns of is a warning.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa

from training.data.batch_requests import as_row, conversation_column, ignored_fields, is_request
from training.data.casting import (
    UNCODED_TYPES,
    TaskColumns,
    Values,
    convert_block,
    decode_texts,
    mask_of,
    small_blocks,
    to_batch,
    to_stored_type,
)
from training.data.checks import ROW_CHECKS, ROW_REMARKS
from training.data.decoding import open_text
from training.data.file_systems import display_name, is_url, name_of
from training.data.ipc_files import BLOCK_ROWS
from training.data.readers import Block, ExtraColumns, load_reader, match_columns
from training.data.row_dicts import from_mappings
from training.data.row_problems import RowProblem, RowProblems, level_of
from training.jobs.protocol import Settings
from training.problems import Problem, UserError, nearest
from training.recipe.column_types import RowSpecification
from training.recipe.filters import parse_filter
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.source_columns import ROLE_FIELDS, SourceColumns, StoredColumn

SPLIT = "input"


ColumnValues: TypeAlias = "list[Any] | pa.Array"
"""The values of a column: an array of Parquet or Arrow, which keeps its type; Python values of other formats."""


class WantedShard(Settings):
    """Rows of a file that are predicted together."""

    file: str
    number: int
    """Its place among the file's shards, from 0."""
    digest: str
    """Of the model's inputs in its usable rows."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a file."""

    numbers: list[int]
    """The number of each row, as messages name it: in CSV the header is row 1, in JSON lines it is the line."""
    inputs: list[Values | None]
    """The model's inputs of each row; None for a row that cannot be used."""
    errors: list[RowProblem | None]
    """The problem of each of these; None for the others."""
    kept: dict[str, ColumnValues] = field(default_factory=dict)
    """The values of the columns that travel along, None where a row lacks one."""
    filtered: frozenset[int] = frozenset()
    """The numbers of the rows that the filter of the training data would remove."""

    def usable(self) -> list[Values]:
        """The inputs of the rows that can be used."""
        return [values for values in self.inputs if values is not None]

    def like_training_rows(self, start: int = 0) -> list[Values | None]:
        """The inputs of the rows that the filter of the training data would keep, from the one at `start`."""
        pairs = zip(self.numbers[start:], self.inputs[start:], strict=True)
        return [values for number, values in pairs if number not in self.filtered]


@dataclass(frozen=True)
class InputColumns(SourceColumns):
    """The columns that are read from files of rows to predict: the model's inputs, and those of the filter if the file
    has them."""

    keeps_rows = True
    roles: Mapping[str, str] = field(default_factory=dict)
    """The rows' names of the columns that the model reads, by their roles."""
    beside: tuple[str, ...] = ()
    """The columns that a file has to have beside these, because they travel along."""
    needs_filter: bool = False
    """Whether a file without the columns of the filter is a problem."""

    @cached_property
    def columns(self) -> tuple[StoredColumn, ...]:
        """The model's inputs, in the order of their roles."""
        types = {role: self.task_type.columns[role] for role in self.roles}
        return tuple(
            StoredColumn(
                role,
                name,
                types[role].form,
                ROLE_FIELDS.get(role, f"data.columns.{role}"),
                types[role].may_be_empty,
                types[role].target,
            )
            for role, name in self.roles.items()
        )

    def is_optional(self, column: StoredColumn) -> bool:
        """Whether a file may lack the column."""
        return self.task_type.columns[column.name].optional and column.may_be_empty

    def in_file(self, there: Sequence[str]) -> InputColumns:
        """Returns the columns to read from this file: without optional ones that it lacks, and with the names that its
        columns have, those before or those after data.rename."""
        data, needed = self.data, {name for name in self.by_source if not self.is_optional(self.by_source[name])}
        rename = {old: new for old, new in data.rename.items() if old in there or (new in needed and new not in there)}
        names = {rename.get(name, name) for name in there} | set(rename.values())
        lacks_filter = bool(data.filter) and not names.issuperset(parse_filter(data.filter or "").columns)
        cast = {name: to for name, to in data.cast.items() if name in names}
        changes = {"rename": rename, "cast": cast}
        if lacks_filter and not self.needs_filter:
            changes["filter"] = None
        roles = {role: name for role, name in self.roles.items() if name in names or name in needed}
        return replace(self, data=data.model_copy(update=changes), roles=roles)

    def unnamed(self, available: Iterable[str]) -> list[str]:
        """None: the recipe has decided which columns are read."""
        return []

    def other_problems(self, there: Sequence[str], where: str) -> list[Problem]:
        """Returns a problem for each column that is to travel along and that the file lacks. Rows of JSON may lack
        it."""
        renamed = [self.data.rename.get(name, name) for name in there]
        if self.data.source == "json":
            return []
        return [
            Problem(
                kind="option",
                where="keep",
                message=f"{where} has no column {name!r}: it has {', '.join(renamed)}.{nearest(name, renamed)}",
            )
            for name in self.beside
            if name not in renamed and name not in there
        ]


class _KeptColumns:
    """The columns that travel along, as training/data/readers.py reads them: with their values unchanged."""

    def __init__(self, wanted: InputColumns, names: Sequence[str], found_fields: set[str]) -> None:
        self._wanted, self._names, self._ignored_fields = wanted, names, found_fields
        forms = {column.name: column.form for column in wanted.columns}
        self._takes_prompts = "messages" not in wanted.roles
        self._messages, self._tools = conversation_column(wanted.roles, forms), wanted.roles.get("tools")

    def of_file(self, names: Sequence[str], column_types: Sequence[pa.DataType] = ()) -> dict[str, str]:
        renamed = {new: old for old, new in self._wanted.data.rename.items() if old in names}
        sources = {name: name if name in names else renamed.get(name) for name in self._names}
        return {name: source for name, source in sources.items() if source is not None}

    def of_more_rows(self, names: Sequence[str]) -> dict[str, str]:
        return self.of_file(names)

    def reads(self, name: str) -> bool:
        return True

    def of_values(self, name: str, values: list[Any]) -> list[Any]:
        return values

    def of_array(self, column: pa.Array, label_names: Sequence[str]) -> pa.Array:
        return column

    def of_rows(self, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yields requests of batch files as rows, and rows that have the names after data.rename with those before."""
        rename = self._wanted.data.rename
        if not rename and not self._messages:
            yield from rows
            return
        for number, row in rows:
            if isinstance(row, Mapping):
                if self._messages and self._messages not in {*row} - {"messages"} and is_request(row):
                    self._ignored_fields |= ignored_fields(row)
                    row = as_row(number, row, self._messages, self._tools, takes_prompts=self._takes_prompts)
                if rename and isinstance(row, Mapping):
                    old_names = {new: old for old, new in rename.items() if old not in row}
                    row = {old_names.get(name, name): value for name, value in row.items()}
            yield number, row


class RowReader:
    """Reads the rows of files for a model.

    Args:
        task_type: of the model.
        columns: the rows' names for the columns that the model reads, by the task type's.
        kept: further columns to read.
        rules: how the files are read.
        needs_filter: whether a file without the columns of the filter is a problem.
    """

    def __init__(
        self,
        task_type: TaskColumns,
        columns: Mapping[str, str],
        kept: Sequence[str] = (),
        rules: ReadingRules | None = None,
        *,
        needs_filter: bool = False,
    ) -> None:
        self._task_type, self._kept = task_type, list(kept)
        self._rules = rules or ReadingRules()
        self._columns, self._needs_filter = self._rules.columns(columns), needs_filter
        self.ignored_fields: set[str] = set()
        """The fields of requests that would change their answers elsewhere, among the rows read so far."""
        self.warnings: dict[str, list[str]] = {}
        """What training would warn of, by file, after its rows were read to the end."""
        self.unfiltered: dict[str, str] = {}
        """Why no row of a file was filtered, although the training data were."""

    def read(self, file: str) -> Iterator[Rows]:
        """Yields the rows of the file in order.

        Raises UserError for a file that is unreadable, or lacks a column that the model needs or that is kept.
        """
        source = format_of(file, self._rules)
        wanted, kept = self._columns_of(source, None if is_url(file) else os.path.dirname(os.path.abspath(file)))
        reader = _read_lines if source == TEXT_LINES else load_reader(source)
        reading = _FileReading(file, wanted, self._task_type, self._kept)
        yield from reading.in_order(reader(wanted, SPLIT, {SPLIT: [file]}, kept))
        self.warnings[file] = reading.warnings()
        if self._rules.has_filter and (lacking := reading.lacking_filter):
            self.unfiltered[file] = lacking

    def read_mappings(self, rows: Sequence[Any], where: str) -> list[Rows]:
        """Returns rows that are Python mappings, read as those of a file of JSON lines; `where` names them in messages.

        Raises UserError if they lack a column that the model needs.
        """
        wanted, kept = self._columns_of("json")
        reading = _FileReading(where, wanted, self._task_type, self._kept)
        return [*reading.in_order(from_mappings(enumerate(rows, 1), wanted, where, kept))]

    def _columns_of(self, source: str, folder: str | None = None) -> tuple[InputColumns, _KeptColumns]:
        """The columns to read from files of a format, and those that travel along. Paths of images start from the
        folder."""
        data = self._rules.data(source, needs_filter=self._needs_filter)
        beside = tuple(name for name in self._kept if name not in self._columns.values())
        specification = cast(RowSpecification, self._task_type)
        wanted = InputColumns(
            data,
            specification,
            image_folder=folder,
            roles=self._columns,
            beside=beside,
            needs_filter=self._needs_filter,
        )
        return wanted, _KeptColumns(wanted, self._kept, self.ignored_fields)

    def shards(self, file: str, shard_rows: int) -> Iterator[Rows]:
        """Yields the rows of the file in parts of `shard_rows`; the last may have fewer. They stay the same when rows
        are appended to the file."""
        waiting: list[Rows] = []
        for rows in self.read(file):
            waiting.append(rows)
            while sum(len(part.numbers) for part in waiting) >= shard_rows:
                whole = _join(waiting)
                yield _slice(whole, 0, shard_rows)
                waiting = [_slice(whole, shard_rows, len(whole.numbers))]
        if any(part.numbers for part in waiting):
            yield _join(waiting)


def _read_lines(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """A text a line, in the one column that the model needs."""
    assert isinstance(wanted, InputColumns)
    needed = [column.source_name for column in wanted.columns if not wanted.is_optional(column)]
    for file in pinned[split]:
        if len(needed) > 1:
            message = f"holds a text a line, and the model takes {len(needed)} values: give {' and '.join(needed)} as "
            raise UserError.of("data", display_name(file), f"{message}columns of a .csv.")
        where = display_name(file)
        match_columns(wanted, needed, where)
        kept, done = slices.of_file(needed), 0
        with open_text(file, wanted.data) as raw:
            while lines := list(islice(raw, BLOCK_ROWS)):
                texts = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
                rows = pa.RecordBatch.from_pydict({needed[0]: pa.array(texts, pa.binary())})
                numbers = np.arange(done + 1, done + 1 + len(lines))
                done += len(lines)
                yield Block(where, rows, numbers, slices=dict.fromkeys(kept, rows.column(0)), spelt=True)


class _FileReading:
    """The rows of one file in their order, made of the blocks of its reader."""

    def __init__(self, file: str, wanted: InputColumns, task_type: TaskColumns, kept: Sequence[str]) -> None:
        self._where, self._wanted, self._task_type, self._kept = display_name(file), wanted, task_type, kept
        self._filter = parse_filter(wanted.data.filter) if wanted.data.filter else None
        self._unread: dict[int, RowProblem] = {}
        """Problems of rows that are in no block and that are not yielded yet: a reader may read ahead."""
        self._done = 0
        """The number of the last row that was yielded."""
        self._remarks = RowProblems()
        differs = "the sets of rows that the model was trained on are filtered differently"
        self.lacking_filter = "" if self._filter else differs
        """Why no row is filtered."""

    def warnings(self) -> list[str]:
        """What training would warn of in the rows that were read, in words."""
        problems = self._remarks.problems(self._wanted)
        return [f"{problem.where}: {problem.message}" for problem in problems if problem.level == "warning"]

    def in_order(self, blocks: Iterable[Block]) -> Iterator[Rows]:
        """Yields each row once. Raises UserError after the last one for columns that are missing in all of them."""
        column_problems: Sequence[Problem] = ()
        for block in small_blocks(blocks, self._wanted):
            column_problems = block.column_problems
            rows = self._convert(block)
            if rows.numbers:
                yield self._with_unread(rows, rows.numbers[-1])
                self._done = rows.numbers[-1]
        if self._unread:
            nothing: dict[str, ColumnValues] = {name: [] for name in self._kept}
            yield self._with_unread(Rows([], [], [], nothing), math.inf)
        errors = [problem for problem in self._remarks.problems(self._wanted) if problem.level == "error"]
        if column_problems or errors:
            raise UserError([*column_problems, *errors])

    def _convert(self, block: Block) -> Rows:
        """The rows of a block. Collects the problems of other rows, and warnings."""
        converted, problems = convert_block(block, self._wanted)
        numbers = block.numbers.tolist()
        places = {number: place for place, number in enumerate(numbers)}
        errors: list[RowProblem | None] = [None] * len(numbers)

        def add(problem: RowProblem) -> None:
            errors[places[problem.row]] = errors[places[problem.row]] or problem

        for problem in problems:
            if problem.row in places:
                add(problem)
            elif problem.row > self._done:
                self._unread.setdefault(problem.row, problem)
        filtered = self._filtered(converted, block, errors)
        for remark in block.remarks:
            if level_of(remark.check, self._wanted) == "error" and remark.row in places:
                add(remark)
            elif remark.row not in self._unread:
                self._remarks.add(block.where, remark.check, remark.description, [remark.row], remark.value)
        kept = {name: self._kept_values(block.slices.get(name), block, add) for name in self._kept}
        stored = pa.RecordBatch.from_pydict(
            {column.name: to_stored_type(_column(converted, column), column, ()) for column in self._wanted.columns}
        )
        for check, find in ROW_CHECKS.items():
            for reason, mask in find(stored, self._wanted):
                for number in block.numbers[mask].tolist():
                    add(RowProblem(number, check, reason))
        for check, remark_on in ROW_REMARKS.items():
            for reason, mask, example in remark_on(stored, self._wanted):
                self._remarks.add(block.where, check, reason, block.numbers[mask].tolist(), example)
        by_row = zip(*(values.to_pylist() for values in stored.columns), strict=True)
        inputs: list[Values | None] = [None if errors[place] else values for place, values in enumerate(by_row)]
        usable = [place for place, values in enumerate(inputs) if values is not None]
        batch = to_batch(self._task_type, self._wanted.roles, [values for values in inputs if values is not None])
        for role, reason, mask, detail in self._task_type.row_problems_on_request(batch):
            for place in (place for place, has_problem in zip(usable, mask, strict=True) if has_problem):
                add(RowProblem(numbers[place], "", f"{reason} in column {self._wanted.roles[role]!r}", detail))
                inputs[place] = None
        return Rows(numbers, inputs, errors, kept, filtered)

    def _filtered(self, rows: pa.RecordBatch, block: Block, errors: Sequence[RowProblem | None]) -> frozenset[int]:
        if self._filter is None:
            return frozenset()
        # Rows of mappings have all columns, empty if no row has them.
        lacking = [
            name
            for name in self._filter.columns
            if name not in rows.schema.names or (block.spelt and rows.column(name).null_count == rows.num_rows)
        ]
        if lacking:
            if rows.num_rows and not self._wanted.needs_filter:
                self.lacking_filter = f"{block.where} has no {' and '.join(lacking)}, which data.filter reads"
            return frozenset()
        mask = mask_of(self._filter, rows, block.where)
        pairs = zip(block.numbers.tolist(), mask.tolist(), errors, strict=True)
        return frozenset(number for number, is_kept, error in pairs if not is_kept and error is None)

    def _kept_values(self, values: Any, block: Block, add: Callable[[RowProblem], None]) -> ColumnValues:
        """The values of a column that travels along. A row with a damaged one has an error."""
        if values is None:
            return [None] * len(block.numbers)
        if isinstance(values, list):
            return values
        if block.spelt:
            texts, damaged = decode_texts(values)
            column: ColumnValues = texts.to_pylist()
        else:
            column, damaged = _without_damage(values)
        for place in damaged:
            add(RowProblem(int(block.numbers[place]), "encoding", "is not UTF-8 text"))
        return column

    def _with_unread(self, rows: Rows, last: float) -> Rows:
        """The rows, with those up to `last` that are in no block in their places."""
        unread = {number: self._unread.pop(number) for number in [*self._unread] if number <= last}
        if not unread:
            return rows
        places = {number: place for place, number in enumerate(rows.numbers)}
        numbers = sorted([*rows.numbers, *unread])
        taken = [places.get(number) for number in numbers]
        return Rows(
            numbers,
            [None if place is None else rows.inputs[place] for place in taken],
            [
                unread[number] if place is None else rows.errors[place]
                for number, place in zip(numbers, taken, strict=True)
            ],
            {name: _take(column, taken) for name, column in rows.kept.items()},
            rows.filtered,
        )


def _column(rows: pa.RecordBatch, column: StoredColumn) -> pa.Array:
    """The values of an input; nulls for an optional column that the file lacks."""
    if column.source_name in rows.schema.names:
        return rows.column(column.source_name)
    return pa.nulls(rows.num_rows, UNCODED_TYPES[column.form])


def _without_damage(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """The column with null for texts that are not UTF-8, and their places."""

    def is_damaged(values: pa.Array) -> bool:
        try:
            values.validate(full=True)
        except pa.ArrowInvalid:
            return True
        return False

    if not is_damaged(column):
        return column, []
    damaged = [place for place in range(len(column)) if is_damaged(column.slice(place, 1))]
    return _take(column, [None if place in damaged else place for place in range(len(column))]), damaged


def _take(column: ColumnValues, places: Sequence[int | None]) -> ColumnValues:
    """The values at these places, with null for None."""
    if isinstance(column, pa.Array):
        return column.take(pa.array(places, pa.int64()))
    return [None if place is None else column[place] for place in places]


def read_shards(reader: RowReader, wanted: Sequence[WantedShard], shard_rows: int) -> Iterator[tuple[str, Rows]]:
    """Yields the digest and the rows of each wanted shard, file by file.

    Raises UserError if a shard's rows no longer have its digest.
    """
    for file, of_file in groupby(wanted, lambda shard: shard.file):
        by_number = {shard.number: shard for shard in of_file}
        for number, rows in enumerate(reader.shards(file, shard_rows) if by_number else ()):
            if shard := by_number.get(number):
                if digest_inputs(rows) != shard.digest:
                    break
                yield by_number.pop(number).digest, rows
            if not by_number:
                break
        if by_number:
            raise UserError.of("data", display_name(file), "has changed since this run began: start another one.")


def format_of(file: str, rules: ReadingRules) -> str:
    """The format of a file or of a folder of texts, a key of FORMATS or TEXT_LINES. Raises UserError for a file of
    another format."""
    found = rules.folder_source if os.path.isdir(file) else rules.format_of(name_of(file))
    if found is None:
        known = ", ".join(rules.suffixes)
        raise UserError.of(
            "data",
            display_name(file),
            f"has an unknown format: choose from {known}; or name its format by data.source.",
        )
    return found


def _join(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    numbers, inputs, errors = [], [], []
    for part in parts:
        numbers += part.numbers
        inputs += part.inputs
        errors += part.errors
    kept = {name: _concat([part.kept[name] for part in parts]) for name in parts[0].kept}
    return Rows(numbers, inputs, errors, kept, frozenset[int]().union(*(part.filtered for part in parts)))


def _concat(columns: Sequence[ColumnValues]) -> ColumnValues:
    if all(isinstance(column, pa.Array) for column in columns):
        return pa.concat_arrays(columns)
    return [value for column in columns for value in column]


def _slice(rows: Rows, start: int, stop: int) -> Rows:
    kept = {name: column[start:stop] for name, column in rows.kept.items()}
    return Rows(rows.numbers[start:stop], rows.inputs[start:stop], rows.errors[start:stop], kept, rows.filtered)


def digest_inputs(rows: Rows) -> str:
    """The digest of the model's inputs in the usable rows, hex: the same for equal values, whatever file they are
    from."""
    digest = hashlib.sha256()
    for values in rows.usable():
        digest.update(json.dumps(values, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def digest_all(rows: Rows) -> str:
    """The digest of everything in these rows, hex: their numbers, inputs, errors and columns that travel along."""
    digest = hashlib.sha256(digest_inputs(rows).encode())
    errors = [None if error is None else str(error) for error in rows.errors]
    digest.update(json.dumps([rows.numbers, errors]).encode())
    for name, column in rows.kept.items():
        values = column.to_pylist() if isinstance(column, pa.Array) else column
        digest.update(json.dumps([name, values], default=str).encode())
    return digest.hexdigest()
