"""Registered versions whose drift or later figures cannot be measured are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.cache.results import Champion
from tasks.registry.monitored_versions import MonitoredVersion, require_no_reference, require_single_inputs
from training.problems import UserError


def version(task: str, **options: Any) -> MonitoredVersion:
    champion = Champion(name="small", version="3", model="weights", max_length=64)
    nothing: dict[str, Any] = {"columns": {}, "expected": {}, "predict": None, "mlflow_run": None}
    place = {"recipe": "small", "split": "test", "load_data": "key"}
    return MonitoredVersion(champion=champion, task=task, options=options, **nothing, **place)


@pytest.mark.parametrize("task", ["preference", "kto", "reward-modeling"])
def test_the_drift_of_models_that_compare_answers_is_not_measured(task: str) -> None:
    with pytest.raises(UserError, match=rf"small/3 compares answers \(task {task}\), whose drift is not measured"):
        require_single_inputs(version(task))
    require_single_inputs(version("sft"))


def test_figures_relative_to_a_base_model_are_not_computed_for_new_rows() -> None:
    for one in (version("preference"), version("kto")):
        with pytest.raises(UserError, match=r"metrics of small/3 are relative to its base model"):
            require_no_reference(one)
    for one in (version("preference", loss="orpo"), version("reward-modeling"), version("sft")):
        require_no_reference(one)
