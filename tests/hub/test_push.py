"""Pushes arrive whole or not at all, once, and each failure is reported with the next step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from tasks.environment_variables import ACCESS_TOKENS
from tasks.hub.client import find_publishing_problems
from tasks.hub.push import Branch, Pushed, connect, push
from tests.hub.server import CUT, Hub
from tests.raised import raised_problems
from training.models.repository_files import part_of
from training.problems import NETWORK, UserError
from training.recipe import parse

NAME = "tester/thing"
PUBLISHED = {
    "name": "thing",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
    "model": {"source": "hub", "path": "me/model"},
    "release": {"registry": "thing", "hub": {"repo": NAME, "license": "mit"}},
}
FILES = {"config.json": b"{}", "model-1.safetensors": b"first" * 100, "model-2.safetensors": b"second" * 100}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the clients wait between their tries
    with Hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", FILES)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def send(hub: Hub, folder: Path, *, revision: str = "main", token: str | None = None, **options: Any) -> Pushed:
    api = HfApi(endpoint=hub.url, token=token or hub.token())
    files = {path.name: path for path in folder.iterdir()}
    hub.requests.clear()
    title = options.pop("title", "thing 1")
    place = Branch(NAME, revision, private=True)
    return push(api, place, files, title=title, replaced=lambda path: part_of(path) is not None, **options)


def problem(hub: Hub, folder: Path, **options: Any) -> Any:
    (found,) = raised_problems(send, hub, folder, **options)
    assert "\n" not in found.message
    return found


def content(hub: Hub, revision: str = "main") -> dict[str, bytes]:
    return {path: file.content for path, file in hub.repos["models", NAME].at(revision).files.items()}


def writes(hub: Hub) -> list[str]:
    return [request for request in hub.requests if not request.startswith(("GET", "HEAD"))]


def test_a_repository_and_a_branch_are_made_private_and_filled_in_one_commit(hub: Hub, folder: Path) -> None:
    pushed = send(hub, folder, revision="other/one")
    repo = hub.repos["models", NAME]
    assert repo.private and content(hub, "other/one") == FILES and content(hub) == {}
    assert pushed == Pushed("other/one", repo.branches["other/one"], f"{hub.url}/{NAME}/tree/other/one", is_new=True)
    assert repo.commits[pushed.commit].parent == repo.branches["main"]


def test_files_that_exist_already_are_neither_sent_nor_committed(hub: Hub, folder: Path) -> None:
    first = send(hub, folder)
    again = send(hub, folder)
    assert (again.commit, again.is_new, writes(hub)) == (first.commit, False, [])
    write(folder, {"config.json": b'{"a": 1}'})
    assert send(hub, folder).commit != first.commit and content(hub)["config.json"] == b'{"a": 1}'
    assert not any(request.startswith("PUT") for request in hub.requests)  # the weights are there


def test_weights_of_the_model_before_go_with_the_same_commit_and_what_is_not_ours_stays(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    send(hub, folder)
    hub.commit("model", NAME, {"notes.txt": b"by a person"})
    before = len(hub.repos["models", NAME].commits)
    send(hub, write(tmp_path / "other", {"model.safetensors": b"third" * 100, "config.json": b"{}"}))
    assert content(hub).keys() == {"model.safetensors", "config.json", "notes.txt"}
    assert len(hub.repos["models", NAME].commits) == before + 1


def test_a_push_that_breaks_leaves_no_half_model_and_goes_on_with_what_is_missing(hub: Hub, folder: Path) -> None:
    write(folder, {"model-3.safetensors": b"third" * 100})
    puts: list[str] = []

    def fault(method: str, path: str) -> int | None:
        puts.append(path) if method == "PUT" else None
        return CUT if method == "PUT" and path != puts[0] else None

    hub.fault = fault
    error = problem(hub, folder)
    assert error.kind == NETWORK and "writing to 'tester/thing' on the Hub failed" in error.message
    assert content(hub) == {} and len(hub.blobs) == 1
    hub.fault = lambda method, path: None
    send(hub, folder)
    assert {path.rpartition("/")[2] for path in puts} - set(hub.blobs) == set()
    assert len([request for request in hub.requests if request.startswith("PUT")]) == 2
    assert content(hub).keys() == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("fault", [CUT, 500])
def test_a_commit_whose_answer_is_lost_is_not_made_again(hub: Hub, folder: Path, fault: int) -> None:
    hub.fault = lambda method, path: fault if "/commit/" in path else None
    assert problem(hub, folder).kind == NETWORK
    hub.fault = lambda method, path: None
    assert send(hub, folder).is_new == (fault == 500)
    assert content(hub) == FILES


def test_a_gateway_that_answers_for_the_hub_is_reported_as_such(hub: Hub, folder: Path) -> None:
    write(folder, {"README.md": b"---\nlicense: mit\n---\n"})
    hub.fault = lambda method, path: 502 if path == "/api/validate-yaml" else None
    assert problem(hub, folder).kind == NETWORK and content(hub) == {}


def test_who_commits_in_between_makes_it_fail_and_nothing_is_mixed(hub: Hub, folder: Path) -> None:
    send(hub, folder)
    write(folder, {"config.json": b"[]"})

    def fault(method: str, path: str) -> None:
        if "/commit/" in path:
            hub.commit("model", NAME, {"config.json": b"of somebody else"})

    hub.fault = fault
    error = problem(hub, folder)
    assert error.kind == NETWORK and "somebody else wrote to 'tester/thing'" in error.message
    assert content(hub)["config.json"] == b"of somebody else"


def test_a_pull_request_is_opened_once_and_the_branch_stays(hub: Hub, folder: Path) -> None:
    send(hub, folder, title="the first")
    write(folder, {"config.json": b"[]"})
    first = send(hub, folder, pull_request=True)
    assert (first.revision, first.url) == ("refs/pr/1", f"{hub.url}/{NAME}/discussions/1")
    assert content(hub) == FILES and content(hub, "refs/pr/1") == FILES | {"config.json": b"[]"}
    assert send(hub, folder, pull_request=True) == Pushed(first.revision, first.commit, first.url, is_new=False)
    write(folder, {"config.json": b"[1]"})
    assert send(hub, folder, pull_request=True, title="thing 2").revision == "refs/pr/2"
    assert send(hub, write(folder, FILES), pull_request=True, title="the first").is_new is False  # the branch has it


def test_a_repository_without_pull_requests_is_not_taken_for_one_that_the_token_may_not_write(
    hub: Hub, folder: Path
) -> None:
    hub.fault = lambda method, path: 404 if path.endswith("/discussions") else None
    error = problem(hub, folder, pull_request=True)
    assert error.where == "release.hub.pull_request" and "takes no pull requests (HTTPStatusError: " in error.message
    assert "turn them on in its settings" in error.message and "token" not in error.message


def test_an_answer_that_the_hub_is_out_of_order_is_not_taken_for_the_networks(hub: Hub, folder: Path) -> None:
    hub.fault = lambda method, path: 500 if path.endswith("/refs") else None
    error = problem(hub, folder)
    assert error.kind == NETWORK and "the fault is the Hub's, so run the same command again later" in error.message
    assert "500" in error.message and "network" not in error.message


def test_a_token_without_write_permission_is_reported(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in (hub.token(write=False), "hf_wrong"):
        error = problem(hub, folder, token=token)
        assert (error.kind, error.where) == (
            "hub",
            "release.hub.repo",
        ) and "set HF_TOKEN to one that may" in error.message
        assert token not in error.message
    hub.repos.clear()
    assert problem(hub, folder, token=hub.token(write=False)).kind == "hub"
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="without an access token: set HF_TOKEN"):
        connect(NAME)


def test_whether_there_is_an_access_token_is_looked_up_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("it may renew a login's token over the network")

    monkeypatch.setattr("huggingface_hub.get_token", fail)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ACCESS_TOKENS:
        monkeypatch.delenv(name, raising=False)
    recipe = parse(PUBLISHED)
    (problem,) = find_publishing_problems(recipe)
    assert problem.where == "release.hub.repo" and "without an access token" in problem.message
    monkeypatch.setenv("HF_TOKEN", " ")
    assert len([*find_publishing_problems(recipe)]) == 1
    (tmp_path / "token").write_text("hf_kept\n")
    assert [*find_publishing_problems(recipe)] == []
    (tmp_path / "token").unlink()
    monkeypatch.setenv(ACCESS_TOKENS[1], "hf_set")
    assert [*find_publishing_problems(recipe)] == []


def test_a_hub_that_is_down_or_forbidden_is_reported(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.stop()
    assert problem(hub, folder).message.startswith("writing to 'tester/thing' on the Hub failed (ConnectError")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in problem(hub, folder).message


def test_a_password_in_the_endpoint_is_not_shown(hub: Hub, folder: Path) -> None:
    api = HfApi(endpoint=hub.url.replace("://", "://ann:secret@"), token=hub.token())
    with pytest.raises(UserError, match=r"401 Unauthorized.*http://127\.0\.0\.1") as raised:
        push(api, Branch(NAME, "main", private=True), {}, title="thing 1", replaced=lambda path: False)
    assert "secret" not in str(raised.value)
