"""The callers of flows."""

from __future__ import annotations

from typing import Any

import pytest

from flows.batch_predict import batch_predict
from flows.callers import WORKER, Caller
from flows.drift import drift
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.retrain import retrain
from flows.sweep import sweep
from tasks.cache.stage import Listener


@pytest.mark.parametrize("flow", [finetune, retrain, sweep, batch_predict, drift, evaluate])
def test_a_flow_of_a_caller_has_the_name_and_the_parameters_of_the_deployed_flow(flow: Any) -> None:
    bound = Caller().bind(flow, lambda *_: None)
    assert (bound.name, bound.version, bound.flow_run_name) == (flow.name, flow.version, flow.flow_run_name)
    assert bound.parameters == flow.parameters
    for parameter in flow.parameters.properties:
        assert parameter not in ("caller", "listeners", "table")


def test_a_flow_of_a_caller_calls_the_function_with_the_caller_its_parameters_and_objects_of_this_process() -> None:
    calls = list[tuple[Any, ...]]()

    def function(caller: Caller, *values: Any, sweep: object) -> None:
        calls.append((caller, *values, sweep))

    caller, chosen = Caller(listeners=(Listener(),), is_command=True), object()
    caller.bind(drift, function, sweep=chosen).fn("small", ["rows.csv"])
    assert calls == [(caller, "small", ["rows.csv"], chosen)]


def test_a_worker_has_no_listeners_and_is_no_command() -> None:
    assert (WORKER.listeners, WORKER.is_command) == ((), False)
