"""Prefect's server of one home, on loopback: `python -m tasks.prefect.prefect_server PORT [--for-one-run]`.

Every request needs the password of the home (tasks/prefect/servers.py), every name but the two of loopback is refused,
and only the server's own pages may read its answers in a browser. The pages themselves, without any data, are open.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tasks.cache import settings
from tasks.prefect.embedded import database_url
from tasks.prefect.servers import auth_string

if TYPE_CHECKING:
    from fastapi import FastAPI

HOSTS = ["127.0.0.1", "localhost"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tasks.prefect.prefect_server")
    parser.add_argument("port", type=int)
    parser.add_argument("--for-one-run", action="store_true", help="without UI and background services")
    options = parser.parse_args()
    settings.prepare_environment()
    _prepare(options.port, options.for_one_run)
    import uvicorn
    from prefect.settings import get_current_settings

    server = get_current_settings().server
    uvicorn.run(
        _app(),
        host="127.0.0.1",
        port=options.port,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level="critical" if options.for_one_run else server.logging_level.lower(),
    )


def _prepare(port: int, for_one_run: bool) -> None:
    """Sets the environment variables of this process alone, so that a password is in no list of processes."""
    os.environ |= {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in HOSTS),
        "PREFECT__SERVER_FINAL": "1",
    }
    if for_one_run:
        os.environ |= {"PREFECT_SERVER_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    url = database_url()
    if url != PREFECT_API_DATABASE_CONNECTION_URL.value():
        os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = url
        # Prefect notes there which blocks are in its database.
        os.environ["PREFECT_SERVER_MEMO_STORE_PATH"] = str(settings.home() / "prefect" / "memo_store.toml")
        (settings.home() / "prefect").mkdir(mode=0o700, exist_ok=True)
        refresh_global_settings_context()


def _app() -> FastAPI:
    from fastapi import FastAPI
    from prefect.server.api.server import create_app
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Mount

    app = create_app()
    (api,) = (route.app for route in app.routes if isinstance(route, Mount) and route.name == "api")
    assert isinstance(api, FastAPI)
    # The last one: the password comes first, so that without it every answer is 401.
    api.user_middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS))
    return app


if __name__ == "__main__":
    main()
