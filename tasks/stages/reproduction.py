"""Making a recorded model again: by what recipe, what is another than then, and whether it came out the same; no
stage."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tasks.cache import settings, store
from tasks.cache.code import code_digests, library_versions
from tasks.cache.garbage_collection import in_use
from tasks.cache.refs import Lock, Ref
from tasks.cache.stage import Listener, Row, Work
from tasks.jobs.launch import python_argv, require_finished, run_job
from tasks.registry.champions import PARTS, folders_of
from tasks.stages.fit import fits_of
from tasks.stages.resolve import pin
from training.data.file_systems import display_name
from training.jobs.protocol import Job
from training.problems import Problem, UserError
from training.recipe import Recipe, parse

PROGRAM = "training.programs.describe_machine"
STALL_TIMEOUT_S = 600.0
THREADS = "OMP_NUM_THREADS"
NONE = "none"


class Difference(NamedTuple):
    """An input that is another here than it was."""

    input: str
    recorded: str
    here: str


class Beside(NamedTuple):
    """A figure of the recorded model, and of the one that was made here."""

    figure: str
    recorded: Mapping[str, float | None]
    here: Mapping[str, float | None]

    @property
    def agrees(self) -> bool:
        """Whether each lies within the other's 95 % interval; where one has no interval, whether they are equal."""
        return _within(self.recorded["value"], self.here) and _within(self.here["value"], self.recorded)


@contextlib.contextmanager
def start_of(record: Mapping[str, Any]) -> Iterator[Path | None]:
    """A folder of links to the registered model that training started from, in the store or else fetched from MLflow,
    gone after the block; None where that was the base model. Raises UserError where it cannot be read any more."""
    champion = Lock.model_validate(record["lock"]).started_from
    if champion is None:
        yield None
        return
    work = Work(key=f"start-{uuid.uuid4().hex[:12]}", out=Path(os.devnull), run="")
    folder = work.job / "start"
    try:
        with in_use():  # what is linked to stays in the store
            parts = _loaded(record) or folders_of(work, champion, "VERSION")
            folder.mkdir(parents=True)
            for name, file in {file.name: file for part in parts.values() for file in part.iterdir()}.items():
                (folder / name).symlink_to(file)
            yield folder
    finally:
        shutil.rmtree(work.job, ignore_errors=True)


def _loaded(record: Mapping[str, Any]) -> dict[str, Path] | None:
    """The folders of the model that training started from, where the store has them as the stage left them."""
    keys = [stage["key"] for stage in record["stages"] if stage["name"] == "load_model"]
    try:
        kept = next(filter(None, (store.find("load_model", key) for key in keys)), None)
    except store.Damaged:
        return None
    return {part: kept.path / part for part in PARTS} if kept else None


def recipe_of(record: Mapping[str, Any], start: Path | None = None) -> Recipe:
    """The recorded recipe, pinned, that registers, publishes and reports nothing, and starts from the model in the
    folder `start`, where one is given. Raises UserError where it is none any more, or cannot be followed by one
    machine."""
    nowhere: dict[str, Any] = {"release.registry": None, "release.hub": None, "training.report_to": []}
    nowhere["model.start_from"] = "base"
    if start is not None:
        nowhere |= {"model.source": "folder", "model.path": str(start), "model.revision": None, "model.config": None}
    recipe = parse(_overlaid(parse(record["said"]).model_dump(mode="json"), record["recipe"]), nowhere)
    if record["lock"]["num_machines"] > 1:
        message = f"it was trained by {record['lock']['num_machines']} machines: run its recipe on as many."
        raise UserError([Problem(kind="compute", where="compute.num_machines", message=message)])
    return recipe


