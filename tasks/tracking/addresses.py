"""Where a person finds a run or a model in a browser; None where that is on no server."""

from __future__ import annotations

from urllib.parse import quote

from tasks.cache import settings


def mlflow_run(run_id: str | None) -> str | None:
    """The page of an MLflow run."""
    return _mlflow(f"runs/{run_id}") if run_id else None


def version(name: str, number: str) -> str | None:
    """The page of a version in MLflow's registry."""
    return _mlflow(version_page(name, number))


def version_page(name: str, number: str) -> str:
    """The same, as a link from another page of MLflow's has it behind `#/`."""
    return f"models/{quote(name)}/versions/{number}"


def flow_run(run: str) -> str | None:
    """The page of a flow run."""
    from prefect.settings import PREFECT_UI_ENABLED, PREFECT_UI_URL

    # The server that lives as long as a run has no UI.
    return f"{PREFECT_UI_URL.value()}/runs/flow-run/{run}" if PREFECT_UI_ENABLED.value() else None


def _mlflow(page: str) -> str | None:
    uri = settings.tracking_uri()
    served = uri.startswith(("http://", "https://"))
    return f"{settings.without_credentials(uri).rstrip('/')}/#/{page}" if served else None
