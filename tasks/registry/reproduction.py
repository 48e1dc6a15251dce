"""Reproduction of a registered model from its record: the recipe, the differences of the environment, and the
comparison of files and figures."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tasks.cache import store
from tasks.cache.code import code_digests, library_versions
from tasks.cache.garbage_collection import in_use
from tasks.cache.results import Artifact, Lock, PinnedFile, PinnedVersion, VersionOfTask
from tasks.cache.stage import Listener, Row, Work
from tasks.home import home, without_credentials
from tasks.jobs.commands import python_argv
from tasks.jobs.launch import require_finished, run_job
from tasks.jobs.retries import DEFAULT_STALL_TIMEOUT_S, BatchDivision
from tasks.registry.lineage import RECIPE_WITHOUT_DEFAULTS, has_own_record
from tasks.registry.pinned_versions import PARTS, find_folders
from tasks.registry.slsa_statement import require_signed_record
from tasks.registry.version_signatures import verify_version
from tasks.shared_store.bucket_remote import find_artifact
from tasks.tracking.connection import FLOW_RUN_TAG, MlflowFailed
from training.data.file_systems import display_name, is_url
from training.jobs.protocol import Job
from training.problems import Problem, UserError
from training.recipe import Recipe, parse

Version = TypeVar("Version", bound=PinnedVersion)
PROGRAM = "training.programs.describe_machine"
OTHER_VERSIONS = {
    "negatives_version": ("data.negatives.path", "mine_negatives"),
    "teacher_version": ("training.teacher.path", "teacher_outputs"),
}
"""By field of the lock, for registered models besides the one that training starts from: the recipe's field that names
the model, and the stage that it works in."""


class RecordedVersions(NamedTuple):
    """The registered models that a training used."""

    start: Path | None
    """The folder of the one that it started from; None if it started from the base model."""
    others: Mapping[str, VersionOfTask]
    """By field of the lock."""
    warnings: Sequence[str]
    """One for each model that is not available, and that only other code would need."""


class Difference(NamedTuple):
    """An input with another value than recorded."""

    input: str
    recorded: str
    here: str


class MetricPair(NamedTuple):
    """A figure of the recorded model and of its reproduction."""

    figure: str
    recorded: Mapping[str, float | None]
    here: Mapping[str, float | None]

    @property
    def agrees(self) -> bool:
        """Whether each value lies within the other's 95 % interval. Without an interval, the values must be equal."""
        return _is_within(self.recorded["value"], self.here) and _is_within(self.here["value"], self.recorded)


def require_whole(record: Mapping[str, Any], name: str) -> None:
    """Raises UserError for a record without the parts that a reproduction needs."""
    needed = ("lock", "stages", "model", "training", "environment", "metrics", "code", "libraries")
    missing = [part for part in needed if part not in record or (part == "model" and record[part] is None)]
    if missing:
        message = f"the record of {name} has no {', '.join(missing)}: it cannot be reproduced."
        raise UserError.of("registry", "VERSION", message)


def require_signed(record: Mapping[str, Any]) -> None:
    """Raises UserError if the version of a record is refused, or if MLflow's record is not the one that was signed with
    it; MlflowFailed."""
    name, number = record["registered"]["name"], record["registered"]["version"]
    run = record["run"]["flow_run_id"]
    signed = verify_version(name, number, {FLOW_RUN_TAG: run}).signed
    if signed is not None and not has_own_record(run):
        require_signed_record(record, signed.provenance, f"{name}/{number}")


