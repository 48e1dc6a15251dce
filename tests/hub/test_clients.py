"""The stand-in for the Hub, through the real clients: what they write is what they read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tasks.hub.push import Branch, push
from tests.hub.server import CUT, Hub

NAME = "tester/thing"


@pytest.fixture
def api(hub: Hub) -> HfApi:
    """A client with a token."""
    return HfApi(endpoint=hub.url, token=hub.token())


def test_an_uploaded_folder_is_downloaded_as_it_was(hub: Hub, api: HfApi, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "weights.safetensors": bytes(range(256)) * 100, "deep/er/notes.txt": b"hello"}
    for path, content in files.items():
        (tmp_path / "up" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "up" / path).write_bytes(content)
    api.create_repo(NAME, private=True)
    api.create_repo(NAME, exist_ok=True)
    commit = api.upload_folder(repo_id=NAME, folder_path=tmp_path / "up")
    down = Path(api.snapshot_download(NAME, revision=commit.oid, cache_dir=tmp_path / "cache"))
    assert {str(p.relative_to(down)): p.read_bytes() for p in down.rglob("*") if p.is_file()} == files
    assert [p for p in hub.requests if p.startswith("PUT /lfs/")] != []  # the weights did not go by the commit
    assert api.upload_folder(repo_id=NAME, folder_path=tmp_path / "up").oid == commit.oid  # nothing new, no commit


def test_a_commit_on_a_stale_parent_is_refused(hub: Hub, api: HfApi) -> None:
    stale = hub.repo("dataset", NAME, {"a.txt": b"1"})
    newer = api.create_commit(
        NAME, [CommitOperationAdd("b.txt", b"2")], commit_message="b", repo_type="dataset", parent_commit=stale
    )
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_commit(
            NAME, [CommitOperationDelete("a.txt")], commit_message="c", repo_type="dataset", parent_commit=stale
        )
    assert refused.value.response.status_code == 412
    assert [c.commit_id for c in api.list_repo_commits(NAME, repo_type="dataset")] == [newer.oid, stale]
    assert api.list_repo_files(NAME, repo_type="dataset") == ["a.txt", "b.txt"]


def test_branches_and_tags_stay_where_main_moves_on(hub: Hub, api: HfApi) -> None:
    first = hub.repo("model", NAME, {"config.json": b"{}"})
    api.create_branch(NAME, branch="other/one")
    api.create_tag(NAME, tag="v1", revision=first)
    second = hub.commit("model", NAME, {"config.json": b"[]"})
    assert [api.model_info(NAME, revision=r).sha for r in ("main", "other/one", "v1")] == [second, first, first]
    refs = api.list_repo_refs(NAME)
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": second, "other/one": first}
    assert [ref.name for ref in refs.tags] == ["v1"]
    with pytest.raises(HfHubHTTPError, match="already exists"):
        api.create_branch(NAME, branch="other/one")


def test_a_missing_or_private_file_is_reported_by_its_own_error(hub: Hub, tmp_path: Path) -> None:
    hub.repo("model", "me/open", {"config.json": b"{}"})
    hub.repo("model", "me/secret", {"config.json": b"{}"}, private=True)
    hub.repo("model", "me/gated", {"config.json": b"{}"}, gated=True)
    stranger, friend = (HfApi(endpoint=hub.url, token=token) for token in (False, hub.token("me/secret", "me/gated")))
    for name in ("me/none", "me/secret"):
        with pytest.raises(RepositoryNotFoundError):
            stranger.model_info(name)
    with pytest.raises(RevisionNotFoundError):
        stranger.model_info("me/open", revision="v2")
    with pytest.raises(EntryNotFoundError):
        stranger.hf_hub_download("me/open", "none.json", cache_dir=tmp_path)
    assert stranger.model_info("me/gated").gated == "manual"  # its page is open, its files are not
    for ask in (stranger.auth_check, lambda name: stranger.hf_hub_download(name, "config.json", cache_dir=tmp_path)):
        with pytest.raises(GatedRepoError):
            ask("me/gated")
    friend.auth_check("me/gated")
    assert friend.model_info("me/secret").private


def test_a_download_that_is_cut_goes_on_where_it_stopped(
    hub: Hub, api: HfApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    content = os.urandom(50_000)
    hub.repo("model", NAME, {"model.safetensors": content})
    faults = iter([None, CUT])  # HEAD, then GET
    hub.fault = lambda method, path: next(faults, None)
    got = api.hf_hub_download(NAME, "model.safetensors", cache_dir=tmp_path)
    assert Path(got).read_bytes() == content
    assert [r.split()[0] for r in hub.requests] == ["HEAD", "GET", "GET"]


def test_a_download_that_fails_keeps_the_whole_files_and_no_part_of_the_one_that_broke(
    hub: Hub, api: HfApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README promises no more between two runs: the clients give each part a name of its own."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    content = os.urandom(50_000)
    hub.repo("model", NAME, {"config.json": b"{}", "model.safetensors": content})
    hub.fault = lambda method, path: CUT if method == "GET" and path.endswith("model.safetensors") else None
    with pytest.raises(Exception):  # noqa: B017 - whichever the clients choose
        api.snapshot_download(NAME, cache_dir=tmp_path, max_workers=1)
    assert list(tmp_path.rglob("*.incomplete")) == []
    hub.fault = lambda method, path: None
    hub.requests.clear()
    down = api.snapshot_download(NAME, cache_dir=tmp_path, max_workers=1)
    assert Path(down, "model.safetensors").read_bytes() == content
    assert [path.rpartition("/")[2] for path in hub.requests if path.startswith("GET") and "/resolve/" in path] == [
        "model.safetensors"
    ]


def test_a_stopped_hub_refuses_and_answers_again_at_the_same_address(hub: Hub, api: HfApi) -> None:
    import httpx2

    hub.repo("model", NAME, {})
    url = hub.url
    api.model_info(NAME)
    hub.stop()
    for _ in range(2):  # the open connection, then a new one
        with pytest.raises(httpx2.TransportError):
            api.model_info(NAME)
    hub.start()
    assert hub.url == url and api.model_info(NAME).id == NAME


READ = """
import json, sys
import datasets, torch
from transformers import AutoModel, AutoTokenizer
rows = datasets.load_dataset("me/rows", "small", split="train")
print(json.dumps({"rows": rows.to_list(), "labels": rows.features["label"].names}))
def read(name):
    model, tokenizer = AutoModel.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    with torch.no_grad():
        answer = model(**tokenizer("good film", return_tensors="pt")).last_hidden_state.tolist()
    return [type(model).__name__, tokenizer.tokenize("good film"), answer]
