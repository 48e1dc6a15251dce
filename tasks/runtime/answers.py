"""Asking a registered model, in a child program of its own."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from typing import Any

from tasks.runtime import settings
from tasks.runtime.connection import MAX_LENGTH_TAG, connect, environment, failures_told
from tasks.runtime.launch import python_argv, require_finished, run_job
from training.problems import Problem, UserError, nearest
from training.protocol import Job

PROGRAM = "tasks.programs.answer"
STALL_TIMEOUT_S = 600.0


def ask(name: str, alias: str, texts: Sequence[str]) -> list[list[dict[str, Any]]]:
    """For each text the labels with their probabilities, the likeliest first.

    Raises UserError where the registry has no such model or alias, MlflowFailed where it does not answer.
    """
    with failures_told():
        version = _version(name, alias)
    job = settings.home() / "jobs" / f"answer-{uuid.uuid4().hex[:12]}"
    Job(
        program=PROGRAM,
        key=job.name,
        settings={
            "model": f"models:/{name}/{version.version}",
            "texts": list(texts),
            "max_length": int(version.tags.get(MAX_LENGTH_TAG, 512)),
        },
    ).write(job)
    try:
        outcome = run_job(
            job,
            python_argv(PROGRAM),
            env=environment(),
            on_events=lambda _: None,
            stall_timeout_s=STALL_TIMEOUT_S,
        )
        return list(require_finished(outcome).figures["answers"])
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _version(name: str, alias: str) -> Any:
    client = connect()
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        models = {model.name: sorted(model.aliases) for model in client.search_registered_models()}
        if name in models:
            has = ", ".join(models[name]) or "none yet"
            message = f"{name!r} has no alias {alias!r}: it has {has}.{nearest(alias, models[name])}"
        else:
            where = settings.without_credentials(settings.tracking_uri())
            has = ", ".join(sorted(models)) or "nothing is registered yet: finetune run registers a model"
            message = f"no model {name!r} is registered in {where}: {has}.{nearest(name, models)}"
        raise UserError([Problem(kind="registry", where="NAME", message=message)]) from error
