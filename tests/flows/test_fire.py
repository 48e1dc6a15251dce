"""Fires that only a whole run can show; `make drill` lights all of them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from tests.drill.ground import Ground, newest_checkpoint, wait_until
from tests.drill.watch import Watch
from tests.flows.small import FinishedRun


def test_a_run_asked_to_end_saves_leaves_nothing_running_and_is_gone_on_with_to_the_same_bytes(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    ground = Ground(tmp_path, server["PREFECT_API_URL"], settings=["release.registry=null"])
    home, watch = tmp_path / "home", Watch()
    # Predictions and scores are found again if, and only if, the weights are the same.
    shutil.copytree(finished.home / "artifacts", home / "artifacts", ignore=shutil.ignore_patterns("fit"))
    home.chmod(0o700)

    run = ground.start(home)
    wait_until(lambda: newest_checkpoint(home) > 0, run)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.ended_within(60) == 130, run.printed()
    assert "Run the same command again" in run.printed() and "Traceback" not in run.printed()

    following = ground.start(home)
    watch.condemn(run)
    watch.settle()
    assert watch.faults == []
    assert following.ended_within(200) == 0, following.printed()
    result = following.result()
    states = {stage["name"]: stage["state"] for stage in result["stages"]}
    assert states.pop("fit") == "resumed"
    assert {name for name, state in states.items() if state == "cached"} == set(states) - {
        "resolve",
        "find_champion",
        "gate",
        "register",
        "promote",
    }
    assert result["model"]["sha256"] == finished.result["model"]["sha256"]
