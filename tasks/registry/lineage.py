"""Lineage of models: each run's record of its inputs, stages and results, and the search for it.

    <home>/runs/<flow run>/lineage.json    and the same file in the MLflow run

A run writes it before it registers a version, and completes it at its end; a version's record is that of the run that
registered it. Credentials in URLs are removed.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from tasks.cache import store
from tasks.cache.code import git_commit
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, Lock, Name, Promotion, Publication, Verdict, Version, label_names
from tasks.cache.stage import Row
from tasks.home import home, without_credentials
from tasks.registry.versions import (
    DRIFT_TAG,
    EVALUATIONS_TAG,
    list_aliases,
    need_model,
    need_version,
    read_name,
    read_tag,
)
from tasks.reports.row_reports import read_report
from tasks.tracking.connection import FLOW_RUN_TAG, connect, mlflow_errors, search_all
from tasks.tracking.outbox import Outbox
from tasks.tracking.tracker import LINEAGE as LINEAGE
from training.data.file_systems import is_url
from training.data.ipc_files import SPLITS, ipc_reader
from training.jobs.protocol import write_atomically
from training.problems import UserError, nearest
from training.recipe import Recipe
from training.recipe.field_types import split_version_name
from training.recipe.rules.column_rules import source_columns

if TYPE_CHECKING:
    from mlflow import MlflowClient

MOST_THREADS = 4096
RECIPE_WITHOUT_DEFAULTS = "recipe_without_defaults"
ENVIRONMENT = "log/environment.json"
SHOWN_NAMES = 20
_DIGITS = re.compile(r"[0-9a-f][0-9a-f-]{3,}")


class _StageOfRecord(TypedDict):
    name: str
    key: Name | None


class _RecipeOfRecord(TypedDict):
    name: Name


class _RunOfRecord(TypedDict):
    flow_run_id: Name


class _Environment(TypedDict):
    threads: NotRequired[Annotated[int, Field(ge=1, le=MOST_THREADS)]]


class _Training(TypedDict):
    micro_batch_size: NotRequired[PositiveInt | None]


class _Code(TypedDict):
    files: dict[str, str]


class _Files(TypedDict):
    digest: str | None
    files: dict[str, dict[str, Any]]


class _Record(TypedDict):
    """The values of a record by which something is done. A registry may give any."""

    recipe: _RecipeOfRecord
    recipe_without_defaults: dict[str, Any]
    run: _RunOfRecord
    lock: NotRequired[Lock]
    stages: NotRequired[list[_StageOfRecord]]
    environment: NotRequired[_Environment | None]
    training: NotRequired[_Training | None]
    metrics: NotRequired[dict[str, dict[str, dict[str, Any]]] | None]
    out_of_fold: NotRequired[dict[str, dict[str, Any]] | None]
    code: NotRequired[_Code]
    libraries: NotRequired[dict[Annotated[str, Field(min_length=1)], str]]
    model: NotRequired[_Files | None]


_RECORD = TypeAdapter(_Record)


def build_record(
    recipe: Recipe,
    run: str,
    rows: Sequence[Row],
    *,
    mlflow_run: str | None,
    verdict: Verdict | None = None,
    version: Version | None = None,
    publication: Publication | None = None,
    promotion: Promotion | None = None,
    state: str = "running",
) -> dict[str, Any]:
    """The run's record, JSON values: its recipe, stages, code, libraries and results as far as they exist.

    `rows` are the stages that ended.
    """
    lock = _read_lock(run)
    values = resolve_fields(recipe, lock)
    artifacts = {row.name: found for row in rows if row.key and (found := store.manifest_of(row.name, row.key))}
    refs = {name: ref for name, (ref, _) in artifacts.items()}
    inputs = {name: store.inputs_of(name, ref.key) or {} for name, ref in refs.items()}
    files = {name: digest for stage in inputs.values() for name, digest in _select("code", stage).items()}
    libraries = {name: version for stage in inputs.values() for name, version in _select("library", stage).items()}
    git = git_commit()
    return _without_credentials(
        {
            "recipe": values,
            # Without defaults: a later version of the project may lack some fields, which matters only for these.
            RECIPE_WITHOUT_DEFAULTS: Recipe.model_validate(values).model_dump(mode="json", exclude_defaults=True),
            "lock": lock.model_dump(mode="json"),
            "rows": _describe_rows(recipe, refs.get("load_data")),
            "model": _describe_model(*artifacts["fit"]) if "fit" in artifacts else None,
            "training": refs["fit"].result if "fit" in refs else None,
            "environment": _read_environment(refs),
            "metrics": refs["score"].result if "score" in refs else None,
            "out_of_fold": refs["score_folds"].result["train"] if "score_folds" in refs else None,
            "teacher": refs["compare_teacher"].result if "compare_teacher" in refs else None,
            "verdict": _json(verdict),
            "version": _json(version),
            "publication": _json(publication),
            "promotion": _json(promotion),
            "code": {"digest": digest_of(files), "files": files, "git": git._asdict() if git else None},
            "libraries": dict(sorted(libraries.items())),
            "project": {
                "finetune-flows": importlib.metadata.version("finetune-flows"),
                "python": platform.python_version(),
            },
            "stages": [_describe_stage(row, refs.get(row.name), inputs.get(row.name, {})) for row in rows],
            "run": {
                "state": state,
                "flow_run_id": run,
                "mlflow_run_id": mlflow_run,
                "began": _find_start_time(run),
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        }
    )


def _describe_stage(row: Row, artifact: Artifact | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": row.name,
        "key": row.key,
        "digest": artifact.digest if artifact else None,
        "state": row.state,
        "seconds": round(row.seconds, 3),
        "ended": row.ended,
        "code": list(_select("code", inputs)),
        "libraries": list(_select("library", inputs)),
        "inputs": {name: value for name, value in inputs.items() if name.partition(".")[0] not in ("code", "library")},
    }


def save_record(record: Mapping[str, Any]) -> str:
    """Writes the record into the run's folder, and returns it as the text for MLflow. An error of the disk is ignored:
    MLflow's copy is the same."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    with contextlib.suppress(OSError):
        write_atomically(home() / "runs" / record["run"]["flow_run_id"] / LINEAGE, text.encode())
    return text


