from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

import training
from training.jobs import protocol
from training.jobs.protocol import (
    Events,
    Failure,
    Job,
    Outcome,
    finished_output,
    last_lines,
    read_events,
    read_outcome,
    sha256,
    write_atomically,
)

ROOT = str(Path(training.__path__[0]).parent)


def start_program(job: Path, main: str, *, options: str = "", **env: str) -> subprocess.Popen[bytes]:
    """A real program whose `main` has these lines as its body."""
    body = "\n    ".join(main.splitlines())
    program = job.parent / f"{job.name}.py"
    program.write_text(
        "import os, time\n"
        "from training.problems import Problem, UserError\n"
        "from training.jobs.program import Interrupted, run_program, stop_requested\n"
        f"def main(job_dir, job, events):\n    {body}\n"
        f"run_program(main{options})\n"
    )
    Job(program="test", key="k", settings={"n": 3}).write(job)
    # The place of its supervisor is left empty: these programs live as long as they like.
    return subprocess.Popen(
        [sys.executable, str(program), str(job)],
        env={**os.environ, "PYTHONPATH": ROOT, **env},
        stderr=subprocess.PIPE,
    )


def run_to_end(job: Path, main: str, **env: str) -> int:
    return start_program(job, main, **env).wait(30)


def wait_for_event(job: Path, kind: str) -> None:
    deadline = time.monotonic() + 20
    while not any(event["kind"] == kind for event in read_events(job / "events.jsonl", 0)[0]):
        assert time.monotonic() < deadline, f"no {kind} event"
        time.sleep(0.02)


def failure(job: Path) -> Failure:
    outcome = read_outcome(job)
    assert outcome is not None and outcome.failure is not None
    return outcome.failure


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(
        program="training.programs.fit", key="abc", settings={"seed": 1, "x": [None, 0.5]}, inputs={"model": "/m"}
    )
    job.write(tmp_path / "job")
    assert Job.read(tmp_path / "job") == job


def test_a_misspelt_field_of_a_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"program": "p", "key": "k", "setings": {}}')
    with pytest.raises(ValidationError, match="setings"):
        Job.read(tmp_path)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    write_atomically(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError):
            write_atomically(path, b"n" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["outcome.json"]


def test_events_are_read_once_each_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path, 0) == ([], 0)
    events = Events(path)
    events.progress(step=1, max_steps=9)
    first, offset = read_events(path, 0)
    events.warning("Zeilenumbruch\n\u2028 und \ud800")
    second, end = read_events(path, offset)
    assert [(e["kind"], e["step"], e["max_steps"]) for e in first] == [("progress", 1, 9)]
    assert [(e["kind"], e["message"]) for e in second] == [("warning", "Zeilenumbruch\n\u2028 und \ud800")]
    assert abs(first[0]["time"] - time.time()) < 60
    assert read_events(path, end) == ([], end)


def test_half_a_line_is_not_read_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time": 1, "kind": "note"')
    assert read_events(path, 0) == ([], 0)
    path.write_bytes(b'{"time": 1, "kind": "note"}\n')
    assert read_events(path, 0) == ([{"time": 1, "kind": "note"}], 28)


def test_a_line_torn_by_a_kill_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time": 1, "kind": "note", "message": "a"}\n{"time": 2, "kin')
    Events(path).note("b")
    assert [event["message"] for event in read_events(path, 0)[0]] == ["a", "b"]


