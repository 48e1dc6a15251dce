"""The walk that runs stages as Prefect tasks: made once, found again, made anew where damaged."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from pydantic import BaseModel

from flows.reports.terminal import Terminal
from tasks.cache import store
from tasks.cache.executor import Executor
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.cache.results import Artifact
from tasks.cache.stage import Builder, Inputs, Listener, Row, Stage, Work, action
from tasks.jobs.commands import python_argv
from tasks.jobs.job import StageJob, whole
from tasks.jobs.job import stage as job_stage
from tasks.jobs.launch import JobFailed
from tasks.jobs.retries import run_child
from tasks.reports.stage_summaries import STAGES, StageEntry
from tests.fork_server import COMMANDS, Fork, run_code
from tests.tasks.plain_stages import stage
from training.jobs.protocol import Job, Outcome, Settings, sha256, write_atomically
from training.problems import Problem, UserError

calls: list[str] = []


def inputs(text: str) -> Inputs:
    return Inputs({"text": text})


@stage(inputs)
def write(work: Work, text: str) -> Mapping[str, Any]:
    calls.append(text)
    (work.out / "text.txt").write_text(text)
    (work.out / "inner").mkdir()
    (work.out / "inner" / "more.txt").write_text(text * 2)
    if text == "raise":
        raise OSError("disk full")
    if text == "mistake":
        raise UserError([Problem(kind="data", where="data.path", message="there is no such file.")])
    return {"characters": len(text)}


@action(inputs)
def act(work: Work, text: str) -> str:
    calls.append(text)
    if text == "nothing to do":
        work.state = "skipped"
    return text.upper()


class Said(BaseModel):
    text: str


@stage(inputs)
def child(work: Work, text: str) -> Mapping[str, Any]:
    calls.append(text)
    return run_child(work, "no.such.program", python_argv("no.such.program"), settings={"text": text}, inputs={})


@action(inputs)
def act_by_child(work: Work, text: str) -> Mapping[str, Any]:
    return run_child(work, "no.such.program", python_argv("no.such.program"), settings={"text": text}, inputs={})


def incomputable(text: str) -> Inputs:
    return Inputs({"text": object()})


@stage(incomputable)
def keyless(work: Work, text: str) -> Mapping[str, Any]:
    calls.append(text)
    return {}


class CopySettings(Settings):
    """Of tests.tasks.jobs.copying."""

    files: list[str]


class Copied(BaseModel):
    copied: int


@job_stage(Copied)
def copy_text(text: Artifact, name: str) -> StageJob:
    """Copies a file."""
    return StageJob("tests.tasks.jobs.copying", CopySettings(files=[name]), reads={"rows": whole(text)})


class Log(Listener):
    """A listener that keeps its calls."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def stage_started(self, stage: str, key: str) -> None:
        self.entries.append(("started", stage))

    def stage_waits(self, stage: str) -> None:
        self.entries.append(("waits", stage))

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.entries.append(("events", stage, events))

    def stage_ended(self, row: Row, result: Any) -> None:
        self.entries.append(("ended", row.name, row.state))


class Broken(Log):
    """A listener in which everything fails."""

    def stage_started(self, stage: str, key: str) -> None:
        raise BrokenPipeError("nobody reads this")

    stage_waits = stage_events = stage_ended = stage_started  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def quick_flows(prefect_server: None) -> Iterator[None]:
    calls.clear()
    # The heartbeat's thread is joined for a second at the end of each flow.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def run(
    *steps: tuple[Stage[Any], str], force: tuple[str, ...] = (), listeners: tuple[Any, ...] = ()
) -> tuple[list[Any], list[Row], dict[str, tuple[str, bool]]]:
    """The stages' results, the rows, and for each task what Prefect shows and whether it keeps the result."""
    walks, ids, results = [], [], []

    def body() -> None:
        ids.append(str(flow_run.get_id()))
        walk = Executor("recipe", ids[0], listeners, frozenset(force))
        walks.append(walk)
        results.extend(walk(stage, text) for stage, text in steps)

    try:
        flow(name="walk")(body)()
    finally:
        rows[:] = walks[0].rows
    shown = {task.name.rsplit("-", 1)[0]: (task.state_name or "", _is_persisted(task.state)) for task in shown_by(*ids)}
    return results, walks[0].rows, shown


rows: list[Row] = []


