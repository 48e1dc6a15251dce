"""Preference tuning whole: trainings share the reference, and are compared on the same rows and by their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flows.forked import finetune
from tests.flows.small import states
from tests.task_types import write_project

Run = Callable[..., tuple[dict[str, str], dict[str, Any]]]
ANSWERS = "evaluation.metrics=[accuracy, generated_length, base_generated_length]"
JUDGE = "evaluation.judge=tests.training.evaluation.test_judgements:longest"


@pytest.fixture
def project(server: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """Runs the tiny recipe of a task type with other settings; gives the states of its stages, and its result."""
    file, home = write_project(request.param, tmp_path), tmp_path / "home"

    def run(name: str, *settings: str) -> tuple[dict[str, str], dict[str, Any]]:
        out = tmp_path / f"{name}.json"
        changes = [word for setting in ("training.num_train_epochs=4", *settings) for word in ("--set", setting)]
        done = finetune(home, "run", str(file), *changes, "--json", str(out), **server)
        assert done.returncode == 0, done.stdout + done.stderr
        return states(out), json.loads(out.read_text()) | {"printed": done.stdout}

    return run


@pytest.mark.drill
@pytest.mark.parametrize("project", ["preference"], indirect=True)
def test_trainings_with_another_beta_share_the_reference_and_are_compared_with_the_champion(project: Run) -> None:
    first, result = project("first")
    assert first["reference_logprobs"] == first["fit"] == "ran" and result["verdict"]["decision"] == "promote"
    second, result = project("second", "options.beta=0.5", ANSWERS, JUDGE)
    assert (second["tokenize"], second["reference_logprobs"], second["fit"]) == ("cached", "cached", "ran")
    comparison = result["verdict"]["comparison"]
    assert second["predict_champion"] == "ran" and comparison["champion"] == "preference/1"
    assert comparison["champion_value"] > 0.6
    length, rate = comparison["answers"]
    figures = result["metrics"]["validation"]
    assert length["value"] == figures["generated_length"]["value"] and length["opponent"] == "preference/1"
    assert length["rows"] == rate["rows"] == 32 and rate["metric"] == "win_rate"
    assert "generated_length" in result["printed"] and "base_generated_length" in result["printed"]
    third, _ = project("third", "options.loss=orpo")
    assert "reference_logprobs" not in third and third["fit"] == "ran"


@pytest.mark.drill
@pytest.mark.parametrize("project", ["kto"], indirect=True)
def test_rated_completions_are_trained_on_and_a_first_model_is_judged_against_its_base(project: Run) -> None:
    states_, result = project("judged", JUDGE, "release.gate.compare=win_rate")
    assert states_["reference_logprobs"] == states_["fit"] == states_["compare"] == "ran"
    comparison = result["verdict"]["comparison"]
    assert (comparison["champion"], comparison["metric"]) == ("the base model", "win_rate")
    assert comparison["rows"] == 32 and comparison["method"] == "sign"
    again, _ = project("again", JUDGE, "release.gate.compare=win_rate")
    assert {again["fit"], again["predict"], again["compare"]} == {"cached"}
