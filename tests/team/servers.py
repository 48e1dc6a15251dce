"""A team's servers on loopback, each with a password: PostgreSQL, an S3 server, Prefect's and MLflow's.

Prefect's and MLflow's are started by the commands and with the environment files of docs/how-to/team.md.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import boto3
from botocore.client import Config
from botocore.exceptions import ClientError

from tests.machine import ROOT
from tests.servers import closed_port
from tests.waiting import wait_until
from training.jobs.processes import die_with_parent

BUCKET = "team-models"
STORE = f"s3://{BUCKET}/finetune"
UNITS = ROOT / "infra" / "systemd"
DEBIAN = Path("/usr/lib/postgresql")
SYSTEM_USER = "postgres"
"""PostgreSQL refuses to run as root; its package makes this user."""
READ = ["s3:Get*", "s3:List*", "s3:Head*"]


def find_missing() -> list[str]:
    """What this needs and the machine lacks, with how to install it."""
    missing = []
    if _postgres_programs() is None:
        missing.append("PostgreSQL's initdb and postgres: apt-get install postgresql")
    elif os.geteuid() == 0 and SYSTEM_USER not in {user.pw_name for user in pwd.getpwall()}:
        missing.append(f"the user {SYSTEM_USER}, as which root starts PostgreSQL: apt-get install postgresql")
    if lacking := [module for module in ("boto3", "moto", "psycopg2") if importlib.util.find_spec(module) is None]:
        install = f"{sys.executable} -m pip install --constraint constraints.txt --editable '.[dev]'"
        missing.append(f"the modules {', '.join(lacking)}: {install}")
    return missing


def _postgres_programs() -> Path | None:
    """The folder of initdb: on the PATH, or the newest where Debian puts it."""
    found = [Path(initdb).resolve()] if (initdb := shutil.which("initdb")) else []
    found += sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class Service:
    """A program that runs until `stop`, with its output in a file.

    Args:
        name: its name; the log is NAME.log.
        folder: where the log is.
        argv: the command.
        env: all its variables.
        user: whose process it is, if not this one's.
    """

    def __init__(
        self, name: str, folder: Path, argv: Sequence[str], env: dict[str, str], user: str | None = None
    ) -> None:
        self.name, self._log, self._argv, self._env, self._user = name, folder / f"{name}.log", argv, env, user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; it dies with this process."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._argv],
                env=self._env,
                user=self._user,
                cwd="/" if self._user else ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait(self, answers: Callable[[], bool]) -> float:
        """Waits until it answers. Returns the seconds."""

        def ready() -> bool:
            ended = self._process is None or self._process.poll() is not None
            assert not ended, f"{self.name} ended:\n{self._log.read_text()[-2000:]}"
            return answers()

        return wait_until(ready, 180.0)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ends it and its children."""
        if self._process is not None:
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class Servers:
    """The four servers.

    Args:
        folder: for databases, logs and environment files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passwords = {name: secrets.token_urlsafe(18) for name in ("postgres", "prefect", "mlflow", "flask")}
        self._ports = {name: closed_port() for name in ("postgres", "s3", "prefect", "mlflow")}
        self.keys: dict[str, dict[str, str]] = {}
        """The variables of each user of the bucket: `worker` and `reader`."""
        self._services: list[Service] = []
        self.etc = folder / "etc"
        """The environment files, which have the secrets."""
        self.etc.mkdir(mode=0o700)

    def url(self, name: str) -> str:
        """The address of a server."""
        return f"http://127.0.0.1:{self._ports[name]}"

    def start(self) -> dict[str, float]:
        """Starts all; returns the seconds of each."""
        return {
            "PostgreSQL": self._start_postgres(),
            "S3 server": self._start_s3(),
            "Prefect": self._start_prefect(),
            "MLflow": self._start_mlflow(),
        }

    def stop(self) -> None:
        """Ends all, the databases last."""
        for service in reversed(self._services):
            service.stop()

    def secrets(self) -> list[bytes]:
        """All passwords and secret keys, and the logins as HTTP has them."""
        plain = [*self.passwords.values(), *(keys["AWS_SECRET_ACCESS_KEY"] for keys in [*self.keys.values()])]
        logins = [f"team:{self.passwords[name]}".encode() for name in ("prefect", "mlflow")]
        return [*(secret.encode() for secret in plain), *map(b64encode, logins)]

    def worker_file(self, keys: str, *, with_store: bool) -> Path:
        """The environment file of workers, with the keys of a user of the bucket."""
        return self._write(
            f"{keys}.env" if with_store else "no-store.env",
            PREFECT_API_URL=f"{self.url('prefect')}/api",
            PREFECT_API_AUTH_STRING=f"team:{self.passwords['prefect']}",
            MLFLOW_TRACKING_URI=self.url("mlflow"),
            MLFLOW_TRACKING_USERNAME="team",
            MLFLOW_TRACKING_PASSWORD=self.passwords["mlflow"],
            # The S3 server of the tests cannot check signatures in URLs, by which MLflow's client would download.
            MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD="false",
            **({"FINETUNE_STORE": STORE, **self._s3_variables(keys)} if with_store else {}),
        )

    def status_without_password(self) -> dict[str, int | str]:
        """How each server answers a request without a password, or with a wrong one."""
        wrong = {**clean_environment(), "PGPASSWORD": "wrong"}
        query = [str(self._program("psql")), *self._connection(), "-c", "select 1", "postgres"]
        refused = subprocess.run(query, env=wrong, capture_output=True, text=True)
        flows = urllib.request.Request(f"{self.url('prefect')}/api/flows/count", b"{}", {"Content-Type": "text/json"})
        return {
            "PostgreSQL": "refused" if "authentication failed" in refused.stderr else refused.stderr or "OPEN",
            "S3 server": self._status_with_wrong_key(),
            "Prefect": _status(flows),
            "MLflow": _status(f"{self.url('mlflow')}/api/2.0/mlflow/experiments/search?max_results=1"),
        }

    def _status_with_wrong_key(self) -> int:
        try:
            self._client("s3", {**self.keys["worker"], "AWS_SECRET_ACCESS_KEY": "wrong"}).list_objects_v2(Bucket=BUCKET)
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        return 200

    def dump(self) -> bytes:
        """All databases, as text."""
        argv = [str(self._program("pg_dumpall")), *self._connection()]
        env = {**clean_environment(), "PGPASSWORD": self.passwords["postgres"]}
        return subprocess.run(argv, env=env, capture_output=True, check=True).stdout

    def objects(self, prefix: str = "") -> dict[str, int]:
        """The size of each object of the bucket."""
        pages = self._s3().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}

    def content(self, name: str) -> bytes:
        """An object of the bucket."""
        return bytes(self._s3().get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def ask_prefect(self, path: str, **body: Any) -> Any:
        """The answer of Prefect's server, to a POST if there is a body."""
        login = b64encode(f"team:{self.passwords['prefect']}".encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
        sent = json.dumps(body).encode() if body else None
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url('prefect')}/api/{path}", sent, headers), timeout=30
        ) as answer:
            return json.load(answer)

    def versions(self, model: str) -> int:
        """The number of registered versions of a model."""
        login = b64encode(f"team:{self.passwords['mlflow']}".encode()).decode()
        query = urllib.parse.urlencode({"filter": f"name = '{model}'"})
        request = urllib.request.Request(
            f"{self.url('mlflow')}/api/2.0/mlflow/model-versions/search?{query}",
            headers={"Authorization": f"Basic {login}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return len(json.load(answer)["model_versions"])

    def _start_postgres(self) -> float:
        data = self.folder / "postgres"
        data.mkdir(mode=0o700)
        user = SYSTEM_USER if os.geteuid() == 0 else None
        password = data / "password"
        password.write_text(self.passwords["postgres"])
        if user:
            for path in (data, password):
                shutil.chown(path, user)
        argv = [str(self._program("initdb")), "--pgdata", str(data / "data"), "--username", "finetune"]
        argv += ["--auth", "scram-sha-256", "--pwfile", str(password), "--no-sync"]
        subprocess.run(argv, user=user, cwd="/", check=True, capture_output=True)
        password.unlink()
        argv = [str(self._program("postgres")), "-D", str(data / "data"), "-p", str(self._ports["postgres"])]
        argv += ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"]
        seconds = self._run(Service("postgres", self.folder, argv, clean_environment(), user), self._postgres_answers)
        env = {**clean_environment(), "PGPASSWORD": self.passwords["postgres"]}
        for database in ("prefect", "mlflow", "mlflow_users"):
            subprocess.run([str(self._program("createdb")), *self._connection(), database], env=env, check=True)
        return seconds

    def _postgres_answers(self) -> bool:
        ready = subprocess.run([str(self._program("pg_isready")), *self._connection()], capture_output=True)
        return ready.returncode == 0

    def _program(self, name: str) -> Path:
        folder = _postgres_programs()
        assert folder is not None
        return folder / name

    def _connection(self) -> list[str]:
        return ["-h", "127.0.0.1", "-p", str(self._ports["postgres"]), "-U", "finetune"]

    def _database(self, driver: str, name: str) -> str:
        port = self._ports["postgres"]
        return f"postgresql+{driver}://finetune:{self.passwords['postgres']}@127.0.0.1:{port}/{name}"

    def _start_s3(self) -> float:
        """Starts the server with a bucket and two users; from then on, it checks each signature and permission."""
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._ports["s3"])]
        service = Service("s3", self.folder, argv, clean_environment())
        seconds = self._run(service, lambda: _status(self.url("s3")) == 200)
        anybody = {"AWS_ACCESS_KEY_ID": "setup", "AWS_SECRET_ACCESS_KEY": "setup"}
        self._client("s3", anybody).create_bucket(Bucket=BUCKET)
        users = self._client("iam", anybody)
        for user, actions in {"worker": ["s3:*"], "reader": READ}.items():
            users.create_user(UserName=user)
            policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
            users.put_user_policy(UserName=user, PolicyName="store", PolicyDocument=json.dumps(policy))
            key = users.create_access_key(UserName=user)["AccessKey"]
            self.keys[user] = {
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            }
        start_checks = urllib.request.Request(
            f"{self.url('s3')}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(start_checks).close()
        return seconds

    def _s3_variables(self, keys: str) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": self.url("s3"), "AWS_REGION": "us-east-1", **self.keys[keys]}

    def _s3(self) -> Any:
        return self._client("s3", self.keys["worker"])

    def _client(self, service: str, keys: dict[str, str]) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url("s3"),
            region_name="us-east-1",
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            config=Config(retries={"max_attempts": 2}),
        )

    def _start_prefect(self) -> float:
        file = self._write(
            "prefect-server.env",
            PREFECT_SERVER_DATABASE_CONNECTION_URL=self._database("asyncpg", "prefect"),
            PREFECT_SERVER_API_AUTH_STRING=f"team:{self.passwords['prefect']}",
            PREFECT_HOME=str(self.folder / "prefect"),
        )
        service = self._of_unit("prefect-server", file, {"4200": str(self._ports["prefect"])})
        return self._run(service, lambda: _status(f"{self.url('prefect')}/api/health") == 200)

    def _start_mlflow(self) -> float:
        users = configparser.ConfigParser(interpolation=None)
        users["mlflow"] = {
            "default_permission": "NO_PERMISSIONS",
            "database_uri": self._database("psycopg2", "mlflow_users"),
            "auth_cache_ttl_seconds": "60",
        }
        with os.fdopen(os.open(self.etc / "mlflow-auth.ini", os.O_WRONLY | os.O_CREAT, 0o600), "w") as ini:
            users.write(ini)
        file = self._write(
            "mlflow-server.env",
            MLFLOW_BACKEND_STORE_URI=self._database("psycopg2", "mlflow"),
            MLFLOW_ARTIFACTS_DESTINATION=f"s3://{BUCKET}/mlflow",
            MLFLOW_AUTH_CONFIG_PATH=str(self.etc / "mlflow-auth.ini"),
            MLFLOW_AUTH_ADMIN_USERNAME="team",
            MLFLOW_AUTH_ADMIN_PASSWORD=self.passwords["mlflow"],
            MLFLOW_FLASK_SERVER_SECRET_KEY=self.passwords["flask"],
            **self._s3_variables("worker"),
        )
        service = self._of_unit("mlflow-server", file, {"5000": str(self._ports["mlflow"])})
        return self._run(service, lambda: _status(f"{self.url('mlflow')}/health") == 200)

    def _of_unit(self, name: str, file: Path, values: dict[str, str]) -> Service:
        return Service(name, self.folder, *command_of_unit(name, file, values))

    def _run(self, service: Service, answers: Callable[[], bool]) -> float:
        self._services.append(service)
        service.start()
        return service.wait(answers)

    def _write(self, name: str, **variables: str) -> Path:
        """Writes an environment file that only this user can read."""
        file = self.etc / name
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.writelines(f"{variable}={value}\n" for variable, value in variables.items())
        return file


def command_of_unit(name: str, file: Path, values: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command and the variables that a systemd unit gives its program, which is this environment's.

    Args:
        name: the unit's name.
        file: its environment file.
        values: words of the command to replace.
    """
    text = (UNITS / f"{name}.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    program, *arguments = [values.get(word, word) for word in shlex.split(line)]
    set_here = [pair for found in re.findall(r"^Environment=(.+)$", text, re.MULTILINE) for pair in shlex.split(found)]
    env = {**clean_environment(), **dict(pair.split("=", 1) for pair in set_here), **read_environment_file(file)}
    return [str(Path(sys.executable).parent / Path(program).name), *arguments], env


def read_environment_file(file: Path) -> dict[str, str]:
    """The variables of a file of lines NAME=value."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def clean_environment() -> dict[str, str]:
    """This process's variables without those that point at other servers, homes or buckets."""
    foreign = ("PREFECT_", "MLFLOW_", "FINETUNE_", "AWS_", "PG")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _status(request: str | urllib.request.Request) -> int:
    """The status of the answer; 0 if there is none."""
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        time.sleep(0.1)
        return 0
