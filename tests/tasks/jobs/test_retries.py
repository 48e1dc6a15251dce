"""A stage's work in a child program: its output brought home, tried again where that may help."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.stage import Work
from tasks.jobs import launch
from tasks.jobs.launch import JobFailed
from tasks.jobs.retries import TRIES, BatchDivision, prepare_next_try, run_child
from tests.raised import raised_problems
from tests.tasks.watching import Heard
from training.jobs.protocol import Failure, Outcome, read_events


@pytest.fixture
def work(home: Path, tmp_path: Path) -> Work:
    out = tmp_path / "out"
    out.mkdir()
    return Work("k" * 40, out, "run", (Heard(),), "child")


def kinds(work: Work) -> list[str]:
    (listener,) = work.listeners
    assert isinstance(listener, Heard)
    return [event["kind"] for event in listener.events]


def run(
    work: Work,
    folder: Path,
    main: str,
    env: dict[str, str] | None = None,
    batches: BatchDivision | None = None,
    stall_timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Runs a real program whose `main` has these lines."""
    body = "\n    ".join(main.splitlines())
    program = folder / "program.py"
    program.write_text(
        "import os, signal\n"
        "from training.problems import Problem, UserError\n"
        "from training.jobs.program import run_program\n"
        f"def main(job_dir, job, events):\n    {body}\n"
        "run_program(main)\n"
    )
    argv = [sys.executable, str(program)]
    return run_child(
        work,
        "program",
        argv,
        settings={"rows": 3},
        inputs={"data": folder},
        env=env,
        stall_timeout_s=stall_timeout_s,
        batches=batches,
    )


WRITE = """
(job_dir / "output" / "model").mkdir()
(job_dir / "output" / "model" / "config.json").write_text(str(job.settings["rows"]))
print("printed")
events.metrics(1, {"loss": 0.5})
return {"rows": job.settings["rows"]}
"""


def test_the_output_the_events_and_what_was_printed_are_brought_home(work: Work, tmp_path: Path) -> None:
    assert run(work, tmp_path, WRITE) == {"rows": 3} and work.state == "ran"
    assert (work.out / "model" / "config.json").read_text() == "3"
    assert [event["kind"] for event in read_events(work.out / "log" / "events.jsonl", 0)[0]] == ["started", "metrics"]
    assert "printed" in (work.out / "log" / "1.log").read_text()
    assert kinds(work) == ["started", "metrics"]


ONCE = """
events.metrics(1, {{"loss": 0.5}})
if not (job_dir / "checkpoints" / "mark").exists():
    (job_dir / "checkpoints" / "mark").touch()
    {}
events.metrics(1, {{"loss": 0.5}})
events.metrics(2, {{"loss": 0.25}})
return {{}}
"""
KILL, LEAVE, HANG = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGSTOP)"


# Of the hanging program only: what a slow machine takes from the supervisor's start to the first event is no hanging.
HANGING_S = 20.0


@pytest.mark.parametrize(
    ("ends", "stall_timeout_s"),
    [
        pytest.param(KILL, 600.0, id="killed"),
        pytest.param(LEAVE, 600.0, id="exit status 0"),
        pytest.param(HANG, HANGING_S, id="hanging", marks=pytest.mark.drill),
    ],
)
def test_a_program_that_ends_early_or_hangs_is_resumed_and_each_event_is_reported_once(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, stall_timeout_s: float
) -> None:
    monkeypatch.setattr(launch, "STALLED_GRACE_S", 0.1)
    assert run(work, tmp_path, ONCE.format(ends), stall_timeout_s=stall_timeout_s) == {} and work.state == "resumed"
    assert kinds(work) == ["started", "metrics", "warning", "started", "metrics"]
    assert {"1.log", "2.log", "events.jsonl"} <= {path.name for path in (work.out / "log").iterdir()}


