"""`finetune store` over the home of a finished run."""

from __future__ import annotations

import io
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tasks.cache import store
from tasks.cache.garbage_collection import Sizes, bytes_on_disk
from tasks.registry.retention import find_shared_needs
from tasks.reports.formatting import format_size
from tasks.shared_store import maintenance
from tasks.shared_store.bucket import Bucket
from tasks.shared_store.shared_artifacts import SharedStore
from tasks.tracking.connection import connect
from tests.flows.small import FinishedRun
from tests.made import KEY, artifact


@pytest.fixture
def copied(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of the finished run with an unused artifact and a damaged one."""
    home = tmp_path / "home"
    shutil.copytree(finished.home, home, symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    artifact("fit", {"weights": b"w" * 1_000_000})
    store.discard("fit", KEY, "for the test")
    artifact("load_data", {"rows": b"r" * 500_000})
    return home


def test_a_removal_frees_the_announced_bytes_and_no_command_misses_the_files(
    finished: FinishedRun, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store"]) == 0
    listed = capsys.readouterr().out.splitlines()
    before = bytes_on_disk([copied])
    assert main(["store", "--remove", "--yes"]) == 0
    removed, freed = capsys.readouterr().out.splitlines()[-1].split(": ")
    assert (removed, freed) == ("Removed 2 of 2", f"{format_size(before - bytes_on_disk([copied]))} freed.")
    assert listed[-1] == f"{freed.removesuffix(' freed.')} can go: finetune store --remove"
    assert any(line.split()[:2] == ["small@champion", "7"] for line in listed), listed
    assert main(["run", str(finished.file)]) == 0
    assert "Nothing changed since flow run" in capsys.readouterr().out
    assert main(["show", "small@champion"]) == 0
    capsys.readouterr()
    assert main(["store", "--remove", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing can go."


def test_a_home_that_was_moved_is_named_where_it_is_now(
    finished: FinishedRun, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, printed = str(finished.file), ""
    for command in (
        ["run", file, "--json", str(tmp_path / "run.json")],
        ["plan", file],
        ["show", "small/1", "--json", str(tmp_path / "show.json")],
        ["runs", "--json", str(tmp_path / "runs.json")],
        ["models"],
        ["store"],
        ["resume", finished.result["flow_run_id"]],
    ):
        main(command)
        captured = capsys.readouterr()
        printed += f"$ {command}\n{captured.out}{captured.err}"
    printed += "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert "Nothing changed since flow run" in printed
    assert [line for line in printed.splitlines() if str(finished.home) in line] == []
    assert f"{copied}/artifacts/fit/" in printed


def test_without_a_terminal_nothing_is_removed_except_with_yes(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "--remove"]) == 2
    assert capsys.readouterr().err == "--remove: needs a terminal for its question: add --yes.\n"
    assert store.find("load_data", KEY) is not None


def test_ctrl_d_at_the_question_removes_nothing_and_no_folder_is_walked_twice(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, walked = io.StringIO(), tmp_path / "walked"
    monkeypatch.setattr(closed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", closed)
    walk = Sizes._walk_entries

    def record(sizes: Sizes, folder: str, usage: Any) -> None:
        with walked.open("a") as file:  # of this process and of the one that measures the home
            file.write(f"{folder}\n")
        walk(sizes, folder, usage)

    monkeypatch.setattr(Sizes, "_walk_entries", record)
    assert main(["store", "--remove"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing was removed."
    folders = walked.read_text().splitlines()
    assert len(folders) == len(set(folders)) > 10 and store.find("load_data", KEY) is not None


def test_a_home_that_is_not_there_is_not_made(home: Path) -> None:
    assert main(["store"]) == 0
    assert not home.exists()


@pytest.fixture
def bucket(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A shared store with all artifacts of the home; nothing in it is young."""
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    for folder in copied.glob("artifacts/*/[!.]*"):
        SharedStore(Bucket(url)).upload(folder.parent.name, folder.name)
    monkeypatch.setenv("FINETUNE_STORE", url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copied}/mlflow.db")
    monkeypatch.setattr(maintenance, "GRACE", timedelta(days=-1))
    return Bucket(url)


def test_the_shared_store_is_shown_after_the_home_and_keeps_what_runs_and_versions_need(
    copied: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store"]) == 0
    here, _, there = capsys.readouterr().out.partition(bucket.url)
    assert "can go: finetune store --remove" in here and "needed" not in there
    assert {"load_data", "files"} <= {line.partition("  ")[0] for line in there.splitlines()}
    before = {*bucket.names("artifacts")}
    assert main(["store", "--shared", "--remove", "--yes"]) == 0
    assert "Removed 3 of 3 objects" in capsys.readouterr().out
    assert before - {*bucket.names("artifacts")} == {f"artifacts/load_data/{KEY}.json"}
    assert main(["store", "--shared"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing can go."


def test_runs_keep_their_artifacts_in_the_shared_store_for_some_days_and_versions_for_ever(
    copied: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = find_shared_needs(1)
    owners = {owner for some in needs.values() for owner in some}
    assert {"small/1", "runs of the last 1 days"} <= owners
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 3 * 86_400)
    later = find_shared_needs(1)
    assert "runs of the last 1 days" not in {owner for some in later.values() for owner in some}
    assert {key for key, some in later.items() if "small/1" in some} == {
        key for key, some in needs.items() if "small/1" in some
    }


def test_a_run_keeps_its_artifacts_in_the_shared_store_while_it_runs_and_for_some_days_after_its_end(
    copied: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    (run,) = client.search_runs([found.experiment_id for found in client.search_experiments()], max_results=1)

    def is_needed() -> bool:
        return any("runs of the last 1 days" in owners for owners in find_shared_needs(1).values())

    later_s = time.time() + 3 * 86_400
    monkeypatch.setattr("time.time", lambda: later_s)
    assert not is_needed()
    client.update_run(run.info.run_id, status="RUNNING")
    assert is_needed()
    client.set_terminated(run.info.run_id, "FAILED", int(1000 * (later_s - 2 * 86_400)))
    assert not is_needed()
    client.set_terminated(run.info.run_id, "FAILED", int(1000 * (later_s - 3600)))
    assert is_needed()


def test_a_home_that_knows_only_its_own_runs_removes_nothing_from_the_shared_store(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bucket.entries()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert main(["store", "--shared", "--remove", "--yes"]) == 2
    assert "MLFLOW_TRACKING_URI: is not set: name the MLflow server of all machines" in capsys.readouterr().err
    assert bucket.entries() == before


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--shared"], "FINETUNE_STORE: is not set: name the shared store, such as s3://bucket/prefix."),
        (["--shared", "--give-up", "52e9"], "--give-up: is for runs of this home: leave it out, or --shared."),
        (["--days", "3"], "--days: needs --shared: add it, or leave this option out."),
        (["--shared", "--days", "0"], "--days: 0 is too few: at least 1 day is kept."),
    ],
)
def test_mistakes_of_the_shared_store_get_one_message(
    copied: Path, arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", *arguments]) == 2
    assert capsys.readouterr().err == f"{shown}\n"
