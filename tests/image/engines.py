"""Engines that build and run container images: docker, podman, and buildah, which needs neither service nor cgroups."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.image.pip_settings import PipSettings
from tests.processes import argv
from training.jobs.processes import send, start_ticks, variable

NAME = "FINETUNE_CONTAINER"
"""Variable of a container's processes: its name."""
ENGINES = ("docker", "podman", "buildah")
MISSING = """No container engine is usable here: {reasons}.
Install one of them:
  docker   https://docs.docker.com/engine/install/
  podman   apt-get install podman
  buildah  apt-get install buildah   (also inside of containers)"""


class Engine:
    """A container engine.

    Args:
        name: one of ENGINES.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_buildah = name == "buildah"

    def build(self, tag: str, file: Path, arguments: dict[str, str], pip: PipSettings) -> None:
        """Builds the image of a Dockerfile. Raises CalledProcessError if a command of it fails."""
        options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        with tempfile.TemporaryDirectory() as folder:
            for secret, path in pip.write_secrets(Path(folder)).items():
                options += ["--secret", f"id={secret},src={path}"]
            if self.name != "docker":  # the format of OCI has no health check
                options += ["--format", "docker"]
                options += [word for path in pip.folders for word in ("--volume", f"{path}:{path}:ro")]
            if self.is_buildah:
                options += ["--isolation", "chroot", "--layers"]
            argv = [self.name, "build", *options, "--tag", tag, "--file", str(file), "."]
            subprocess.run(argv, check=True, cwd=file.parents[1], env=os.environ | {"DOCKER_BUILDKIT": "1"})

    def import_root(self, tag: str, root: Path) -> None:
        """Makes an image of a root file system."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "root.tar"
            subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
            if not self.is_buildah:
                self._output("import", "--change", f"ENV {path}", str(archive), tag)
                return
            container = self._output("from", "scratch").strip()
            self._output("add", container, str(archive), "/")
            self._output("config", "--env", path, container)
            self._output("commit", "--quiet", "--rm", "--format", "docker", container, tag)

    def has_image(self, tag: str) -> bool:
        """Whether an image of this name is here."""
        return subprocess.run([self.name, "inspect", "--type", "image", tag], capture_output=True).returncode == 0

    def inspect(self, tag: str) -> dict[str, Any]:
        """The image as the engine describes it, its history included."""
        inspected = json.loads(self._output("inspect", "--type", "image", tag))
        image: dict[str, Any] = inspected if isinstance(inspected, dict) else inspected[0]
        if not self.is_buildah:
            image["History"] = self._output("history", "--no-trunc", tag)
        return image

    def configuration(self, tag: str) -> dict[str, Any]:
        """Entrypoint, Cmd, User and Healthcheck of an image."""
        image = self.inspect(tag)
        config: dict[str, Any] = image["Docker"]["config"] if self.is_buildah else image["Config"]
        config.setdefault("Healthcheck", image.get("Healthcheck"))  # podman has it there
        return config

    def size(self, tag: str) -> int:
        """Bytes of an image."""
        if self.is_buildah:
            images = json.loads(self._output("images", "--json", tag))
            number, unit = str(images[0]["size"]).split()
            return int(float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit])
        return int(self.inspect(tag)["Size"])

    def _output(self, *arguments: str) -> str:
        return subprocess.run([self.name, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


class Container:
    """A container with a home of its own, on the host's network.

    Args:
        engine: runs it.
        image: its image.
        name: a name that no other container has.
        folder: for its output, and its home if the engine has no volumes.
        env: its variables; they are not in any command line.
    """

    def __init__(self, engine: Engine, image: str, name: str, folder: Path, env: dict[str, str]) -> None:
        self.name = name
        self._engine, self._image = engine, image
        self._env = {NAME: name, **env}
        self._config = engine.configuration(image)
        self._log = folder / f"{name}.log"
        self._log.touch()
        self._process: subprocess.Popen[bytes] | None = None
        self._working = ""
        self._env_file = folder / f"{name}.env"
        if engine.is_buildah:
            self._working = subprocess.check_output(["buildah", "from", "--name", name, image], text=True).strip()
            # buildah mounts the image's volume and the one of the command line at the same place, in random order.
            for place in self._config.get("Volumes") or {}:
                subprocess.run(["buildah", "config", "--volume", f"{place}-", self._working], check=True)
            self._home = str(folder / f"{name}-home")
            Path(self._home).mkdir(mode=0o700)
            # buildah takes values from its command line only: the container reads them from a file.
            self._env_file.touch(mode=0o600)
            self._env_file.write_text("".join(f"{key}={shlex.quote(value)}\n" for key, value in self._env.items()))
            if os.getuid() == 0:
                for path in (self._home, self._env_file):
                    os.chown(path, 1000, 1000)
        else:
            self._home = name
            subprocess.run([engine.name, "volume", "create", name], check=True, stdout=subprocess.DEVNULL)

    def start(self, *argv: str) -> None:
        """Starts the container, with the image's own command if none is given."""
        command = list(argv) or list(self._config["Cmd"])
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._run_command([*self._config["Entrypoint"], *command] if self._working else command),
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *argv: str) -> tuple[int, str]:
        """Runs a command in the container to its end. Returns its exit status and output."""
        before = self._log.stat().st_size
        self.start(*argv)
        assert self._process is not None
        status = self._process.wait()
        return status, self._log.read_bytes()[before:].decode(errors="replace")

    def execute(self, *argv: str) -> tuple[int, str]:
        """Runs a command beside the container's own. Returns its exit status and output."""
        command = self._run_command(list(argv)) if self._working else [self._engine.name, "exec", self.name, *argv]
        done = subprocess.run(command, env=os.environ | self._env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def is_healthy(self) -> bool:
        """Whether the image's health check succeeds."""
        return self.execute(*self._config["Healthcheck"]["Test"][1:])[0] == 0

    def stop(self) -> tuple[float, int]:
        """Sends SIGTERM to the first process. Returns the seconds until the container has ended, and the number of its
        processes that are left."""
        assert self._process is not None
        began = time.monotonic()
        if self._working:
            for pid in self._pids():
                if "tasks.services.container_init" in argv(pid):
                    send(pid, signal.SIGTERM)
        else:
            subprocess.run([self._engine.name, "kill", "--signal", "TERM", self.name], stdout=subprocess.DEVNULL)
        self._process.wait()
        return time.monotonic() - began, len(self._pids())

    def output(self) -> str:
        """Everything that the container has printed."""
        return self._log.read_text(errors="replace")

    def remove(self) -> None:
        """Kills and removes the container and its home."""
        for pid in self._pids():
            send(pid, signal.SIGKILL)
        commands = (
            [["rm", self._working]] if self._working else [["rm", "--force", self.name], ["volume", "rm", self.name]]
        )
        for command in commands:
            subprocess.run([self._engine.name, *command], capture_output=True)

    def _run_command(self, argv: list[str]) -> list[str]:
        volume = ["--volume", f"{self._home}:/home/finetune"]
        if self._working:
            volume += ["--volume", f"{self._env_file}:/run/secrets/env:ro"]
            read = ["sh", "-c", 'set -a; . /run/secrets/env; exec "$@"', "sh"]
            return ["buildah", "run", "--isolation", "chroot", *volume, self._working, "--", *read, *argv]
        names = [word for name in self._env for word in ("--env", name)]  # the values are in the engine's environment
        options = ["--rm", "--name", self.name, "--network", "host", *volume, *names]
        return [self._engine.name, "run", *options, self._image, *argv]

    def _pids(self) -> list[int]:
        """The container's processes, without the engine's own."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        inside = [pid for pid in pids if start_ticks(pid) and variable(pid, NAME) == self.name]
        return [pid for pid in inside if Path((argv(pid) or [""])[0]).name not in ENGINES]


def find_engine(wanted: str | None) -> Engine:
    """The wanted engine, or the first that is usable. Raises LookupError with what to install if none is."""
    reasons = []
    for name in [wanted] if wanted else ENGINES:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
        elif subprocess.run([name, "info"], capture_output=True).returncode:
            reasons.append(f"`{name} info` fails")
        else:
            return Engine(name)
    raise LookupError(MISSING.format(reasons=", ".join(reasons)))