@contextlib.contextmanager
def find_versions(record: Mapping[str, Any], stored: Collection[str]) -> Iterator[RecordedVersions]:
    """The registered models that the training used, with temporary folders of their files, from the store or MLflow.
    One whose outputs are stored, and made by the present code, has none: it is not needed.

    `stored`: the stages whose outputs are stored. Raises UserError and MlflowFailed if a model is not available that is
    certainly needed.
    """
    lock = Lock.model_validate(record["lock"])
    others = {role: version for role in OTHER_VERSIONS if (version := getattr(lock, role)) is not None}
    start, warnings = None, list[str]()
    with contextlib.ExitStack() as folders:
        if lock.start is not None or others:
            folders.enter_context(in_use())  # the store keeps the linked files
        if lock.start is not None:
            start = folders.enter_context(_with_folder(lock.start, "VERSION", _find_load_model(record))).folder
        for role, version in others.items():
            where, stage = OTHER_VERSIONS[role]
            if stage in stored and not _compare_code(record):
                continue
            try:
                others[role] = folders.enter_context(_with_folder(version, where))
            except (UserError, MlflowFailed) as error:
                if stage not in stored:
                    raise
                warnings.append(f"{stage} is stored; other code would need {version}, which is not available: {error}")
        yield RecordedVersions(start, others, warnings)


@contextlib.contextmanager
def _with_folder(version: Version, where: str, parts: Mapping[str, Path] | None = None) -> Iterator[Version]:
    """The version with a temporary folder, into which the files of its parts are linked; they are found if they are not
    given."""
    work = Work(key=f"version-{uuid.uuid4().hex[:12]}", out=Path(os.devnull), run="")
    try:
        parts = parts or find_folders(work, version, where)
        folder = work.job / "version"
        folder.mkdir(parents=True)
        for file in {file.name: file for part in parts.values() for file in part.iterdir()}.values():
            store.link_or_copy(str(file), str(folder / file.name))
        yield version.model_copy(update={"folder": folder})
    finally:
        shutil.rmtree(work.job, ignore_errors=True)


def _find_load_model(record: Mapping[str, Any]) -> dict[str, Path] | None:
    keys = [stage["key"] for stage in record["stages"] if stage["name"] == "load_model" and stage["key"]]
    found = next(filter(None, (find_artifact("load_model", key) for key in keys)), None)
    return {part: found.path / part for part in PARTS} if found else None


def recorded_recipe(record: Mapping[str, Any], start: Path | None = None) -> Recipe:
    """The recorded recipe without registration, publication, trackers, folds and the files of the gate. It starts from
    the model in the folder `start`, if given. Raises UserError if the recipe is no longer valid or needs several
    machines."""
    overrides: dict[str, Any] = {"release.registry": None, "release.hub": None, "training.report_to": []}
    overrides |= {"model.start_from": "base", "release.gate.must_hold": None}
    overrides |= {"evaluation.folds": None, "evaluation.parallel_folds": 1}
    if start is not None:
        overrides |= {"model.source": "folder", "model.path": str(start), "model.revision": None, "model.config": None}
    recipe = parse(
        _replace_values(parse(record[RECIPE_WITHOUT_DEFAULTS]).model_dump(mode="json"), record["recipe"]), overrides
    )
    if record["lock"]["num_machines"] > 1:
        message = f"it was trained by {record['lock']['num_machines']} machines: run its recipe on as many."
        raise UserError.of("compute", "compute.num_machines", message)
    return recipe


def _replace_values(fields: Any, values: Any) -> Any:
    """The fields with the recorded values, which may be former defaults. Recorded fields that no longer exist are
    dropped."""
    if not (isinstance(fields, dict) and isinstance(values, dict)):
        return values
    return {name: _replace_values(field, values.get(name, field)) for name, field in fields.items()}


def find_stored_inputs(record: Mapping[str, Any]) -> dict[str, Artifact]:
    """The recorded rows, base model and outputs of a teacher, by stage, if the files that they were made of are missing
    here: from this home or the shared store. Empty if nothing is missing, or not all of it is stored."""
    recorded = Lock.model_validate(record["lock"])
    files = {"load_data": recorded.all_data_files, "load_model": [*recorded.model_files.values()]}
    files |= {"load_unlabelled": recorded.unlabelled, "teacher_outputs": [*recorded.teacher_files.values()]}
    missing = [stage for stage, pinned in files.items() if any(map(_is_missing, pinned))]
    found = _find_stored(record, missing)
    return found if len(found) == len(missing) else {}


