"""Served rows with their predictions, in files that `finetune drift` and `finetune evaluate` read.

    FOLDER/served-00000001.jsonl    rows as they were sent, with the columns below; the oldest file goes when there are
                                    more rows than may be kept

A row of /predict has its own columns. A conversation has its messages and tools, and a continued text its text, in the
columns that the model reads; tools that it does not read are `served_tools`. Beside them: `prediction` (an object, or
the text of an answer), `served_by` (`NAME/VERSION`), `served_at` (ISO 8601, UTC), and `served_prompt` if the request
selected a prompt by `input_type`: the column of the training data that has it. A column of the row with one of these
names is kept in its place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.home import find_replaceable
from training.data.batch_requests import plain_message

FILE_ROWS = 1_000
"""Rows of a file, at most a tenth of all that are kept."""
_NAME = re.compile(r"served-(\d+)\.jsonl")


class RecordedRows:
    """The rows that a server records.

    Args:
        folder: created if missing.
        name: of the served model.
        share: of the rows, drawn at random.
        most_rows: of all files together.
        on_failure: called with the number of rows that could not be written, and the reason: answers go on.
        columns: the names of the columns that the model reads, by the task type's.

    Raises OSError, also for a folder in which another user could put a link in the place of a file.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        share: float,
        most_rows: int,
        on_failure: Callable[[int, str], None],
        columns: Mapping[str, str],
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if foreign := find_replaceable(folder.absolute() / "file"):
            raise OSError(errno.EPERM, f"{foreign} belongs to another user or may be written by others")
        self._folder, self._name, self._share = folder, name, share
        self._file_rows = max(1, min(FILE_ROWS, most_rows // 10))
        self._most_files = max(1, most_rows // self._file_rows)
        self._on_failure = on_failure
        conversation = columns.get("messages") or columns.get("prompt") or "messages"
        text = columns.get("text") or columns.get("prompt") or "text"
        self._columns = {"messages": conversation, "tools": columns.get("tools", "served_tools"), "text": text}
        self._numbers = sorted(int(found[1]) for file in folder.iterdir() if (found := _NAME.fullmatch(file.name)))
        self._rows = self._file_rows  # a server continues no file of another one
        self._draw = random.Random()

    def add_predictions(
        self,
        rows: Sequence[Mapping[str, Any]],
        records: Sequence[Mapping[str, Any] | None],
        version: str,
        prompt: str | None = None,
    ) -> None:
        """Adds some of the rows that were predicted. `prompt`: the column whose prompt the request selected."""
        beside = {} if prompt is None else {"served_prompt": prompt}
        predicted = zip(rows, records, strict=True)
        self._add([{"prediction": record, **beside, **row} for row, record in predicted if record], version)

    def add_answer(self, fields: Mapping[str, Any], answer: str, version: str) -> None:
        """Adds a conversation or a text with its answer, or not. `fields`: of training.programs.serve.Generate."""
        row = {column: fields[name] for name, column in self._columns.items() if fields.get(name) is not None}
        if fields.get("messages") is not None:
            row[self._columns["messages"]] = [*map(plain_message, fields["messages"])]
        self._add([{**row, "prediction": answer}], version)

    def _add(self, rows: Sequence[Mapping[str, Any]], version: str) -> None:
        drawn = [row for row in rows if self._draw.random() < self._share]
        beside = {"served_by": f"{self._name}/{version}", "served_at": datetime.now(UTC).isoformat(timespec="seconds")}
        while drawn:
            try:
                if self._rows >= self._file_rows:
                    self._begin_file()
                part = drawn[: self._file_rows - self._rows]
                lines = "".join(json.dumps({**beside, **row}, ensure_ascii=False) + "\n" for row in part)
                self._append(lines.encode("utf-8", "surrogatepass"))
            except OSError as error:
                return self._on_failure(len(drawn), error.strerror or str(error))
            self._rows += len(part)
            drawn = drawn[len(part) :]

    def _begin_file(self) -> None:
        number = max(self._numbers, default=0) + 1
        while not self._create(number):
            number += 1
        self._numbers.append(number)
        self._rows = 0
        for number in self._numbers[: -self._most_files]:
            with contextlib.suppress(OSError):
                self._file(number).unlink()
        self._numbers = self._numbers[-self._most_files :]

    def _create(self, number: int) -> bool:
        """Creates a file; False if there is one, such as another server's, or a link."""
        with contextlib.suppress(FileExistsError):
            os.close(_private(str(self._file(number)), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            return True
        return False

    def _append(self, lines: bytes) -> None:
        """Appends whole lines, or nothing: a full disk may take a part of them."""
        with open(self._file(self._numbers[-1]), "ab", buffering=0, opener=_private) as file:
            size = file.seek(0, os.SEEK_END)
            written = 0
            try:
                while written < len(lines):
                    written += file.write(lines[written:]) or 0
            except OSError:
                file.truncate(size)
                raise

    def _file(self, number: int) -> Path:
        return self._folder / f"served-{number:08d}.jsonl"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
