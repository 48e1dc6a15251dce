"""The first reading of the rows to predict: shards, errors, types of columns, and duplicate ids.

Rows are read twice: here, before anything is predicted, and again when their shard is predicted. Nothing is copied, and
memory does not grow with the rows. If ids are checked, 20 bytes a row are in temporary files.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.cache.input_files import CHANGED
from tasks.registry.model_spec import ModelSpec
from tasks.reports.formatting import format_count
from training import task_types
from training.data.arrow_columns import as_json
from training.data.batch_requests import ID as OPENAI_ID
from training.data.batch_requests import conversation_column
from training.data.file_systems import display_name, is_url, local_path
from training.data.listing import Listing, SourceFile, describe_unread, list_texts
from training.data.prediction_files import GENERATED, STAMPS, KeptColumns, predicted_names
from training.data.prediction_rows import RowReader, Rows, digest_all, digest_inputs, format_of
from training.problems import Problem, UserError
from training.recipe import BatchPrediction
from training.recipe.batch_prediction import SHARD_ROWS, SHARD_TEXTS
from training.recipe.credentials import describe_secret
from training.recipe.reading_rules import ReadingRules
from training.task_types.task_type import TaskType

Progress = Callable[[int, int], None]
"""Called with the number of files that were read and that of all files."""
ID = np.dtype([("hash", "<u8"), ("file", "<i4"), ("row", "<i8")])
PARTS = 64
"""The number of files with the ids' hashes: 100 million ids take 32 MB of memory at once."""
MAX_REASONS = MAX_NAMES = 10
"""The largest number of reasons, and of files, in a message."""


@dataclass(frozen=True)
class Shard:
    """Rows of a file that are predicted and stored together."""

    file: str
    number: int
    """Its place among the file's shards, from 0."""
    rows: int
    usable: int
    """Rows without an error."""
    digest: str
    """Of the model's inputs in its usable rows."""
    content: str
    """Digest of everything that is written of its rows, except predictions."""


@dataclass
class Scan:
    """The rows of all files."""

    shards: list[Shard] = field(default_factory=list)
    """In the order of the files and their rows."""
    kept: KeptColumns = field(default_factory=KeptColumns)
    errors: Counter[str] = field(default_factory=Counter)
    """The number of unusable rows by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first row with each reason."""
    without_rows: list[str] = field(default_factory=list)
    """The files that have no rows."""
    unusable: dict[str, str] = field(default_factory=dict)
    """The first error of each file in which no row can be used, unless its rows were read and are only empty."""
    remarks: list[str] = field(default_factory=list)
    """What training would warn of."""
    unfiltered: list[str] = field(default_factory=list)
    """Why the rows of files are not filtered as the training data were."""

    @property
    def rows(self) -> int:
        """All rows, usable or not."""
        return sum(shard.rows for shard in self.shards)

    @property
    def files(self) -> int:
        """The number of files with rows."""
        return len({shard.file for shard in self.shards})

    def warnings(self) -> list[str]:
        """What training would warn of, and the files without rows."""
        if not self.without_rows:
            return self.remarks
        files = format_count(len(self.without_rows), "file")
        return [*self.remarks, f"{files} without rows: {_list_names(self.without_rows)}"]


def list_files(
    inputs: Sequence[str],
    output: str | None = None,
    *,
    field: str = "input",
    rules: ReadingRules,
    remarks: list[str] | None = None,
) -> list[SourceFile]:
    """The files of paths, folders, globs and URLs, each once; a folder of texts is one. Raises UserError with the
    problems of all of them.

    Args:
        inputs: The paths.
        output: The place of the run's predictions: a file in it is a problem.
        field: The name of the parameter with the paths, for messages.
        rules: How the files are read: they know its formats.
        remarks: Gets a sentence on each folder with folders of rows, which are not read; predictions are none.
    """
    listing, problems, found = Listing(), list[Problem](), dict[str, SourceFile]()
    if output is not None and (message := describe_secret(output, "parameters of runs")):
        problems.append(Problem(kind="data", where="output", message=message))
    for number, path in enumerate(inputs):
        files, of_path = _list_path(path, f"{field}[{number}]", listing, output, rules)
        problems += of_path
        found |= {file.file: file for file in files}
        if remarks is not None and files and not any(os.path.isdir(file.file) for file in files):
            remarks += _remark_unread(path, listing, output, rules)
    if problems:
        raise UserError(problems)
    rules.require_used(format_of(file, rules) for file in found)
    return list(found.values())


