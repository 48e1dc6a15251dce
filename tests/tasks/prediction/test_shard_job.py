"""Batch predictions on a cluster: what is reported before anything is predicted, logins, and GPUs of programs."""

from __future__ import annotations

import importlib.util
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.jobs.engines.ray_messages import AUTH_MODE, TOKEN_PATH, own_login
from tasks.prediction.shard_job import FIELDS, require_engine, share_of
from tests.raised import raised_problems
from training.problems import Problem, UserError, renamed
from training.recipe import BatchPrediction, parse_batch_prediction

Installed = Callable[[bool], None]


def prediction(**more: Any) -> BatchPrediction:
    values = {"model": "small", "input": ["rows"], "output": "out", "cluster": "ray", "processes": 2}
    return parse_batch_prediction(values | more)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Makes the package ray installed, or not."""
    there = importlib.util.find_spec

    def install(installed: bool) -> None:
        found = object() if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "ray" else there(name))

    return install


def problem_of(given: BatchPrediction) -> Problem:
    (problem,) = raised_problems(require_engine, given)
    return problem


def test_a_cluster_without_its_package_is_reported_with_the_command_that_installs_it(ray: Installed) -> None:
    ray(False)
    problem = problem_of(prediction(cluster_address="127.0.0.1:1"))
    assert problem.where == "cluster" and "pip install 'finetune-flows[ray]'" in problem.message
    require_engine(prediction(cluster=None, processes="auto"))


def test_an_address_at_which_nothing_listens_is_reported_by_the_name_of_its_parameter(
    ray: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray(True)
    problem = problem_of(prediction(cluster_address="127.0.0.1:1"))
    assert problem.where == "cluster_address" and "no Ray cluster answers at '127.0.0.1:1'" in problem.message
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert problem_of(prediction()).where == "cluster_address"


def test_problems_of_a_cluster_at_work_have_the_names_of_parameters_too() -> None:
    places = ("compute.num_machines", "compute.cluster_address", "data.path")
    with pytest.raises(UserError) as raised, renamed(FIELDS):
        raise UserError(Problem(kind="compute", where=where, message="is wrong") for where in places)
    assert [problem.where for problem in raised.value.problems] == ["processes", "cluster_address", "data.path"]


@pytest.mark.parametrize(
    ("gpus", "count", "shares"),
    [([], 2, [[], []]), (["0", "1", "2"], 2, [["0", "2"], ["1"]]), (["0", "1"], 3, [["0"], ["1"], ["0"]])],
)
def test_each_program_has_a_gpu_if_there_is_one(gpus: list[str], count: int, shares: list[list[str]]) -> None:
    assert [share_of(gpus, number, count) for number in range(count)] == shares


def test_a_cluster_of_this_machine_has_a_token_that_only_the_user_can_read(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (AUTH_MODE, TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    home.mkdir(mode=0o700)
    login = own_login()
    token = Path(login[TOKEN_PATH])
    assert login[AUTH_MODE] == "token" and token.parent == home and own_login() == login
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    monkeypatch.setenv(TOKEN_PATH, "/etc/mine")
    assert own_login()[TOKEN_PATH] == "/etc/mine"
    monkeypatch.setenv(AUTH_MODE, "disabled")
    assert own_login() == {}