def resolve_fields(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    """All fields of the recipe, with names resolved to commits, paths made absolute, and numbers for `auto`."""
    values = recipe.model_dump(mode="json")
    resolve_names(values, lock)
    for section, pinned in lock.by_section(values["data"]):
        if pinned.files and not is_url(section["path"]):
            section["path"] = _absolute(section["path"])
            # Each file by its name: the folder may have got more files since.
            section["splits"] = {s: [glob.escape(f.path) for f in files] for s, files in pinned.files.items()}
    if lock.model_files and recipe.model.path and recipe.model.source == "folder":
        values["model"]["path"] = _absolute(recipe.model.path)
    if lock.teacher_files and recipe.training.teacher is not None:
        values["training"]["teacher"]["path"] = _absolute(recipe.training.teacher.path)
    if recipe.data.unlabelled is not None and not is_url(recipe.data.unlabelled):
        values["data"]["unlabelled"] = _absolute(recipe.data.unlabelled)
    if lock.corrections is not None:
        values["data"]["corrections"] = lock.corrections.path
    if recipe.model.chat_template:
        values["model"]["chat_template"] = _absolute(recipe.model.chat_template)
    return values


def resolve_names(values: dict[str, Any], lock: Lock) -> None:
    """Puts the lock's commits, versions and numbers in place of names and of `auto` in the fields of a recipe, which
    may lack those with defaults."""
    if lock.model_hub is not None:
        values["model"]["revision"] = lock.model_hub.commit
    for section, pinned in lock.by_section(values["data"]):
        if pinned.hub is not None:
            section["revision"] = pinned.hub.commit
    if lock.model_version is not None:
        values["model"]["path"] = str(lock.model_version)
    if lock.negatives_version is not None:
        values["data"]["negatives"]["path"] = str(lock.negatives_version)
    if lock.teacher_version is not None:
        values["training"]["teacher"]["path"] = str(lock.teacher_version)
    if lock.teacher_hub is not None:
        values["training"]["teacher"]["revision"] = lock.teacher_hub.commit
    numbers = {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision}
    values.setdefault("compute", {}).update(numbers)


def find_record(name: str) -> dict[str, Any]:
    """The record of `NAME/VERSION`, of `NAME@alias`, of a flow run by the beginning of its id, or of a recipe's last
    run: from the home, or else from MLflow.

    Raises UserError, with the nearest name, if nothing has this name, and MlflowFailed if MLflow does not answer.
    """
    if re.search(r"[/@]", name):
        return find_version(name)
    here = [path for path in _list_records() if path.parent.name.startswith(name)] if _DIGITS.fullmatch(name) else []
    if len(here) > 1:
        raise _ambiguous_id(name)
    if here:
        return _parse(here[0].read_bytes(), name)
    for path in _list_records():
        with contextlib.suppress(UserError):  # a damaged record does not hide the others
            found = _parse(path.read_bytes(), name)
            if found["recipe"]["name"] == name:
                return found
    with mlflow_errors():
        client = connect()
        text = _download_of_run(client, name) or _download_of_recipe(client, name)
        if text is None:
            raise _unknown_name(client, name)
    return _parse(text, name)


def find_version(name: str) -> dict[str, Any]:
    """The record of `NAME/VERSION` or `NAME@alias`; `registered` has the version's present state in the registry.

    Raises UserError and MlflowFailed like `find_record`.
    """
    model_name, alias, number = split_version_name(name)
    with mlflow_errors():
        client = connect()
        model = need_model(client, model_name)
        version = need_version(client, model, alias=alias, version=number)
        run = read_name(version, FLOW_RUN_TAG)
        file = home() / "runs" / (run or "") / LINEAGE
        text = file.read_bytes() if run and file.is_file() else _download(client, version.run_id)
    shown = f"{model_name}/{version.version}"
    if text is None:
        message = f"{shown} has no {LINEAGE}: no run of finetune registered it, or its record was deleted."
        raise UserError.of("registry", "VERSION", message)
    registered = {
        "name": model_name,
        "version": str(version.version),
        "aliases": list_aliases(model, str(version.version)),
        "registered": datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
        "drift": read_tag(version, DRIFT_TAG, dict[str, Any] | None),
        "evaluations": read_tag(version, EVALUATIONS_TAG, list[Any], "[]"),
    }
    return {**_parse(text, shown), "registered": registered}


def find_record_of_version(name: str) -> dict[str, Any] | None:
    """The record of `NAME/VERSION`; None if no run registered it. Raises UserError and MlflowFailed like
    `find_record`."""
    try:
        return find_version(name)
    except UserError as error:
        if error.problems[0].where != "VERSION":
            raise
        return None


def has_own_record(run: str) -> bool:
    """Whether a flow run of this home has left its record here."""
    return (home() / "runs" / run / LINEAGE).is_file()


def _read_lock(run: str) -> Lock:
    try:
        return Lock.model_validate_json((home() / "runs" / run / "lock.json").read_bytes())
    except (OSError, ValueError):  # the run ended before it had a lock
        return Lock()


def _find_start_time(run: str) -> str | None:
    with contextlib.suppress(LookupError, OSError):
        return datetime.fromtimestamp(Outbox(run).read_start()["time"], UTC).isoformat(timespec="seconds")
    return None


def _json(value: Any) -> Any:
    return None if value is None else value.model_dump(mode="json")


def _select(prefix: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`{"training/programs/fit.py": digest}` of `code.training/programs/fit.py`."""
    return {name.removeprefix(f"{prefix}."): value for name, value in inputs.items() if name.startswith(f"{prefix}.")}


def _describe_rows(recipe: Recipe, data: Artifact | None) -> dict[str, Any] | None:
    if data is None:
        return None
    labels = None
    with contextlib.suppress(OSError, ValueError):
        labels = label_names(data)
    numbers = {name: value for name, value in data.result.items() if value is not None}
    found = {"figures": numbers, "labels": labels, "digest": data.digest, "columns": _list_columns(recipe, data)}
    return {**found, **_describe_mixture(data)}


def _list_columns(recipe: Recipe, data: Artifact) -> list[dict[str, str | None]]:
    """The stored columns: `name`, `type` and, of a column that is read from the source, its name there."""
    read = source_columns(recipe)
    sources = {column.name: read.source_names[column.source_name] for column in read.columns}
    files = [data.path / f"{split}.arrow" for split in SPLITS]
    for file in filter(Path.is_file, files):
        with ipc_reader(file) as reader:
            return [{"name": one.name, "type": str(one.type), "source": sources.get(one.name)} for one in reader.schema]
    return []


def _describe_mixture(data: Artifact) -> dict[str, Any]:
    """The table of the sets of a mixture; empty without one."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return {"mixture": read_report(data.path)["mixture"]}
    return {}


def list_model_files(key: str) -> dict[str, dict[str, Any]] | None:
    """The files of a trained model by name, each with `bytes` and `sha256`; None without its artifact."""
    found = store.manifest_of("fit", key)
    return None if found is None else _describe_model(*found)["files"]


def _describe_model(ref: Artifact, files: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    inside = {name.partition("/")[2]: file for name, file in files.items() if name.startswith("model/")}
    return {"digest": ref.parts.get("model"), "files": inside}


def _read_environment(refs: Mapping[str, Artifact]) -> dict[str, Any] | None:
    """The environment of the training; a cached training may have run on another machine."""
    try:
        return dict(json.loads((refs["fit"].path / ENVIRONMENT).read_text(encoding="utf-8")))
    except (KeyError, OSError, ValueError):
        return None


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {name: _without_credentials(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_without_credentials(inside) for inside in value]
    return value


def _list_records() -> list[Path]:
    """The records in the home, newest first."""
    return sorted((home() / "runs").glob(f"*/{LINEAGE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _parse(text: str | bytes, name: str) -> dict[str, Any]:
    with damage(name):
        found = dict(json.loads(text))
        if RECIPE_WITHOUT_DEFAULTS not in found:
            found[RECIPE_WITHOUT_DEFAULTS] = found.pop("said")  # its name in earlier versions of this project
        _RECORD.validate_python(found)
        return found


@contextlib.contextmanager
def damage(name: str) -> Iterator[None]:
    """In a block that only reads the record of `name`, raises UserError for what its wrong values cause."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        detail = ""
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            detail = f" ({'.'.join(map(str, first['loc']))} is {first['input']!r:.60}: {first['msg']})"
        message = f"the {LINEAGE} of {name} is damaged{detail}, or of another version of the project."
        raise UserError.of("registry", "NAME", message) from error


def _download_of_run(client: MlflowClient, digits: str) -> str | None:
    if not _DIGITS.fullmatch(digits):
        return None
    experiments = [experiment.experiment_id for experiment in search_all(client.search_experiments)]
    found = client.search_runs(experiments, f"tags.`{FLOW_RUN_TAG}` LIKE '{digits}%'", max_results=2)
    if len(found) > 1:
        raise _ambiguous_id(digits)
    return _download(client, found[0].info.run_id) if found else None


def _download_of_recipe(client: MlflowClient, name: str) -> str | None:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"], max_results=20)
    return next((text for run in runs if (text := _download(client, run.info.run_id))), None)


def _download(client: MlflowClient, run_id: str | None) -> str | None:
    """The record in an MLflow run; None if it has none."""
    if not run_id or not any(file.path == LINEAGE for file in client.list_artifacts(run_id)):
        return None
    with tempfile.TemporaryDirectory() as aside:
        return Path(client.download_artifacts(run_id, LINEAGE, aside)).read_text(encoding="utf-8")


def _ambiguous_id(digits: str) -> UserError:
    return UserError.of("registry", "RUN", f"{digits!r} begins the ids of several runs: write more of the id.")


def _unknown_name(client: MlflowClient, name: str) -> UserError:
    registered = [model.name for model in search_all(client.search_registered_models)]
    recipes = [experiment.name for experiment in search_all(client.search_experiments)]
    # A blank is in no recipe's name: the history is of a batch prediction or of a sweep.
    histories = {path.name for path in (home() / "recipes").glob("*") if " " not in path.name}
    names = sorted(histories | {*recipes} - {"Default"})
    if name in registered:
        return UserError.of(
            "registry", "NAME", f"{name!r} is a registered model: name a version, {name}@champion or {name}/1."
        )
    has = _join_names(names) or "nothing has run yet"
    models = f" Registered: {_join_names(registered)}." if registered else ""
    message = f"no run and no recipe that has run is named {name!r}: {has}.{models}"
    return UserError.of("registry", "NAME", message + nearest(name, [*names, *registered]))


def _join_names(names: Sequence[str]) -> str:
    return ", ".join([*names[:SHOWN_NAMES], *(["…"] if len(names) > SHOWN_NAMES else [])])
