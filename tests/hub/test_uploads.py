"""Checkpoints on the Hub during training: whole ones, sent by another process, without delaying the training."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from tasks.cache.stage import Work
from tasks.hub.checkpoint_uploads import CheckpointPusher, upload_checkpoints
from tests.hub.server import Hub
from training.engine import checkpoints
from training.jobs.protocol import CHECKPOINTS, EVENTS, Job, read_events
from training.recipe import Recipe, parse

NAME = "tester/thing"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "tokenizer"


def save(job: Path, step: int, needs: Sequence[int] = ()) -> None:
    """A checkpoint as training writes one, and the older ones that go then."""
    final = job / CHECKPOINTS / checkpoints.name(step)
    with checkpoints.write(final, [checkpoints.name(other) for other in needs]) as folder:
        (folder / "model.safetensors").write_bytes(b"weights %d" % step)
        (folder / "config.json").write_text("{}")
        (folder / "optimizer.pt").write_bytes(b"momentum %d" % step)
    checkpoints.rotate(final.parent)


def content(hub: Hub, revision: str = "main") -> dict[str, bytes]:
    repo = hub.repos.get(("models", NAME))
    return {path: file.content for path, file in repo.at(revision).files.items()} if repo else {}


def uploads(hub: Hub, job: Path, tokenizer: Path, which: str) -> CheckpointPusher:
    if which == "all_checkpoints":  # as the flow does before training begins
        (job / checkpoints.OUTGOING).mkdir(parents=True)
    settings = {"name": "small", "repo": NAME, "revision": "main", "private": True, "checkpoints": which}
    inputs = {"job": str(job), "tokenizer": str(tokenizer)}
    api = HfApi(endpoint=hub.url, token=hub.token())
    return CheckpointPusher(Job(program="p", key="k", settings=settings, inputs=inputs), job / "copy", lambda repo: api)


def test_the_newest_lies_with_those_that_it_needs_where_training_can_go_on_from_it(
    hub: Hub, tokenizer: Path, tmp_path: Path
) -> None:
    job, sent = tmp_path / "job", uploads(hub, tmp_path / "job", tokenizer, "checkpoint")
    for step, needs in ((10, []), (20, [10]), (30, [10])):
        save(job, step, needs)
        sent.push_new()
    files = ("model.safetensors", "config.json", "optimizer.pt", "manifest.json")
    places = ("last-checkpoint/checkpoint-30", "best-checkpoint/checkpoint-10")  # never two in one folder
    assert content(hub).keys() == {f"{place}/{file}" for place in places for file in files}
    made = len(hub.repos["models", NAME].commits)
    sent.push_new()
    uploads(hub, job, tokenizer, "checkpoint").push_new()  # a run that goes on after a kill
    assert len(hub.repos["models", NAME].commits) == made == 4
    down = Path(HfApi(endpoint=hub.url, token=hub.token()).snapshot_download(NAME, cache_dir=tmp_path / "cache"))
    checkpoints.require_intact(down / "last-checkpoint" / "checkpoint-30")
    checkpoints.adopt(down / "last-checkpoint" / "checkpoint-30", tmp_path)
    assert checkpoints.find_damage(tmp_path / "checkpoint-30") is None and (tmp_path / "checkpoint-10").is_dir()


def test_all_of_them_stay_there_although_training_removes_the_old_ones(
    hub: Hub, tokenizer: Path, tmp_path: Path
) -> None:
    job, sent = tmp_path / "job", uploads(hub, tmp_path / "job", tokenizer, "all_checkpoints")
    for step in (10, 20, 30, 40):
        save(job, step)
        sent.push_new()
    assert {path.partition("/")[0] for path in content(hub)} == {f"checkpoint-{n}" for n in (10, 20, 30, 40)}
    assert sorted(path.name for path in (job / CHECKPOINTS).iterdir()) == ["checkpoint-30", "checkpoint-40"]


def test_those_that_training_saves_faster_than_they_are_sent_all_arrive(
    hub: Hub, tokenizer: Path, tmp_path: Path
) -> None:
    job, sent = tmp_path / "job", uploads(hub, tmp_path / "job", tokenizer, "all_checkpoints")
    for step, needs in ((10, []), (20, []), (30, [20]), (40, []), (50, []), (60, [50])):
        save(job, step, needs)
    sent.push_new()
    assert {path.partition("/")[0] for path in content(hub)} == {f"checkpoint-{n}" for n in range(10, 70, 10)}
    assert checkpoints.list_unsent(job / CHECKPOINTS) == checkpoints.list_lost(job / CHECKPOINTS) == []
    save(job, 70)  # what was sent is rotated as ever, and nothing waits for room
    left = sorted(path.name for folder in (CHECKPOINTS, checkpoints.OUTGOING) for path in (job / folder).glob("*0"))
    assert left == ["checkpoint-50", "checkpoint-60", "checkpoint-70"]


def test_those_that_are_missing_at_the_end_are_named_with_the_reason(
    home: Path, hub: Hub, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment(tmp_path / "hf", hub.token()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checkpoints, "MIN_FREE_SHARE", 2.0)
    listener = RunEvents()
    work = Work("key", home / "out", "run", (listener,), "fit")  # type: ignore[arg-type]
    hub.stop()
    with upload_checkpoints(work, recipe("all_checkpoints"), tokenizer):
        for step in (10, 20, 30):
            save(work.job, step)
    (message,) = listener.messages
    assert message.startswith(
        "checkpoints are missing on the Hub: checkpoint-20, checkpoint-30: release.hub.repo: writing"
    )
    assert message.endswith("; checkpoint-10: removed unsent, as less than 200% of the disk was free")


def test_each_save_is_a_commit_of_weights_and_tokenizer_without_optimizer_state(
    hub: Hub, tokenizer: Path, tmp_path: Path
) -> None:
    job, sent = tmp_path / "job", uploads(hub, tmp_path / "job", tokenizer, "every_save")
    for step in (10, 20):
        save(job, step)
        sent.push_new()
        # The model that was published before stays at the branch's root: this one has still to be judged.
        assert content(hub).keys() == {
            f"last-weights/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")
        }
        assert content(hub)["last-weights/model.safetensors"] == b"weights %d" % step
    titles = [commit.title for commit in hub.repos["models", NAME].commits.values()]
    assert titles == ["initial commit", "small checkpoint-10", "small checkpoint-20"]


def test_one_that_is_damaged_or_vanishes_while_it_is_read_is_not_sent(
    hub: Hub, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, sent = tmp_path / "job", uploads(hub, tmp_path / "job", tokenizer, "checkpoint")
    save(job, 10)
    (job / CHECKPOINTS / "checkpoint-10" / "model.safetensors").write_bytes(b"weights 11")
    sent.push_new()
    save(job, 20)
    link = os.link

    def link_after_removal(source: str, target: str) -> None:
        shutil.rmtree(job / CHECKPOINTS / "checkpoint-20", ignore_errors=True)
        link(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link_after_removal)
        sent.push_new()
    assert hub.requests == []
    save(job, 20)
    sent.push_new()
    assert content(hub)["last-checkpoint/checkpoint-20/model.safetensors"] == b"weights 20"


class RunEvents:
    """A listener that keeps the messages of the run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.messages += [event["message"] for event in events]


