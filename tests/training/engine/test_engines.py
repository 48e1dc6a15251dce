"""An engine of the recipe's author: the documented one is followed to the letter, and mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.test_docs import example
from tests.training import tiny
from tests.training.forks import events, finish, kill_when, weights
from training.engine.checkpoints import step_of

MISTAKES = """
class Train:
    def __init__(self, task): ...

def nothing(task): ...

def two(task, more): ...
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's folder, with the documented file in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_engine.py").write_text(example("engine"))
    (tmp_path / "my_mistakes.py").write_text(MISTAKES)
    return tmp_path


@pytest.mark.slow
def test_the_readmes_engine_trains_what_is_exported_and_goes_on_after_a_kill(world: Path, mine: Path) -> None:
    settings = {"engine": "my_engine:train", "num_train_epochs": 3, "learning_rate": 0.5}
    whole = tiny.fit_job(world, mine / "whole", **settings)
    outcome = finish(whole)
    assert outcome.state == "finished", outcome
    assert (outcome.result["steps"], outcome.result["epochs"]) == (57, 3.0)
    newest = max((whole / "checkpoints").glob("checkpoint-*"), key=step_of)
    trained = torch.load(newest / "state.pt")["model"]
    exported = load_file(whole / "output/model/model.safetensors")
    assert exported.keys() <= trained.keys()
    assert all(torch.equal(trained[name], weight) for name, weight in exported.items())

    killed = tiny.fit_job(world, mine / "killed", **settings)
    assert kill_when(killed, lambda: any((killed / "checkpoints").glob("checkpoint-19")))
    assert finish(killed).result["steps"] == 57
    assert any(event["message"].startswith("resuming from checkpoint-") for event in events(killed, "note"))
    assert weights(killed) == weights(whole)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("my_engine:trains", "'my_engine' has no 'trains': it has train. Did you mean 'train'?"),
        ("my_mistakes:Train", "'my_mistakes:Train' is the class Train: it must be a function that takes a Task and "),
        ("my_mistakes:two", "'my_mistakes:two' is of type function: it must be a function that takes a Task and "),
        (
            "my_mistakes:nothing",
            "'my_mistakes:nothing' returned NoneType: it must return a training.engine.training_task.Trained.",
        ),
        ("my_engine:train", "'my_engine:train' would train alone in each of 2 processes: create accelerate."),
    ],
)
def test_a_wrong_engine_is_reported_in_one_message(world: Path, mine: Path, engine: str, message: str) -> None:
    processes = 2 if engine == "my_engine:train" else 1  # it is written for one
    failure = finish(tiny.fit_job(world, mine / "wrong", engine=engine, processes=processes)).failure
    assert failure is not None and failure.kind == "user_error"
    (problem,) = failure.problems
    assert problem.where == "training.engine" and problem.message.startswith(message)
