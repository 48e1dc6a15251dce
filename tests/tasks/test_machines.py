"""How machine 0 and its helpers coordinate; their training is in tests/training/distributed/test_ranks.py."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tasks.cache.refs import Lock, Ref
from tasks.cache.stage import Row, Work
from tasks.jobs.launch import JobFailed, Machines, accelerate_argv, accelerate_environment, build_predict_launch
from tasks.jobs.machines import Helper, Leader, LeaderState, find_machines, gather
from tests.flows.small import write_project
from tests.tasks.watching import Heard
from training.problems import UserError
from training.recipe import Compute

FIRST, SECOND = Machines(2, 0, "127.0.0.1:29400"), Machines(2, 1, "127.0.0.1:29400")
ENVIRONMENT = (*("NNODES", "SLURM_NNODES", "NODE_RANK", "SLURM_NODEID"), "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_variables(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def helped(helper: Helper) -> LeaderState:
    return helper.help(20.0, lambda text: None)


@pytest.mark.parametrize(
    ("compute", "environment"),
    [
        ({"num_machines": 2, "machine_rank": 1, "rendezvous": "10.0.0.1:29400"}, {}),
        ({"num_machines": 2}, {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}),
        ({"num_machines": "auto"}, {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "10.0.0.1",
                                    "MASTER_PORT": "29400"}),
        ({"num_machines": "auto", "machine_rank": 1, "rendezvous": "10.0.0.1:29400"},
         {"NNODES": "2", "NODE_RANK": "0"}),
    ],
)  # fmt: skip
def test_which_machine_this_is_comes_from_the_recipe_or_else_the_environment(
    compute: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_machines(Compute(**compute)) == Machines(2, 1, "10.0.0.1:29400")


def test_one_machine_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "4")
    monkeypatch.setenv("SLURM_NODEID", "3")
    assert find_machines(Compute()) == Machines()


def test_missing_settings_of_several_machines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as raised:
        find_machines(Compute(num_machines=2))
    assert [problem.where for problem in raised.value.problems] == ["compute.machine_rank", "compute.rendezvous"]
    monkeypatch.setenv("NODE_RANK", "2")
    with pytest.raises(UserError, match=r"compute\.machine_rank: 2 is out of range: there are 2 machines, 0 to 1"):
        find_machines(Compute(num_machines=2, rendezvous="a:1"))
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "port")
    with pytest.raises(
        UserError, match=r"compute\.rendezvous: 'a:port' in MASTER_ADDR and MASTER_PORT is not host:port"
    ):
        find_machines(Compute(num_machines=2, machine_rank=0))
    monkeypatch.setenv("NODE_RANK", "first")
    with pytest.raises(UserError, match="NODE_RANK='first' in the environment is not a number"):
        find_machines(Compute(num_machines=2, rendezvous="a:1"))


def test_each_machine_launches_its_share_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.jobs.launch.visible_gpus", lambda: ["0", "1", "2", "3"])
    argv = accelerate_argv("p", num_processes=4, mixed_precision="no", use_cpu=False, machines=SECOND)
    options = dict(itertools.pairwise(argv))
    names = ("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port")
    assert [options[name] for name in names] == ["4", "2", "1", "127.0.0.1", "29400"]
    assert accelerate_environment(num_processes=4, use_cpu=False, machines=SECOND)["CUDA_VISIBLE_DEVICES"] == "0,1"
    # Between machines, gloo finds the interface itself, or by the user's own variable.
    far = Machines(2, 1, "10.0.0.1:29400")
    assert "GLOO_SOCKET_IFNAME" not in accelerate_environment(num_processes=4, use_cpu=True, machines=far)


def test_a_machine_predicts_with_its_own_processes_each_with_the_threads_of_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    described = [
        build_predict_launch("p", Lock(num_processes=processes, num_machines=machines)).as_json(Path("job"))
        for processes, machines in ((1, 1), (4, 2))
    ]
    alone, launched = (dict(itertools.pairwise(of["argv"])) for of in described)
    assert alone == {sys.executable: "-m", "-m": "p", "p": "job"}
    assert (launched["--num_processes"], launched["--num_machines"]) == ("2", "1")
    one, several = (of["environment"]["OMP_NUM_THREADS"] for of in described)
    assert one == several == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("state", "message"), [("failed", "No rows."), ("interrupted", "KeyboardInterrupt")])
def test_a_helper_ends_as_a_run_did_that_never_came_to_train(state: str, message: str) -> None:
    helper, replies = Helper(SECOND), list[LeaderState]()
    helping = threading.Thread(target=lambda: replies.append(helped(helper)))
    helping.start()
    leader = Leader(FIRST, "run")
    leader.run_ended({"state": state, "problems": [{"message": message}]})
    helping.join(20.0)
    assert [(reply.ended, reply.message) for reply in replies] == [(state, message)]


def test_a_helper_waits_for_its_own_run_and_ignores_the_end_of_an_earlier_one() -> None:
    Leader(FIRST, "earlier").run_ended({"state": "failed", "problems": []})
    reply = Helper(SECOND).help(0.3, lambda text: None)
    assert reply.ended == "failed" and reply.message.startswith("machine 0 has not begun within 0.3 s")


def test_a_helper_ends_when_machine_0s_run_was_killed() -> None:
    leader = Leader(FIRST, "run")
    helper = Helper(SECOND)
    os.close(leader._lock)  # as the system does for a process that ends
    assert helped(helper).message.startswith("machine 0's run was killed: run the same command ")


def test_two_runs_do_not_meet_their_machines_at_one_place() -> None:
    leader = Leader(FIRST, "one")
    with pytest.raises(UserError, match=r"another run uses 127\.0\.0\.1:29400"):
        Leader(FIRST, "two")
    leader.run_ended({"state": "completed", "problems": []})
    Leader(FIRST, "two").run_ended({"state": "completed", "problems": []})


def test_machine_0_does_not_wait_for_ever(tmp_path: Path) -> None:
    leader, heard = Leader(FIRST, "run"), Heard()
    with pytest.raises(JobFailed, match=r"No sign of machine 1 of 2 within 0.1 s"):
        gather(FIRST, Work("k", tmp_path, "run", (heard,), "fit"), timeout_s=0.1)
    leader.run_ended({"state": "failed", "problems": []})


def test_finetune_run_on_a_helping_machine_registers_nothing_and_reports_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_project(tmp_path / "project"), tmp_path / "out.json"
    leader = Leader(FIRST, "run")
    leader.stage_ended(Row("fit", "k", "ran", 1.0), Ref(stage="fit", key="k", digest="d"))
    # Training is over, and the run goes on: its lock is held.
    fields = {"num_machines": 2, "machine_rank": 1, "rendezvous": FIRST.rendezvous, "num_processes": 2}
    sets = [word for name, value in fields.items() for word in ("--set", f"compute.{name}={value}")]
    assert main(["run", str(file), "--json", str(out), *sets]) == 0
    leader.run_ended({"state": "completed", "problems": []})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    assert printed[0].startswith("small, machine 1 of 2: trained. The model is on machine 0: ")
    assert printed[0].endswith("artifacts/fit/k/model")
    assert json.loads(out.read_text())["state"] == "completed"
