"""Registered models of tests, and `finetune serve` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tasks.registry.versions import COLUMNS_TAG, TASK_TAG
from tasks.tracking.connection import MAX_LENGTH_TAG, MODEL_TAG, connect
from tests.flows import forked
from tests.flows.small import environment
from tests.fork_server import COMMANDS, Fork, forked_python
from tests.made import KEY, artifact
from tests.waiting import wait_until
from training import task_types

ROOT = Path(__file__).resolve().parents[2]


def register(folder: Path, task: str = "sft", columns: Sequence[str] = (), **options: Any) -> None:
    """The model in the folder as the champion of `counter`, with its files in the store. It reads these columns; by
    default the task type's main one, which is called `talk`."""
    connect().create_registered_model("counter")
    add_version(store_model(folder), task, columns=columns, **options)
    connect().set_registered_model_alias("counter", "champion", "1")


def store_model(folder: Path, key: str = KEY) -> str:
    """The model in the folder as a part of an artifact in the store. Returns its digest."""
    files = {f"model/{file.name}": file.read_bytes() for file in folder.iterdir()}
    return str(artifact("fit", files, key=key).parts["model"])


def add_version(digest: str, task: str = "sft", key: str = KEY, columns: Sequence[str] = (), **options: Any) -> str:
    """A further version of `counter` with the same files; with another digest, one whose files are nowhere. Returns its
    number."""
    known = task_types.class_of(task).columns
    main = "messages" if "messages" in known else next(iter(known))
    read = {column: column for column in columns} or {main: "talk"}
    tags = {TASK_TAG: json.dumps({"task": task, "options": options}), COLUMNS_TAG: json.dumps(read)}
    tags |= {MAX_LENGTH_TAG: "64", MODEL_TAG: digest, "finetune.fit.key": key}
    return str(connect().create_model_version("counter", "file:///nowhere", tags=tags).version)


class Server:
    """`finetune serve` with these arguments, on a port that is free.

    Args:
        home: of the model.
        arguments: of the command.
        command: the command `finetune`; by default it is a fork, and its programs are.
        env: further environment variables.
    """

    def __init__(self, home: Path, *arguments: str, command: Sequence[str] = (), **env: str) -> None:
        argv, environ = ["serve", "--port", "0", *arguments], environment(home, **env)
        output, printing = os.pipe()
        with open(os.devnull) as nothing:
            files = (nothing, printing, printing)
            self.process: subprocess.Popen[bytes] | Fork
            if command:
                argv = [*command, *argv]
                self.process = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=printing, stderr=printing)
            else:
                words = [forked_python(), *argv]
                self.process = Fork(forked.run, words, env=forked.QUIET | environ, files=files, level=COMMANDS).start()
        os.close(printing)
        self.printed = ""
        threading.Thread(target=self._read, args=(output,), daemon=True).start()
        wait_until(lambda: "Ask it:" in self.printed or self.process.poll() is not None)
        found = re.search(r"http://127\.0\.0\.1:\d+", self.printed)
        assert found, self.printed
        self.url = found[0]
        self.token = (home / "services" / "serve.token").read_text()
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60, trust_env=False
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def says(self, text: str) -> None:
        """Waits until the server has printed the text."""
        wait_until(lambda: text in self.printed)

    def _read(self, output: int) -> None:
        with open(output) as lines:
            for line in lines:
                self.printed += line
