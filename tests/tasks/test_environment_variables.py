"""The environment variables of programs and servers: what each gets, and what none gets."""

from __future__ import annotations

import http.server
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from flows.cli.main import main
from tasks.environment_variables import (
    BUCKETS,
    PREFECT_SERVER,
    added_environment,
    environment,
    find_environment_problems,
    passed,
    prepare_environment,
    server_environment,
)
from tasks.home import home as create_home
from tasks.hub import client
from tasks.services import prefect_server, process_manager
from tasks.stages import fit
from tasks.tracking import connection
from tests.fork_server import NEW_PYTHON
from tests.tasks.jobs.test_launch import run

SECRETS = {
    "HF_TOKEN": "hf_x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AZURE_CLIENT_SECRET": "x",
    "GOOGLE_APPLICATION_CREDENTIALS": "/keys.json",
    "FSSPEC_HTTP": "x",
    "PGPASSWORD": "x",
    "DATABASE_URL": "postgresql://me:x@db/rows",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "x",
    "MLFLOW_TRACKING_PASSWORD": "x",
    "MLFLOW_TRACKING_URI": "http://me:x@mlflow.example",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "x",
    "PREFECT_API_AUTH_STRING": "me:x",
    "PREFECT_API_KEY": "x",
    "FINETUNE_SWEEPS": "postgresql://me:x@db/sweeps",
    "WANDB_API_KEY": "x",
    "OPENAI_API_KEY": "x",
    "SLURM_JWT": "x",
    "MY_OWN": "x",
}
HARMLESS = {
    "HF_HOME": "/hub",
    "NCCL_DEBUG": "INFO",
    "https_proxy": "http://me:x@proxy:3128",
    "SSL_CERT_FILE": "/etc/ssl/cert.pem",
    "LC_ALL": "C.UTF-8",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}


@pytest.fixture
def full_of_secrets(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name, value in (SECRETS | HARMLESS).items():
        monkeypatch.setenv(name, value)


def secrets_in(env: dict[str, str]) -> set[str]:
    return SECRETS.keys() & env.keys()


@pytest.mark.usefixtures("full_of_secrets")
def test_a_program_gets_what_the_list_names_and_no_credential(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "return dict(os.environ)")
    found = dict(outcome.result)
    assert secrets_in(found) == set()
    assert found.items() >= HARMLESS.items() and found["PATH"] == os.environ["PATH"]


@pytest.mark.usefixtures("full_of_secrets")
def test_a_program_gets_the_variables_that_the_user_names_and_a_server_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_PASS_ENV", "MY_OWN, OPENAI_*")
    outcome, _ = run(tmp_path, "return dict(os.environ)")
    assert secrets_in(dict(outcome.result)) == {"MY_OWN", "OPENAI_API_KEY"}
    assert secrets_in(server_environment(PREFECT_SERVER)) == {"PGPASSWORD"}


@pytest.mark.slow
@pytest.mark.usefixtures("full_of_secrets")
def test_torch_loads_compiled_code_from_a_folder_that_no_other_user_can_create(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    create_home()
    code = """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
    return {"compiled": cache_dir(), "kernels": triton_cache_dir(0)}
    """
    outcome, _ = run(tmp_path, code)
    assert Path(outcome.result["compiled"]).parent == home and home.stat().st_mode & 0o777 == 0o700
    assert outcome.result["kernels"].startswith(f"{home}/")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    assert environment({})["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"


@pytest.mark.usefixtures("full_of_secrets")
def test_a_training_gets_no_login_of_a_tracker() -> None:
    assert secrets_in(environment(fit._secrets())) == set()


@pytest.mark.usefixtures("full_of_secrets")
def test_each_program_gets_the_login_of_its_own_service_alone() -> None:
    assert secrets_in(environment(client.build_environment())) == {"HF_TOKEN"}
    buckets = {"AWS_SECRET_ACCESS_KEY", "AZURE_CLIENT_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_HTTP"}
    assert secrets_in(environment(passed(BUCKETS))) == buckets
    mlflow = {"MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"}
    assert secrets_in(environment(connection.build_environment())) == buckets | mlflow


@pytest.mark.usefixtures("full_of_secrets")
def test_a_client_that_opens_the_tracking_database_itself_gets_the_databases_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me@db/mlflow")
    assert "PGPASSWORD" in connection.build_environment()


@pytest.mark.usefixtures("full_of_secrets")
def test_the_server_of_a_run_gets_no_login_of_another_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", NEW_PYTHON)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = prefect_server._start_server(listening.getsockname()[1], listening.fileno())
        content = Path(f"/proc/{server.pid}/environ").read_text()
        server.send_signal(signal.SIGKILL)
        server.wait()
    given = dict(entry.split("=", 1) for entry in content.split("\0") if entry)
    assert secrets_in(given) == {"PGPASSWORD"} and given["HF_HOME"] == "/hub"


@pytest.mark.usefixtures("full_of_secrets")
def test_each_server_of_up_gets_no_login_of_another_service() -> None:
    prefect, mlflow, worker = (
        service.environment()
        for service in process_manager._build_services({"prefect": 0, "mlflow": 0}, "/tmp/of-the-worker")
    )
    assert secrets_in(prefect) == {"PGPASSWORD"}
    assert secrets_in(mlflow) == set()
    assert secrets_in(worker) == SECRETS.keys()  # its runs are commands: they need the logins of all stages
    assert worker["TMPDIR"] == "/tmp/of-the-worker" and mlflow.get("TMPDIR") != worker["TMPDIR"]


@pytest.mark.parametrize(("before", "after"), [("", ""), (".corp,10.0.0.0/8", ".corp,10.0.0.0/8,")])
def test_requests_to_servers_of_this_machine_pass_no_proxy(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setenv("no_proxy", before)
    monkeypatch.setenv("NO_PROXY", "")
    prepare_environment()
    assert os.environ["no_proxy"] == before  # without a proxy, nothing changes
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    prepare_environment()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == f"{after}127.0.0.1,localhost,::1"
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.build_opener().open(f"http://127.0.0.1:{server.server_port}/", timeout=60)


def test_without_home_the_users_own_is_taken_and_a_user_without_one_is_told_to_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "")
    prepare_environment()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir and find_environment_problems() == []
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    prepare_environment()
    (problem,) = find_environment_problems()
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


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        (".env", "\n" * 2_000_000, False),
        (".env", "A=1\r" + "\n" * 2_000_000 + "\texport  PREFECT_HOME=x", True),
        ("pyproject.toml", "prefect = " + "[" * 100_000, True),
        ("pyproject.toml", ".".join(["prefect"] * 100_000) + " = 1", True),
        ("pyproject.toml", ".".join(["a"] * 100_000) + " = 1", False),
    ],
)
def test_files_made_to_take_hours_or_all_memory_are_judged_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content, newline="")
    assert [one.where for one in find_environment_problems()] == ([name] if refused else [])