def recipe(which: str) -> Recipe:
    return parse(
        {
            "name": "small",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "folder", "path": "models/small"},
            "release": {"hub": {"repo": NAME, "license": "mit", "checkpoints": which}},
        }
    )


def wait(until: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_a_warning_and_gets_them_when_it_answers(
    home: Path, hub: Hub, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment(tmp_path / "hf", hub.token()).items():
        monkeypatch.setenv(name, value)
    listener = RunEvents()
    work = Work("key", home / "out", "run", (listener,), "fit")  # type: ignore[arg-type]

    def warnings() -> list[str]:
        return [event["message"] for event in read_events(work.job / EVENTS, 0)[0]]

    hub.stop()
    with upload_checkpoints(work, recipe("checkpoint"), tokenizer):
        save(work.job, 10)
        wait(warnings)
        hub.start()
        wait(lambda: len(warnings()) == 2)
        assert content(hub)["last-checkpoint/checkpoint-10/model.safetensors"] == b"weights 10"
        save(work.job, 20)  # as training ends
    assert content(hub)["last-checkpoint/checkpoint-20/model.safetensors"] == b"weights 20"
    first, second = warnings()
    assert first.startswith(
        "uploads of checkpoints wait for the next try; training continues. release.hub.repo: writing"
    )
    assert second == "uploads of checkpoints succeed again" and listener.messages == []
    hub.stop()
    with upload_checkpoints(work, recipe("checkpoint"), tokenizer):
        save(work.job, 30)
    (missing,) = listener.messages
    assert missing.startswith(
        "checkpoints are missing on the Hub: release.hub.repo: writing to 'tester/thing' on the Hub failed"
    )
    token = os.environ["HF_TOKEN"].encode()
    assert [path for path in home.rglob("*") if path.is_file() and token in path.read_bytes()] == []
    assert json.loads((work.job / "hub" / "job.json").read_text())["settings"]["checkpoints"] == "checkpoint"