def test_steps_repeated_after_a_kill_add_no_second_point(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = Events(path)
    for step in (20, 40, 60):
        before.metrics(step, {"loss": 1.0 / step})
    after = Events(path)
    for step in (60, 80):
        after.metrics(step, {"loss": 1.0 / step})
        after.metrics(step, {"eval_loss": 2.0 / step})
    after.metrics(80, {"loss": 1.0 / 80})
    points = [(event["step"], *event["values"]) for event in read_events(path, 0)[0]]
    assert points == [
        (20, "loss"),
        (40, "loss"),
        (60, "loss"),
        (60, "eval_loss"),
        (80, "loss"),
        (80, "eval_loss"),
    ]


def test_after_kills_a_step_has_one_point_of_each_name_and_all_its_work_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for seconds in (2.0, 3.0, 4.0):  # each try repeats the step
        events = Events(path)
        events.metrics(20, {"train_loss": 0.5, "epoch": 1.0})
        events.metrics(20, {"eval_loss": 0.6, "epoch": 1.0})
        events.speed(20, {"rows_per_second": 10 / seconds}, {"rows": 10, "seconds": seconds})
    written = read_events(path, 0)[0]
    points = [(event["kind"], name, value) for event in written for name, value in event["values"].items()]
    assert points == [
        ("metrics", "train_loss", 0.5),
        ("metrics", "epoch", 1.0),
        ("metrics", "eval_loss", 0.6),
        ("speed", "rows_per_second", 5.0),
    ]
    assert sum(event["seconds"] for event in written if event["kind"] == "speed") == 9.0


def test_a_program_that_returns_has_finished_with_figures_and_the_digest_of_every_file(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    main = """
(job_dir / "output" / "sub").mkdir()
(job_dir / "output" / "sub" / "a.txt").write_text("text")
return {"n": job.settings["n"]}
"""
    assert run_to_end(job, main) == 0
    outcome = finished_output(job)
    assert outcome is not None
    assert outcome.result == {"n": 3}
    assert outcome.files == {"sub/a.txt": sha256(job / "output" / "sub" / "a.txt")}


def test_output_files_of_an_earlier_try_are_not_in_the_result(tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "output").mkdir(parents=True)
    (job / "output" / "half").write_text("")
    run_to_end(job, "return {}")
    outcome = finished_output(job)
    assert outcome is not None and outcome.files == {}
    assert not (job / "output" / "half").exists()


@pytest.mark.parametrize("damage", ["truncated", "removed", "outcome removed", "outcome torn"])
def test_damaged_output_does_not_count_as_finished(tmp_path: Path, damage: str) -> None:
    output = tmp_path / "output" / "a.bin"
    output.parent.mkdir()
    output.write_bytes(b"content")
    outcome = Outcome(state="finished", files={"a.bin": sha256(output)})
    write_atomically(tmp_path / "outcome.json", outcome.model_dump_json().encode())
    assert finished_output(tmp_path) == outcome
    if damage == "truncated":
        output.write_bytes(b"conten")
    elif damage == "removed":
        output.unlink()
    elif damage == "outcome removed":
        (tmp_path / "outcome.json").unlink()
    else:
        (tmp_path / "outcome.json").write_text('{"state": "fin')
    assert finished_output(tmp_path) is None


def test_the_users_mistakes_come_back_all_together_and_without_a_traceback(tmp_path: Path) -> None:
    job = tmp_path / "job"
    main = 'raise UserError(Problem(kind="data", where=w, message="is wrong") for w in ("a", "b"))'
    assert run_to_end(job, main) == 1
    failed = failure(job)
    assert (failed.kind, failed.traceback) == ("user_error", "")
    assert [problem.where for problem in failed.problems] == ["a", "b"]


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        ("raise MemoryError", "out_of_memory"),
        ("raise type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory')", "out_of_memory"),
        ("raise KeyError('lost')", "internal"),
        ("raise SystemExit(0)", "internal"),
    ],
)
def test_an_exception_is_reported_by_kind_with_its_true_traceback(tmp_path: Path, main: str, kind: str) -> None:
    job = tmp_path / "job"
    assert run_to_end(job, main) == 1
    failed = failure(job)
    assert failed.kind == kind
    assert "job.py" in failed.traceback and "in main" in failed.traceback


def test_a_program_that_receives_a_stop_signal_is_interrupted_at_once(tmp_path: Path) -> None:
    job = tmp_path / "job"
    program = start_program(job, "events.note('at work')\ntime.sleep(60)")
    wait_for_event(job, "note")
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 1
    assert failure(job).kind == "interrupted"


