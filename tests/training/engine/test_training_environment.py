"""The environment of a checkpoint is compared with that of the run that resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training.engine.training_environment import find_differences
from training.problems import UserError

HERE: dict[str, Any] = {
    "engine": "trainer",
    "strategy": "ddp",
    "processes": 2,
    "global batch size": 16,
    "steps per epoch": 5,
    "device": "a processor",
    "threads": 1,
    "torch": "2",
}


def result_of(accepted: bool, here: dict[str, Any], **written: Any) -> str | None:
    """The accepted differences, or the message of the refusal."""
    try:
        return find_differences(Path("checkpoint-4"), "field", {**HERE, **written}, {**HERE, **here}, accepted=accepted)
    except UserError as error:
        (problem,) = error.problems
        assert problem.where == "field"
        return problem.message


def test_settings_that_do_not_change_the_bytes_are_no_difference() -> None:
    assert result_of(False, {}, threads=4) is None  # taken over
    assert result_of(False, {}, **{"global batch size": 8, "steps per epoch": 9}) is None  # a matter of the recipe
    assert result_of(False, {"cuda": 3}) is None  # not recorded by its writer


def test_all_differences_are_named_at_once_with_the_flag_that_accepts_them() -> None:
    message = result_of(False, {}, torch="1", device="another", processes=1) or ""
    for part in (
        "torch 1 (here 2)",
        "device another (here a processor)",
        "processes 1 (here 2)",
        "inexact_resume: true",
    ):
        assert part in message
    accepted = result_of(True, {}, torch="1", device="another", threads=4)
    assert accepted == "device another (here a processor), threads 4 (here 1), torch 1 (here 2)"
    assert result_of(True, {}, threads=4) == "threads 4 (here 1)"


@pytest.mark.parametrize(
    ("here", "written", "why"),
    [
        ({}, {"strategy": "fsdp"}, "strategies write different files"),
        ({}, {"engine": "accelerate"}, "engines write different files"),
        ({"strategy": "deepspeed-zero2"}, {"strategy": "deepspeed-zero2", "processes": 4}, "only ddp"),
        ({"engine": "mine:train"}, {"engine": "mine:train", "processes": 4}, "only ddp"),
        ({}, {"processes": 1, "global batch size": 8}, "it must stay the same: change the batch size"),
    ],
)
def test_an_impossible_resume_is_refused_even_if_inexact_resume_is_accepted(
    here: dict[str, Any], written: dict[str, Any], why: str
) -> None:
    for accepted in (False, True):
        message = result_of(accepted, here, **written) or ""
        assert "It cannot be resumed" in message and why in message
