"""Where a model came from: a record of everything that went into it, kept by each run and found again by a name.

    <home>/runs/<flow run>/lineage.json    and the same file with the MLflow run

It is written before a version is registered, and whole when the run ends; a version's record is that of the run that
registered it. Credentials of URLs are left out.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cache import settings, store
from tasks.cache.code import git_commit
from tasks.cache.digests import digest_of
from tasks.cache.refs import Lock, Promotion, Publication, Ref, Verdict, Version
from tasks.cache.stage import Row
from tasks.registry.versions import need_model, need_version, problem
from tasks.tracking.connection import FLOW_RUN_TAG, connect, every, mlflow_errors
from tasks.tracking.outbox import Outbox
from training.data.file_systems import is_url
from training.jobs.protocol import write_atomically
from training.problems import UserError, nearest
from training.recipe import Recipe

if TYPE_CHECKING:
    from mlflow import MlflowClient

LINEAGE = "lineage.json"
ENVIRONMENT = "log/environment.json"
SHOWN_NAMES = 20
_DIGITS = re.compile(r"[0-9a-f][0-9a-f-]{3,}")


def record(
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
    """Everything that is known of how a run made its model, JSON values; of one that failed, as far as it came.

    `rows` are the stages that ended, `lock` what the run's own folder says of the recipe's names.
    """
    lock = _lock_of(run)
    values = pinned(recipe, lock)
    made = {row.name: found for row in rows if row.key and (found := store.manifest_of(row.name, row.key))}
    refs = {name: ref for name, (ref, _) in made.items()}
    inputs = {name: store.inputs_of(name, ref.key) or {} for name, ref in refs.items()}
    files = {name: digest for one in inputs.values() for name, digest in _of("code", one).items()}
    libraries = {name: version for one in inputs.values() for name, version in _of("library", one).items()}
    git = git_commit()
    return _without_credentials(
        {
            "recipe": values,
            # Not left to a default: only here does a field matter that a later version of the project does not have.
            "said": Recipe.model_validate(values).model_dump(mode="json", exclude_defaults=True),
            "lock": lock.model_dump(mode="json"),
            "rows": _rows(refs.get("load_data")),
            "model": _model(*made["fit"]) if "fit" in made else None,
            "training": refs["fit"].figures if "fit" in refs else None,
            "environment": _environment(refs),
            "metrics": refs["score"].figures if "score" in refs else None,
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
            "stages": [_stage(row, refs.get(row.name), inputs.get(row.name, {})) for row in rows],
            "run": {
                "state": state,
                "flow_run_id": run,
                "mlflow_run_id": mlflow_run,
                "began": _began(run),
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        }
    )


def _stage(row: Row, made: Ref | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": row.name,
        "key": row.key,
        "digest": made.digest if made else None,
        "state": row.state,
        "seconds": round(row.seconds, 3),
        "code": list(_of("code", inputs)),
        "libraries": list(_of("library", inputs)),
        "inputs": {name: value for name, value in inputs.items() if name.partition(".")[0] not in ("code", "library")},
    }


def keep(told: Mapping[str, Any]) -> str:
    """Keeps the record with its run in the home, and gives it as the text that MLflow is to have. A disk that does not
    take it is no error: MLflow's copy says the same."""
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    with contextlib.suppress(OSError):
        write_atomically(settings.home() / "runs" / told["run"]["flow_run_id"] / LINEAGE, text.encode())
    return text


