"""The state of `finetune up` as other processes read it, here and on another machine; its logs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_API_URL, temporary_settings

from flows.cli.main import main
from tasks import servers
from tasks.servers import MLFLOW, PREFECT, ServicesFailed, ServicesState
from tasks.services import lifecycle, prefect_server, process_manager
from training.jobs.processes import start_ticks
from training.problems import UserError

PREFECT_VARIABLES = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
MLFLOW_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
OTHER = "http://prefect.example/api"


@pytest.fixture(autouse=True)
def kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process manager's lock is held; the environment is restored at the end."""
    for name in (*PREFECT_VARIABLES, *MLFLOW_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with servers.process_manager_lock() as alone:
        assert alone
        yield


def running_services(**more: object) -> ServicesState:
    state = ServicesState(
        pid=os.getpid(),
        ticks=start_ticks(os.getpid()),
        prefect="http://127.0.0.1:1",
        mlflow="http://127.0.0.1:2",
        answering=(PREFECT, MLFLOW),
    ).model_copy(update=more)
    servers.write_state(state)
    return state


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in (*PREFECT_VARIABLES, *MLFLOW_VARIABLES) if name in os.environ}


def test_a_process_is_pointed_at_the_servers_of_its_home_and_logged_in() -> None:
    running_services()
    servers.use_home_servers()
    passwords = [servers.ensure_password(name) for name in (PREFECT, MLFLOW)]
    assert environment() == {
        "PREFECT_API_URL": "http://127.0.0.1:1/api",
        "PREFECT_API_AUTH_STRING": f"finetune:{passwords[0]}",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:2",
        "MLFLOW_TRACKING_USERNAME": "finetune",
        "MLFLOW_TRACKING_PASSWORD": passwords[1],
    }
    assert passwords[0] != passwords[1]


def test_a_server_of_another_user_is_not_given_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    running_services()
    monkeypatch.setenv("PREFECT_API_URL", OTHER)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "theirs")
    before = environment()
    servers.use_home_servers()
    assert environment() == before


def test_a_shell_with_an_earlier_password_gets_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    running_services()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "finetune:earlier")
    servers.use_home_servers()
    assert os.environ["PREFECT_API_AUTH_STRING"] == servers.auth_string()


def test_a_server_that_does_not_answer_yet_is_not_used() -> None:
    running_services(answering=(PREFECT,))
    servers.use_home_servers()
    assert set(environment()) == set(PREFECT_VARIABLES)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may listen in the name of another user")
def test_a_server_whose_port_another_user_has_taken_is_not_used() -> None:
    uid, nobody = os.getuid(), 65534
    os.seteuid(nobody)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.seteuid(uid)
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        running_services(prefect=url, mlflow=None, answering=(PREFECT,))
        servers.use_home_servers()
        assert environment() == {} and not servers.is_healthy(url)


def test_a_port_whose_program_does_not_speak_http_is_no_healthy_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        answering = Thread(target=answer)
        answering.start()
        assert not servers.is_healthy(f"http://127.0.0.1:{server.getsockname()[1]}")
        answering.join()


def test_a_password_file_that_a_power_cut_left_empty_is_made_again(home: Path) -> None:
    servers.services_folder()
    (home / "services" / "prefect.password").touch(mode=0o600)
    assert len(servers.ensure_password(PREFECT)) >= 32
    assert servers.ensure_password(PREFECT) == servers.ensure_password(PREFECT)


def test_services_on_another_machine_are_named_and_neither_used_nor_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled: list[object] = []
    monkeypatch.setattr(lifecycle, "send", lambda *arguments: signalled.append(arguments))
    running_services(host="other-machine")
    servers.use_home_servers()
    assert environment() == {}
    with pytest.raises(ServicesFailed, match=r"runs on other-machine since .*: run `finetune down` there"):
        lifecycle.down()
    assert signalled == []
    assert main(["status", "--env"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "on other-machine since" in printed.err
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(UserError) as refused:
        prefect_server.ensure_prefect_server()
    assert "on other-machine since" in refused.value.problems[0].message


def test_the_name_of_a_worker_has_no_character_that_prefect_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "50% of"))
    assert not set(servers.worker_name()) & set("/%")


