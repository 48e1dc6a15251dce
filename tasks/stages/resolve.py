"""Stage: resolution of names to content: Hub revisions to commits, files to digests, `auto` to values.

The lock is stored with the flow run, so that a retried run uses the content of its first try.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.cache.digests import Digests
from tasks.cache.history import History
from tasks.cache.input_files import Progress, digests_of, pin_files, pin_images
from tasks.cache.results import Lock, PinnedCommit, PinnedFile, PinnedRows, VersionOfTask
from tasks.cache.stage import Inputs, Work, action
from tasks.home import home
from tasks.hub.client import Found, Kind, find_publishing_problems, look_up
from tasks.jobs.engines import engine_of
from tasks.jobs.hardware import mixed_precision, visible_gpus
from tasks.jobs.this_machine import find_problems_here
from tasks.prediction.input_rows import list_files
from tasks.registry.pinned_versions import (
    digest_rows,
    find_base,
    find_retriever,
    find_start,
    find_teacher,
    find_training_rows,
)
from tasks.tracking.connection import find_registry_problems
from training.data.file_systems import is_url, name_of
from training.data.listing import SourceFile, describe_unread, list_texts
from training.data.sources import find_split_files, fingerprint, image_folder, load_object, object_splits
from training.evaluation.hub_metrics import PREFIX, fetch
from training.jobs.protocol import write_atomically
from training.models.repository_files import CHAT_TEMPLATE, POOLING, part_of, require_files, require_model_folder
from training.models.repository_files import name_of as name_of_file
from training.models.weights import read_shapes
from training.problems import Problem, UserError, collected, on_one_line, relocated
from training.recipe import Data, Recipe, parse
from training.recipe.reading_rules import ReadingRules
from training.recipe.rules.release_rules import absent_splits
from training.recipe.tables.formats import FORMATS
from training.recipe.tables.row_checks import TEACHER_ROWS
from training.task_types import class_of
from training.tokenization.chat_templates import require_template


def lock_file(run: str) -> Path:
    """The file with the lock of a flow run."""
    return home() / "runs" / run / "lock.json"


def inputs(recipe: Recipe, recorded: Lock | None = None) -> Inputs:
    """The whole recipe."""
    return Inputs({"recipe": recipe.model_dump(mode="json")})


@action(inputs, read_only=True)
def resolve(work: Work, recipe: Recipe, recorded: Lock | None = None) -> Lock:
    """Locks the data, the model and the values of `auto`. Raises UserError with everything that cannot be found.

    `recorded`: the lock of the run that is reproduced, in place of a look at names.
    """
    if not work.run:  # a plan
        return pin(recipe, work.progress)
    file = lock_file(work.run)
    if file.is_file():
        return Lock.model_validate_json(file.read_bytes())
    problems = [*find_publishing_problems(recipe), *find_registry_problems(recipe)]
    lock = recorded or pin(recipe, work.progress, [one for one in problems if one.level == "error"])
    for problem in problems:
        work.warning(f"{problem.where}: {problem.message}")
    _download_metrics(recipe)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, lock.model_dump_json().encode())
    History(recipe.name).remember_commits(lock)
    for note in lock.notes:
        work.note(note)
    return lock


def _download_metrics(recipe: Recipe) -> None:
    """Downloads the code of metrics from the Hub, because the programs that compute them have no network."""
    problems: list[Problem] = []
    for index, name in enumerate(recipe.evaluation.metrics):
        if name.startswith(PREFIX):
            with collected(problems), relocated(f"evaluation.metrics[{index}]"):
                fetch(name)
    if problems:
        raise UserError(problems)


def pin(
    recipe: Recipe,
    progress: Progress = lambda done, total: None,
    known: Sequence[Problem] = (),
    versions: Mapping[str, VersionOfTask] = MappingProxyType({}),
) -> Lock:
    """The content behind the recipe's names. Raises UserError with all problems, including those in `known`.

    `progress` is called while files at URLs are read, with the bytes read and the total. `versions`: registered
    models that find negatives or teach, by field of the lock; they are not looked up.
    """
    problems = [*known]
    found = _pin_names(recipe, progress, problems, versions)
    compute = recipe.compute
    gpus, machines = len(visible_gpus()), compute.num_machines
    processes = max(1, gpus) * machines if compute.num_processes == "auto" else compute.num_processes
    problems += [*engine_of(compute.cluster).find_package_problems(), *find_problems_here(recipe, processes, gpus)]
    if problems:
        raise UserError(problems)
    precision = mixed_precision() if compute.mixed_precision == "auto" else compute.mixed_precision
    return Lock(mixed_precision=precision, num_processes=processes, num_machines=machines, **found)


def _pin_names(
    recipe: Recipe, progress: Progress, problems: list[Problem], versions: Mapping[str, VersionOfTask]
) -> dict[str, Any]:
    """Fields of the lock; adds to `problems`. The base model is not looked up if training starts from the champion."""
    found = {**_start(), **versions}
    try:
        found |= _pin_data(recipe, found, progress) | _pin_negatives(recipe, found) | _pin_unlabelled(recipe)
        problems += _find_absent_splits(recipe, found)
        found["rows"] = digest_rows(recipe, Lock(**found))
        if recipe.model.start_from == "champion":
            found["started_from"], note = find_start(recipe, Lock(**found))
            found["notes"].append(note)
    except UserError as error:
        problems.extend(error.problems)
        if recipe.model.start_from == "champion":  # it is unknown whether there is one
            return found
    if found.get("started_from") is None:
        with collected(problems):
            found |= _pin_model(recipe, found)
    with collected(problems):
        found |= _pin_teacher(recipe, found)
    with collected(problems):
        found["must_hold"] = pin_must_hold(recipe)
    with collected(problems):
        found["model_files"] = found.get("model_files", {}) | _pin_chat_template(recipe)
    return found


def pin_must_hold(recipe: Recipe) -> list[PinnedFile]:
    """The files of release.gate.must_hold with their digests; none without the field. Raises UserError."""
    if (must_hold := recipe.release.gate.must_hold) is None:
        return []
    return _pin_rows(must_hold.path, "release.gate.must_hold.path", ReadingRules.of(recipe.data))


def _pin_rows(path: str, where: str, rules: ReadingRules) -> list[PinnedFile]:
    """The files of rows at the path in a field of the recipe."""
    with relocated(lambda found: where if found == "input[0]" else found):
        return pin_files(list_files([path], rules=rules))


def _pin_unlabelled(recipe: Recipe) -> dict[str, Any]:
    """The files of data.unlabelled with their digests, if the recipe has it. Raises UserError."""
    if (path := recipe.data.unlabelled) is None:
        return {}
    return {"unlabelled": _pin_rows(path, "data.unlabelled", ReadingRules.of(recipe.data))}


def _pin_corrections(path: str) -> PinnedFile:
    """The file of data.corrections with its digest. Raises UserError."""
    files = _pin_rows(path, "data.corrections", ReadingRules())
    if len(files) > 1 or not name_of(files[0].path).endswith((".csv", ".tsv")):
        message = f"{path!r} is not one CSV file: name the file that `finetune labels` wrote, with decisions in it."
        raise UserError.of("data", "data.corrections", message)
    return files[0]


def _find_absent_splits(recipe: Recipe, found: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems with evaluated splits that are missing. The splits of Hub datasets are known only after reading."""
    evaluated, data = recipe.evaluation.splits, recipe.data
    splits: set[str] = set()
    for one, pinned in zip(data.sets, Lock(**found).sets, strict=True):
        if one.source == "hub":
            return
        splits |= set(object_splits(one, evaluated) if one.source == "python" else pinned.files)
    for where, message in absent_splits(evaluated, splits, data):
        yield Problem(kind="data", where=where, message=message)