def _overlaid(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the recorded values, which may have been the defaults of then; those that there are no more are
    left out."""

    def overlaid(field: Any, value: Any) -> Any:
        return _overlaid(field, value) if isinstance(field, dict) and isinstance(value, dict) else value

    return {name: overlaid(field, values.get(name, field)) for name, field in fields.items()}


def as_pinned(recipe: Recipe, record: Mapping[str, Any]) -> Lock:
    """What the recipe's names mean here. Raises UserError for every file that is gone, or has changed since."""
    was, now = Lock.model_validate(record["lock"]), pin(recipe)
    files = [f for split in was.data_files.values() for f in split], [*was.model_files.values()]
    there = {f.path: f.sha256 for split in now.data_files.values() for f in split}
    there |= {f.path: f.sha256 for f in now.model_files.values()}
    problems = [
        Problem(kind=kind, where=display_name(file.path), message=_why_not(file.sha256, there.get(file.path)))
        for kind, pinned in zip(("data", "model"), files, strict=True)
        for file in pinned
        if there.get(file.path) != file.sha256
    ]
    if problems:
        raise UserError(problems)
    return now


def _why_not(was: str, now: str | None) -> str:
    if now is None:
        return f"is gone: put the file back whose sha256 is {was}."
    return f"has changed since (sha256 {now[:12]}, then {was[:12]}): put the file of then back."


def compute_as_recorded(record: Mapping[str, Any]) -> None:
    """Has what is started from here on compute with as many threads as then: their number changes how sums are
    rounded."""
    if threads := (record["environment"] or {}).get("threads"):
        os.environ[THREADS] = str(threads)


def machine_here() -> dict[str, Any]:
    """What trainings compute with here, as the record has it; a child program finds out."""
    job = settings.home() / "jobs" / f"machine-{uuid.uuid4().hex[:12]}"
    Job(program=PROGRAM, key=job.name, settings={}, inputs={}).write(job)
    try:
        argv = python_argv(PROGRAM)
        outcome = run_job(job, argv, env={}, on_events=lambda _: None, stall_timeout_s=STALL_TIMEOUT_S)
        return require_finished(outcome).figures
    finally:
        shutil.rmtree(job, ignore_errors=True)


def differences(record: Mapping[str, Any], lock: Lock, machine: Mapping[str, Any]) -> list[Difference]:
    """All that is known to be another than when the model was made: libraries, code, hardware, threads, and what rows
    that come from Python say of themselves."""
    recorded = dict(_recorded(record))
    here = dict(_here(recorded, lock, machine))
    return [Difference(name, _text(was), _text(here[name])) for name, was in recorded.items() if here[name] != was]


def _recorded(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"library {name}", version) for name, version in record["libraries"].items())
    yield from ((f"code {path}", digest) for path, digest in record["code"]["files"].items())
    under = record["environment"] or {}
    yield from ((name, under[name]) for name in ("device", "threads") if name in under)
    yield "rows' fingerprint", record["lock"]["data_fingerprint"]


def _here(recorded: Mapping[str, Any], lock: Lock, machine: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    code: dict[str, str] = {}
    for name in recorded:
        sort, _, what = name.partition(" ")
        if sort == "library":
            yield name, _version(what)
        elif sort == "code":
            if what not in code:
                code |= _digests(what)
            yield name, code.get(what)
        elif name in machine:
            yield name, machine[name]
    told = lock.data_fingerprint
    yield "rows' fingerprint", told and settings.without_credentials(told)


def _version(library: str) -> str | None:
    try:
        return library_versions([library] if library != "python" else [])[library]
    except ModuleNotFoundError:  # importlib.metadata's PackageNotFoundError is one
        return None


def _digests(path: str) -> dict[str, str]:
    """The digests of a file of code and of all that it imports from here; empty where it is gone."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        return code_digests([module])
    except (ModuleNotFoundError, SyntaxError):
        return {}


def _text(value: Any) -> str:
    text = NONE if value is None else str(value)
    return text[:12] if len(text) == 64 and " " not in text else text


class AsDivided(Listener):
    """A listener that has the training divide its batches as the recorded one did, which changes its sums."""

    def __init__(self, recipe: Recipe, record: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._rows = (record["training"] or {}).get("micro_batch_size")
        self._lock: Lock | None = None

    def stage_ended(self, row: Row, result: Any) -> None:
        """Remembers, once the model is there, what fitted then."""
        if isinstance(result, Lock):
            self._lock = result
        if row.name != "load_model" or not isinstance(result, Ref) or self._lock is None or self._rows is None:
            return
        asked, fits = self._recipe.training.per_device_train_batch_size, fits_of(self._recipe, self._lock, result)
        while -(-asked // fits.divisor) > self._rows:
            fits.divisor *= 2
        if fits.divisor > 1:
            fits.save()


def other_files(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The names of the model's files that are not the same bytes, or not there in one of the two."""
    names = sorted(recorded.keys() | here.keys())
    return [name for name in names if recorded.get(name, {}).get("sha256") != here.get(name, {}).get("sha256")]


def figures_beside(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[Beside]:
    """Each figure of the recorded model beside that of the one made here."""
    lost = {"value": None, "low": None, "high": None}
    return [
        Beside(f"{split} {name}", figure, here.get(split, {}).get(name, lost))
        for split, figures in recorded.items()
        for name, figure in figures.items()
    ]


def _within(value: float | None, figure: Mapping[str, float | None]) -> bool:
    low, high = figure.get("low"), figure.get("high")
    if value is None or low is None or high is None:
        return value == figure["value"]
    return low <= value <= high