def find_made_by_versions(record: Mapping[str, Any]) -> dict[str, Artifact]:
    """The stored artifacts that registered models made, by stage. With other code they are made again."""
    lock = Lock.model_validate(record["lock"])
    used = [stage for role, (_, stage) in OTHER_VERSIONS.items() if getattr(lock, role) is not None]
    return _find_stored(record, used)


def _find_stored(record: Mapping[str, Any], stages: Iterable[str]) -> dict[str, Artifact]:
    keys = {stage["name"]: stage["key"] for stage in record["stages"] if stage["key"]}
    found = {stage: find_artifact(stage, keys[stage]) for stage in stages if stage in keys}
    return {stage: artifact for stage, artifact in found.items() if artifact is not None}


def _is_missing(file: PinnedFile) -> bool:
    return not is_url(file.path) and not Path(file.path).exists()


def link_stored(artifacts: Mapping[str, Artifact], folders: Mapping[str, Path]) -> None:
    """Links the artifacts into the present home, from these folders."""
    for stage, ref in artifacts.items():
        target = store.folder(stage, ref.key)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f".{ref.key}")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(folders[stage], aside, copy_function=store.link_or_copy)
            (aside / store.RECORD).unlink(missing_ok=True)
            aside.rename(target)


def recorded_lock(
    record: Mapping[str, Any], versions: RecordedVersions, start: Mapping[str, PinnedFile] | None
) -> Lock:
    """The recorded lock with these versions.

    Args:
        start: the files of the registered model that training starts from, unless its artifact is stored.
    """
    lock = Lock.model_validate(record["lock"]).model_copy(update=dict(versions.others))
    if start is None:
        return lock
    of_folder = {"started_from": None, "model_version": None, "model_files": {**start, **lock.model_files}}
    return lock.model_copy(update=of_folder)


def require_recorded_files(record: Mapping[str, Any], lock: Lock) -> None:
    """Raises UserError for every recorded file that is missing in the lock or has other content."""
    recorded = Lock.model_validate(record["lock"])
    models = (*lock.model_files.values(), *lock.teacher_files.values())
    here = {file.path: file.sha256 for file in (*lock.all_data_files, *lock.unlabelled, *models)}
    problems = []
    recorded_models = (*recorded.model_files.values(), *recorded.teacher_files.values())
    for kind, files in (("data", [*recorded.all_data_files, *recorded.unlabelled]), ("model", recorded_models)):
        for file in files:
            digest = here.get(file.path)
            if digest == file.sha256:
                continue
            if digest is None:
                message = f"is missing: put the file with sha256 {file.sha256} back."
            else:
                message = f"has sha256 {digest[:12]} instead of {file.sha256[:12]}: put the recorded file back."
            problems.append(Problem(kind=kind, where=display_name(file.path), message=message))
    if problems:
        raise UserError(problems)


def _fingerprints(lock: Lock) -> str | None:
    """The fingerprints of the sets of rows that have one, without credentials."""
    found = [without_credentials(one.fingerprint) for one in lock.sets if one.fingerprint]
    return "; ".join(found) or None


def set_recorded_threads(record: Mapping[str, Any]) -> None:
    """Makes all programs that are started from now on use the recorded number of threads, which changes rounding."""
    if threads := (record["environment"] or {}).get("threads"):
        os.environ["OMP_NUM_THREADS"] = str(threads)


def describe_machine() -> dict[str, Any]:
    """This machine's hardware and threads, as a child program finds them."""
    job = home() / "jobs" / f"machine-{uuid.uuid4().hex[:12]}"
    Job(program=PROGRAM, key=job.name, settings={}, inputs={}).write(job)
    try:
        argv = python_argv(PROGRAM)
        outcome = run_job(job, argv, env={}, on_events=lambda _: None, stall_timeout_s=DEFAULT_STALL_TIMEOUT_S)
        return dict(require_finished(outcome).result)
    finally:
        shutil.rmtree(job, ignore_errors=True)


