"""The base model from the Hub, through the clients' own cache."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from tasks.cache.results import Lock, PinnedCommit
from tasks.cache.stage import Work
from tasks.hub.client import explain_read_errors
from tasks.stages.load_model import load_model
from tests.hub.server import Hub
from tests.made import NO_WEIGHTS
from training.problems import UserError
from training.recipe import Recipe, parse

pytestmark = pytest.mark.usefixtures("home")

FILES = {
    "config.json": b"{}",
    "model.safetensors": NO_WEIGHTS,
    "tokenizer.json": b"{}",
    "special_tokens_map.json": b"{}",
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "other/model.safetensors": b"weights of another format",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants._HF_DEFAULT_ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        yield hub


def recipe() -> Recipe:
    data = {"source": "hub", "path": "me/rows", "text": ["text"], "label": "label"}
    model = {"source": "hub", "path": "me/model"}
    return parse({"name": "test", "task": "sequence-classification", "data": data, "model": model})


def load(out: Path, commit: str) -> dict[str, bytes]:
    """The files in the stage's folder."""
    out.mkdir()
    load_model.make(
        Work("k", out, "run"), recipe(), Lock(model_hub=PinnedCommit(name="me/model@main", commit=commit)), None
    )
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_the_commit_that_was_pinned_is_taken_without_what_a_model_does_not_need(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo("model", "me/model", FILES)
    hub.commit("model", "me/model", {"config.json": b'{"moved": true}'})
    assert load(tmp_path / "out", commit) == {
        "model/config.json": b"{}",
        "model/model.safetensors": NO_WEIGHTS,
        "tokenizer/tokenizer.json": b"{}",
        "tokenizer/special_tokens_map.json": b"{}",
    }
    assert not [request for request in hub.requests if "README" in request or ".bin" in request or "other/" in request]


def test_a_loaded_model_is_not_loaded_again(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo("model", "me/model", FILES)
    first = load(tmp_path / "first", commit)
    hub.stop()
    assert load(tmp_path / "second", commit) == first


def test_a_model_that_another_program_left_in_part_is_not_taken_for_the_whole(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repo("model", "me/model", FILES)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        hf_hub_download("me/model", name, revision=commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="unset HF_HUB_OFFLINE"):
        load(tmp_path / "out", commit)


def test_a_full_disk_is_not_taken_for_a_dead_network() -> None:
    with pytest.raises(OSError, match="No space") as failed, explain_read_errors("model", "me/model", "main"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert failed.value.errno == errno.ENOSPC
