"""The simulation keeps its promises for some seeds, finds planted mistakes, and plays a seed twice alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulate.mutations import MUTATIONS
from tests.simulate.seeds import SCENES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The output of `python -m tests.simulate`. It has a process of its own, because it replaces calls of the system,
    and needs texts with the same hashes each time."""
    argv = [sys.executable, "-m", "tests.simulate", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_no_promise_is_broken_by_faults_of_disks_networks_and_processes() -> None:
    played = simulate("--seeds", "100")
    assert played.returncode == 0, played.stdout + played.stderr
    assert re.search(r"kill \d+, .*made \d+, .*power_loss \d+", played.stdout), played.stdout
    assert re.search(r"conflicts \d+, .*moves \d+", played.stdout), played.stdout


def test_planted_mistakes_are_found() -> None:
    planted = simulate("--mutations", "--only", "not synced")
    assert planted.returncode == 0, planted.stdout + planted.stderr
    assert planted.stdout.count("not synced") == 10 and "not found" not in planted.stdout, planted.stdout


def test_a_seed_plays_the_same_steps_each_time() -> None:
    first, second = (simulate("--seed", "3", "--steps") for _ in range(2))
    assert first.stdout.count("\n") > 100, first.stdout + first.stderr
    assert first.stdout == second.stdout


def test_a_seed_in_a_row_of_seeds_plays_the_same_steps_as_in_a_process_of_its_own() -> None:
    seeds = ["--digests", "--first", "100", "--seeds", "6"]
    row, alone = simulate(*seeds), simulate(*seeds, "--alone")
    assert row.stdout.count("\n") == 6 * len(SCENES), row.stdout + row.stderr
    assert row.stdout == alone.stdout


def test_each_planted_mistake_replaces_a_function_that_there_is() -> None:
    for _, plant in MUTATIONS.values():
        with plant():
            pass
