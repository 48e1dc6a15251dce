"""Stages on the Hub, in a process of their own, which several cases share: it takes seconds to start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasks.cache import store
from tasks.cache.stage import Work
from tasks.environment_variables import prepare_environment
from tasks.stages.load_data import load_data
from tasks.stages.load_model import load_model
from tasks.stages.resolve import pin
from tests.flows.small import environment
from training.problems import UserError
from training.recipe import parse

Step = tuple[str, dict[str, Any]]
"""A stage and its recipe."""

STAGES = {"load_data": load_data, "load_model": load_model}


def run_stages(home: Path, cases: Sequence[Sequence[Step]], env: dict[str, str]) -> tuple[list[Any], list[str]]:
    """The outcome of each case, and the heavy libraries that were loaded into the process.

    The steps of a case are done in order, and the last one's outcome counts: its artifact's digest, or its problems as
    lists of kind, field and message. Cases are done at once.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.hub.stages"],
        input=json.dumps(cases),
        env=environment(home, **env),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    return printed["outcomes"], printed["heavy"]


def digest(name: str, written: dict[str, Any]) -> str:
    """Runs one stage as a run does, and gives its artifact's digest."""
    recipe = parse(written)
    inputs = [recipe, pin(recipe)] + [None] * (name == "load_model")
    stage = STAGES[name]
    flat, _ = stage.flat_inputs(*inputs)
    with store.filling(name, stage.key(flat)) as aside:
        result = stage.make(Work(stage.key(flat), aside, "run"), *inputs)
        return store.publish(aside, name, stage.key(flat), flat, result).digest


def outcome(case: Sequence[Step]) -> Any:
    """The last step's digest, or its problems."""
    try:
        return [digest(*step) for step in case][-1]
    except UserError as error:
        return [[problem.kind, problem.where, problem.message] for problem in error.problems]


if __name__ == "__main__":
    prepare_environment()
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds / 50)  # the clients wait for up to eight seconds between tries
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(outcome, json.load(sys.stdin)))
    heavy = sorted({"torch", "transformers", "datasets"} & set(sys.modules))
    print(json.dumps({"outcomes": outcomes, "heavy": heavy}))
