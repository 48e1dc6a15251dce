"""`make team` before its servers start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.team import __main__ as team
from tests.team import servers
from tests.waiting import wait_until


def test_without_postgresql_nothing_starts_and_the_message_has_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "DEBIAN", tmp_path)
    monkeypatch.setattr(sys, "argv", ["team"])
    assert team.main() == 2
    printed = capsys.readouterr()
    assert "apt-get install postgresql" in printed.err and printed.out == ""


def test_a_secret_in_a_command_line_is_found(tmp_path: Path) -> None:
    (secret, *_) = (known := servers.Servers(tmp_path)).secrets()
    watch = team.CommandLines(known)
    try:
        with subprocess.Popen(["sh", "-c", "read line", secret.decode()], stdin=subprocess.PIPE):
            wait_until(lambda: bool(watch.found), 20.0)
    finally:
        watch.stop()
    assert watch.found == {"sh"}
