"""The Prefect server of one home, on loopback: `python -m tasks.prefect.prefect_server PORT --fd N [--for-one-run]`.

The guard (tasks/prefect/guard.py) decides which requests reach it: they need the server's password. The pages
themselves need none, as they hold no data. The parent process binds the port and passes the socket as a descriptor.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket
import sys
from pathlib import Path

from tasks.database_templates import create_database
from tasks.environment import prepare_environment
from tasks.home import home
from tasks.prefect.ephemeral_server import SQLITE, database_url
from tasks.prefect.guard import HOSTS, Guard, serve
from tasks.prefect.servers import PREFECT, auth_string, ensure_password


def main() -> None:
    """Parses the command line and runs the server until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m tasks.prefect.prefect_server")
    parser.add_argument("port", type=int)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket that is bound to the port")
    parser.add_argument("--for-one-run", action="store_true", help="without UI and background services")
    options = parser.parse_args()
    gc.set_threshold(20_000)  # as in flows/cli/main.py: the imports take a tenth longer with the default
    prepare_environment()
    _configure_prefect(options.port, options.for_one_run)
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    server_settings = get_current_settings().server
    started = serve(
        Guard(create_app(), options.port, ensure_password(PREFECT), is_open=_is_open, websockets=True),
        socket.socket(fileno=options.fd),
        timeout_keep_alive=server_settings.api.keepalive_timeout,
        ws_ping_interval=server_settings.api.websocket_ping_interval,
        ws_ping_timeout=server_settings.api.websocket_ping_timeout,
        log_level="critical" if options.for_one_run else server_settings.logging_level.lower(),
    )
    if not started:
        sys.exit(1)


def _is_open(path: str) -> bool:
    """Pages without data, and health checks."""
    return not f"{path}/".startswith("/api/") or path in ("/api/health", "/api/ready")


def _configure_prefect(port: int, for_one_run: bool) -> None:
    """Configures Prefect by environment variables of this process, so that no list of processes shows the password."""
    os.environ |= {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in HOSTS),
        "PREFECT__SERVER_FINAL": "1",
    }
    if for_one_run:
        os.environ |= {
            "PREFECT_SERVER_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            # The server of `finetune up` registers the types of blocks that its UI offers. Memoized, it would not.
            "PREFECT_API_BLOCKS_REGISTER_ON_START": "0",
            "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "0",
        }
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    url = database_url()
    in_home = url != PREFECT_API_DATABASE_CONNECTION_URL.value()
    if in_home:
        os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = url
        # Prefect's cache of the blocks in its database: each database needs its own.
        os.environ["PREFECT_SERVER_MEMO_STORE_PATH"] = str(home() / "prefect" / "memo_store.toml")
    refresh_global_settings_context()
    if in_home:
        _create_database(Path(url.removeprefix(SQLITE)))


def _create_database(file: Path) -> None:
    """Creates the database in the home if it is missing. The server would migrate it there, which takes seconds."""
    import prefect

    file.parent.mkdir(mode=0o700, exist_ok=True)
    if not file.exists():
        create_database(file, f"prefect-{prefect.__version__}", _migrate)


def _migrate(file: Path) -> None:
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import provide_database_interface, temporary_database_config

    async def migrate() -> None:
        database = provide_database_interface()
        await database.create_db()
        await (await database.engine()).dispose()

    with temporary_database_config(AioSqliteConfiguration(f"{SQLITE}{file}")):
        asyncio.run(migrate())


if __name__ == "__main__":
    main()