def test_a_file_of_settings_that_is_longer_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").touch()
    os.truncate(tmp_path / ".env", 2**40)  # nothing, which takes no disk
    assert [one.where for one in find_environment_problems()] == [".env"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import prefect.settings; "])
def test_prefect_reads_no_settings_that_appear_in_the_working_directory_later(tmp_path: Path, first: str) -> None:
    program = f"{first}from tasks import environment_variables; environment_variables.prepare_environment(); "
    program += "from pathlib import Path; Path('.env').write_text('PREFECT_API_URL=http://one'); "
    program += "Path('prefect.toml').write_text('api.key = \"two\"'); "
    program += "Path('pyproject.toml').write_text('[tool.prefect]\\nhome = \"three\"'); "
    program += "from prefect.settings.models.root import Settings; print(Settings().model_dump_json())"
    child = subprocess.run(
        [NEW_PYTHON, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PREFECT_PROFILES_PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert not any(value in child.stdout for value in ("http://one", '"two"', "three"))


def test_other_files_of_the_working_directory_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("DB=postgres\n# PREFECT_API_URL=http://…\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "prefect-models"\n')
    (tmp_path / "matplotlibrc").write_text("axes.grid: true\n")
    assert find_environment_problems() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_another_user_s_settings_of_plots_in_the_working_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "matplotlibrc").write_text("backend: module://mine\n")
    os.chown(tmp_path / "matplotlibrc", 65534, 65534)
    os.mkfifo(tmp_path / "prefect.toml")
    assert [problem.where for problem in find_environment_problems()] == ["prefect.toml", "matplotlibrc"]


def test_threads_spin_shortly_unless_the_user_has_a_policy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    added = added_environment({})
    assert (added["OMP_WAIT_POLICY"], added["GOMP_SPINCOUNT"]) == ("PASSIVE", "3000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    added = added_environment({})
    assert added["OMP_WAIT_POLICY"] == "ACTIVE" and "GOMP_SPINCOUNT" not in added


def test_programs_ask_for_large_pages_unless_the_user_tunes_malloc(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert added_environment({})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert added_environment({})["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"
