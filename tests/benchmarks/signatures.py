"""Verification of a signed version, as a share of what it takes to load the version.

In seconds of processor time, of this process and of the one that loads, so that other work hardly changes them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tasks.cache import store
from tasks.cache.results import PinnedVersion
from tasks.cache.stage import Work
from tasks.home import home
from tasks.registry import pinned_versions
from tasks.registry.version_signatures import SignedVersion, sign_version
from tasks.registry.versions import LOGGED_PARTS
from tasks.tracking.connection import FIT_TAG, MODEL_TAG, connect
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row

ROUNDS = 3
NAME, KEY = "measured", "k" * 40
KEPT = f"artifacts/{pinned_versions.FETCHED}"
"""Versions that were fetched, in the home."""
MOST = 0.02
PROGRAM = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
"""A process that loads the model, as every command has one."""


def measure(subject: Subject) -> list[Row]:
    """The seconds of verification as a share of those to fetch a signed version and to load its model."""
    folder = subject.folder / "signatures"
    with patch.dict(os.environ, {"FINETUNE_HOME": str(folder / "home")}):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        own = _register(subject, folder)
        fetched = own.model_copy(update={"key": None})
        return [
            _compare("a version in the home's store: verification / loading", own, [], MOST),
            _compare("a version fetched from MLflow: verification / loading", fetched, [], MOST),
            _compare("… by a home that has not seen it", fetched, ["signatures", "digests.db", KEPT], MOST),
        ]


def _register(subject: Subject, folder: Path) -> PinnedVersion:
    """A signed version of the subject's base model, which a training of this home has made."""
    with store.filling("fit", KEY) as aside:
        for base in subject.base.values():
            shutil.copytree(base, aside / "model", dirs_exist_ok=True)
        stored = store.publish(aside, "fit", KEY, {}, None)
    for part, base in subject.base.items():
        shutil.copytree(base, folder / "version" / LOGGED_PARTS[part])  # type: ignore[index]
    client, tags = connect(), {MODEL_TAG: stored.parts["model"], FIT_TAG: KEY}
    client.create_registered_model(NAME)
    number = str(client.create_model_version(NAME, (folder / "version").as_uri(), tags=tags).version)
    sign_version(client, NAME, number, None)
    return PinnedVersion(name=NAME, version=number, model=stored.parts["model"], key=KEY, max_length=128)


def _compare(what: str, champion: PinnedVersion, forgotten: list[str], most: float) -> Row:
    verifying, loading = [], []
    for number in range(ROUNDS):
        for name in forgotten:
            (shutil.rmtree if (home() / name).is_dir() else os.remove)(home() / name)
        spent: list[float] = []
        began = _processor_s()
        with (
            patch.object(pinned_versions, "_verify", _timed(pinned_versions._verify, spent)),
            patch.object(pinned_versions, "_find_fetched", _timed(pinned_versions._find_fetched, spent)),
            patch.object(SignedVersion, "require_files", _timed(SignedVersion.require_files, spent)),
        ):
            folders = pinned_versions.find_folders(Work(f"{number}", Path(os.devnull), ""), champion, "NAME")
        subprocess.run([sys.executable, "-c", PROGRAM, folders["model"]], check=True, stderr=subprocess.DEVNULL)
        loading.append(_processor_s() - began)
        verifying.append(sum(spent))
        shutil.rmtree(home() / "jobs", ignore_errors=True)
    verify_s, load_s = statistics.median(verifying), statistics.median(loading)
    size = sum(file.stat().st_size for file in (store.folder("fit", KEY) / "model").iterdir())
    how = f"{verify_s * 1e3:.0f} ms of {load_s:.2f} s, medians of {ROUNDS}; {size / 1e6:.0f} MB"
    return Row(what, verify_s / load_s, how, most=most)


def _processor_s() -> float:
    """Seconds of processor time of this process, and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        began = _processor_s()
        try:
            return function(*arguments, **named)
        finally:
            spent.append(_processor_s() - began)

    return timed
