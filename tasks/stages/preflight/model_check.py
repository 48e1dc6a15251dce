"""Check of a recipe's model by its configuration and the names of its weights, before training.

<home>/checked/<digest>    the notes and warnings of each model in which training.programs.check_model found no error
"""

from __future__ import annotations

import contextlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.cache.code import code_digests, library_versions, users_code
from tasks.cache.digests import digest_of
from tasks.cache.results import Lock, PinnedVersion
from tasks.cache.store import folder
from tasks.home import home
from tasks.hub.client import explain_read_errors
from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import mixed_precision
from tasks.jobs.launch import JobFailed, require_finished, run_job
from tasks.registry.pinned_versions import fetch_config
from tasks.reports.formatting import first_line
from training import task_types
from training.jobs.protocol import Job, write_atomically
from training.models import generation_settings, gguf_vocabulary
from training.models.repository_files import read_json
from training.models.weights import INDEX, WEIGHTS, read_shapes
from training.problems import UserError
from training.programs.check_model import CheckedModel, CheckModelSettings
from training.recipe import Recipe
from training.recipe.tables.exports import EXPORTS, libraries_of, missing_packages

__all__ = ["CheckedModel", "require_model"]

PROGRAM = "training.programs.check_model"
STALL_TIMEOUT_S = 300.0


def require_model(recipe: Recipe, lock: Lock, *, download: bool = False, model: Path | None = None) -> CheckedModel:
    """Checks the model's type, its configuration, its number of positions, the names of its layers, and whether the
    weights in its files are its own; tries the run's number format and exports on a small copy. Returns notes and
    warnings, and a note if the model could not be checked.

    `download` allows fetching config.json from the Hub or the registry. `model` is the model's folder, if it is known;
    else it is looked for on this machine. Raises UserError for a model that cannot be trained by the recipe.
    """
    field = lock.start_field if lock.start else "model.config" if recipe.model.source == "scratch" else "model.path"
    if model is None:
        model = _find_folder(recipe, lock)
    if model and any(EXPORTS[name].for_known_tokenizers for name in recipe.release.exports):
        place = beside if (beside := model.parent / "tokenizer").is_dir() else model
        is_here = place == beside or (place / gguf_vocabulary.TOKENIZER).is_file()
        if is_here and (problems := [*gguf_vocabulary.find_problems(place)]):
            raise UserError(problems)
    config = read_json(model / "config.json") if model else _configuration(recipe, lock, field, download)
    if not config:
        return CheckedModel(notes=[f"{field} was not checked: its config.json is empty, or not on this machine yet."])
    if model is not None:
        generation_settings.require_usable(model, task_types.class_of(recipe.task).auto_class, field)
    settings = CheckModelSettings(
        **recipe.task_and_options,
        labels=_labels(recipe),
        max_length=recipe.tokens.max_length,
        lora=recipe.training.lora,
        attn_implementation=recipe.model.attn_implementation,
        use_liger_kernel=recipe.training.use_liger_kernel,
        mixed_precision=mixed_precision() if (chosen := recipe.compute.mixed_precision) == "auto" else chosen,
        exports=[name for name in recipe.release.exports if not missing_packages([name])],
        config=config,
        weights=read_shapes({path.name: path for path in model.iterdir()}, field) if model else None,
        field=field,
    )
    written = settings.model_dump(mode="json")
    own, installed = users_code(task_types.user_code(recipe.task))
    code = code_digests([PROGRAM, *task_types.code_modules(recipe.task), *own])
    optional = [name for name in ("peft", "liger-kernel") if find_spec(name.replace("-", "_"))]
    libraries = library_versions(["transformers", "torch", *optional, *libraries_of(settings.exports), *installed])
    checked = home() / "checked" / digest_of([written, code, libraries])[:40]
    with contextlib.suppress(OSError, ValueError):
        return CheckedModel.model_validate_json(checked.read_bytes())
    with tempfile.TemporaryDirectory(prefix="finetune-") as job_dir:
        job = Job(program=PROGRAM, key=checked.name, settings=written, inputs={})
        job.write(Path(job_dir))
        try:
            argv = python_argv(PROGRAM)
            ended = run_job(Path(job_dir), argv, env={}, on_events=lambda _: None, stall_timeout_s=STALL_TIMEOUT_S)
            found = CheckedModel.model_validate(require_finished(ended).result)
        except UserError as error:
            raise _name_version(error, lock.start) from None
        except (JobFailed, OSError) as error:
            return CheckedModel(notes=[f"{field} was not checked: {first_line(error)}"])
    with contextlib.suppress(OSError):  # a full disk is reported by the stage that needs it
        checked.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(checked, found.model_dump_json().encode())
    return found


def _name_version(error: UserError, version: PinnedVersion | None) -> UserError:
    """The same problems, which begin with the registered version, if there is one."""
    if version is None:
        return error
    return UserError(
        problem.model_copy(update={"message": f"{version}: {problem.message}"}) for problem in error.problems
    )


def _labels(recipe: Recipe) -> list[str]:
    """The labels, or two placeholders if only the rows name them."""
    columns = task_types.load(**recipe.task_and_options).columns.values()
    has_labels = any(column.form in ("label", "labels") for column in columns)
    return list(recipe.data.label_names or ("0", "1")) if has_labels else []


def _find_folder(recipe: Recipe, lock: Lock) -> Path | None:
    """The folder on this machine that has the whole model; None if there is none."""
    model, version = recipe.model, lock.start
    if version is not None:
        found = folder("fit", version.key) / "model" if version.key else None
    elif lock.model_hub is not None:
        config = _hub_file(str(model.path), lock.model_hub.commit, download=False)
        found = config.parent if config else None
    else:
        found = Path(model.path).expanduser() if model.source == "folder" and model.path else None
    return found if found and (found / "config.json").is_file() and _has_weights(found) else None


def _has_weights(model: Path) -> bool:
    """Whether all files with weights are here: another program may have downloaded some of them."""
    shards = read_json(model / INDEX).get("weight_map", {})
    return (model / WEIGHTS).is_file() or all((model / str(name)).is_file() for name in {*shards.values()})


def _configuration(recipe: Recipe, lock: Lock, field: str, download: bool) -> dict[str, Any] | None:
    """The model's configuration; None if it is not on this machine."""
    model, version = recipe.model, lock.start
    if version is not None:
        return fetch_config(version, field) if download else None
    if model.source == "scratch":
        return dict(model.config or {})
    if lock.model_hub is not None:
        cached = _hub_file(str(model.path), lock.model_hub.commit, download)
        return read_json(cached) if cached else None
    file = Path(str(model.path)).expanduser() / "config.json"
    return read_json(file) if file.is_file() else None


def _hub_file(name: str, commit: str, download: bool) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=commit)
    if isinstance(found, str):
        return Path(found)
    if not download:
        return None
    with explain_read_errors("model", name, commit):
        return Path(hf_hub_download(name, "config.json", revision=commit))
