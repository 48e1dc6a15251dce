"""Retention: the artifacts, jobs and run records of the home that runs or registered versions still need.

Needed are the stages of every registered version with an alias, of the last run of each recipe, and of runs that can be
resumed or have undelivered entries. They are read from the outboxes of the runs and from the registry;
tasks/cache/garbage_collection.py removes all others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.cache import history
from tasks.cache.garbage_collection import Needs
from tasks.cache.stage import without_number
from tasks.home import home
from tasks.reports.stage_summaries import MONITORING_STAGES, STAGES
from tasks.tracking.connection import FLOW_RUN_TAG, connect, list_registered, mlflow_errors, search_all
from tasks.tracking.outbox import PENDING_STATE, Outbox
from tasks.tracking.tracker import STUDY_TAG, TRIAL_STATE_TAG, TRIAL_TAG, VERSION_TAG
from training.problems import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun


@dataclass(frozen=True)
class PastRun:
    """A run, read from its outbox."""

    id: str
    recipe: str
    keys: frozenset[str]
    """Keys of the stages that the run started."""
    version: str | None
    """`name/version` of the run's model in the registry, if it has one."""
    study: str | None
    """The study of a sweep, or of a trial that it has stopped or that failed."""
    is_trial: bool
    completed: bool
    delivered: bool
    """Whether MLflow has all entries; an undelivered entry may be a file of an artifact."""
    state_is_pending: bool
    """Whether the final state has yet to be delivered to the Prefect server."""

    def __str__(self) -> str:
        return f"run {self.id[:8]} of {self.recipe}"


def find_needs(given_up: Collection[str] = ()) -> Needs:
    """Finds the needed keys, and who needs them. Runs that are `given_up`, named by the beginnings of their ids, need
    none.

    Raises UserError if a run that is given up does not exist, and MlflowFailed if MLflow does not answer.
    """
    runs = {path.name: _read_run(path.name) for path in sorted((home() / "runs").glob("*")) if path.is_dir()}
    with mlflow_errors():
        client = connect()
        aliased = [*_list_aliased(client, runs)]
        needing = [*aliased, *_list_last_runs(), *_list_unfinished(runs, _find_run_ids(runs, given_up), client)]
    of_aliased = {key for _, keys in aliased for key in keys}
    return Needs(
        needed_by=_group_by_key(needing),
        known={key for run in runs.values() for key in run.keys},
        finished={
            run.id: run.keys
            for run in runs.values()
            if run.completed and run.delivered and not run.state_is_pending and not run.keys & of_aliased
        },
    )


def find_shared_needs(days: int) -> dict[str, list[str]]:
    """Finds who needs the artifacts of the shared store, by key: registered versions, with an alias or without, runs of
    the last `days`, whatever machine they ran on, and what this home needs. A run counts from its start until `days`
    after its end.

    Raises MlflowFailed if MLflow does not answer.
    """
    since_ms = int(1000 * (time.time() - days * 86_400))
    with mlflow_errors():
        client = connect()
        versions = [*search_all(client.search_model_versions)]
        recent = (
            f"attributes.start_time >= {since_ms}",
            f"attributes.end_time >= {since_ms}",
            "attributes.status = 'RUNNING'",
        )
        runs = {run.info.run_id: run for condition in recent for run in _search_runs(client, condition)}
        needing = [(f"runs of the last {days} days", _keys_of(run.data.tags)) for run in runs.values()]
        for version in versions:
            run = runs.get(version.run_id) or _find_run(client, version.run_id)
            keys = _keys_of(version.tags) | (_keys_of(run.data.tags) if run else set())
            needing.append((f"{version.name}/{version.version}", keys))
    return _group_by_key(
        [*needing, *((who, {key}) for key, owners in find_needs().needed_by.items() for who in owners)]
    )


def _search_runs(client: MlflowClient, condition: str) -> Iterator[MlflowRun]:
    experiments = [experiment.experiment_id for experiment in search_all(client.search_experiments)]
    if experiments:
        yield from search_all(client.search_runs, experiment_ids=experiments, filter_string=condition)


