"""A recording of a terminal; then real servers, a run of the demo by a worker, and a headless Chromium that checks and
pictures its pages.

    python -m tests.ui

Each page must show its texts. The pictures that the documentation shows are in tests/ui/pictures/.
The exit status is 1 if a page lacks a text. Chromium comes with the system: apt-get install chromium.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = (sys.executable, "-c", "from flows.cli.main import start; start()")


def main() -> int:
    """The command line."""
    from tasks import servers
    from tests.flows.served import Server
    from tests.servers import closed_port
    from tests.ui import recording
    from tests.ui.browser import Missing
    from tests.ui.pages import look, try_served_model

    recording.main()
    with tempfile.TemporaryDirectory(prefix="finetune-ui-", ignore_cleanup_errors=True) as folder:
        os.environ.update(FINETUNE_HOME=f"{folder}/home", PREFECT_HOME=f"{folder}/prefect", DO_NOT_TRACK="1")
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)
        ports = {name: str(closed_port()) for name in ("prefect", "mlflow")}
        try:
            _finetune("up", "--detach", "--prefect-port", ports["prefect"], "--mlflow-port", ports["mlflow"])
            _finetune("deploy", "deployments/demo.yaml")
            prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports.values())
            os.environ.update(servers.read_last_state().environment)
            _run("-m", "prefect", "--no-prompt", "deployment", "run", "finetune/demo", "--watch")
            look(prefect, mlflow, Path(__file__).with_name("pictures"))
            with Server(Path(os.environ["FINETUNE_HOME"]), "demo", command=FINETUNE) as served:
                try_served_model(served.url, served.token)
        except Missing as missing:
            print(missing, file=sys.stderr)
            return 1
        finally:
            _finetune("down")
    return 0


def _finetune(*arguments: str) -> None:
    _run(*FINETUNE[1:], *arguments)


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
