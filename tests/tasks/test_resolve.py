"""Names become content: files, commits of the Hub, the machine's own values."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from tasks.data import load_data
from tasks.model import load_model
from tasks.resolve import pin, resolve
from tasks.runtime.history import History
from tasks.runtime.refs import Pins, Ref
from tasks.runtime.stage import Row, Work
from training.problems import UserError
from training.recipe import Recipe, parse

OLD, NEW = "a" * 40, "b" * 40
SCRATCH = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}
HUB = {"source": "hub", "path": "me/rows", "text": ["text"], "label": "label"}


class Heard:
    """Keeps the messages that it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def stage_started(self, stage: str, key: str) -> None: ...

    def stage_waits(self, stage: str) -> None: ...

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.messages += [event["message"] for event in events]

    def stage_ended(self, row: Row, result: Any) -> None: ...


def recipe_of(data: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return parse(
        {"name": "test", "kind": "sequence-classification", "data": data, "model": model or SCRATCH, **sections}
    )


def run(recipe: Recipe, flow_run: str = "flow-1") -> tuple[Pins, list[str]]:
    heard = Heard()
    return resolve.make(Work("k", Path(), flow_run, (heard,), "resolve"), recipe), heard.messages


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.csv").write_text("text,label\na,x\nb,y\n")
    (folder / "dev.csv").write_text("text,label\nc,x\n")
    return {"source": "csv", "path": str(folder), "text": ["text"], "label": "label"}


def problems(recipe: Recipe) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as refused:
        pin(recipe)
    return [(problem.where, problem.message) for problem in refused.value.problems]


def test_files_are_pinned_by_their_content(home: Path, rows: dict[str, Any]) -> None:
    pins = pin(recipe_of(rows))
    assert {split: [Path(f.path).name for f in files] for split, files in pins.data_files.items()} == {
        "train": ["train.csv"],
        "validation": ["dev.csv"],
    }
    content = Path(rows["path"], "train.csv").read_bytes()
    assert pins.data_files["train"][0].sha256 == hashlib.sha256(content).hexdigest()
    assert pins.mixed_precision in ("no", "bf16", "fp16") and pins.num_processes == 1


def load_key(recipe: Recipe, pins: Pins) -> str:
    return load_data.key(load_data.flat_ingredients(recipe, pins)[0])


def test_moved_files_are_the_same_data_and_a_changed_cell_is_other_data(home: Path, rows: dict[str, Any]) -> None:
    before = recipe_of(rows)
    key = load_key(before, pin(before))
    moved = Path(rows["path"]).rename(Path(rows["path"]).with_name("moved"))
    after = recipe_of({**rows, "path": str(moved)})
    assert load_key(after, pin(after)) == key
    (moved / "train.csv").write_text("text,label\na,x\nb,x\n")
    assert load_key(after, pin(after)) != key


def test_what_was_pinned_stays_for_the_same_flow_run(home: Path, rows: dict[str, Any]) -> None:
    recipe = recipe_of(rows)
    first, _ = run(recipe)
    shutil.rmtree(rows["path"])
    assert run(recipe)[0] == first
    with pytest.raises(UserError):
        run(recipe, "flow-2")


def test_a_plan_pins_nothing(home: Path, rows: dict[str, Any]) -> None:
    run(recipe_of(rows), flow_run="")
    assert not (home / "runs").exists() and History("test").last_pins() is None


MODEL = {"config.json": "{}", "model.safetensors": "w", "tokenizer.json": "{}", "README.md": "x", "model.bin": "pickle"}


def write_model(folder: Path, *names: str) -> dict[str, Any]:
    folder.mkdir()
    for name in names or tuple(MODEL):
        (folder / name).write_text(MODEL[name])
    return {"source": "folder", "path": str(folder)}


def test_a_model_folder_is_pinned_without_what_is_not_taken(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    pins = pin(recipe_of(rows, write_model(tmp_path / "model")))
    assert sorted(pins.model_files) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_moved_model_folder_is_the_same_model(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    data = Ref(kind="load_data", key="k", digest="d")

    def key(name: str) -> str:
        recipe = recipe_of(rows, {"source": "folder", "path": str(tmp_path / name)})
        return load_model.key(load_model.flat_ingredients(recipe, pin(recipe), data)[0])

    write_model(tmp_path / "model")
    before = key("model")
    (tmp_path / "model").rename(tmp_path / "moved")
    assert key("moved") == before


def test_all_that_is_missing_is_told_together(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    Path(rows["path"], "dev.csv").unlink()
    model = write_model(tmp_path / "model", "README.md")
    told = problems(recipe_of(rows, model))
    assert [where for where, _ in told] == ["data.path", "model.path", "model.path", "model.path"]
    assert "validation" in told[0][1] and [
        part in message
        for part, (_, message) in zip(("config.json", "safetensors", "tokenizer"), told[1:], strict=True)
    ]


def test_a_model_folder_that_is_not_there_is_told_with_its_field(home: Path, rows: dict[str, Any]) -> None:
    ((where, message),) = problems(recipe_of(rows, {"source": "folder", "path": "no/such/folder"}))
    assert where == "model.path" and "no/such/folder is not a folder" in message


def test_a_callable_is_pinned_by_what_it_says_it_is_made_from(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pinned_rows.py").write_text("def rows(split): ...\nrows.fingerprint = lambda: 'version 3'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    data = {**HUB, "source": "python", "path": "my_pinned_rows:rows"}
    assert pin(recipe_of(data)).data_fingerprint == "version 3"


def test_what_the_recipe_says_is_not_replaced_by_what_the_machine_offers(home: Path, rows: dict[str, Any]) -> None:
    assert pin(recipe_of(rows, compute={"mixed_precision": "no"})).mixed_precision == "no"


class Hub(BaseHTTPRequestHandler):
    """Answers for metadata as the Hub does: `answers` maps a path to a status, a code and a commit."""

    answers: ClassVar[dict[str, tuple[int, str, str]]] = {}

    def do_GET(self) -> None:
        status, code, commit = self.answers.get(self.path, (404, "RepoNotFound", ""))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        content = json.dumps({"id": "me/rows", "sha": commit, "siblings": []}).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, str, str]]]:
    """A stand-in on loopback, and what it answers."""
    answers: dict[str, tuple[int, str, str]] = {}
    monkeypatch.setattr(Hub, "answers", answers)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield answers
    server.shutdown()
    server.server_close()


ROWS_AT_MAIN = "/api/datasets/me/rows/revision/main"


def test_names_on_the_hub_are_pinned_to_commits(hub: dict[str, Any], home: Path) -> None:
    hub[ROWS_AT_MAIN] = (200, "", OLD)
    hub["/api/models/me/model/revision/v1.0"] = (200, "", NEW)
    pins, said = run(recipe_of(HUB, {"source": "hub", "path": "me/model", "revision": "v1.0"}))
    assert (pins.data_commit, pins.model_commit, said) == (OLD, NEW, [])


def test_a_branch_that_moves_is_other_data_to_the_next_run_and_not_to_a_retry(hub: dict[str, Any], home: Path) -> None:
    hub[ROWS_AT_MAIN] = (200, "", OLD)
    recipe = recipe_of(HUB)
    before, _ = run(recipe)
    hub[ROWS_AT_MAIN] = (200, "", NEW)
    assert run(recipe)[0] == before
    after, _ = run(recipe, "flow-2")
    assert after.data_commit == NEW and load_key(recipe, after) != load_key(recipe, before)


def test_a_commit_is_not_looked_up(home: Path) -> None:
    assert pin(recipe_of({**HUB, "revision": OLD})).data_commit == OLD


@pytest.mark.parametrize(
    ("answer", "where", "words"),
    [
        ((401, "", ""), "data.path", ["refuses", "HF_TOKEN"]),
        ((403, "", ""), "data.path", ["refuses", "HF_TOKEN"]),
        ((404, "RepoNotFound", ""), "data.path", ["no dataset 'me/rows'", "HF_TOKEN"]),
        ((403, "GatedRepo", ""), "data.path", ["gated", "HF_TOKEN"]),
        ((404, "RevisionNotFound", ""), "data.revision", ["no revision 'main'", "branch, a tag or a commit"]),
        ((500, "", ""), "data.path", ["cannot be asked", "network"]),
    ],
)
def test_a_name_that_the_hub_does_not_give_is_told_with_what_to_do(
    hub: dict[str, Any], home: Path, answer: tuple[int, str, str], where: str, words: list[str]
) -> None:
    hub[ROWS_AT_MAIN] = answer
    ((told, message),) = problems(recipe_of(HUB))
    assert told == where and all(word in message for word in words), message


def test_a_name_that_cannot_be_one_is_told(hub: dict[str, Any], home: Path) -> None:
    ((where, message),) = problems(recipe_of({**HUB, "path": "me/rows/more"}))
    assert where == "data.path" and "owner/name" in message


def unreachable(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize("how", ["offline", "closed port"])
def test_where_the_hub_cannot_be_asked_the_last_commit_of_the_same_name_is_used_and_said(
    hub: dict[str, Any], home: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub[ROWS_AT_MAIN] = (200, "", OLD)
    before, _ = run(recipe_of(HUB))
    unreachable(how, monkeypatch)
    pins, (note,) = run(recipe_of(HUB), "flow-2")
    assert pins.data_commit == OLD and load_key(recipe_of(HUB), pins) == load_key(recipe_of(HUB), before)
    assert "me/rows" in note and OLD[:12] in note
    ((where, message),) = problems(recipe_of({**HUB, "path": "me/others"}))
    assert where == "data.path" and "'me/others' at 'main'" in message
    assert problems(recipe_of({**HUB, "revision": "v2"}))[0][0] == "data.path"


def test_the_last_commit_does_not_hide_that_a_name_is_gone(hub: dict[str, Any], home: Path) -> None:
    hub[ROWS_AT_MAIN] = (200, "", OLD)
    run(recipe_of(HUB))
    del hub[ROWS_AT_MAIN]
    assert problems(recipe_of(HUB))[0][0] == "data.path"