def _find_run(client: MlflowClient, run_id: str | None) -> MlflowRun | None:
    """The run that registered a version; None if it was deleted for good."""
    try:
        return client.get_run(run_id) if run_id else None
    except Exception as error:
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _keys_of(tags: Mapping[str, str]) -> set[str]:
    """The keys of stages in the tags of a run or a version."""
    stages, named = {*STAGES, *MONITORING_STAGES}, ((tag.removeprefix("finetune."), key) for tag, key in tags.items())
    return {key for tag, key in named if tag.endswith(".key") and without_number(tag.removesuffix(".key")) in stages}


def _group_by_key(needing: Iterable[tuple[str, Collection[str]]]) -> dict[str, list[str]]:
    needed_by: dict[str, list[str]] = {}
    for who, keys in needing:
        for key in keys:
            needed_by.setdefault(key, []).append(who)
    return needed_by


def _list_aliased(client: MlflowClient, runs: Mapping[str, PastRun]) -> Iterator[tuple[str, set[str]]]:
    """Versions with an alias, with the keys in their tags and the keys of the run that registered them."""
    for model in search_all(client.search_registered_models):
        for alias, number in model.aliases.items():
            tags = client.get_model_version(model.name, str(number)).tags
            keys = _keys_of(tags)
            run = runs.get(tags.get(FLOW_RUN_TAG, ""))
            yield f"{model.name}@{alias}", keys | (run.keys if run else set())


def _list_last_runs() -> Iterator[tuple[str, set[str]]]:
    """The last run of each recipe: the next run is compared with it."""
    for recipe in history.recipes():
        yield f"last run of {recipe}", history.History(recipe).keys()


def _list_unfinished(
    runs: Mapping[str, PastRun], given_up: Collection[str], client: MlflowClient
) -> Iterator[tuple[str, frozenset[str]]]:
    """Runs that can be resumed, have undelivered entries, or registered a version that the registry lacks."""
    completed = [run.keys for run in runs.values() if run.completed]
    ended_studies = {run.study for run in runs.values() if run.completed and run.study and not run.is_trial}
    folders = [home() / "jobs", *(home() / "artifacts").glob("*/")]
    stored = {name for folder in folders if folder.is_dir() for name in os.listdir(folder)}
    registered = list_registered(client)
    for run in runs.values():
        if run.id in given_up or (run.is_trial and run.study in ended_studies and run.delivered):
            continue
        # A run needs no resume if a completed run has all of its stored keys. Actions have keys but store nothing, so
        # their keys, which change from run to run, do not count.
        if not run.completed and not any(run.keys & stored <= keys for keys in completed):
            yield f"{run}, to resume", run.keys
        elif not run.delivered:
            yield f"{run}, to deliver to MLflow", run.keys
        elif run.version is not None and run.version not in registered:
            yield (
                f"{run}, whose {run.version} is registered elsewhere or was deleted; --give-up RUN if it was",
                run.keys,
            )


def _find_run_ids(runs: Mapping[str, PastRun], beginnings: Collection[str]) -> set[str]:
    """Finds the ids with these beginnings. Raises UserError for a beginning that fits no run, or several."""
    ids = set()
    for beginning in beginnings:
        matches = [run for run in runs if beginning and run.startswith(beginning)]
        if len(matches) != 1:
            message = f"{beginning!r} begins the id of {len(matches)} runs here: `finetune runs` lists them."
            raise UserError.of("option", "--give-up", message)
        ids |= set(matches)
    return ids


def _read_run(id: str) -> PastRun:
    """Reads the run from its outbox. A run that is being retried is not completed."""
    tags: dict[str, str] = {}
    keys, recipe, completed, outbox = set(), "", False, Outbox(id)
    for entry in outbox.read_entries("start", "end", "tags"):
        if entry["entry"] == "start":
            recipe, completed = entry["experiment"], False
        elif entry["entry"] == "end":
            completed = entry["status"] == "FINISHED"
        elif entry["entry"] == "tags":
            tags |= entry["values"]
            keys |= {key for tag, key in entry["values"].items() if tag.endswith(".key")}
    return PastRun(
        id,
        recipe,
        frozenset(keys),
        version=tags.get(VERSION_TAG),
        study=tags.get(STUDY_TAG) if TRIAL_TAG not in tags or TRIAL_STATE_TAG in tags else None,
        is_trial=TRIAL_TAG in tags,
        completed=completed,
        delivered=not outbox.read_undelivered(),
        state_is_pending=(outbox.folder / PENDING_STATE).is_file(),
    )