def test_a_program_that_stops_itself_may_save_first(tmp_path: Path) -> None:
    job = tmp_path / "job"
    main = """
events.note("at work")
while not stop_requested():
    time.sleep(0.01)
(job_dir / "checkpoints" / "saved").touch()
raise Interrupted("saved at step 5")
"""
    program = start_program(job, main, options=", stops_itself=True")
    wait_for_event(job, "note")
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 1
    assert failure(job).kind == "interrupted"
    assert "saved at step 5" in failure(job).message
    assert (job / "checkpoints" / "saved").exists()


RESTARTS = """
import os, signal
from training.jobs.program import restart, run_program, stop_requested

def main(job_dir, job, events):
    if (job_dir / "restarted").exists():
        return {"stop_requested": stop_requested()}
    (job_dir / "restarted").touch()
    execv = os.execv
    def stop(*argv):
        os.kill(os.getpid(), signal.SIGTERM)
        execv(*argv)
    if job.settings["when"] == "before":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        os.execv = stop
    restart()

if __name__ == "__main__":
    run_program(main, stops_itself=True)
"""


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_stop_signal_at_a_restart_reaches_the_restarted_program(tmp_path: Path, when: str) -> None:
    (tmp_path / "restarts.py").write_text(RESTARTS)
    job = tmp_path / "job"
    Job(program="test", key="k", settings={"when": when}).write(job)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])}
    subprocess.run([sys.executable, "-m", "restarts", str(job)], env=env, timeout=30, check=True)
    outcome = read_outcome(job)
    assert outcome is not None and outcome.result == {"stop_requested": True}


def test_a_killed_program_has_no_outcome_not_even_that_of_an_earlier_try(tmp_path: Path) -> None:
    job = tmp_path / "job"
    assert run_to_end(job, "return {}") == 0
    assert run_to_end(job, "os.kill(os.getpid(), 9)") == -9
    assert read_outcome(job) is None


def test_a_rank_other_than_the_first_reports_its_failure_but_not_its_success(tmp_path: Path) -> None:
    job = tmp_path / "job"
    assert run_to_end(job, "return {}", RANK="1") == 0
    assert read_outcome(job) is None
    run_to_end(job, "raise MemoryError", RANK="1")
    run_to_end(job, "raise ConnectionError('peer is gone')")
    assert (failure(job).kind, failure(job).rank) == ("out_of_memory", 1)


def test_a_program_whose_supervisor_died_while_it_started_does_nothing(tmp_path: Path) -> None:
    job = tmp_path / "job"
    # A pid that lives, but was started at another time than the supervisor of that number.
    assert run_to_end(job, "return {}", FINETUNE_SUPERVISOR=f"{os.getpid()}:1") == 1
    assert sorted(os.listdir(job)) == ["job.json"]


def test_the_protocol_loads_nothing_heavy() -> None:
    code = "import sys, training.jobs.protocol; print(*{'torch', 'transformers', 'numpy'}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_resumed_process_parses_only_the_events_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of training leave a line of progress for each second, and every rank opens the file."""
    path = tmp_path / "events.jsonl"
    before = Events(path)
    for step in range(100):
        before.progress(done=step, total=100)
    before.metrics(50, {"loss": 0.5})
    parsed: list[bytes] = []
    monkeypatch.setattr(protocol, "_event", lambda line: parsed.append(line) or json.loads(line))
    after = Events(path)
    after.progress(done=100, total=100)
    assert parsed == []
    after.metrics(50, {"loss": 0.5})
    assert [json.loads(line)["kind"] for line in parsed] == ["metrics"]
    assert len(read_events(path, 0, ["metrics"])[0]) == 1


def test_last_lines_are_read_from_the_end_of_the_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(log, 3) == ["line 99997", "line 99998", "line 99999"]
    assert len(last_lines(log, 100_000)) < 10_000
    log.write_text("")
    assert last_lines(log, 3) == []