def _list_path(
    path: str, where: str, listing: Listing, output: str | None, rules: ReadingRules
) -> tuple[list[SourceFile], list[Problem]]:
    """The files of one path, and what is wrong with it and them."""
    if message := describe_secret(path, "parameters of runs"):
        return [], [Problem(kind="data", where=where, message=message)]
    try:
        folder, files = listing.find_files(path, rules.suffixes)
        texts = rules.folder_source if os.path.isdir(os.path.expanduser(local_path(path))) else None
        if texts and all(format_of(file.file, rules) == texts for file in files):
            files = [SourceFile(folder)] if list_texts(folder)[0] else []
    except UserError as error:
        return [], [
            problem.model_copy(update={"where": where}) if problem.where == "data.path" else problem
            for problem in error.problems
        ]
    if not files:
        message = f"{display_name(path)} has no file of rows: give files with one of the suffixes "
        return [], [Problem(kind="data", where=where, message=f"{message}{', '.join(rules.suffixes)}.")]
    problems = list[Problem]()
    for file in files:
        try:
            format_of(file.file, rules)
        except UserError as error:
            problems += [
                problem.model_copy(update={"where": where, "message": f"{problem.where} {problem.message}"})
                for problem in error.problems
            ]
        if output is not None and _is_inside(file.file, output):
            message = f"{display_name(file.file)} is in the output: name another output, or move the file."
            problems.append(Problem(kind="data", where=where, message=message))
    return files, problems


def _remark_unread(path: str, listing: Listing, output: str | None, rules: ReadingRules) -> list[str]:
    """A sentence on the folders of rows in a folder, which are not read, apart from the output; none without any."""
    own = output if output is None or is_url(output) else str(Path(output).expanduser().absolute())
    base = local_path(path).rstrip("/")
    inner = [
        name
        for name in listing.unread_folders(path, rules.suffixes)
        if own is None or not _is_inside(own, f"{base}/{name}")
    ]
    return [describe_unread(path, inner)] if inner else []


def _is_inside(file: str, output: str) -> bool:
    if is_url(output):
        return file == output or file.startswith(output.rstrip("/") + "/")
    place = Path(output).expanduser().absolute()
    return not is_url(file) and (Path(file) == place or place in Path(file).parents)


def scan_rows(
    files: Sequence[SourceFile],
    reader: RowReader,
    shard_rows: int,
    id_column: str | None,
    progress: Progress,
    on_shard: Callable[[Shard, Rows], None] = lambda shard, rows: None,
    *,
    field: str = "input",
) -> Scan:
    """Reads all rows; calls `on_shard` with each shard in order. `field` is the parameter with the paths, for messages.

    Raises UserError with the problems of all files, if there are no rows, and for duplicate ids.
    """
    scan, problems, ids = Scan(), list[Problem](), None if id_column is None else UniqueIds(id_column)
    for done, file in enumerate(files, 1):
        seen = _File(file.file)
        try:
            for number, rows in enumerate(reader.shards(file.file, shard_rows)):
                _add(scan, file.file, number, rows)
                seen.add(rows)
                on_shard(scan.shards[-1], rows)
                if ids is not None:
                    ids.add(file.file, rows)
            seen.end(scan, reader)
        except UserError as error:
            problems += error.problems
        progress(done, len(files))
    problems += [] if ids is None else ids.problems()
    if not problems and not scan.shards:
        problems.append(Problem(kind="data", where=field, message="there are no rows: give files that have some."))
    if problems:
        raise UserError(problems)
    return scan


class _File:
    """What a scan finds in one file."""

    def __init__(self, file: str) -> None:
        self._file, self._rows, self._has_usable, self._first_error = file, 0, False, ""

    def add(self, rows: Rows) -> None:
        """Adds the next rows."""
        self._rows += len(rows.numbers)
        for number, error in zip(rows.numbers, rows.errors, strict=True):
            self._has_usable |= error is None or error.check == "blank_text"
            if error is not None and not self._first_error:
                self._first_error = f"row {number} {error}"

    def end(self, scan: Scan, reader: RowReader) -> None:
        """Adds the file to the scan, after all of its rows."""
        if not self._rows:
            scan.without_rows.append(display_name(self._file))
        elif not self._has_usable:
            scan.unusable[display_name(self._file)] = self._first_error
        scan.remarks += reader.warnings.get(self._file, [])
        scan.unfiltered += [reader.unfiltered[self._file]] if self._file in reader.unfiltered else []


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _add(scan: Scan, file: str, number: int, rows: Rows) -> None:
    usable = sum(error is None for error in rows.errors)
    scan.shards.append(Shard(file, number, len(rows.numbers), usable, digest_inputs(rows), digest_all(rows)))
    scan.kept = scan.kept.seen(rows)
    for row, error in zip(rows.numbers, rows.errors, strict=True):
        if error is not None:
            scan.errors[error.description] += 1
            scan.examples.setdefault(error.description, f"{display_name(file)} row {row}{error.value}")


def require_few_errors(scan: Scan, max_error_rate: float) -> None:
    """Raises UserError, with the counts by reason, if more rows than this share are unusable; and for files in which no
    row can be used, unless all rows may be unusable."""
    if max_error_rate < 1:
        require_usable_files(scan.unusable, "input", " Or allow all rows to be unusable.")
    count = scan.errors.total()
    if count <= max_error_rate * scan.rows:
        return
    most = scan.errors.most_common(MAX_REASONS)
    reasons = [f"{reason}: {format_count(number, 'row')} (such as {scan.examples[reason]})" for reason, number in most]
    more = len(scan.errors) - len(reasons)
    listed = "; ".join([*reasons, *([f"{more} further reasons"] if more else [])])
    message = (
        f"{count:,} of {scan.rows:,} rows cannot be used, which is more than {max_error_rate:g} of them: {listed}. "
        "Correct them, or allow a larger share."
    )
    raise UserError.of("data", "max_error_rate", message)