def _pin_chat_template(recipe: Recipe) -> dict[str, PinnedFile]:
    """The recipe's chat template, which replaces the tokenizer's; empty if the recipe has none."""
    if recipe.model.chat_template is None:
        return {}
    file = Path(recipe.model.chat_template).expanduser().absolute()
    require_template(file)
    return {CHAT_TEMPLATE: _pin_files([file])[0]}


def pin_data(recipe: Recipe, progress: Progress = lambda done, total: None) -> Lock:
    """The lock of the data alone. Raises UserError."""
    found = _start()
    return Lock(**found | _pin_data(recipe, found, progress))


def pin_model(recipe: Recipe) -> Lock:
    """The lock of the model alone; empty for a folder, which is checked, and for a model from scratch. Raises UserError
    if there is no model, or none that can be fine-tuned."""
    if recipe.model.source == "folder":
        _require_whole(_model_folder(recipe), images=class_of(recipe.task).reads_images())
    found = _start()
    return Lock(**found | _pin_model(recipe, found)) if recipe.model.source in ("hub", "registry") else Lock()


def pin_folder_of_model(recipe: Recipe) -> dict[str, PinnedFile]:
    """The files of a base model that is a folder. Raises UserError if it is no whole model."""
    return pin_model_folder(_model_folder(recipe), images=class_of(recipe.task).reads_images())