print(json.dumps([read("tester/model"), read(sys.argv[1])]))
"""


@pytest.mark.slow
def test_datasets_and_transformers_read_what_is_there_and_a_pushed_model_answers_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    from training.programs.create_model import create, save_tokenizer, train_wordpiece

    tokenizer = train_wordpiece(lambda: iter(["good film", "bad film"]), 60)
    save_tokenizer(tokenizer, 32, tmp_path / "model")
    config = {"model_type": "distilbert", "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
    create({**config, "vocab_size": tokenizer.get_vocab_size()}, tokenizer, 1).save_pretrained(tmp_path / "model")
    card = (
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - {split: train, path: small/train-*}\n"
        "dataset_info:\n- config_name: small\n  features:\n  - {name: text, dtype: string}\n"
        "  - {name: label, dtype: {class_label: {names: {'0': bad, '1': good}}}}\n---\n"
    )
    rows = io.BytesIO()
    pq.write_table(pa.table({"text": ["good film", "bad film"], "label": pa.array([1, 0], pa.int64())}), rows)
    with Hub() as hub:
        files = {path.name: path for path in (tmp_path / "model").iterdir()}
        api, place = HfApi(endpoint=hub.url, token=hub.token()), Branch("tester/model", "main", private=True)
        push(api, place, files, title="a model", replaced=lambda path: False)
        parquet = "small/train-00000-of-00001.parquet"
        hub.repo("dataset", "me/rows", {"README.md": card.encode(), parquet: rows.getvalue()}, private=True)
        env = {**os.environ, **hub.environment(tmp_path / "cache", hub.token("me/rows"))}
        done = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path / "model")], env=env, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    read, (pushed, local) = map(json.loads, done.stdout.splitlines())
    assert read["rows"] == [{"text": "good film", "label": 1}, {"text": "bad film", "label": 0}]
    assert read["labels"] == ["bad", "good"] and pushed == local and pushed[:2] == ["DistilBertModel", ["good", "film"]]
