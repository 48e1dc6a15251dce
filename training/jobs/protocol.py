"""What crosses the process boundary: job.json in, events.jsonl while it runs, outcome.json at the very end.

A job is a directory. Whoever wants something done writes job.json; a program (`python -m training.programs.fit JOB`)
reads it, appends events, fills output/ and writes outcome.json last. No outcome means that it was killed.

    job.json        what to run: program, settings, inputs
    events.jsonl    append-only: progress, metrics with their step and time, warnings, notes
    outcome.json    finished, with the digest of every file under output/; or why it failed
    checkpoints/    the program's own, kept from one try to the next
    output/         the result; emptied when a program starts
    logs/           what the launcher and rank 0 printed, one file a try; what each other rank printed
    lock            held by the job's supervisor and by everything that it started
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from training.problems import Problem

JOB = "job.json"
EVENTS = "events.jsonl"
OUTCOME = "outcome.json"
CHECKPOINTS = "checkpoints"
OUTPUT = "output"
LOGS = "logs"

FailureKind = Literal["user_error", "out_of_memory", "interrupted", "lost_rank", "stalled", "not_started", "internal"]


class Settings(BaseModel):
    """The base of a program's settings in job.json: frozen and closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Job(BaseModel):
    """One run of a training-side program: everything that it needs to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str
    """The module that is run, such as `training.programs.fit`."""
    key: str
    """Names the work: the same key is the same work, so a later try continues an earlier one."""
    settings: dict[str, Any] = {}
    """The program's Settings as plain JSON values."""
    inputs: dict[str, str] = {}
    """Absolute paths of what it reads."""

    def write(self, job_dir: Path) -> None:
        """Make the job's directory if need be and write its job.json."""
        job_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(job_dir / JOB, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, job_dir: Path) -> Job:
        """The job of this directory. Raises FileNotFoundError, or pydantic's ValidationError."""
        return cls.model_validate_json((job_dir / JOB).read_bytes())


class Failure(BaseModel):
    """Why a job did not finish."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FailureKind
    """What may help: mend (user_error), less at once (out_of_memory), try again (the others but internal)."""
    message: str
    """One or two sentences for the user."""
    traceback: str = ""
    """Of the rank that failed; empty where there is none, and for the user's own mistakes."""
    rank: int = 0
    """The process that failed, 0 to world size - 1."""
    problems: tuple[Problem, ...] = ()
    """All of the user's mistakes, for user_error."""


class Outcome(BaseModel):
    """How a job ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: Literal["finished", "failed"]
    failure: Failure | None = None
    figures: dict[str, Any] = {}
    """What the program found worth saying, such as the number of steps."""
    files: dict[str, str] = {}
    """SHA-256 of every file under output/, by its path relative to output/ with forward slashes."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that `path` is always whole: the old file or the new one, also after a power cut.

    Raises OSError (a full disk, say); then `path` is as before and nothing is left beside it.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Have the disk hold what was written to this file, or this directory's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The file's SHA-256 as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rank() -> int:
    """Which of the job's processes this is, as its launcher numbered them; 0 when there is but one."""
    return int(os.environ.get("RANK", "0"))


class Events:
    """Appends to a job's events.jsonl: JSON lines, each with `time` (Unix seconds) and `kind`.

    A line goes out in one system call, so a reader sees it whole, lines of several processes never mix, and a
    kill can tear at most the last one; that one is closed with a newline when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event of any kind; the fields are plain JSON values."""
        line = json.dumps({"time": time.time(), "kind": kind, **fields})
        os.write(self._file, line.encode() + b"\n")

    def progress(self, **fields: Any) -> None:
        """Say how far the work is; also the sign of life that a stalled job fails to give."""
        self.write("progress", **fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record figures of one step, unless these names were recorded at that step before.

        A job that goes on from a checkpoint repeats the steps after it, exactly; the curve keeps one point of
        each.
        """
        point = step, frozenset(values)
        if point not in self._recorded:
            self._recorded.add(point)
            self.write("metrics", step=step, values={name: float(value) for name, value in values.items()})

    def warning(self, message: str) -> None:
        """Say what the user should know although the work goes on."""
        self.write("warning", message=message)

    def note(self, message: str) -> None:
        """Say what happened, for the log."""
        self.write("note", message=message)

    @cached_property
    def _recorded(self) -> set[tuple[int, frozenset[str]]]:
        """The points of earlier tries. Only the process that writes figures reads them."""
        earlier = read_events(self._path, 0, ["metrics"])[0]
        return {(event["step"], frozenset(event["values"])) for event in earlier if _is_point(event)}

    def close(self) -> None:
        """Close the file; nothing can be written any more."""
        os.close(self._file)


def read_events(path: Path, offset: int, kinds: Collection[str] = ()) -> tuple[list[dict[str, Any]], int]:
    """The events written at or after byte `offset`, and the offset to go on from; given `kinds`, only events of these.

    Lines of other kinds are not parsed: a long training writes a line of progress each second. A last line without its
    newline is left for the next call; a line that is no event (torn by a kill) is passed over. A file that is not
    there has no events.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    whole = content[: content.rfind(b"\n") + 1]
    marks = [f'"kind": {json.dumps(kind)}'.encode() for kind in kinds]
    lines = (line for line in whole.splitlines() if not marks or any(mark in line for mark in marks))
    events = [event for line in lines if (event := _event(line)) is not None]
    return [event for event in events if not kinds or event["kind"] in kinds], offset + len(whole)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event and "time" in event else None


def _is_point(event: Mapping[str, Any]) -> bool:
    return "step" in event and isinstance(event.get("values"), dict)


def last_lines(path: Path, count: int, longest_bytes: int = 65_536) -> list[str]:
    """The last lines of a text file, read from its end: a log may be large. Of more than `longest_bytes`, the end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - longest_bytes))
        return file.read().decode(errors="replace").splitlines()[-count:]


def read_outcome(job_dir: Path) -> Outcome | None:
    """How the job ended as its programs told it, or None when they told nothing.

    When several processes failed, the first is the cause and the others are its consequences; one that only says
    that it lost another, or was asked to stop, is a consequence even when it speaks first.
    """
    told = sorted(job_dir.glob("outcome*.json"), key=lambda path: path.stat().st_mtime_ns)
    outcomes = []
    for path in told:
        try:
            outcomes.append(Outcome.model_validate_json(path.read_bytes()))
        except ValidationError:
            continue
    return min(outcomes, key=_telling, default=None)


def _telling(outcome: Outcome) -> int:
    """How little an outcome says of the cause; equal ones stay in the order of their times."""
    if outcome.failure is None:
        return 0
    return {"interrupted": 2, "lost_rank": 3}.get(outcome.failure.kind, 1)


def finished_output(job_dir: Path) -> Outcome | None:
    """The outcome of a job that finished and whose every output file is there, byte for byte; else None."""
    outcome = read_outcome(job_dir)
    if outcome is None or outcome.state != "finished":
        return None
    output = job_dir / OUTPUT
    whole = all((output / name).is_file() and sha256(output / name) == digest for name, digest in outcome.files.items())
    return outcome if whole else None


def crash_file(job_dir: Path, of_rank: int) -> Path:
    """Where the tracebacks of a rank's crash in native code are written; empty when there was none."""
    return job_dir / LOGS / f"crash.rank{of_rank}.txt"


def crash_files(job_dir: Path) -> list[Path]:
    """Those of all ranks that have begun."""
    return sorted((job_dir / LOGS).glob("crash.rank*.txt"))
