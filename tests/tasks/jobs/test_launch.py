from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import training
from tasks.cache.results import Lock
from tasks.jobs.commands import Machines, accelerate_argv, accelerate_environment, build_predict_launch
from tasks.jobs.engines.local import LOCAL, Handle
from tasks.jobs.launch import JobFailed, require_finished, run_job
from tests.drill.full_disk import SmallDisk, why_not
from tests.fork_server import NEW_PYTHON
from tests.processes import listening
from tests.waiting import wait_until
from training.jobs.processes import descendants, start_ticks
from training.jobs.protocol import Failure, Job, Outcome, finished_output, read_events, read_outcome
from training.jobs.resources import Kills, cores
from training.problems import UserError

ROOT = str(Path(training.__path__[0]).parent)


def write_job(folder: Path, main: str, *, before: str = "", after: str = "") -> tuple[Path, list[str]]:
    """A job and the command of a real program whose `main` has these lines as its body."""
    body = "\n    ".join(main.splitlines())
    (folder / "program.py").write_text(
        f"{before}\n"
        "import os, sys, time\n"
        "from training.problems import Problem, UserError\n"
        "from training.jobs.program import run_program\n"
        f"def main(job_dir, job, events):\n    {body}\n"
        "try:\n"
        "    run_program(main)\n"
        f"finally:\n    pass; {after}\n"
    )
    Job(program="test", key="k").write(folder / "job")
    return folder / "job", [sys.executable, str(folder / "program.py")]