def differences(record: Mapping[str, Any], lock: Lock, machine: Mapping[str, Any]) -> list[Difference]:
    """The known differences from the recorded run: libraries, code, hardware, threads, and the fingerprint of rows
    that come from Python."""
    environment = record["environment"] or {}
    names = [name for name in ("device", "threads") if name in environment]
    recorded = {name: environment[name] for name in names} | {
        "rows' fingerprint": _fingerprints(Lock.model_validate(record["lock"]))
    }
    here = {name: machine.get(name) for name in names} | {"rows' fingerprint": _fingerprints(lock)}
    return [*_compare_code(record), *_compare(recorded, here)]


def _compare_code(record: Mapping[str, Any]) -> list[Difference]:
    """The libraries and the files of code that differ."""
    recorded: dict[str, Any] = {f"library {name}": version for name, version in record["libraries"].items()}
    recorded |= {f"code {path}": digest for path, digest in record["code"]["files"].items()}
    here: dict[str, Any] = {f"library {name}": _find_version(name) for name in record["libraries"]}
    here |= {f"code {path}": digest for path, digest in _digest_code(record["code"]["files"]).items()}
    return _compare(recorded, here)


def _compare(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(name, _shorten(value), _shorten(here.get(name)))
        for name, value in recorded.items()
        if here.get(name) != value
    ]


def _find_version(library: str) -> str | None:
    try:
        return library_versions([library] if library != "python" else [])[library]
    except ModuleNotFoundError:  # importlib.metadata's PackageNotFoundError is one
        return None


def _digest_code(paths: Mapping[str, str]) -> dict[str, str]:
    """The digests of these files of code and of the files that they import; files that are missing are left out."""
    found: dict[str, str] = {}
    for path in paths:
        if path not in found:
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            with contextlib.suppress(ModuleNotFoundError, SyntaxError):
                found |= code_digests([module])
    return found


def _shorten(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 and " " not in text else text


class RecordedBatches(Listener):
    """Makes training divide its batches as in the recorded run, because the division changes rounding.

    Args:
        find_division: tasks.stages.fit.batch_division.
    """

    def __init__(
        self, recipe: Recipe, record: Mapping[str, Any], find_division: Callable[[Recipe, Lock, Path], BatchDivision]
    ) -> None:
        self._recipe = recipe
        self._rows = (record["training"] or {}).get("micro_batch_size")
        self._find_division = find_division
        self._lock: Lock | None = None

    def stage_ended(self, row: Row, result: Any) -> None:
        """Stores the recorded batch size once the model is there."""
        if isinstance(result, Lock):
            self._lock = result
        if row.name != "load_model" or not isinstance(result, Artifact) or self._lock is None or self._rows is None:
            return
        batch_size = self._recipe.training.per_device_train_batch_size
        division = self._find_division(self._recipe, self._lock, result.path / "model")
        while -(-batch_size // division.divisor) > self._rows:
            division.halve()
        division.save()


def differing_files(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The names of the model's files with other bytes, or missing in one of the two models."""
    names = sorted(recorded.keys() | here.keys())
    return [name for name in names if recorded.get(name, {}).get("sha256") != here.get(name, {}).get("sha256")]


def pair_metrics(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[MetricPair]:
    """Pairs each figure of the recorded model with that of its reproduction."""
    missing = {"value": None, "low": None, "high": None}
    return [
        MetricPair(f"{split} {name}", figure, here.get(split, {}).get(name, missing))
        for split, figures in recorded.items()
        for name, figure in figures.items()
    ]


def _is_within(value: float | None, figure: Mapping[str, float | None]) -> bool:
    low, high = figure.get("low"), figure.get("high")
    if value is None or low is None or high is None:
        return value == figure["value"]
    return low <= value <= high
