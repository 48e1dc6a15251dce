"""Cores and kills of this process by its control groups, in the two versions that Linux has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from training.jobs import resources
from training.jobs.resources import Kills


@pytest.fixture
def inner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The control group of this process, at the mount of the test's parameter."""
    mount = request.param
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"4:{mount}:/outer/inner\n")
    group = tmp_path / "groups" / mount / "outer" / "inner"
    group.mkdir(parents=True)
    monkeypatch.setattr(resources, "PROC", tmp_path)
    monkeypatch.setattr(resources, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    return group


@pytest.mark.parametrize("inner", [""], indirect=True)
def test_a_quota_of_cpu_time_limits_the_cores(inner: Path) -> None:
    assert resources.cores() == 64
    (inner / "cpu.max").write_text("max 100000\n")
    assert resources.cores() == 64
    (inner.parent / "cpu.max").write_text("400000 100000\n")
    assert resources.cores() == 4
    (inner / "cpu.max").write_text("150000 100000\n")
    assert resources.cores() == 2
    (inner / "cpu.max").write_text("10000 100000\n")
    assert resources.cores() == 1


@pytest.mark.parametrize("inner", ["cpu,cpuacct"], indirect=True)
def test_a_quota_in_the_older_version_limits_the_cores(inner: Path) -> None:
    (inner / "cpu.cfs_period_us").write_text("100000\n")
    (inner / "cpu.cfs_quota_us").write_text("-1\n")
    assert resources.cores() == 64
    (inner / "cpu.cfs_quota_us").write_text("400000\n")
    assert resources.cores() == 4


@pytest.mark.parametrize(
    ("inner", "file", "content"),
    [
        ("", "memory.events", "oom 4\noom_kill 3\noom_group_kill 0\n"),
        ("memory", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
    indirect=["inner"],
)
def test_kills_are_those_of_the_own_control_group_and_else_those_of_the_machine(
    inner: Path, tmp_path: Path, file: str, content: str
) -> None:
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 7\n")
    assert resources.killed_for_memory() == Kills(7, own=False)
    (inner / file).write_text(content)
    assert resources.killed_for_memory() == Kills(3, own=True)