def test_a_service_that_does_not_answer_is_named_with_the_reason_in_its_log(home: Path) -> None:
    state = running_services(answering=(PREFECT, MLFLOW))
    logs = servers.services_folder() / servers.WORKER / "logs"
    logs.mkdir(parents=True)
    (logs / "1.log").write_text("PermissionError: /tmp/runner_storage\nAn exception occurred.\n")
    message = lifecycle._describe_wait(state)
    assert message.startswith("worker did not answer within") and "PermissionError: /tmp/runner_storage" in message


def test_a_process_that_has_the_pid_of_a_process_manager_that_ended_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled: list[object] = []
    monkeypatch.setattr(lifecycle, "send", lambda *arguments: signalled.append(arguments))
    monkeypatch.setattr(lifecycle, "STOP_TIMEOUT_S", 0.1)
    running_services(ticks=1)
    with pytest.raises(ServicesFailed):
        lifecycle.down()
    assert signalled == []


def test_each_home_has_a_prefect_database_of_its_own_unless_the_user_names_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_DATABASE_CONNECTION_URL}):
        assert prefect_server.database_url() == f"sqlite+aiosqlite:///{home}/prefect/prefect.db"
        monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "second"))
        assert prefect_server.database_url() == f"sqlite+aiosqlite:///{tmp_path}/second/prefect/prefect.db"
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: ""}):
        assert prefect_server.database_url().endswith("/second/prefect/prefect.db")
    mine = "postgresql+asyncpg://me@127.0.0.1/prefect"
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: mine}):
        assert prefect_server.database_url() == mine


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


def test_no_service_imports_files_of_the_folder_in_which_up_was_started(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    environment = lifecycle._build_environment()
    service = process_manager.Service("mlflow", ["json.tool", os.devnull], lambda: environment, lambda: True)
    service.start()
    assert service.supervisor is not None
    service.supervisor.wait(60)
    (log,) = (home / "services" / "mlflow" / "logs").glob("*.log")
    assert "Expecting value" in log.read_text()


def test_the_worker_reads_no_settings_in_the_folder_in_which_up_was_started(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.toml").write_text("[worker]\nheartbeat_seconds = 77.5\n")
    monkeypatch.chdir(tmp_path)
    (service,) = process_manager._build_services({}, str(tmp_path))
    service.argv = ["prefect", "config", "view", "--show-sources"]
    service.start()
    assert service.supervisor is not None
    service.supervisor.wait(60)
    (log,) = (home / "services" / service.name / "logs").glob("*.log")
    assert "PREFECT_" in log.read_text() and "77.5" not in log.read_text()


@pytest.mark.slow
def test_the_socket_of_a_service_reaches_its_program_and_keeps_the_port_while_that_restarts(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "greeter.py").write_text(GREETER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        service = process_manager.Service(
            "greeter", ["greeter", str(listening.fileno())], lambda: {**os.environ}, lambda: True, (listening,)
        )
        service.start()
        pids = [greeting(port)]
        os.kill(int(pids[0]), signal.SIGKILL)
        with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
            pass
        service.stop()
        service.start()
        pids.append(greeting(port))
        service.stop()
    assert pids[0] != pids[1]


def test_a_port_that_is_taken_is_taken_for_localhost_by_ipv6_too_and_nothing_answers_there(home: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    listening, beside = servers.take_port(0)
    with listening, beside:
        port = listening.getsockname()[1]
        with pytest.raises(OSError, match="in use"), socket.create_server(("::1", port), family=socket.AF_INET6):
            pass
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("::1", port), timeout=5):
            pass
        with pytest.raises(OSError, match="in use"):
            servers.take_port(port)
    with socket.create_server(("::1", port), family=socket.AF_INET6), pytest.raises(OSError, match="in use"):
        servers.take_port(port)
    socket.create_server(("127.0.0.1", port)).close()


GREETER = """
import os, socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection, _ = listening.accept()
    connection.sendall(str(os.getpid()).encode())
    connection.close()
"""


def greeting(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        return connection.recv(100).decode()


def test_ports_out_of_range_and_twice_named_are_refused_together_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--prefect-port", "99999", "--mlflow-port", "8080", "--serve", "m", "--serve-port", "8080"]) == 2
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "--prefect-port: 99999 is no port: give 0 to 65535.",
        "--mlflow-port: port 8080 is that of --serve-port too: name another.",
        "--serve-port: port 8080 is that of --mlflow-port too: name another.",
    ]
