"""Check of a recipe's model by its configuration, before training.

<home>/checked/<digest>    an empty file for each model in which training.programs.check_model found no problem
"""

from __future__ import annotations

import contextlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.cache.code import code_digests, library_versions, users_code
from tasks.cache.digests import digest_of
from tasks.cache.refs import Champion, Lock
from tasks.cache.settings import home
from tasks.cache.store import folder
from tasks.hub.client import explain_read_errors
from tasks.jobs.commands import python_argv
from tasks.jobs.launch import JobFailed, require_finished, run_job
from tasks.registry.champions import fetch_config
from training import task_types
from training.jobs.protocol import Job
from training.models.repository_files import read_json
from training.problems import UserError
from training.recipe import Recipe
from training.recipe.program_settings import CheckModelSettings

PROGRAM = "training.programs.check_model"
STALL_TIMEOUT_S = 300.0


def require_model(recipe: Recipe, lock: Lock, *, download: bool) -> str | None:
    """Raises UserError for a model that the recipe's task, lengths or adapters do not fit: its type, its configuration,
    its number of positions, the names of its layers.

    `download` allows fetching config.json from the Hub or the registry. Returns why the model could not be checked, or
    None.
    """
    field, config = _configuration(recipe, lock, download)
    if not config:
        return f"{field} was not checked: its config.json is not on this machine yet."
    settings = CheckModelSettings(
        **recipe.task_and_options,
        labels=_labels(recipe),
        max_length=recipe.tokens.max_length,
        lora=recipe.training.lora,
        attn_implementation=recipe.model.attn_implementation,
        use_liger_kernel=recipe.training.use_liger_kernel,
        config=config,
        field=field,
    )
    written = settings.model_dump(mode="json")
    own, installed = users_code(task_types.user_code(recipe.task))
    code = code_digests([PROGRAM, *task_types.code_modules(recipe.task), *own])
    optional = [name for name in ("peft", "liger-kernel") if find_spec(name.replace("-", "_"))]
    libraries = library_versions(["transformers", "torch", *optional, *installed])
    checked = home() / "checked" / digest_of([written, code, libraries])[:40]
    if checked.exists():
        return None
    with tempfile.TemporaryDirectory(prefix="finetune-") as job_dir:
        job = Job(program=PROGRAM, key=checked.name, settings=written, inputs={})
        job.write(Path(job_dir))
        try:
            argv = python_argv(PROGRAM)
            ended = run_job(Path(job_dir), argv, env={}, on_events=lambda _: None, stall_timeout_s=STALL_TIMEOUT_S)
            require_finished(ended)
        except UserError as error:
            raise _name_version(error, lock.start) from None
        except (JobFailed, OSError) as error:
            return f"{field} was not checked: {(str(error).splitlines() or [''])[0]}"
    with contextlib.suppress(OSError):  # a full disk is reported by the stage that needs it
        checked.parent.mkdir(mode=0o700, exist_ok=True)
        checked.touch()
    return None


def _name_version(error: UserError, version: Champion | None) -> UserError:
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


def _configuration(recipe: Recipe, lock: Lock, download: bool) -> tuple[str, dict[str, Any] | None]:
    """The recipe field that names the model, and the model's configuration; None if it is not on this machine."""
    model, version = recipe.model, lock.start
    if version is not None:
        file = folder("fit", version.key) / "model" / "config.json" if version.key else None
        config = read_json(file) if file and file.is_file() else None
        return lock.start_field, config or (fetch_config(version, lock.start_field) if download else None)
    if model.source == "scratch":
        return "model.config", dict(model.config or {})
    file = Path(str(model.path)).expanduser() / "config.json"
    if model.source == "hub":
        cached = _hub_file(str(model.path), lock.model_hub.commit, download) if lock.model_hub else None
        return "model.path", read_json(cached) if cached else None
    return "model.path", read_json(file) if file.is_file() else None


def _hub_file(name: str, commit: str, download: bool) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=commit)
    if isinstance(found, str):
        return Path(found)
    if not download:
        return None
    with explain_read_errors("model", name, commit):
        return Path(hf_hub_download(name, "config.json", revision=commit))
