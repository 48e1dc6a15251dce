"""MLflow's server of one home, on loopback: `python -m tasks.services.mlflow_server PORT --fd N`.

`mlflow server` accepts no socket, and reads a request's body before it asks for a password. So this program serves
MLflow's application itself, behind the guard (tasks/services/request_guard.py), which asks for the password of the
server. The parent process binds the port and passes the socket as a descriptor.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

from tasks.environment_variables import prepare_environment
from tasks.home import home, mlflow_artifacts
from tasks.servers import MLFLOW, ensure_password
from tasks.services.request_guard import Guard, serve
from tasks.tracking.connection import SERVED_ROOT, update_artifact_paths

UPLOADS = ("/api/2.0/mlflow-artifacts/artifacts/", "/ajax-api/2.0/mlflow-artifacts/artifacts/")
"""Files that are uploaded here go to the disk as they arrive."""


def main() -> None:
    """Parses the command line and runs the server until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m tasks.services.mlflow_server")
    parser.add_argument("port", type=int)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket that is bound to the port")
    options = parser.parse_args()
    prepare_environment()
    update_artifact_paths(is_server=True)
    database = f"sqlite:///{home() / 'mlflow.db'}"
    _configure_mlflow(database)
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(database, database, SERVED_ROOT)
    guard = Guard(
        app,
        options.port,
        ensure_password(MLFLOW),
        is_open=lambda path: path == "/health",
        is_stream=lambda path: path.startswith(UPLOADS),
        asks_for_login=True,
    )
    if not serve(guard, socket.socket(fileno=options.fd), log_level="warning"):
        sys.exit(1)


def _configure_mlflow(database: str) -> None:
    """Sets the variables that `mlflow server` passes to its application in MLflow 3.17."""
    from mlflow.server import constants

    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.REGISTRY_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: SERVED_ROOT,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(mlflow_artifacts()),
        "_MLFLOW_SGI_NAME": "uvicorn",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


if __name__ == "__main__":
    main()
