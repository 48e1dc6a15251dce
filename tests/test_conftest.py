"""What keeps the tests fast: folders that are made once for all workers, and programs that are forks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fork_server import ROOT
from tests.forked_python import level_of

MakeOnce = Callable[[str, Callable[[Path], None]], Path]


def test_of_all_that_want_a_folder_at_once_the_first_makes_it_and_the_others_wait(make_once: MakeOnce) -> None:
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.05)
        (folder / "content").write_text("whole")

    with ThreadPoolExecutor(4) as pool:  # each opens the lock for itself, as workers do
        found = {
            (folder, (folder / "content").read_text()) for folder in pool.map(lambda _: make_once("a", fill), "1234")
        }
    assert found == {(calls[0], "whole")} and len(calls) == 1


def test_a_folder_whose_making_failed_is_made_by_the_next_that_wants_it(make_once: MakeOnce) -> None:
    def fail(folder: Path) -> None:
        (folder / "content").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once("b", fail)
    folder = make_once("b", lambda folder: (folder / "content").write_text("whole"))
    assert (folder / "content").read_text() == "whole"


def test_every_program_is_a_fork_of_a_process_with_its_libraries() -> None:
    files = [file for room in ("tasks", "training") for file in (ROOT / room).rglob("*.py")]
    texts = {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}
    programs = {name for name, text in texts.items() if "\n    run_program(main" in text}
    assert "training.programs.fit" in programs
    # The client of the Hub reads its environment variables when it is imported.
    assert {name for name in programs if level_of(name) is None} == {"tasks.hub.checkpoint_uploads", "tasks.hub.push"}
