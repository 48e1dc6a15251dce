"""The files of a job, the protocol between the flow's process and a program.

A job is a directory. The flow writes job.json; a program (`python -m training.programs.fit JOB`) reads it, appends
events, fills output/ and writes outcome.json last. A job without outcome was killed.

    job.json        program, settings, inputs
    events.jsonl    append-only: progress, metrics with their step and time, warnings, notes
    outcome.json    finished, with the digest of every file in output/; or the reason of the failure
    checkpoints/    the program's, kept from one try to the next
    inputs/         links to the files that the program may read
    output/         the result; emptied when a program starts
    logs/           output of the launcher and rank 0, a file for each try; output of each other rank
    lock            held by the job's supervisor and all its descendants

A program may start before its job is known, in a folder of its own. It imports the modules of imports.json there, and
waits for the link `job` to its job's directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.problems import Problem

JOB = "job.json"
EVENTS = "events.jsonl"
OUTCOME = "outcome.json"
OUTCOMES = "outcome*.json"
"""A file for each process that reported one."""
CHECKPOINTS = "checkpoints"
OUTPUT = "output"
LOGS = "logs"
INPUTS = "inputs"
IMPORTS = "imports.json"
PROGRESS_EVERY_S = 1.0
"""How often programs report progress, at most."""

FailureKind = Literal["user_error", "out_of_memory", "interrupted", "lost_rank", "stalled", "not_started", "internal"]


class Settings(BaseModel):
    """The base of a program's settings in job.json: frozen and closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Result(BaseModel):
    """The base of a program's result, which its outcome and its artifact's manifest hold as JSON: frozen and closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class TaskSettings(Settings):
    """With the task type, which most programs need."""

    task: str
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class NotInKey:
    """Marks a field of a program's settings, or of a section of the recipe in them, that cannot change the output."""

    reason: str
    keys: frozenset[str] = frozenset()
    """Of a field with a mapping: only these of its keys are marked."""


def values_in_key(settings: BaseModel) -> dict[str, Any]:
    """The settings as plain JSON values, without the fields that are marked NotInKey. Raises TypeError for a mark
    without a reason."""
    values = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value, marks = getattr(settings, name), [mark for mark in field.metadata if isinstance(mark, NotInKey)]
        if any(not mark.reason.strip() for mark in marks):
            raise TypeError(f"{type(settings).__name__}.{name} is NotInKey without a reason")
        if any(not mark.keys for mark in marks):
            del values[name]
        elif marks:
            values[name] = {
                key: one for key, one in values[name].items() if all(key not in mark.keys for mark in marks)
            }
        elif isinstance(value, BaseModel):
            values[name] = values_in_key(value)
    return values


class Job(BaseModel):
    """A program with its settings and inputs."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    program: str
    """The module to run, such as `training.programs.fit`."""
    key: str
    """Two tries with the same key do the same work, so the later one continues the earlier one."""
    settings: dict[str, Any] = {}
    """The program's Settings as plain JSON values."""
    inputs: dict[str, str] = {}
    """Absolute paths by name."""

    def write(self, job_dir: Path) -> None:
        """Writes job.json, and creates the directory if it is missing."""
        job_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(job_dir / JOB, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, job_dir: Path) -> Job:
        """The job in a directory. Raises FileNotFoundError or pydantic's ValidationError."""
        return cls.model_validate_json((job_dir / JOB).read_bytes())


class Imports(BaseModel):
    """The modules that a program imports while it waits for its job."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    modules: list[str]
    hidden: list[str] = []
    """Optional packages without which they are imported: see `hide_package`."""
    needed: list[str] = []
    """Optional packages with which they are imported."""


class Failure(BaseModel):
    """The reason why a job did not finish."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: FailureKind
    """The remedy: a new recipe (user_error), smaller batches (out_of_memory), another try (others, not internal)."""
    message: str
    """One or two sentences for the user."""
    traceback: str = ""
    """Of the rank that failed; empty for user_error."""
    rank: int = 0
    """The process that failed, from 0."""
    problems: tuple[Problem, ...] = ()
    """All mistakes of the user, for user_error."""
    proven: bool = True
    """For out_of_memory: False if Linux killed a process on this machine, which may have been another program's."""


class Outcome(BaseModel):
    """The end of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    state: Literal["finished", "failed"]
    failure: Failure | None = None
    result: Any = None
    """The program's result: its Result, or here, in the flow's process, the JSON values of it."""
    files: dict[str, str] = {}
    """SHA-256 of every file in output/, by its path relative to output/ with forward slashes."""


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is always complete: the old one or the new one, even after a power cut. Users outside of its
    group cannot write to it, whatever the umask is.

    Raises OSError, for example if the disk is full; then the old file is unchanged and no other file is left.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(aside, "xb", opener=partial(os.open, mode=0o664)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def without_nan(value: Any) -> Any:
    """Returns JSON values with null for numbers that JSON cannot hold: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(inside) for name, inside in value.items()}
    return [without_nan(inside) for inside in value] if isinstance(value, list | tuple) else value


def fsync(path: Path) -> None:
    """Syncs a file, or a directory's list of names, to the disk."""
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
    """The number of this process in its job, as the launcher sets it; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


class Started(TypedDict):
    """A process of the program has begun its work."""

    kind: Literal["started"]
    time: float
    """Unix seconds, in all events of a job's file."""
    program: str
    rank: int
    pid: int


