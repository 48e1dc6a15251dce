"""Preference tuning whole: trainings share the reference, and are compared on the same pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.flows.forked import finetune
from tests.flows.small import states
from tests.task_types import write_project


@pytest.mark.drill
def test_trainings_with_another_beta_share_the_reference_and_are_compared_with_the_champion(
    server: dict[str, str], tmp_path: Path
) -> None:
    file, home = write_project("preference", tmp_path), tmp_path / "home"

    def run(name: str, *settings: str) -> tuple[dict[str, str], dict[str, Any]]:
        out = tmp_path / f"{name}.json"
        changes = [word for setting in ("training.num_train_epochs=4", *settings) for word in ("--set", setting)]
        done = finetune(home, "run", str(file), *changes, "--json", str(out), **server)
        assert done.returncode == 0, done.stdout + done.stderr
        return states(out), json.loads(out.read_text())

    first, result = run("first")
    assert first["reference_logprobs"] == first["fit"] == "ran" and result["verdict"]["decision"] == "promote"
    second, result = run("second", "options.beta=0.5")
    assert (second["tokenize"], second["reference_logprobs"], second["fit"]) == ("cached", "cached", "ran")
    assert second["predict_champion"] == "ran" and result["verdict"]["comparison"]["champion"] == "preference/1"
    assert result["verdict"]["comparison"]["champion_value"] > 0.6
    third, _ = run("third", "options.loss=orpo")
    assert "reference_logprobs" not in third and third["fit"] == "ran"
