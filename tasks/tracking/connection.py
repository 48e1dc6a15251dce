"""Connection to MLflow: the server or the home's database, runs and experiments, locks, errors and page addresses."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from tasks.database_templates import create_database
from tasks.environment_variables import BUCKETS, DATABASE, MLFLOW, passed
from tasks.home import (
    home,
    mlflow_artifacts,
    named_lock,
    registry_place,
    tracking_is_local,
    tracking_uri,
    without_credentials,
)
from tasks.loopback import HOME_SERVERS
from training.problems import Problem

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from training.recipe import Recipe

FLOW_RUN_TAG = "finetune.flow_run_id"
# Tags of a registered version: the digest of its model's folder, the tokens after which a text is truncated, and the
# gate's decision with its reason.
MODEL_TAG = "finetune.model_digest"
FIT_TAG = "finetune.fit.key"
"""The artifact of its training, which a store may still have."""
MAX_LENGTH_TAG = "finetune.max_length"
VERDICT_TAG, REASON_TAG = "finetune.verdict", "finetune.verdict_reason"
UNKNOWN_MODEL = "m-00000000000000000000000000000000"
"""An id that no logged model has."""

_logger = logging.getLogger(__name__)


class MlflowFailed(Exception):
    """MLflow failed while a stage or a command needs it; the message is for the user."""


def import_client() -> type[MlflowClient]:
    """Imports MLflow's client, which takes a second, with few retries and without logs of errors that it raises."""
    # The outbox retries: minutes of retries inside one call would only delay the end of a run.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # These loggers print pages about errors that are also raised, and that the caller reports in one line.
    for name in ("mlflow.store.db.utils", "mlflow.system_metrics.system_metrics_monitor"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from mlflow import MlflowClient

    return MlflowClient


def import_store() -> None:
    """Imports all of MLflow that a connection needs: half a second more for the database in the home."""
    import_client()
    if tracking_is_local():
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def connect() -> MlflowClient:
    """Connects a client to the tracking server, or to the database in the home, which is created if missing."""
    create_client, uri = import_client(), tracking_uri()
    # Two processes that migrate a new SQLite file at the same time both fail; a server migrates its database itself.
    with named_lock("mlflow-database") if uri.startswith("sqlite:") else contextlib.nullcontext():
        if tracking_is_local():
            if not has_database():
                _create_database()
            update_artifact_paths()
        client = create_client(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


def find_registry_problems(recipe: Recipe) -> list[Problem]:
    """The problem of the registry's server if a model is to be registered there: see `find_server_problems`."""
    return find_server_problems(recipe.name) if recipe.release.registry is not None else []


def find_server_problems(experiment: str) -> list[Problem]:
    """The problem of a server that the environment names, before anything is trained for its registry: it is too old,
    or keeps the files of this experiment where this machine cannot write them; a warning if it does not answer now."""
    if not _is_server() or registry_place() == "home":
        return []
    uri = tracking_uri()
    shown, create_client = without_credentials(uri), import_client()
    from mlflow.exceptions import MlflowException, RestException
    from requests import RequestException

    client = create_client(tracking_uri=uri, registry_uri=uri)
    try:
        found = client.get_experiment_by_name(experiment)
        locations = {(found or one).artifact_location for one in client.search_experiments(max_results=1)}
    except (MlflowException, RequestException) as error:
        message = f"MLflow at {shown} does not answer ({one_line(error)}): it must when the model is registered."
        return [_build_server_problem(message).model_copy(update={"level": "warning"})]
    try:
        client.get_logged_model(UNKNOWN_MODEL)
    except (MlflowException, RequestException) as error:
        codes = ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED")
        if not (isinstance(error, RestException) and error.error_code in codes):
            message = f"the server at {shown} has no logged models, in which versions are stored ({one_line(error)}): "
            message += "update it to MLflow 3, or name another."
            return [_build_server_problem(message)]
    for location in locations:
        if folder := find_unwritable(location):
            message = (
                f"the server at {shown} has clients write files to {folder} themselves, a folder that this machine "
            )
            message += (
                "does not have or may not write: start the server with --artifacts-destination, name a bucket in "
            )
            message += "--default-artifact-root, or make the folder if the server is on this machine."
            return [_build_server_problem(message)]
    return []


def find_unwritable(location: str) -> Path | None:
    """The local folder above an experiment's artifacts, if this machine does not have it or may not write there. A
    client would make it without a word, on its own disk."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file"):
        return None
    root = Path(unquote(parts.path)).parent
    return None if os.access(root, os.W_OK | os.X_OK) else root


def _build_server_problem(message: str) -> Problem:
    return Problem(kind="tracking", where="MLFLOW_TRACKING_URI", message=message)


def has_database() -> bool:
    """Whether there is a server or a database; the first connection creates the database in the home."""
    return not tracking_is_local() or _database_file().exists()


def _database_file() -> Path:
    return home() / "mlflow.db"


def _create_database() -> None:
    """Creates the database in the home. Files of the experiment that MLflow makes itself belong to the home as well."""
    import mlflow

    file = _database_file()
    create_database(file, f"mlflow-{mlflow.__version__}", _migrate)
    location, now_ms = (mlflow_artifacts() / "0").as_uri(), int(time.time() * 1000)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(
            "UPDATE experiments SET artifact_location = ?, creation_time = ?, last_update_time = ?",
            (location, now_ms, now_ms),
        )


def _migrate(file: Path) -> None:
    from mlflow import MlflowClient

    MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments(max_results=1)


SERVED_ROOT = "mlflow-artifacts:/"
"""Of the home's server: clients send and fetch files through it."""
_PATH_COLUMNS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Columns with absolute paths of files, by table of MLflow's database."""


def update_artifact_paths(*, is_server: bool = False) -> None:
    """Rewrites the artifact paths in the home's database after the home was moved or copied. Unless this process is the
    server, locations that only its clients can resolve become paths as well."""
    current, database = mlflow_artifacts(), _database_file()
    if not current.is_dir() or not database.exists():  # if only the database was copied, its files have not moved
        return
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        if not is_server and _has_root(connection, SERVED_ROOT):
            _replace_root(connection, SERVED_ROOT, f"{current.as_uri()}/")
        locations = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        urls = {url for (url,) in locations if url and url.startswith("file:///")}
        roots = {root for root, folder, _ in (url.rpartition(f"/{current.name}/") for url in urls) if folder}
        for root in roots:
            former = Path(unquote(urlsplit(root).path)) / current.name
            if former == current or (former.exists() and former.samefile(current)):
                continue
            for old, new in ((former.as_uri(), current.as_uri()), (str(former), str(current))):
                _replace_root(connection, f"{old}/", f"{new}/")


# Of a server of another host, the location begins with the root and another slash.
_BELOW_ROOT = "substr({column}, 1, :length) = :old AND substr({column}, :length + 1, 1) != '/'"


def _has_root(connection: sqlite3.Connection, old: str) -> bool:
    """Whether a path begins with this root: of an experiment, or of what a client made in it while the paths were
    rewritten."""
    return any(
        connection.execute(
            f"SELECT 1 FROM {table} WHERE {_BELOW_ROOT.format(column=column)} LIMIT 1", {"old": old, "length": len(old)}
        ).fetchone()
        for table, columns in _PATH_COLUMNS.items()
        for column in columns
    )


def _replace_root(connection: sqlite3.Connection, old: str, new: str) -> None:
    for table, columns in _PATH_COLUMNS.items():
        for column in columns:
            connection.execute(
                f"UPDATE {table} SET {column} = :new || substr({column}, :length + 1) "
                f"WHERE {_BELOW_ROOT.format(column=column)}",
                {"old": old, "new": new, "length": len(old)},
            )


def find_files_here(location: str) -> Path | None:
    """The place on this machine that an artifact location names, a path or one of the home's server; None for files of
    another server or a bucket."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    if is_local_uri(location):
        return Path(local_file_uri_to_path(location))
    below = location.removeprefix(SERVED_ROOT)
    if below == location or below.startswith("/") or registry_place() != "home":
        return None
    return mlflow_artifacts() / unquote(below)


@contextlib.contextmanager
def mlflow_errors() -> Iterator[None]:
    """Raises MlflowFailed instead of the errors of MLflow's client in the block: MLflow is down or refuses."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    try:
        yield
    except (MlflowException, RequestException) as error:
        uri = without_credentials(tracking_uri())
        # MLflow's traces contain the URL with its password.
        raise MlflowFailed(
            f"MLflow at {uri} fails: start it, or name another with MLFLOW_TRACKING_URI ({one_line(error)})."
        ) from None


def build_environment() -> dict[str, str]:
    """The variables of a child program that uses MLflow: server, logins, and time to store a large model."""
    # Without a server between them, MLflow's client opens the database, and writes to the bucket of the models, itself.
    return {
        **passed((*MLFLOW, HOME_SERVERS, *BUCKETS, *(() if _is_server() else DATABASE))),
        "MLFLOW_TRACKING_URI": tracking_uri(),
        "MLFLOW_REGISTRY_URI": tracking_uri(),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "600",
    }


def find_or_create_run(
    client: MlflowClient,
    experiment: str,
    run: str,
    warn: Callable[[str], None] = _logger.warning,
    began_s: float | None = None,
) -> str:
    """Returns the id of the flow run's MLflow run, which is created if missing, with this start time (default: now). A
    deleted experiment is restored, with a warning."""
    with named_lock(f"mlflow-run-{run}"):
        experiment_id = _find_or_create_experiment(client, experiment, warn)
        existing = client.search_runs([experiment_id], f"tags.`{FLOW_RUN_TAG}` = '{run}'", max_results=1)
        if existing:
            return str(existing[0].info.run_id)
        # The run may have started long before this delivery.
        began_ms = None if began_s is None else int(began_s * 1000)
        name = f"{experiment}-{run[-8:]}"
        created = client.create_run(experiment_id, began_ms, tags={FLOW_RUN_TAG: run}, run_name=name)
        return str(created.info.run_id)


def _find_or_create_experiment(client: MlflowClient, name: str, warn: Callable[[str], None]) -> str:
    with named_lock(f"mlflow-experiment-{name}"):
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            if experiment.lifecycle_stage == "deleted":  # MLflow still reserves its name
                client.restore_experiment(experiment.experiment_id)
                warn(
                    f"The experiment {name!r} was deleted in MLflow, and is restored with its runs because this recipe "
                    "tracks its runs there. For an empty one, give the recipe another name."
                )
            return str(experiment.experiment_id)
        location = (mlflow_artifacts() / name).as_uri() if tracking_is_local() else None
        return str(client.create_experiment(name, artifact_location=location))


def one_line(error: Exception) -> str:
    """The error in one line, without passwords."""
    return without_credentials(f"{type(error).__name__}: {cause_of(error)}")


def cause_of(error: Exception) -> str:
    """The cause that the first line of the error's message names, at most 200 characters."""
    line = (str(error).splitlines() or [""])[0]
    # In the message of a failed connection, the cause follows 300 other characters.
    return line.rpartition("(Caused by ")[2].removesuffix(")")[:200]


def search_all(search: Callable[..., Any], **query: Any) -> Iterator[Any]:
    """The results of a search of MLflow's client, from all pages."""
    page = None
    while page is None or page.token:
        page = search(**query, page_token=page.token if page else None)
        yield from page


def list_registered(client: MlflowClient) -> set[str]:
    """The `name/version` of all versions in the registry."""
    if tracking_is_local():  # the client would read all tags of all versions
        query = "SELECT name, version FROM model_versions WHERE current_stage != 'Deleted_Internal'"
        with contextlib.closing(sqlite3.connect(_database_file(), timeout=60)) as connection:
            return {f"{name}/{version}" for name, version in connection.execute(query)}
    return {f"{version.name}/{version.version}" for version in search_all(client.search_model_versions)}


def read_aliases(model: str) -> dict[str, str]:
    """The version of each alias of a registered model; empty if it is not registered. Raises MlflowFailed."""
    if registry_place() == "home":  # the import of MLflow's client takes seconds
        if not _database_file().exists():
            return {}
        query = "SELECT alias, version FROM registered_model_aliases WHERE name = ?"
        with contextlib.closing(sqlite3.connect(_database_file(), timeout=60)) as connection:
            return {alias: str(version) for alias, version in connection.execute(query, (model,))}
    with mlflow_errors():
        found = connect().search_registered_models(f"name = '{model}'")
    return {alias: str(version) for one in found if one.name == model for alias, version in one.aliases.items()}


def run_url(run_id: str | None) -> str | None:
    """The address of an MLflow run's page; None without a run or a server."""
    return _url(f"runs/{run_id}") if run_id else None


def version_url(name: str, number: str) -> str | None:
    """The address of a version's page in MLflow's registry; None without a server."""
    return _url(version_page(name, number))


def version_page(name: str, number: str) -> str:
    """The address of a version's page after `#/`, for links between MLflow's pages."""
    return f"models/{quote(name)}/versions/{number}"


def _url(page: str) -> str | None:
    return f"{without_credentials(tracking_uri()).rstrip('/')}/#/{page}" if _is_server() else None


def _is_server() -> bool:
    """Whether MLflow is a server, and not a database that this process opens itself."""
    return tracking_uri().startswith(("http://", "https://"))