class Progress(TypedDict):
    """A part of the work is done."""

    kind: Literal["progress"]
    time: NotRequired[float]
    done: NotRequired[int]
    total: NotRequired[int]
    unit: NotRequired[str]
    """Of both numbers; without it, steps of a training or rows."""
    phase: NotRequired[str]
    split: NotRequired[str]
    epoch: NotRequired[float]
    loss: NotRequired[float | None]
    rows_per_second: NotRequired[float]


class Message(TypedDict):
    """A problem that does not end the job, an occurrence for the log, or the reason for which the job waits."""

    kind: Literal["warning", "note", "waiting"]
    time: NotRequired[float]
    message: str


class Points(TypedDict):
    """Points of curves: metrics, or rates."""

    kind: Literal["metrics", "speed"]
    time: float
    step: int
    values: dict[str, float]


class Saved(TypedDict):
    """A checkpoint is complete."""

    kind: Literal["checkpoint"]
    time: float
    step: int
    seconds: float
    """From its beginning until it is on the disk."""
    paused: float
    """Those in which training waited: for the checkpoint before, for the removal of older ones, and for the files."""


class OfProgram(TypedDict):
    """An event of one program alone, with fields of its own: the estimate and the strategy of a training, and those of
    predicted shards."""

    kind: Literal["estimate", "strategy", "shard", "predicted"]
    time: float


Event = Started | Progress | Message | Points | Saved | OfProgram


class Events:
    """Appends events to a job's events.jsonl, each as a line of JSON.

    Each line is written by one system call, so lines of several processes never mix, and a kill can cut only the last
    one. The next writer ends a cut line with a newline.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Appends an event; the fields are plain JSON values."""
        line = json.dumps({"time": time.time(), "kind": kind, **fields})
        os.write(self._file, line.encode() + b"\n")

    def progress(self, **fields: Any) -> None:
        """Reports progress. A job without progress for some time counts as stalled."""
        self.write("progress", **fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records figures of a step, without those that were recorded for that step before."""
        if new := self._add_points("metrics", step, values):
            self.write("metrics", step=step, values=new)

    def speed(self, step: int, values: Mapping[str, float], amounts: Mapping[str, float]) -> None:
        """Records rates of the steps since the last report, without those that were recorded for that step before, and
        the amounts that they are made of, which also count for repeated steps."""
        self.write("speed", step=step, values=self._add_points("speed", step, values), **amounts)

    def warning(self, message: str) -> None:
        """Reports a problem that does not end the job."""
        self.write("warning", message=message)

    def note(self, message: str) -> None:
        """Reports an occurrence, for the log."""
        self.write("note", message=message)

    def _add_points(self, kind: str, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The values without points that the file has: a job that resumes from a checkpoint repeats the steps after it,
        and an evaluation has the epoch of the loss of its step."""
        new = {name: float(value) for name, value in values.items() if (kind, step, name) not in self._recorded}
        self._recorded.update((kind, step, name) for name in new)
        return new

    @cached_property
    def _recorded(self) -> set[tuple[str, int, str]]:
        """Kind, step and name of each point of earlier tries, read on first use: most processes record none."""
        events = read_events(self._path, 0, ["metrics", "speed"])[0]
        return {(event["kind"], event["step"], name) for event in events for name in event["values"]}


def read_events(path: Path, offset: int, kinds: Collection[str] = ()) -> tuple[list[Any], int]:
    """The events from byte `offset` on, and the offset for the next call; with `kinds`, only events of these kinds.

    Lines of other kinds are not parsed: a long training writes a line of progress each second. A last line without a
    newline is left for the next call. A line that a kill has cut is skipped. A missing file has no events.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    complete = content[: content.rfind(b"\n") + 1]
    marks = [f'"kind": {json.dumps(kind)}'.encode() for kind in kinds]
    lines = (line for line in complete.splitlines() if not marks or any(mark in line for mark in marks))
    events = [event for line in lines if (event := _event(line)) is not None]
    return [event for event in events if not kinds or event["kind"] in kinds], offset + len(complete)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event and "time" in event else None


def last_lines(path: Path, count: int, longest_bytes: int = 65_536) -> list[str]:
    """The last lines of a text file, at most `longest_bytes` of it: a log may be large."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - longest_bytes))
        return file.read().decode(errors="replace").splitlines()[-count:]


def read_outcome(job_dir: Path) -> Outcome | None:
    """The outcome of a job; None if none of its processes wrote one.

    If several processes failed, the first failure is the cause and the others follow from it. Interrupted and lost_rank
    are never the cause, even if they come first.
    """
    outcomes = []
    for path in sorted(job_dir.glob(OUTCOMES), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(ValidationError):
            outcomes.append(Outcome.model_validate_json(path.read_bytes()))
    late = {"interrupted": 2, "lost_rank": 3}
    return min(outcomes, key=lambda outcome: late.get(outcome.failure.kind, 1) if outcome.failure else 0, default=None)


def finished_output(job_dir: Path) -> Outcome | None:
    """The outcome of a finished job if all its output files are unchanged; else None."""
    outcome = read_outcome(job_dir)
    if outcome is None or outcome.state != "finished":
        return None
    output = job_dir / OUTPUT
    files = outcome.files.items()
    intact = all((output / name).is_file() and sha256(output / name) == digest for name, digest in files)
    return outcome if intact else None


def crash_file(job_dir: Path, rank: int) -> Path:
    """The file for the traceback of a rank's crash in native code; empty without a crash."""
    return job_dir / LOGS / f"crash.rank{rank}.txt"


def crash_files(job_dir: Path) -> list[Path]:
    """The crash files of all ranks that have started."""
    return sorted((job_dir / LOGS).glob("crash.rank*.txt"))
