"""The command `finetune` in a fork: a new Python would import for seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from flows.cli.main import start
from tasks import servers
from tests import fork_server
from tests.flows.small import environment

QUIET = dict.fromkeys(("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_LOGGING_INTERNAL_LEVEL"), "CRITICAL")
"""What a command sets before it imports Prefect, which the server of forks has imported with it."""


def code_with_forked_programs(code: str) -> str:
    """The code of a new Python, with an import of its own of all but what the programs need that it starts."""
    return f"import sys; sys.executable = {fork_server.forked_python()!r}; {code}"


def finetune(
    home: Path, *arguments: str, timeout_s: float = 300, python: str | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs `finetune` as a person would. Its programs are forks too, unless it has another `python`."""
    words = [python or fork_server.forked_python(), *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        files, env = (nothing, out, err), QUIET | environment(home, **more)
        fork = fork_server.Fork(run, words, env=env, files=files, level=fork_server.COMMANDS).start()
        code = fork.join(timeout_s)
        if code is None:
            fork.kill()
        printed, errors = (stream.seek(0) or stream.read().decode() for stream in (out, err))
    assert code is not None, f"`finetune {' '.join(arguments)}` takes longer than {timeout_s:g} s: {printed}{errors}"
    return subprocess.CompletedProcess(["finetune", *arguments], code, printed, errors)


def run(python: str, *arguments: str) -> None:
    if not os.environ.keys() >= QUIET.keys():
        os.environ.update(QUIET | os.environ)
        fork_server.refresh_prefect_settings()
    use_home_servers = servers.use_home_servers

    def use_and_refresh() -> None:
        before = dict(os.environ)
        use_home_servers()
        if os.environ != before:
            fork_server.refresh_prefect_settings(logging=False)

    servers.use_home_servers = use_and_refresh
    Figure.savefig = fork_server.draw_nothing
    sys.path[:] = fork_server.new_search_path()
    sys.argv = ["finetune", *arguments]
    sys.executable = python
    start()


if __name__ == "__main__":
    run(fork_server.forked_python(), *sys.argv[1:])