def run(
    folder: Path, main: str, *, before: str = "", after: str = "", env: dict[str, str] | None = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    job, argv = write_job(folder, main, before=before, after=after)
    events: list[dict[str, Any]] = []
    return run_job(job, argv, env=env, on_events=events.extend, stall_timeout_s=20, poll_s=0.02), events


def failure(outcome: Outcome) -> Failure:
    assert outcome.state == "failed" and outcome.failure is not None
    return outcome.failure


def pid_at_work(job: Path) -> int:
    """Wait for a program to start; its pid."""
    wait_until(lambda: any(event["kind"] == "started" for event in read_events(job / "events.jsonl", 0)[0]))
    return int(read_events(job / "events.jsonl", 0)[0][0]["pid"])


def at_work_for(job: Path) -> list[int]:
    """The processes that have the job on their command lines; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended
            if str(job).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def test_a_job_gives_its_outcome_and_every_event_once(tmp_path: Path) -> None:
    main = """
for step in range(50):
    events.metrics(step, {"loss": 1.0})
    time.sleep(0.005)
events.note("the last words")
(job_dir / "output" / "a").write_text("a")
return {"steps": 50}
"""
    outcome, events = run(tmp_path, main)
    assert (outcome.state, outcome.result, list(outcome.files)) == ("finished", {"steps": 50}, ["a"])
    assert [event["step"] for event in events if event["kind"] == "metrics"] == list(range(50))
    assert events[-1]["message"] == "the last words"
    assert events == read_events(tmp_path / "job" / "events.jsonl", 0)[0]


def test_the_end_of_a_job_is_not_waited_for_until_the_next_poll(tmp_path: Path) -> None:
    job, argv = write_job(tmp_path, "return {}")
    began = time.monotonic()
    assert run_job(job, argv, stall_timeout_s=60, poll_s=30).state == "finished"
    assert time.monotonic() - began < 30


def test_a_finished_job_is_not_run_again_but_its_events_are_reported(tmp_path: Path) -> None:
    first, events = run(tmp_path, "return {'pid': os.getpid()}")
    assert run(tmp_path, "raise AssertionError('run again')") == (first, events)


def test_a_finished_job_whose_output_was_damaged_is_run_again(tmp_path: Path) -> None:
    main = "(job_dir / 'output' / 'a').write_text('a')\nreturn {'pid': os.getpid()}"
    first, _ = run(tmp_path, main)
    (tmp_path / "job" / "output" / "a").write_text("b")
    second, _ = run(tmp_path, main)
    assert first.files == second.files
    assert first.result != second.result
    assert finished_output(tmp_path / "job") == second


def test_a_job_with_a_finished_outcome_has_finished_whatever_its_exit_code(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "return {}", after="os.abort()")
    assert outcome.state == "finished"


def test_exit_code_0_without_an_outcome_is_a_failure_that_shows_the_log(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "return {}", before="print('who am I?'); raise SystemExit(0)")
    assert failure(outcome).kind == "not_started"
    assert "who am I?" in failure(outcome).message


def test_a_program_that_cannot_even_start_is_a_failure_that_shows_the_log(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "return {}", before="import nowhere_to_be_found")
    assert failure(outcome).kind == "not_started"
    assert "No module named 'nowhere_to_be_found'" in failure(outcome).message


def test_a_killed_program_was_interrupted(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "os.kill(os.getpid(), 9)")
    assert failure(outcome).kind == "interrupted"


def test_a_crash_in_native_code_is_reported_with_the_line_that_led_there(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "os.abort()")
    assert failure(outcome).kind == "internal"
    assert "in main" in failure(outcome).traceback


LOST = """
(job_dir / "logs" / "crash.rank1.txt").write_text({crash!r})
raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
"""


def test_a_rank_that_crashed_is_the_cause_and_one_that_lost_it_is_not(tmp_path: Path) -> None:
    crash = "Fatal Python error: Segmentation fault\n  File rows.py, line 3 in read"
    outcome, _ = run(tmp_path, LOST.format(crash=crash))
    assert (failure(outcome).kind, failure(outcome).traceback) == ("internal", crash)


@pytest.mark.parametrize("crash", ["", "Fatal Python error: Aborted"])
def test_a_rank_that_was_killed_or_aborted_over_the_loss_of_another_is_reported_as_lost(
    tmp_path: Path, crash: str
) -> None:
    outcome, _ = run(tmp_path, LOST.format(crash=crash))
    assert failure(outcome).kind == "lost_rank"
    assert failure(outcome).message.startswith("One of the processes was killed")


def test_the_outcome_of_an_earlier_try_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    run(tmp_path, "raise MemoryError")
    outcome, _ = run(tmp_path, "return {}", before="import nowhere_to_be_found")
    assert failure(outcome).kind == "not_started"


@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_a_full_disk_is_reported_even_if_the_program_could_not_report_it(tmp_path: Path) -> None:
    main = """
with open(job_dir / "output" / "large", "wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
"""
    (tmp_path / "disk").mkdir()
    job, argv = write_job(tmp_path / "disk", main)
    code = (
        "import sys; from pathlib import Path; from tasks.jobs.launch import run_job\n"
        "job, argv = Path(sys.argv[1]), sys.argv[2:]\n"
        "print(run_job(job, argv, on_events=lambda e: None, stall_timeout_s=60).model_dump_json())"
    )
    with SmallDisk(tmp_path / "disk", megabytes=2) as disk:
        follower = [*disk.inside, sys.executable, "-c", code, str(job), *argv]
        env = {**os.environ, "PYTHONPATH": ROOT}
        printed = subprocess.run(follower, env=env, capture_output=True, text=True, check=True).stdout
        assert read_outcome(disk.seen / "job") is None
    (problem,) = failure(Outcome.model_validate_json(printed)).problems
    assert problem.where == str(job) and problem.message.startswith("the disk is full: 0 of 2 MB are free.")


def test_the_users_mistakes_are_raised_as_such_and_other_failures_as_job_failed(tmp_path: Path) -> None:
    mistaken, _ = run(tmp_path, "raise UserError([Problem(kind='data', where='a.csv:3', message='is empty')])")
    with pytest.raises(UserError, match=r"a\.csv:3: is empty"):
        require_finished(mistaken)
    failed, _ = run(tmp_path, "raise MemoryError")
    with pytest.raises(JobFailed) as caught:
        require_finished(failed)
    assert pickle.loads(pickle.dumps(caught.value)).failure == failed.failure
    finished = Outcome(state="finished")
    assert require_finished(finished) is finished


@pytest.mark.slow
def test_a_job_that_gives_no_sign_of_life_is_stopped(tmp_path: Path) -> None:
    job, argv = write_job(tmp_path, "time.sleep(60)")
    outcome = run_job(job, argv, on_events=lambda events: None, stall_timeout_s=3.0)
    assert failure(outcome).kind == "stalled"
    # By the command line, and not by an event: a slow machine may not have got as far as its first one.
    assert at_work_for(job) == []


def test_an_exception_while_following_stops_the_job_first(tmp_path: Path) -> None:
    job, argv = write_job(tmp_path, "time.sleep(60)")

    def cancelled(events: list[dict[str, Any]]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job, argv, on_events=cancelled, stall_timeout_s=60)
    assert start_ticks(pid_at_work(job)) == 0


def test_when_the_process_that_follows_a_job_is_killed_the_job_ends_soon_after(tmp_path: Path) -> None:
    job, argv = write_job(tmp_path, "time.sleep(60)")
    code = (
        "import sys; from pathlib import Path; from tasks.jobs.launch import run_job\n"
        "run_job(Path(sys.argv[1]), sys.argv[2:], on_events=lambda e: None, stall_timeout_s=60)"
    )
    follower = subprocess.Popen([sys.executable, "-c", code, str(job), *argv], cwd=ROOT)
    pid = pid_at_work(job)
    assert start_ticks(pid)
    follower.kill()
    follower.wait()
    wait_until(lambda: not start_ticks(pid), 30.0)  # the job itself would take 60 s


def test_a_handle_is_plain_json_that_another_process_can_use(tmp_path: Path) -> None:
    job, argv = write_job(tmp_path, "print('here', flush=True)\ntime.sleep(60)")
    handle = LOCAL.start(job, argv, {})
    pid_at_work(job)
    code = (
        "import sys; from tasks.jobs.engines.local import LOCAL, Handle\n"
        "handle = Handle.model_validate_json(sys.argv[1])\n"
        "before = LOCAL.poll(handle); LOCAL.stop(handle, 10)\n"
        "print(before, LOCAL.poll(handle), LOCAL.logs(handle).name)\n"
    )
    other = [sys.executable, "-c", code, handle.model_dump_json()]
    # Until its starter has collected it, the stopped supervisor is a zombie: that counts as ended.
    done = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "1.log"]
    assert not LOCAL.poll(handle)
    assert LOCAL.logs(handle).read_text().startswith("here\n")


def test_a_pid_used_again_is_not_taken_for_the_job(tmp_path: Path) -> None:
    assert not LOCAL.poll(Handle(job=str(tmp_path), pid=os.getpid(), started=1))


def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    job, argv = write_job(tmp_path, "os.kill(os.getpid(), 19)")
    handle = LOCAL.start(job, argv, {})
    pid = pid_at_work(job)
    LOCAL.stop(handle, 0.2)
    assert not LOCAL.poll(handle)
    assert start_ticks(pid) == 0


def test_a_process_that_is_stopped_because_another_was_killed_for_want_of_memory_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = chain([Kills(0, own=True)], repeat(Kills(1, own=True)))
    monkeypatch.setattr("tasks.jobs.engines.local.killed_for_memory", lambda: next(killed))
    outcome, _ = run(tmp_path, "os.kill(os.getpid(), 15)\ntime.sleep(60)")
    assert (failure(outcome).kind, failure(outcome).proven) == ("out_of_memory", True)


def test_a_kill_for_want_of_memory_that_may_have_met_another_program_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = chain([Kills(0, own=False)], repeat(Kills(1, own=False)))
    monkeypatch.setattr("tasks.jobs.engines.local.killed_for_memory", lambda: next(killed))
    outcome, _ = run(tmp_path, "os.kill(os.getpid(), 9)")
    assert (failure(outcome).kind, failure(outcome).proven) == ("out_of_memory", False)


def test_a_kill_for_want_of_memory_long_before_the_end_of_a_job_is_not_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.jobs.launch.KILLED_WITHIN_S", 0.1)
    killed = chain([Kills(0, own=True)], repeat(Kills(1, own=True)))
    monkeypatch.setattr("tasks.jobs.engines.local.killed_for_memory", lambda: next(killed))
    outcome, _ = run(tmp_path, "time.sleep(1)\nos.kill(os.getpid(), 9)")
    assert failure(outcome).kind == "interrupted"


def test_the_users_own_modules_can_be_imported_and_shadow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training" / "jobs").mkdir(parents=True)
    for name in ("training/__init__.py", "training/jobs/protocol.py", "json.py", "pydantic.py"):
        (tmp_path / name).write_text("raise AssertionError('shadowed')")
    (tmp_path / "my_rows.py").write_text("COUNT = 3")
    monkeypatch.chdir(tmp_path)
    outcome, _ = run(tmp_path, "import json, pydantic, my_rows\nreturn {'rows': my_rows.COUNT}")
    assert outcome.result == {"rows": 3}


def test_a_job_sees_no_rank_of_another_launcher_no_secret_and_the_environment_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    secrets = (
        "HF_TOKEN",
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "FSSPEC_HTTP",
    )
    for name in secrets:
        monkeypatch.setenv(name, "a secret")
    names = ("RANK", "ACCELERATE_USE_FSDP", *secrets, "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "MY_SECRET")
    outcome, _ = run(tmp_path, f"return {{n: os.environ.get(n) for n in {names}}}", env={"MY_SECRET": "s"})
    assert outcome.result == dict(zip(names, (*[None] * 7, "1", "1", "s"), strict=True))


def test_under_accelerate_one_process_runs_whatever_the_users_own_configuration(
    tmp_path: Path,
) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: fp16\ngpu_ids: '7'\ndebug: true\n"
    )
    shown = ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES", "ACCELERATE_DEBUG_MODE")
    job, _ = write_job(tmp_path, f"return {{n: os.environ.get(n) for n in {shown}}}")
    argv = accelerate_argv("program", num_processes=1, mixed_precision="no", use_cpu=False)
    env = {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])}
    outcome = run_job(job, argv, env=env, on_events=lambda events: None, stall_timeout_s=60)
    assert require_finished(outcome).result == dict(zip(shown, (None, "no", None, None), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_that_train_on_one_machine_listen_on_loopback_alone(tmp_path: Path, processes: int) -> None:
    main = """
one_machine.use_store()
torch.distributed.init_process_group("gloo")
time.sleep(3600)
"""
    before = "import torch\nfrom training.distributed import one_machine"
    job, argv = write_job(tmp_path, main, before=before)
    if processes > 1:
        argv = accelerate_argv("program", num_processes=processes, mixed_precision="no", use_cpu=True)
    # A single process of FSDP or ZeRO is a group too.
    env = accelerate_environment(num_processes=processes, use_cpu=True, strategy="fsdp")
    handle = LOCAL.start(job, [NEW_PYTHON, *argv[1:]], env | {"PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])})

    def addresses() -> dict[int, set[Any]]:
        return listening(descendants(handle.pid))

    try:
        wait_until(lambda: len(addresses()) == processes)  # each exchanges tensors; their store has no port
        assert {str(address) for found in addresses().values() for address in found} == {"127.0.0.1"}
    finally:
        LOCAL.stop(handle, 0)


class PlainProcess:
    """A runner: one process, without a supervisor."""

    class Handle(BaseModel):
        job: str

    def start(self, job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle:
        with open(job / "log.txt", "ab") as log:
            self.process = subprocess.Popen([*argv, str(job)], env={**os.environ, **env}, stderr=log)
        return self.Handle(job=str(job))

    def poll(self, handle: Handle) -> bool:
        return self.process.poll() is None

    def wait(self, handle: Handle, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    def stop(self, handle: Handle, grace_s: float) -> None:
        self.process.kill()
        self.process.wait()

    def logs(self, handle: Handle) -> Path:
        return Path(handle.job, "log.txt")

    def killed_for_memory(self) -> Kills:
        return Kills(0, own=True)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["finished", "killed", "stalled"])
def test_a_job_is_followed_to_its_end_by_any_runner(tmp_path: Path, ends: str) -> None:
    main = {
        "finished": "return {'from': os.environ['WORD']}",
        "killed": "print('last words', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)",
        "stalled": "time.sleep(60)",
    }[ends]
    job, argv = write_job(tmp_path, main)
    limit_s = 2.0 if ends == "stalled" else 20.0
    outcome = run_job(job, argv, env={"WORD": "here"}, stall_timeout_s=limit_s, poll_s=0.02, runner=PlainProcess())
    if ends == "finished":
        assert outcome.result == {"from": "here"}
    else:
        assert failure(outcome).kind == {"killed": "interrupted", "stalled": "stalled"}[ends]
    assert ends != "killed" or failure(outcome).message.endswith("last words")


def test_each_machine_launches_its_share_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.jobs.commands.visible_gpus", lambda: ["0", "1", "2", "3"])
    second = Machines(2, 1, "10.0.0.1:29400")
    argv = accelerate_argv("p", num_processes=4, mixed_precision="no", use_cpu=False, machines=second)
    options = dict(itertools.pairwise(argv))
    names = ("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port")
    assert [options[name] for name in names] == ["4", "2", "1", "10.0.0.1", "29400"]
    assert accelerate_environment(num_processes=4, use_cpu=False, machines=second)["CUDA_VISIBLE_DEVICES"] == "0,1"


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
    assert one == several == str(cores())
