"""The display of a running stage."""

from __future__ import annotations

import io
import os
import pty
import re

import pytest

from flows.reports import terminal
from tasks.cache.stage import Row
from tests.fork_server import COMMANDS, Fork, run_code


def test_progress_shows_rows_a_second_and_until_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "FILE_INTERVAL_S", 0.0)
    err = io.StringIO()
    shown = terminal.Terminal(io.StringIO(), err)
    shown.stage_started("fit", "k")
    for done in (1, 2):
        event = {"kind": "progress", "done": done, "total": 4, "loss": 0.5, "rows_per_second": 1391.25}
        shown.stage_events("fit", [event])
    assert re.search(r"2/4  train loss 0.500  1,391 rows/s  0 s left, until \d\d:\d\d\n$", err.getvalue())


AT_WORK = """
import select, sys
from flows.reports.terminal import open_terminal
from tasks.cache.stage import Row

shown = open_terminal(None, quiet=False)
try:
    shown.stage_started("resolve", "k")
    shown.stage_ended(Row("resolve", "k", "cached", 0.25), None)
    shown.stage_started("load_data", "k")
    for done in (1, 2):
        event = {"kind": "progress", "done": done, "total": 4, "loss": 0.5, "rows_per_second": 1391.25}
        shown.stage_events("load_data", [event])
    print("printed by a library", file=sys.stderr)
    shown.stage_events("load_data", [{"kind": "warning", "message": "row 7 is [odd]"}])
    select.select([sys.stdin], [], [], 60)
    raise KeyboardInterrupt
except KeyboardInterrupt:
    shown.stage_ended(Row("load_data", "k", "failed", 1.5), None)
finally:
    shown.close()
print("told")
"""


def test_a_terminal_shows_all_stages_and_is_left_as_it_was_when_the_run_is_interrupted() -> None:
    written = _written(b"2/4", TERM="xterm", COLUMNS="120", LINES="40")
    frames, _, left = written.rpartition("\x1b[?25h")  # the cursor, shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames)
    assert "  resolve          cached       0.2 s\n" in plain
    assert re.search(r"  load_data +running +\d\.\d s\n    █{10}░{10} 2/4  train loss 0.500  1,391 rows/s", plain)
    assert re.search(r"\n  load_model +waiting *\n(.+waiting *\n)+  promote +waiting", plain)
    assert "printed by a library\n" in plain and "  load_data: row 7 is [odd]\n" in plain
    assert "  load_data        failed       1.5 s\n" in plain
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", left).split() == ["told"]


def test_a_small_terminal_shows_how_far_the_stage_at_work_is_and_no_more_lines_than_it_has() -> None:
    written = _written(b"2/4", TERM="xterm", COLUMNS="80", LINES="6")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    far = r"█{8}░{9} 2/4  train loss 0.500  1,391 rows/s  0 s left, until \d\d:\d\d"
    assert "  resolve          cached       0.2 s\n" in plain
    assert re.search(rf"  load_data +running +\d\.\d s\n    {far}\n", plain)
    assert "promote" not in plain
    assert max(len(ups) // 8 for ups in re.findall(r"(?:\x1b\[1A\x1b\[2K)+", written)) <= 5


def test_a_terminal_without_control_sequences_has_a_line_for_each_stage() -> None:
    written = _written(b"row 7", TERM="dumb")
    assert "\x1b" not in written and "\r" not in written
    assert [line for line in written.splitlines() if line.startswith("  resolve")] == [
        "  resolve          cached       0.2 s"
    ]


def _written(last: bytes, **env: str) -> str:
    """All that the terminal shows of a run that is interrupted when it has shown `last`."""
    ours, theirs = pty.openpty()
    waits, goes_on = os.pipe()
    files = (waits, theirs, theirs)
    child = Fork(run_code, [AT_WORK], env={**os.environ, **env}, files=files, level=COMMANDS).start()
    os.close(theirs)
    os.close(waits)
    written, is_waiting = b"", True
    while more := _read(ours):
        written += more
        if is_waiting and last in written:
            os.close(goes_on)
            is_waiting = False
    os.close(ours)
    assert child.join() == 0, written
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # on Linux, when the other end is closed
        return b""


def test_a_quiet_terminal_shows_nothing_and_keeps_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    shown = terminal.Quiet()
    shown.stage_started("fit", "k")
    shown.stage_events("fit", [{"kind": "warning", "message": "odd"}])
    shown.stage_ended(Row("fit", "k", "ran", 1.0), None)
    shown.run_ended(result := {"state": "completed", "metrics": {}})
    shown.close()
    printed = capsys.readouterr()
    assert (printed.out, printed.err, shown.result) == ("", "", result)