def pin_variants(recipe: Recipe, variants: Iterable[Mapping[str, Any]]) -> list[Lock]:
    """The locks of the teacher and of the rows without labels alone, of a recipe with the fields of each variant of a
    sweep. Raises UserError."""
    written, locks = recipe.model_dump(exclude_unset=True), []
    for fields in variants:
        one, found = parse(written, fields), _start()
        locks.append(Lock(**found | _pin_teacher(one, found) | _pin_unlabelled(one)))
    return locks


def _start() -> dict[str, Any]:
    """Fields of the lock before any name is looked up."""
    return {"notes": [], "unreachable": []}


def _look_up(kind: Kind, path: str, revision: str | None, recipe: Recipe, found: dict[str, Any]) -> Found:
    """As `look_up`; adds a note if the Hub cannot be reached."""
    looked = look_up(kind, path, revision, History(recipe.name))
    if not looked.reachable:
        found["unreachable"].append(path)
        found["notes"].append(
            f"the Hub cannot be asked for {path!r}: using commit {looked.pin.commit[:12]}, as last time"
        )
    return looked


def _pin_data(recipe: Recipe, found: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Fields of the lock for the rows of all sets. Raises UserError with the problems of all sets."""
    data, corrections, corpus = recipe.data, None, list[PinnedFile]()
    pinned, files, problems = dict[int, PinnedRows](), dict[int, dict[str, list[SourceFile]]](), list[Problem]()
    for index, one in enumerate(data.sets):
        try:
            if one.source == "hub":
                pinned[index] = PinnedRows(hub=_look_up("dataset", one.path, one.revision, recipe, found).pin)
            elif one.source == "python":
                pinned[index] = PinnedRows(fingerprint=fingerprint(load_object(one.path)))
            else:
                files[index], unread, folders = find_split_files(one)
                found["notes"] += _name_unread(one, unread, folders)
        except UserError as error:
            problems += data.locate(error.problems, index)
    with collected(problems):
        corrections = _pin_corrections(data.corrections) if data.corrections else None
    with collected(problems):
        corpus = _pin_rows(data.corpus, "data.corpus", ReadingRules.of(data)) if data.corpus else []
    if problems:
        raise UserError(problems)
    further = {"corrections": corrections, "corpus": corpus}
    flat = (file for splits in files.values() for found in splits.values() for file in found)
    digests = digests_of(flat, progress) if files else {}
    for index, splits in files.items():
        pins = {
            split: [PinnedFile(path=file.file, sha256=digests[file.file], size_bytes=_size(file)) for file in found]
            for split, found in splits.items()
        }
        images = pin_images(image_folder(data.sets[index])) if class_of(recipe.task).reads_images() else None
        pinned[index] = PinnedRows(files=pins, images=images)
    if data.mix is not None:
        sets = {name: pinned[index] for index, name in enumerate(data.set_names)}
        return {"data_sets": sets, **further}
    (only,) = pinned.values()
    rows = {"data_hub": only.hub, "data_files": only.files, "data_fingerprint": only.fingerprint}
    return {**rows, "data_images": only.images, **further}


def _name_unread(data: Data, unread: Sequence[SourceFile], folders: Sequence[str]) -> Iterator[str]:
    if FORMATS[data.source].is_folder:
        files = [os.path.relpath(file.file, os.path.expanduser(data.path)) for file in unread]
        for names, reason in ((folders, "in no split"), (files, "of other suffixes than the rows")):
            some = ", ".join(map(on_one_line, names[:3])) + (", …" if len(names) > 3 else "")
            if names:
                yield f"{data.path}: not read, because {reason}: {len(names):,} ({some})"
        return
    if folders:
        yield describe_unread(data.path, folders)
    if unread:
        some = ", ".join(on_one_line(file.name) for file in unread[:3]) + (", …" if len(unread) > 3 else "")
        count = "1 file is" if len(unread) == 1 else f"{len(unread):,} files are"
        yield f"{data.path}: {count} in no split and not read ({some}): name files of other names in data.splits"


def _size(file: SourceFile) -> int | None:
    if is_url(file.file):
        return file.size_bytes
    texts = list_texts(file.file)[0] if os.path.isdir(file.file) else [file]
    return sum(Path(text.file).stat().st_size for text in texts)


def _pin_repository(path: str, revision: str | None, recipe: Recipe, found: dict[str, Any]) -> PinnedCommit:
    """The commit of a model on the Hub. Raises UserError if it lacks files."""
    looked = _look_up("model", path, revision, recipe, found)
    if looked.files is not None:
        where = f"{path!r} at {looked.pin.commit[:12]}"
        require_files(looked.files, where, images=class_of(recipe.task).reads_images())
    return looked.pin


def _pin_model(recipe: Recipe, found: dict[str, Any]) -> dict[str, Any]:
    """The base model's version, commit or files, if it has any."""
    model = recipe.model
    if model.source == "hub":
        return {"model_hub": _pin_repository(str(model.path), model.revision, recipe, found)}
    if model.source == "folder":
        return {"model_files": pin_folder_of_model(recipe)}
    if model.source == "registry":
        version = find_base(recipe)
        if str(version) != model.path:
            found["notes"].append(f"training starts from {version}, which is {model.path}")
        return {"model_version": version}
    return {}


def _pin_negatives(recipe: Recipe, found: dict[str, Any]) -> dict[str, Any]:
    """The version that finds negatives, if the recipe names one."""
    negatives = recipe.data.negatives
    if negatives is None or negatives.source != "registry" or "negatives_version" in found:
        return {}
    version = find_retriever(recipe)
    if str(version) != negatives.path:
        found["notes"].append(f"negatives are found by {version}, which is {negatives.path}")
    return {"negatives_version": version}


def _pin_teacher(recipe: Recipe, found: dict[str, Any]) -> dict[str, Any]:
    """The teacher's version, commit or files, if the recipe has one."""
    teacher = recipe.training.teacher
    if teacher is None or "teacher_version" in found:
        return {}
    if teacher.source != "registry":
        found["notes"] += _name_unchecked(recipe, teacher.path, "unknown")
        with relocated("training.teacher.path"):
            if teacher.source == "hub":
                return {"teacher_hub": _pin_repository(teacher.path, teacher.revision, recipe, found)}
            return {"teacher_files": pin_model_folder(Path(teacher.path).expanduser().absolute())}
    version = find_teacher(recipe)
    if str(version) != teacher.path:
        found["notes"].append(f"the teacher is {version}, which is {teacher.path}")
    if find_training_rows(version) is None:
        found["notes"] += _name_unchecked(recipe, str(version), "not in this home")
    return {"teacher_version": version}


def _name_unchecked(recipe: Recipe, teacher: str, reason: str) -> list[str]:
    """The note about a teacher whose training rows cannot be compared with the evaluated ones."""
    if recipe.data.checks.get(TEACHER_ROWS) == "ignore":
        return []
    note = f"the training rows of the teacher {teacher} are {reason}, so it is not checked whether the model is "
    return [f"{note}evaluated on some of them (data.checks.{TEACHER_ROWS})"]


def _model_folder(recipe: Recipe) -> Path:
    return Path(recipe.model.path or "").expanduser().absolute()


def pin_model_folder(folder: Path, *, images: bool = False) -> dict[str, PinnedFile]:
    """The files of a local model of texts or of images by name. Raises UserError with everything that it lacks."""
    _require_whole(folder, images=images)
    paths = sorted(path for path in folder.iterdir() if path.is_file() and part_of(path.name))
    paths += sorted(folder.glob(POOLING))
    names = [name_of_file(path.relative_to(folder).as_posix()) for path in paths]
    return dict(zip(names, _pin_files(paths), strict=True))


def _require_whole(folder: Path, *, images: bool) -> None:
    """Raises UserError for a local model that lacks files, or has damaged weights."""
    require_model_folder(folder, images=images)
    read_shapes({path.name: path for path in folder.iterdir()})


def _pin_files(paths: list[Path]) -> list[PinnedFile]:
    digests = Digests(home()).of_many(paths)
    return [
        PinnedFile(path=str(path), sha256=digest, size_bytes=path.stat().st_size)
        for path, digest in zip(paths, digests, strict=True)
    ]
