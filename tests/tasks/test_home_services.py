"""What other processes take from the state of `finetune up`, here and on another machine; its logs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_API_URL, temporary_settings

from flows.cli.main import main
from tasks.prefect import embedded, servers
from tasks.prefect.servers import MLFLOW, PREFECT, ServicesFailed, State
from tasks.services import process_manager
from training.jobs.processes import start_ticks
from training.problems import UserError

PREFECT_VARIABLES = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
MLFLOW_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
OTHER = "http://prefect.example/api"


@pytest.fixture(autouse=True)
def kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A keeper holds its lock; the environment is restored at the end."""
    for name in (*PREFECT_VARIABLES, *MLFLOW_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with servers.kept_alone() as alone:
        assert alone
        yield


def told(**more: object) -> State:
    state = State(
        pid=os.getpid(),
        ticks=start_ticks(os.getpid()),
        prefect="http://127.0.0.1:1",
        mlflow="http://127.0.0.1:2",
        answering=(PREFECT, MLFLOW),
    ).model_copy(update=more)
    servers.tell(state)
    return state


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in (*PREFECT_VARIABLES, *MLFLOW_VARIABLES) if name in os.environ}


def test_a_process_is_pointed_at_the_servers_of_its_home_and_logged_in() -> None:
    told()
    servers.use()
    password = servers.password()
    assert environment() == {
        "PREFECT_API_URL": "http://127.0.0.1:1/api",
        "PREFECT_API_AUTH_STRING": f"finetune:{password}",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:2",
        "MLFLOW_TRACKING_USERNAME": "finetune",
        "MLFLOW_TRACKING_PASSWORD": password,
    }


def test_a_server_of_somebody_else_is_not_given_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    told()
    monkeypatch.setenv("PREFECT_API_URL", OTHER)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "theirs")
    before = environment()
    servers.use()
    assert environment() == before


def test_a_shell_with_an_earlier_password_gets_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "finetune:earlier")
    servers.use()
    assert os.environ["PREFECT_API_AUTH_STRING"] == servers.auth_string()


def test_a_server_that_does_not_answer_yet_is_not_used() -> None:
    told(answering=(PREFECT,))
    servers.use()
    assert set(environment()) == set(PREFECT_VARIABLES)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may listen in the name of another user")
def test_the_password_is_not_sent_to_a_port_that_another_user_has_taken() -> None:
    uid, nobody = os.getuid(), 65534
    os.seteuid(nobody)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.seteuid(uid)
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        told(prefect=url, mlflow=None, answering=(PREFECT,))
        servers.use()
        assert environment() == {} and not servers.answers(url)


def test_a_password_file_that_a_power_cut_left_empty_is_made_again(home: Path) -> None:
    servers.folder()
    (home / "services" / "password").touch(mode=0o600)
    assert len(servers.password()) >= 32
    assert servers.password() == servers.password()


def test_services_on_another_machine_are_named_and_neither_used_nor_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled: list[object] = []
    monkeypatch.setattr(servers, "send", lambda *arguments: signalled.append(arguments))
    told(host="other-machine")
    servers.use()
    assert environment() == {}
    with pytest.raises(ServicesFailed, match=r"runs on other-machine since .*: run `finetune down` there"):
        servers.down()
    assert signalled == []
    assert main(["status", "--env"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "on other-machine since" in printed.err
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(UserError) as refused:
        embedded.ensure_prefect_server()
    assert "on other-machine since" in refused.value.problems[0].message


def test_a_process_that_has_the_number_of_a_keeper_that_is_gone_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled: list[object] = []
    monkeypatch.setattr(servers, "send", lambda *arguments: signalled.append(arguments))
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 0.1)
    told(ticks=1)
    with pytest.raises(ServicesFailed):
        servers.down()
    assert signalled == []


def test_each_home_has_a_prefect_database_of_its_own_unless_the_user_names_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_DATABASE_CONNECTION_URL}):
        assert embedded.database_url() == f"sqlite+aiosqlite:///{home}/prefect/prefect.db"
        monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "second"))
        assert embedded.database_url() == f"sqlite+aiosqlite:///{tmp_path}/second/prefect/prefect.db"
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: ""}):
        assert embedded.database_url().endswith("/second/prefect/prefect.db")
    mine = "postgresql+asyncpg://me@127.0.0.1/prefect"
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: mine}):
        assert embedded.database_url() == mine


def test_logs_of_services_are_trimmed_while_they_are_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_manager, "LOG_BYTES", 1000)
    logs = home / "services" / "worker" / "logs"
    logs.mkdir(parents=True)
    (logs / "notes.log").touch()  # not a service's
    for number in range(1, 12):
        (logs / f"{number}.log").write_text("early\n")
    with open(logs / "11.log", "a") as writer:
        writer.write("x" * 2000 + "last\n")
        writer.flush()
        process_manager.trim_logs(home / "services")
        writer.write("next\n")
    assert {path.stem for path in logs.iterdir()} == {"7", "8", "9", "10", "11", "notes"}
    kept_text = (logs / "11.log").read_text()
    assert len(kept_text) == 505 and kept_text.endswith("xlast\nnext\n") and "early" not in kept_text
