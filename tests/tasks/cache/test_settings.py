"""Where things live."""

from __future__ import annotations

import http.server
import os
import pwd
import stat
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from flows.cli.main import main
from tasks.cache import settings
from tasks.prefect import servers
from training.problems import UserError


def test_the_home_is_made_for_its_owner_alone(home: Path) -> None:
    assert settings.home() == home and stat.S_IMODE(home.stat().st_mode) == 0o700


def test_the_home_is_in_the_working_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FINETUNE_HOME")
    assert settings.home() == tmp_path / ".finetune"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_home_that_others_may_write_is_refused(home: Path, mode: int) -> None:
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(UserError, match="chmod 700"):
        settings.home()


def test_a_home_that_others_may_read_becomes_its_owners_alone(home: Path) -> None:
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    settings.home()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_home_in_a_folder_in_which_others_may_rename_it_is_refused_by_the_name_of_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    monkeypatch.setenv("FINETUNE_HOME", str(shared / "mine" / "home"))
    shared.chmod(0o1777)  # as /tmp
    settings.home()
    shared.chmod(0o777)
    with pytest.raises(UserError, match=rf"{shared} belongs to another user or may be written by others"):
        settings.home()


def test_a_home_that_is_a_file_is_refused(home: Path) -> None:
    home.write_text("x")
    with pytest.raises(UserError, match="Name another folder"):
        settings.home()


def test_the_tracker_is_the_homes_own_unless_one_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.tracking_is_local() and settings.tracking_uri() == f"sqlite:///{home}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert not settings.tracking_is_local() and settings.tracking_uri() == "http://tracker:5000"


def test_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    settings.prepare_environment()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:5000/api failed", "http://host:5000/api failed"),
        ("postgresql://me:s:e:c@host/db", "postgresql://host/db"),
        ("postgresql://me:se/c@host/db", "postgresql://host/db"),
        ("http://host:5000/a/me@work failed", "http://host:5000/a/me@work failed"),
        ("https://token@host", "https://host"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("mail me@host about http://host", "mail me@host about http://host"),
    ],
)
def test_names_and_passwords_in_urls_are_not_shown(text: str, shown: str) -> None:
    assert settings.without_credentials(text) == shown


def test_the_homes_own_registry_is_the_same_through_the_server_of_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert settings.registry_place() == "http://127.0.0.1:5000"
    servers.write_state(servers.ServicesState(pid=1, prefect=None, mlflow="http://127.0.0.1:5000"))
    assert settings.registry_place() == "home"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert settings.registry_place() == "http://tracker:5000"


def test_a_thread_keeps_the_home_and_the_tracker_with_which_it_began(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[Path, str]] = []

    def look() -> None:
        looked.append((settings.home_path(), settings.tracking_uri()))

    late = settings.with_this_home(look)
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "another"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    thread = threading.Thread(target=late)
    thread.start()
    thread.join()
    assert looked == [(home, f"sqlite:///{home}/mlflow.db")]
    assert settings.home_path() == tmp_path / "another"


@pytest.mark.parametrize(("before", "after"), [("", ""), (".corp,10.0.0.0/8", ".corp,10.0.0.0/8,")])
def test_requests_to_servers_of_this_machine_pass_no_proxy(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setenv("no_proxy", before)
    monkeypatch.setenv("NO_PROXY", "")
    settings.prepare_environment()
    assert os.environ["no_proxy"] == before  # without a proxy, nothing changes
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    settings.prepare_environment()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == f"{after}127.0.0.1,localhost,::1"
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.build_opener().open(f"http://127.0.0.1:{server.server_port}/", timeout=10)


def test_without_home_the_users_own_is_taken_and_a_user_without_one_is_told_to_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "")
    settings.prepare_environment()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir and settings.find_environment_problems() == []
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    settings.prepare_environment()
    (problem,) = settings.find_environment_problems()
    assert problem.where == "HOME" and "user 54321 has no home folder" in problem.message


def test_a_file_of_certificates_that_is_gone_is_one_message_before_anything_starts(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        f"SSL_CERT_FILE: {tmp_path}/gone.pem is no file with certificates: name one, or unset the variable.\n"
    )
    assert not home.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".env", "A=1\nexport PREFECT_LOGGING_SETTINGS_PATH=/elsewhere/logging.yml\n"),
        (".env", " 'prefect_api_url'=http://127.0.0.1:9/api\n"),
        ("prefect.toml", 'api.url = "http://127.0.0.1:9/api"\n'),
        ("pyproject.toml", '[tool]\nprefect.profiles_path = "profiles.toml"\n'),
    ],
)
def test_settings_of_prefect_in_the_working_directory_are_one_message_before_anything_starts(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        f"{name}: Prefect would take settings from this file in the working directory, which may have come with rows "
        "or a model. Set them in the environment or in a profile (`prefect config set`), and remove them here, or call "
        "finetune in another folder.\n"
    )
    assert not home.exists()


def test_other_files_of_the_working_directory_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("DB=postgres\n# PREFECT_API_URL=http://…\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "prefect-models"\n')
    (tmp_path / "matplotlibrc").write_text("axes.grid: true\n")
    assert settings.find_environment_problems() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_another_user_s_settings_of_plots_in_the_working_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "matplotlibrc").write_text("backend: module://mine\n")
    os.chown(tmp_path / "matplotlibrc", 65534, 65534)
    os.mkfifo(tmp_path / "prefect.toml")
    assert [problem.where for problem in settings.find_environment_problems()] == ["prefect.toml", "matplotlibrc"]


@pytest.mark.parametrize("name", ["a%20b", "what?"])
def test_a_home_whose_path_libraries_would_take_for_a_url_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / name))
    with pytest.raises(UserError, match="which paths in URLs of databases cannot have: name another folder"):
        settings.home()
    assert not (tmp_path / name).exists()