def test_a_program_that_is_killed_again_and_again_is_given_up(work: Work, tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as failed:
        run(work, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert failed.value.failure.kind == "interrupted"
    assert kinds(work).count("started") == TRIES and list(work.out.iterdir()) == []


FURTHER = """
step = len([*(job_dir / "checkpoints").glob("*")]) + 1
if step <= {steps}:
    folder = job_dir / "checkpoints" / f"checkpoint-{{step}}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
elif step > {ends}:
    return {{}}
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Each start is killed a step further, up to `steps`, and then ends if these are more than `ends`."""


@pytest.mark.slow
def test_a_training_that_is_killed_is_resumed_as_long_as_each_try_gets_further(work: Work, tmp_path: Path) -> None:
    assert run(work, tmp_path, FURTHER.format(steps=3 * TRIES, ends=3 * TRIES)) == {}
    assert kinds(work).count("started") == 3 * TRIES + 1


def test_one_that_gets_no_further_than_before_is_given_up(work: Work, tmp_path: Path) -> None:
    with pytest.raises(JobFailed):
        run(work, tmp_path, FURTHER.format(steps=2, ends=99))
    assert kinds(work).count("started") == 2 + TRIES - 1


def test_the_users_mistakes_are_raised_with_all_their_problems_and_not_tried_again(work: Work, tmp_path: Path) -> None:
    mistakes = "raise UserError([Problem(kind='data', where=w, message='m') for w in ('row 1', 'row 2')])"
    assert [problem.where for problem in raised_problems(run, work, tmp_path, mistakes)] == ["row 1", "row 2"]
    assert kinds(work).count("started") == 1


def test_an_error_in_the_program_is_not_tried_again(work: Work, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="ZeroDivisionError"):
        run(work, tmp_path, "1 / 0")
    assert kinds(work).count("started") == 1


def test_a_job_with_a_checkpoint_is_reported_as_resumed(work: Work, tmp_path: Path) -> None:
    (work.job / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    run(work, tmp_path, WRITE)
    assert work.state == "resumed"


def test_a_finished_job_is_not_run_again(work: Work, tmp_path: Path) -> None:
    run(work, tmp_path, WRITE)
    again = Work(work.key, tmp_path / "again", "run", (Heard(),), "child")
    again.out.mkdir()
    assert run(again, tmp_path, "raise AssertionError") == {"rows": 3} and again.state == "resumed"
    assert (again.out / "model" / "config.json").read_text() == "3"


def test_secrets_travel_in_the_environment_and_not_in_the_jobs_files(work: Work, tmp_path: Path) -> None:
    read = "return {'length': len(os.environ['MY_TOKEN'])}"
    assert run(work, tmp_path, read, env={"MY_TOKEN": "hf_secret"}) == {"length": 9}
    assert json.loads((work.job / "job.json").read_text())["settings"] == {"rows": 3}
    written = [path for path in work.job.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    assert written == []


NEEDS_QUARTERS = """
if job.settings["micro_batch_divisor"] < 4:
    raise MemoryError
return {"division": job.settings["micro_batch_divisor"]}
"""


def test_out_of_memory_halves_the_batch_until_it_fits_and_the_next_work_of_this_kind_begins_there(
    work: Work, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(work, tmp_path, NEEDS_QUARTERS, batches=BatchDivision(6, tmp_path, program="p")) == {"division": 4}
    (listener,) = work.listeners
    assert isinstance(listener, Heard)
    endings = [event["message"].split(". ")[-1] for event in listener.events if event["kind"] == "warning"]
    assert endings == [
        "Continuing with at most 3 rows at a time.",
        "Continuing with at most 2 rows at a time.",
    ]
    assert BatchDivision(6, tmp_path, program="p").rows == 2
    again = Work("j" * 40, tmp_path / "again", "run", (Heard(),), "child")
    again.out.mkdir()
    run(again, tmp_path, NEEDS_QUARTERS, batches=BatchDivision(6, tmp_path, program="p"))
    assert kinds(again) == ["note", "started"]
    assert BatchDivision(6, tmp_path, program="other").rows == BatchDivision(8, tmp_path, program="p").rows - 2 == 6
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    assert BatchDivision(6, tmp_path, program="p").rows == 6


def test_smaller_batches_after_a_kill_that_another_program_may_have_caused_are_for_this_work_alone(
    tmp_path: Path, home: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    batches = BatchDivision(6, tmp_path, program="p")
    failure = Failure(kind="out_of_memory", message="killed.", proven=False)
    prepare_next_try(Outcome(state="failed", failure=failure), failure, 0, batches)
    assert batches.rows == 3
    batches.save()
    assert BatchDivision(6, tmp_path, program="p").rows == 6


def test_when_single_rows_do_not_fit_the_run_ends_with_the_next_step(work: Work, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(JobFailed, match="choose a smaller model") as failed:
        run(work, tmp_path, "raise MemoryError", batches=BatchDivision(3, tmp_path, program="p"))
    assert failed.value.failure.kind == "out_of_memory" and kinds(work).count("started") == 3


def test_a_job_that_goes_on_keeps_its_batches_whatever_others_have_learnt_since(work: Work, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = BatchDivision(6, tmp_path, program="p")
    with pytest.raises(JobFailed):
        run(work, tmp_path, "1 / 0", batches=first)
    learnt = BatchDivision(6, tmp_path, program="p")
    assert learnt.halve()
    learnt.save()
    again = run(work, tmp_path, "return job.settings", batches=BatchDivision(6, tmp_path, program="p"))
    assert again["micro_batch_divisor"] == 1
