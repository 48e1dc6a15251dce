"""Trackers besides MLflow: each gets the whole run by one interface, and one curve without doubled points."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.cache import store
from tasks.cache.results import Artifact
from tasks.cache.stage import Row
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import Curve, Point, Run, Tracker
from tests.tracker_files import tensorboard_curves, wandb_curves, wandb_records
from tests.wandb_server import wandb_server
from training.jobs.protocol import Events, read_events
from training.recipe.tables.trackers import TRACKERS, TrackerEntry

KEY = "0123456789" * 4
TRAINING = [
    {"time": 1000.5, "kind": "metrics", "step": 10, "values": {"loss": 0.5, "learning_rate": 0.25}},
    {"time": 1000.5, "kind": "speed", "step": 10, "values": {"tokens_per_second": 9.0}},
    {"time": 1002.5, "kind": "metrics", "step": 20, "values": {"loss": 0.25}},
    {"time": 1002.75, "kind": "metrics", "step": 20, "values": {"eval_loss": 0.5}},
    {"time": 1004.5, "kind": "metrics", "step": 30, "values": {"loss": 0.125}},
]
CURVES = {
    "fit/loss": [(10, 0.5), (20, 0.25), (30, 0.125)],
    "fit/learning_rate": [(10, 0.25)],
    "fit/speed/tokens_per_second": [(10, 9.0)],
    "fit/eval_loss": [(20, 0.5)],
}


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def trained() -> Artifact:
    """The artifact of the training."""
    with store.filling("fit", KEY) as aside:
        (aside / "log").mkdir()
        (aside / "loss.png").write_bytes(b"picture")
        (aside / "log" / "1.log").write_text("printed: row 7")
        (aside / "log" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in TRAINING))
        return store.publish(aside, "fit", KEY, {}, {"steps": 30})


def run_to_the_end(run: str, tracker: str, *batches: list[dict[str, Any]]) -> RunTracker:
    tracking = RunTracker("recipe", run, "a name", report_to=[tracker])
    tracking.log_params({"training.learning_rate": "3e-05", "name": "recipe"})
    tracking.log_text("recipe.yaml", "name: recipe\n")
    tracking.stage_started("fit", KEY)
    for batch in batches:
        tracking.stage_events("fit", batch)
    tracking.stage_ended(Row("fit", KEY, "ran", 1.5), trained())
    tracking.describe("Promoted.")
    tracking.end("FINISHED")
    assert tracking.warnings == []
    return tracking


class Recorder(Tracker):
    """All that a new tracker needs: this class, and its line in the table."""

    title: ClassVar[str] = "Recorder"
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        super().__init__(run, warn)
        self.calls.append(("run", run.id, run.recipe))

    def start(self, name: str | None, parent: str | None) -> None:
        self.calls.append(("start", name, parent))

    def log_params(self, values: Mapping[str, str]) -> None:
        self.calls.append(("params", values))

    def set_tags(self, values: Mapping[str, str]) -> None:
        self.calls += [("tag", *item) for item in values.items()]

    def describe(self, markdown: str) -> None:
        self.calls.append(("note", markdown))

    def log_points(self, curve: Curve, points: Sequence[Point]) -> None:
        self.calls += [(curve, point) for point in points if curve.key]

    def log_figures(self, values: Mapping[str, float], time_ms: int) -> None:
        self.calls.append(("figures", values))

    def log_text(self, name: str, content: str) -> None:
        self.calls.append(("text", name, content))

    def log_file(self, path: Path, folder: str) -> None:
        self.calls.append(("file", path.name, folder))

    def end(self, status: str, time_ms: int) -> None:
        self.calls.append(("end", status))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setitem(TRACKERS, "recorder", TrackerEntry(f"{__name__}:Recorder", package="pytest"))
    monkeypatch.setattr("importlib.import_module", lambda name: __import__("sys").modules[name])
    return Recorder.calls


def test_a_tracker_of_one_class_and_one_line_gets_the_whole_run(tracked: Path, recorder: list[tuple[Any, ...]]) -> None:
    run_to_the_end("flow-1", "recorder", TRAINING)
    assert recorder[:2] == [("run", "flow-1", "recipe"), ("start", "a name", None)]
    assert ("params", {"training.learning_rate": "3e-05", "name": "recipe"}) in recorder
    assert ("text", "recipe.yaml", "name: recipe\n") in recorder
    points = [call for call in recorder if isinstance(call[0], Curve)]
    assert points[0] == (Curve("fit", KEY), Point("fit/loss", 0.5, 1_000_500, 10))
    assert len(points) == sum(map(len, CURVES.values()))
    assert ("figures", {"fit/seconds": 1.5, "fit/steps": 30.0}) in recorder
    assert {("file", "loss.png", "fit"), ("file", "events.jsonl", "fit")} <= set(filter(_is_hashable, recorder))
    assert ("tag", "fit.key", KEY) in recorder and ("note", "Promoted.") in recorder
    assert recorder[-1] == ("end", "FINISHED")


def _is_hashable(call: tuple[Any, ...]) -> bool:
    return call[0] == "file"


def test_a_tracker_that_fails_stops_no_run_and_is_named_in_a_warning(
    tracked: Path, recorder: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tracker: Recorder, *_: Any) -> None:
        raise ConnectionError("no way out")

    monkeypatch.setattr(Recorder, "log_points", fail)
    monkeypatch.setattr("tasks.tracking.run_tracker.DEAD_WAIT_S", 0.1)
    tracking = RunTracker("recipe", "flow-1", report_to=["recorder"])
    tracking.stage_started("fit", KEY)
    tracking.stage_events("fit", TRAINING)
    tracking.end("FINISHED")
    (warning,) = tracking.warnings
    assert warning.startswith("Recorder lacks a part of this run (ConnectionError: no way out); ")
    assert tracking.trouble is None


def _tensorboard(home: Path) -> dict[str, list[tuple[int, float]]]:
    return tensorboard_curves(home / "tensorboard" / f"recipe-{KEY[:8]}")


def _wandb(home: Path) -> dict[str, list[tuple[int, float]]]:
    (folder,) = home.glob(f"wandb/offline-run-*-recipe-{KEY[:8]}*")
    return wandb_curves(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("tracker", "read"), [("tensorboard", _tensorboard), ("wandb", _wandb)])
def test_a_training_has_one_curve_however_often_runs_of_it_are_killed(
    tracked: Path, home: Path, tracker: str, read: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    job = Events(home / "events.jsonl")
    for index, event in enumerate(TRAINING):
        # Each try of the run begins with all events of the job, as a program that is resumed does.
        job.write(event["kind"], step=event["step"], values=event["values"])
        killed = RunTracker("recipe", f"flow-{index}", report_to=[tracker])
        killed.stage_started("fit", KEY)
        killed.stage_events("fit", read_events(home / "events.jsonl", 0)[0])
        killed.end("KILLED")
    assert read(home) == CURVES
    again = RunTracker("recipe", "flow-4", report_to=[tracker])  # a retry of the last flow run
    again.stage_started("fit", KEY)
    again.stage_events("fit", read_events(home / "events.jsonl", 0)[0])
    again.end("FINISHED")
    assert read(home) == CURVES


@pytest.mark.parametrize(("tracker", "read"), [("tensorboard", _tensorboard), ("wandb", _wandb)])
def test_a_training_that_the_store_has_shows_its_curve(
    tracked: Path, home: Path, tracker: str, read: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    for run in ("flow-1", "flow-2"):
        tracking = RunTracker("recipe", run, report_to=[tracker])
        tracking.stage_started("fit", KEY)
        tracking.stage_ended(Row("fit", KEY, "cached", 0.1), trained() if run == "flow-1" else store.find("fit", KEY))
        tracking.end("FINISHED")
        assert read(home) == CURVES


def test_tensorboard_shows_the_recipe_of_a_training(tracked: Path, home: Path) -> None:
    run_to_the_end("flow-1", "tensorboard", TRAINING)
    shown = EventAccumulator(str(home / "tensorboard" / f"recipe-{KEY[:8]}"))
    shown.Reload()
    assert [event.tensor_proto.string_val[0] for event in shown.Tensors("recipe")] == [b"    name: recipe\n"]
    assert [(event.step, event.value) for event in shown.Scalars("fit/loss")] == CURVES["fit/loss"]


def test_a_curve_that_a_kill_has_cut_in_the_middle_of_a_point_goes_on_there(tracked: Path, home: Path) -> None:
    run_to_the_end("flow-1", "tensorboard", TRAINING)
    (file,) = (home / "tensorboard" / f"recipe-{KEY[:8]}").glob("*.finetune")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    run_to_the_end("flow-2", "tensorboard", TRAINING[:2], TRAINING[2:])
    assert file.read_bytes() == whole


def test_a_training_that_begins_again_replaces_the_curve_of_the_first(tracked: Path, home: Path) -> None:
    run_to_the_end("flow-1", "tensorboard", [event | {"time": event["time"] - 500} for event in TRAINING * 2])
    run_to_the_end("flow-2", "tensorboard", TRAINING)
    assert _tensorboard(home) == CURVES


def test_a_wandb_run_has_parameters_figures_and_pictures_and_no_rows(tracked: Path, home: Path) -> None:
    run_to_the_end("flow-1", "wandb", TRAINING)
    (folder,) = home.glob("wandb/offline-run-*")
    records = [*wandb_records(folder)]
    last = [record.run for record in records if record.HasField("run")][-1]
    assert (last.run_id, last.project, last.display_name) == (f"recipe-{KEY[:8]}", "recipe", "a name")
    config = {update.key: update.value_json for update in last.config.update}
    assert float(config["training.learning_rate"]) == 3e-5 and config["name"] == '"recipe"'
    assert last.notes == "Promoted."
    summary = {
        update.key: json.loads(update.value_json)
        for record in records
        if record.HasField("summary")
        for update in record.summary.update
    }
    assert (summary["fit/steps"], summary["fit.key"]) == (30.0, KEY)
    stored = {path.relative_to(folder / "files").as_posix() for path in (folder / "files").rglob("*.*")}
    assert stored == {"recipe.yaml", "fit/loss.png"}


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Callable[[str, str], None]]:
    """Sets W&B's address and key; an empty key for none."""

    def set_login(address: str, key: str) -> None:
        monkeypatch.delenv("WANDB_MODE")
        monkeypatch.setenv("NETRC", str(home / "netrc"))
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", key)
        wandb.teardown()  # it has read the environment

    yield set_login
    wandb.teardown()