def shown_by(run_id: str) -> list[TaskRun]:
    """The run's tasks as Prefect shows them, once it has taken in their ends."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run_id)]))
    deadline = time.monotonic() + 20
    with get_client(sync_client=True) as client:
        while True:
            found = client.read_task_runs(flow_run_filter=wanted)
            if found and all(task.state and task.state.is_final() for task in found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def _is_persisted(state: Any) -> bool:
    return bool(getattr(state.data, "storage_key", None) and Path(state.data.storage_key).is_file())


def states(of: list[Row]) -> list[str]:
    return [row.state for row in of]


def test_a_stage_is_its_file_its_program_a_line_of_the_table_and_its_call(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these it is run, stored, shown and planned."""
    monkeypatch.setitem(STAGES, "copy_text", StageEntry(lambda result: f"{result.copied} copied"))
    monkeypatch.setitem(STAGES, "write", StageEntry(lambda result: f"{result['characters']} characters"))

    def pipeline(build: Builder) -> Any:
        return build(copy_text, build(write, "hello"), "text.txt")

    def run_pipeline() -> tuple[Artifact[Copied], str]:
        printed = io.StringIO()

        @flow(name="copies")
        def body() -> Any:
            return pipeline(Executor("recipe", str(flow_run.get_id()), (Terminal(printed, printed),)))

        return body(), printed.getvalue()

    copied, printed = run_pipeline()
    assert (copied.path / "text.txt").read_text() == "hello" and copied.result.copied == 1
    assert re.search(r"^  copy_text +ran .* 1 copied$", printed, re.MULTILINE)
    again, printed = run_pipeline()
    assert again == copied and re.search(r"^  copy_text +cached .* 1 copied$", printed, re.MULTILINE)
    planner = Planner("recipe")
    assert pipeline(planner) == copied and planner.rows[-1].state == "cached"


def test_a_second_run_is_shown_as_cached_and_calls_nothing(home: Path) -> None:
    (first,), made, shown_first = run((write, "hello"))
    (second,), found, shown_second = run((write, "hello"))
    assert (states(made), states(found)) == (["ran"], ["cached"])
    assert (shown_first["write"][0], shown_second["write"][0]) == ("Completed", "Cached")
    assert calls == ["hello"] and first == second
    assert isinstance(first, Artifact) and (first.path / "text.txt").read_text() == "hello"
    assert made[0].artifact == found[0].artifact == first.location
    assert History("recipe").last_key("write") == first.key