def pinned(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    """All fields of the recipe, names and `auto` replaced by what they came to: commits, absolute paths, numbers."""
    values = recipe.model_dump(mode="json")
    for section, pin in (("data", lock.data_hub), ("model", lock.model_hub)):
        if pin is not None:
            values[section]["revision"] = pin.commit
    if lock.data_files and not is_url(recipe.data.path):
        values["data"]["path"] = _absolute(recipe.data.path)
        # By name, so that files which came to the folder since are not taken along.
        values["data"]["splits"] = {s: [glob.escape(f.path) for f in files] for s, files in lock.data_files.items()}
    if lock.model_files and recipe.model.path and recipe.model.source == "folder":
        values["model"]["path"] = _absolute(recipe.model.path)
    if recipe.model.chat_template:
        values["model"]["chat_template"] = _absolute(recipe.model.chat_template)
    values["compute"] |= {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision}
    return values


def find(name: str) -> dict[str, Any]:
    """The record of `NAME/VERSION`, `NAME@alias`, of a flow run by its id or the first digits of it, or of the last
    run of a recipe by its name: from the home, else from MLflow.

    Raises UserError, with the nearest, for a name that is none of these, MlflowFailed where MLflow does not answer.
    """
    if re.search(r"[/@]", name):
        return of_version(name)
    here = [path for path in _kept_here() if path.parent.name.startswith(name)] if _DIGITS.fullmatch(name) else []
    if len(here) > 1:
        raise _several(name)
    if here:
        return _read(here[0].read_text(), name)
    for path in _kept_here():
        with contextlib.suppress(UserError):  # a damaged one is no reason not to find another
            found = _read(path.read_text(), name)
            if found["recipe"]["name"] == name:
                return found
    with mlflow_errors():
        client = connect()
        text = _of_run(client, name) or _of_recipe(client, name)
        if text is None:
            raise _unknown(client, name)
    return _read(text, name)


def of_version(name: str) -> dict[str, Any]:
    """The record of `NAME/VERSION` or `NAME@alias`, and under `registered` the version as it now is in the registry.

    Raises UserError and MlflowFailed as `find` does.
    """
    model_name, at, alias = name.partition("@")
    number = ""
    if not at:
        model_name, _, number = name.partition("/")
    with mlflow_errors():
        client = connect()
        model = need_model(client, model_name)
        version = need_version(client, model, alias=alias, version=number)
        run = version.tags.get(FLOW_RUN_TAG, "")
        kept = settings.home() / "runs" / run / LINEAGE
        text = kept.read_text() if run and kept.is_file() else _text_of(client, version.run_id)
    shown = f"{model_name}/{version.version}"
    if text is None:
        message = f"of {shown} no {LINEAGE} is kept: it was registered by other means, or before there was one."
        raise problem("VERSION", message)
    registered = {
        "name": model_name,
        "version": str(version.version),
        "aliases": sorted(a for a, its in model.aliases.items() if str(its) == str(version.version)),
        "registered": datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
    }
    return {**_read(text, shown), "registered": registered}


def _lock_of(run: str) -> Lock:
    try:
        return Lock.model_validate_json((settings.home() / "runs" / run / "lock.json").read_bytes())
    except (OSError, ValueError):  # the run ended before it knew
        return Lock()


def _began(run: str) -> str | None:
    with contextlib.suppress(LookupError, OSError):
        return datetime.fromtimestamp(Outbox(run).start()["time"], UTC).isoformat(timespec="seconds")
    return None


def _json(value: Any) -> Any:
    return None if value is None else value.model_dump(mode="json")


def _of(sort: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`{"training/programs/fit.py": digest}` of `code.training/programs/fit.py`."""
    return {name.partition(".")[2]: v for name, v in inputs.items() if name.partition(".")[0] == sort}


def _rows(data: Ref | None) -> dict[str, Any] | None:
    if data is None:
        return None
    labels = None
    with contextlib.suppress(OSError, ValueError):
        labels = json.loads((data.path / "labels.json").read_text())
    return {"figures": data.figures, "labels": labels, "digest": data.digest}


def model_files(key: str) -> dict[str, dict[str, Any]] | None:
    """The files of a trained model by name, each with `bytes` and `sha256`; None where its artifact is gone."""
    found = store.manifest_of("fit", key)
    return None if found is None else _model(*found)["files"]


def _model(ref: Ref, files: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    inside = {name.partition("/")[2]: file for name, file in files.items() if name.startswith("model/")}
    return {"digest": ref.parts.get("model"), "files": inside}


def _environment(refs: Mapping[str, Ref]) -> dict[str, Any] | None:
    """The environment of the training, which may have been another run's, on another machine."""
    try:
        return dict(json.loads((refs["fit"].path / ENVIRONMENT).read_text()))
    except (KeyError, OSError, ValueError):
        return None


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return settings.without_credentials(value)
    if isinstance(value, Mapping):
        return {name: _without_credentials(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_without_credentials(inside) for inside in value]
    return value


def _kept_here() -> list[Path]:
    """The records in the home, the newest first."""
    return sorted(
        (settings.home() / "runs").glob(f"*/{LINEAGE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True
    )


def _read(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        found["recipe"]["name"], found["run"]["flow_run_id"], found["said"]
        return dict(found)
    except (ValueError, KeyError, TypeError) as error:
        raise problem("NAME", f"the {LINEAGE} of {name} is damaged, or of another version of the project.") from error


def _of_run(client: MlflowClient, digits: str) -> str | None:
    if not _DIGITS.fullmatch(digits):
        return None
    experiments = [experiment.experiment_id for experiment in every(client.search_experiments)]
    found = client.search_runs(experiments, f"tags.`{FLOW_RUN_TAG}` LIKE '{digits}%'", max_results=2)
    if len(found) > 1:
        raise _several(digits)
    return _text_of(client, found[0].info.run_id) if found else None


def _of_recipe(client: MlflowClient, name: str) -> str | None:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"], max_results=20)
    return next((text for run in runs if (text := _text_of(client, run.info.run_id))), None)


def _text_of(client: MlflowClient, run_id: str | None) -> str | None:
    """The record that is kept with an MLflow run; None where there is none."""
    if not run_id or not any(file.path == LINEAGE for file in client.list_artifacts(run_id)):
        return None
    with tempfile.TemporaryDirectory() as aside:
        return Path(client.download_artifacts(run_id, LINEAGE, aside)).read_text()


def _several(digits: str) -> UserError:
    return problem("RUN", f"{digits!r} begins the ids of several runs: give more of it.")


def _unknown(client: MlflowClient, name: str) -> UserError:
    registered = [model.name for model in every(client.search_registered_models)]
    recipes = [experiment.name for experiment in every(client.search_experiments)]
    names = sorted({path.name for path in (settings.home() / "recipes").glob("*")} | {*recipes} - {"Default"})
    if name in registered:
        return problem("NAME", f"{name!r} is a registered model: say which, {name}@champion or {name}/1.")
    has = _listed(names) or "nothing has run yet"
    models = f" Registered: {_listed(registered)}." if registered else ""
    message = f"{name!r} is no run and no recipe that has run: {has}.{models}"
    return problem("NAME", message + nearest(name, [*names, *registered]))


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:SHOWN_NAMES], *(["…"] if len(names) > SHOWN_NAMES else [])])