def require_usable_files(unusable: Mapping[str, str], where: str, other_way: str = "") -> None:
    """Raises UserError if there are files in which no row can be used; `unusable` has the first error of each."""
    if unusable:
        named = _list_names([f"{file} ({error})" for file, error in unusable.items()])
        files = format_count(len(unusable), "file")
        message = f"no row can be used of {files}: {named}. Correct or remove them.{other_way}"
        raise UserError.of("data", where, message)


class UniqueIds:
    """The ids of all rows, by a hash of 8 bytes: two of a million different ids are taken for one with a chance of one
    in 37 million. They are in temporary files, each with the same remainder of the hash, and compared file by file."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._parts = [TemporaryFile() for _ in range(PARTS)]  # noqa: SIM115 (closed by `problems`)
        self._files: list[str] = []
        self._missing = Counter[str]()
        self._first_missing: dict[str, int] = {}

    def add(self, file: str, rows: Rows) -> None:
        """Adds the ids of some rows. A row with an error may have none."""
        if file not in self._files[-1:]:
            self._files.append(file)
        ids = rows.kept[self._column]
        values = ids.to_pylist() if isinstance(ids, pa.Array) else ids
        digests, numbers = [], []
        for number, value, error in zip(rows.numbers, values, rows.errors, strict=True):
            if value is None or value == "":
                if error is None:
                    self._missing[file] += 1
                    self._first_missing.setdefault(file, number)
                continue
            text = value if isinstance(value, str) else as_json(value)
            digests.append(hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest())
            numbers.append(number)
        found = np.empty(len(numbers), ID)
        found["hash"] = np.frombuffer(b"".join(digests), "<u8")
        found["file"], found["row"] = len(self._files) - 1, numbers
        parts = found["hash"] % PARTS
        for part in np.unique(parts):
            self._parts[part].write(found[parts == part].tobytes())

    def problems(self) -> list[Problem]:
        """A problem for each file with rows without an id, and one for all duplicates."""
        found = [
            Problem(
                kind="data",
                where=f"{display_name(file)} row {self._first_missing[file]}",
                message=f"has no value in column {self._column!r} ({count:,} rows like this): give each row an id.",
            )
            for file, count in self._missing.items()
        ]
        repeats, firsts = 0, []
        for part in self._parts:
            part.seek(0)
            ids = np.frombuffer(part.read(), ID)
            part.close()
            ids = ids[np.argsort(ids["hash"], kind="stable")]
            again = np.flatnonzero(ids["hash"][1:] == ids["hash"][:-1]) + 1
            repeats += len(again)
            if len(again):
                later = min(ids[again], key=_place)
                firsts.append((later, ids[np.searchsorted(ids["hash"], later["hash"])]))
        if firsts:
            later, earlier = min(firsts, key=lambda pair: _place(pair[0]))
            message = (
                f"has the id of {self._name(earlier)} in column {self._column!r} ({repeats:,} rows like this): give "
            )
            message += "each row its own" + ("." if self._column == OPENAI_ID else ", or leave out the check of ids.")
            found.append(Problem(kind="data", where=self._name(later), message=message))
        return found

    def _name(self, row: Any) -> str:
        return f"{display_name(self._files[row['file']])} row {row['row']}"


def _place(row: Any) -> tuple[int, int]:
    """The place of a row among all rows."""
    return int(row["file"]), int(row["row"])


class RowFiles:
    """Reads files for a prediction by a model. Raises UserError if they do not fit each other."""

    def __init__(self, prediction: BatchPrediction, model: ModelSpec) -> None:
        task_type = task_types.load(**model.task)
        kept = prediction.keep if prediction.keep is not None else [*model.columns.values()]
        if prediction.format == "openai":
            _require_assistant(prediction, model, task_type)
            kept = [OPENAI_ID]
        self.id = OPENAI_ID if prediction.format == "openai" else prediction.id
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
            raise UserError.of("data", display_name(self._file), CHANGED)
        return rows


def _require_assistant(prediction: BatchPrediction, model: ModelSpec, task_type: TaskType) -> None:
    """Raises UserError if the model does not answer conversations."""
    forms = {role: task_type.columns[role].form for role in model.columns}
    if conversation_column(model.columns, forms) is None or GENERATED not in task_type.record_types([]):
        message = f"'openai' is for assistants, which answer conversations, and {model.name} is a model for "
        message += f"{model.task['task']} of {', '.join(model.columns)}: choose from parquet, csv, jsonl."
        raise UserError.of("option", "format", message)
    if prediction.keep is not None or prediction.id not in (None, OPENAI_ID):
        message = f"'openai' has the column {OPENAI_ID} alone: leave out keep and id."
        raise UserError.of("option", "format", message)