def test_a_run_that_wandb_continues_sends_each_step_once(tracked: Path, login: Callable[[str, str], None]) -> None:
    with wandb_server() as server:
        login(server.url, "0" * 40)
        killed = RunTracker("recipe", "flow-1", report_to=["wandb"])
        killed.stage_started("fit", KEY)
        killed.stage_events("fit", TRAINING[:3])  # its last step is not evaluated yet
        killed.end("KILLED")
        for run in ("flow-2", "flow-3"):
            run_to_the_end(run, "wandb", TRAINING)
        rows = server.history[f"recipe-{KEY[:8]}"]
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name in row.keys() & CURVES.keys():
            curves.setdefault(name, []).append((row["_step"], row[name]))
    assert curves == CURVES


def test_wandb_takes_no_server_from_a_file_of_the_working_directory(
    tracked: Path,
    home: Path,
    login: Callable[[str, str], None],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked = tmp_path_factory.mktemp("rows")
    with wandb_server() as server:
        login(server.url, "0" * 40)
        monkeypatch.delenv("WANDB_BASE_URL")
        monkeypatch.chdir(unpacked)
        (unpacked / "wandb").mkdir()
        (unpacked / "wandb/settings").write_text(f"[default]\nbase_url = {server.url}\n")
        tracking = RunTracker("recipe", "flow-1", report_to=["wandb"])
        tracking.stage_started("fit", KEY)
        tracking.stage_events("fit", TRAINING)
        tracking.end("FINISHED")
        assert server.history == {}
    (warning,) = tracking.warnings
    assert warning.startswith("W&B's settings in wandb/settings of the working directory") and _wandb(home) == CURVES


@pytest.mark.parametrize(
    ("key", "reason"), [("", "W&B has no login"), ("0" * 40, "W&B at http://127.0.0.1:9 does not answer")]
)
def test_a_run_that_wandb_cannot_get_is_kept_in_a_folder_with_a_warning(
    tracked: Path, home: Path, login: Callable[[str, str], None], key: str, reason: str
) -> None:
    login("http://127.0.0.1:9", key)
    tracking = RunTracker("recipe", "flow-1", report_to=["wandb"])
    tracking.stage_started("fit", KEY)
    tracking.stage_events("fit", TRAINING)
    tracking.end("FINISHED")
    (warning,) = tracking.warnings
    assert warning.startswith(reason) and "`wandb sync`" in warning and _wandb(home) == CURVES