def test_the_record_lies_in_the_artifacts_own_folder(home: Path) -> None:
    (ref,), _, shown = run((write, "hello"))
    assert json.loads((ref.path / store.RECORD).read_text()) and shown["write"] == ("Completed", True)
    assert sorted(path.name for path in (home / "artifacts").iterdir()) == ["write"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty_the_folder(place: Path) -> None:
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped byte": lambda place: flip(place / "text.txt"),
    "a missing manifest": lambda place: (place / store.MANIFEST).unlink(),
    "an emptied folder": empty_the_folder,
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_made_again_and_kept_in_quarantine_with_a_warning(home: Path, damage: str) -> None:
    (ref,), _, _ = run((write, "hello"))
    DAMAGES[damage](ref.path)
    log = Log()
    (again,), made, _ = run((write, "hello"), listeners=(log,))
    events = [event for entry in log.entries if entry[0] == "events" for event in entry[2]]
    (warning,) = [event["message"] for event in events if event["kind"] == "warning"]
    assert str(ref.path) in warning and f"its files are now in {home / 'quarantine'}" in warning
    assert states(made) == ["ran"] and calls == ["hello", "hello"] and again == ref
    assert (ref.path / "inner" / "more.txt").read_text() == "hellohello"
    (kept,) = (home / "quarantine").iterdir()
    assert (kept / "quarantined.txt").read_text().strip()
    assert states(run((write, "hello"))[1]) == ["cached"]


def test_a_deleted_artifact_is_made_again(home: Path) -> None:
    (ref,), _, _ = run((write, "hello"))
    for path in sorted(ref.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    ref.path.rmdir()
    assert states(run((write, "hello"))[1]) == ["ran"]
    assert not (home / "quarantine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("record", [None, b"{", b'{"metadata": {}, "result": "bm8="}', b"flip"])
def test_an_artifact_without_a_good_record_is_taken_and_shown_as_cached(home: Path, record: bytes | None) -> None:
    (ref,), _, _ = run((write, "hello"))
    if record is None:
        (ref.path / store.RECORD).unlink()
    elif record == b"flip":
        flip(ref.path / store.RECORD)
    else:
        (ref.path / store.RECORD).write_bytes(record)
    (found,), again, shown = run((write, "hello"))
    assert states(again) == ["cached"] and shown["write"][0] == "Cached" and calls == ["hello"] and found == ref
    # And from then on by Prefect itself.
    assert run((write, "hello"))[2]["write"][0] == "Cached"


@pytest.mark.parametrize(("text", "error"), [("raise", OSError), ("mistake", UserError)])
def test_a_stage_that_fails_leaves_nothing_and_is_tried_again(home: Path, text: str, error: type[Exception]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            run((write, text))
        assert states(rows) == ["failed"]
    assert calls == [text, text]
    assert list((home / "artifacts" / "write").iterdir()) == []
    assert History("recipe").last_key("write") is None


def test_a_forced_stage_is_made_anew_though_it_is_whole(home: Path) -> None:
    run((write, "hello"))
    _, forced, shown = run((write, "hello"), force=("write",))
    assert states(forced) == ["ran"] and shown["write"][0] == "Completed" and calls == ["hello", "hello"]
    assert states(run((write, "hello"))[1]) == ["cached"]


def finish(key: str, home: Path) -> Path:
    """The files of a finished child, where the run was killed before it could publish."""
    job = home / "jobs" / key
    Job(program="no.such.program", key=key).write(job)
    (job / "output").mkdir()
    (job / "output" / "model.txt").write_text("weights")
    digest = sha256(job / "output" / "model.txt")
    outcome = Outcome(state="finished", result={"steps": 3}, files={"model.txt": digest})
    write_atomically(job / "outcome.json", outcome.model_dump_json().encode())
    return job


def key_of(of: Stage[Any], text: str) -> str:
    return of.key(of.flat_inputs(text)[0])


def test_a_job_that_had_finished_is_published_as_resumed_and_its_folder_removed(home: Path) -> None:
    job = finish(key_of(child, "hello"), home)
    (ref,), made, _ = run((child, "hello"))
    assert states(made) == ["resumed"] and ref.result == {"steps": 3}
    assert (ref.path / "model.txt").read_text() == "weights"
    assert not job.exists()
    assert states(run((child, "hello"))[1]) == ["cached"]


def test_a_forced_stage_does_not_take_what_its_finished_job_left(home: Path) -> None:
    finish(key_of(child, "hello"), home)
    with pytest.raises(JobFailed, match="ended before it began"):
        run((child, "hello"), force=("child",))


def test_an_action_runs_again_though_its_job_of_a_killed_run_had_finished(home: Path) -> None:
    finish(key_of(act_by_child, "hello"), home)
    with pytest.raises(JobFailed, match="ended before it began"):
        run((act_by_child, "hello"))


def test_an_action_runs_each_time_and_nothing_of_it_is_kept(home: Path) -> None:
    for _ in range(2):
        (result,), acted, shown = run((act, "hello"))
        assert (result, states(acted), shown["act"]) == ("HELLO", ["ran"], ("Completed", False))
    assert calls == ["hello", "hello"] and not (home / "artifacts").exists()
    assert states(run((act, "nothing to do"))[1]) == ["skipped"]


def test_a_key_that_cannot_be_computed_fails_the_run_and_makes_nothing(home: Path) -> None:
    with pytest.raises(TypeError, match="JSON"):
        run((keyless, "hello"))
    assert calls == [] and states(rows) == ["failed"]


def test_listeners_receive_each_stage_in_order(home: Path) -> None:
    log = Log()
    run((write, "hello"), (act, "hello"), listeners=(log,))
    assert log.entries == [
        ("started", "write"),
        ("ended", "write", "ran"),
        ("started", "act"),
        ("ended", "act", "ran"),
    ]


def test_a_listener_that_fails_fails_no_run_and_hides_no_error(home: Path) -> None:
    log = Log()
    assert states(run((write, "hello"), listeners=(Broken(), log))[1]) == ["ran"]
    assert log.entries[-1] == ("ended", "write", "ran")
    with pytest.raises(OSError, match="disk full"):
        run((write, "raise"), listeners=(Broken(), log))


SLOW = """
import sys, time
from pathlib import Path
from prefect import flow
from tasks.cache.executor import Executor
from tasks.cache.stage import Inputs, Listener
from tests.tasks.plain_stages import stage

@stage(lambda: Inputs({"slow": True}))
def slow(work):
    with open("made", "a") as made:
        made.write("x")
    Path("making").touch()
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end and not Path("go").exists():
        time.sleep(0.05)
    (work.out / "text.txt").write_text("hello")
    return {}

class Say(Listener):
    def stage_waits(self, stage): print("waits", flush=True)
    def stage_ended(self, row, result): print(row.state, flush=True)

@flow(name="slow")
def main():
    Executor("recipe", sys.argv[2], (Say(),))(slow)
"""


def start_slow(folder: Path, seconds: float, name: str) -> Fork:
    """A process in the folder, which prints into a file with this name."""
    (folder / "slow_stage.py").write_text(SLOW)
    code = f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, ''); import slow_stage; slow_stage.main()"
    with open(folder / name, "wb") as printed, open(os.devnull, "r+b") as nothing:
        env = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
        files = (nothing, printed, nothing)
        return Fork(run_code, [code, str(seconds), name], env=env, files=files, level=COMMANDS).start()


def wait_until(path: Path, process: Fork) -> None:
    while not path.exists():
        assert process.is_alive(), "the process ended before it made the artifact"
        time.sleep(0.05)


@pytest.mark.slow
def test_of_two_processes_one_makes_it_and_the_other_waits_and_finds_it(home: Path, tmp_path: Path) -> None:
    processes = {name: start_slow(tmp_path, 90, name) for name in ("first", "second")}
    while not any("waits" in (tmp_path / name).read_text() for name in processes):
        assert all(process.is_alive() for process in processes.values())
        time.sleep(0.05)
    (tmp_path / "go").touch()
    assert [process.join(90) for process in processes.values()] == [0, 0]
    assert sorted((tmp_path / name).read_text().split() for name in processes) == [["ran"], ["waits", "cached"]]
    assert (tmp_path / "made").read_text() == "x"


@pytest.mark.slow
def test_when_the_one_that_makes_it_is_killed_the_next_makes_it(home: Path, tmp_path: Path) -> None:
    first = start_slow(tmp_path, 60, "first")
    wait_until(tmp_path / "making", first)
    first.kill()
    assert first.join(60) == -signal.SIGKILL
    second = start_slow(tmp_path, 0, "second")
    assert second.join(60) == 0 and (tmp_path / "second").read_text().split() == ["ran"]
    assert (tmp_path / "made").read_text() == "xx"


@action(inputs, gives=Said)
def act_and_take_back(work: Work, text: str) -> Said:
    def rollback() -> str:
        if text == "stuck":
            raise OSError("it is away")
        calls.append(f"not {text}")
        return f"{text} was taken back"

    calls.append(text)
    work.rollback = rollback
    return Said(text=text)


@action(inputs)
def fail(work: Work, text: str) -> None:
    raise {"mistake": UserError([Problem(kind="hub", where="there", message="no.")]), "stop": KeyboardInterrupt()}[text]


def run_together(*steps: tuple[Stage[Any], str]) -> list[dict[str, Any]]:
    """Runs actions that belong together. Returns the events that their listeners receive, even if one fails."""

    def body() -> None:
        walk = Executor("recipe", str(flow_run.get_id()), (log,))
        with walk.transaction():
            for stage, text in steps:
                walk(stage, text)

    log = Log()
    events[:] = []
    try:
        flow(name="walk")(body)()
    finally:
        events[:] = [event for entry in log.entries if entry[0] == "events" for event in entry[2]]
    return events


events: list[dict[str, Any]] = []


@pytest.mark.parametrize(("how", "error"), [("mistake", UserError), ("stop", KeyboardInterrupt)])
def test_where_one_of_them_fails_actions_that_belong_together_are_rolled_back_last_first(
    home: Path, how: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        run_together((act_and_take_back, "one"), (act_and_take_back, "two"), (fail, how))
    assert calls == ["one", "two", "not two", "not one"]
    assert [event["message"] for event in events] == ["two was taken back", "one was taken back"]
    assert History("recipe").last_key("act_and_take_back") is None  # a plan must not take it for done


def test_a_failed_rollback_is_reported_and_hides_neither_the_error_nor_the_others(home: Path) -> None:
    with pytest.raises(UserError, match="there: no"):
        run_together((act_and_take_back, "one"), (act_and_take_back, "stuck"), (fail, "mistake"))
    assert calls == ["one", "stuck", "not one"]
    assert events[0] == {"kind": "warning", "message": "its changes could not be rolled back: it is away"}


@pytest.mark.slow
def test_actions_that_all_end_well_are_remembered_together(home: Path) -> None:
    run_together((act_and_take_back, "one"), (act, "two"))
    assert calls == ["one", "two"] and events == []
    key = History("recipe").last_key("act_and_take_back")
    assert key and History("recipe").last_result("act_and_take_back", key) == {"text": "one"}
    assert History("recipe").last_key("act")
