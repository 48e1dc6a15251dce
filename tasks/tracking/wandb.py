"""Weights & Biases: a W&B run for each training, with the id RECIPE-KEY.

A training that is resumed, or that a new run finds in the store, continues its W&B run: the rows of its history are
optimizer steps, and a step that W&B has is not sent again. Without a server (WANDB_MODE=offline, or not logged in) the
run is a folder that `wandb sync` sends later; a resumed training begins another folder with all of its steps, which
replaces the earlier one when it ends.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import requests

from tasks.home import home, named_lock, without_credentials
from tasks.tracking.tracker import RECIPE, Curve, Point, Run, Tracker

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it is read at the import
import wandb

KNOCK_S = 5.0
_FOREIGN_SETTINGS = ("wandb/settings", ".wandb/settings")
"""The files of the working directory from which W&B would take settings."""
INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 20.0, 20.0
"""By default W&B waits for minutes at the start of a run, and without an end at the end of one and of the process."""


class WeightsAndBiases(Tracker):
    """Shows a run as a W&B run of the project that WANDB_PROJECT names, by default the recipe."""

    title: ClassVar[str] = "W&B"

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        super().__init__(run, warn)
        self._waiting: list[Mapping[str, Any]] = []
        """Entries of before the training, whose key names the W&B run."""
        self._name: str | None = None
        self._group: str | None = None
        self._run: wandb.Run | None = None
        self._curve = Curve()
        self._row: dict[str, float] = {}
        self._step = -1
        """The step of the row, which is logged when it is complete."""
        self._replaced: list[Path] = []
        """Folders of earlier tries."""

    def deliver(self, entry: Mapping[str, Any]) -> None:
        """Keeps the entries until there is a W&B run. A run without a training has none."""
        if self._run is None and not entry.get("key"):
            self._waiting.append(entry)
            return
        if self._run is None:
            self._open(Curve(entry["stage"], entry["key"]))
        while self._waiting:
            super().deliver(self._waiting[0])
            del self._waiting[0]
        super().deliver(entry)

    def start(self, name: str | None, parent: str | None) -> None:
        """The trials of a sweep are a group."""
        self._name, self._group = name, parent

    def log_params(self, values: Mapping[str, str]) -> None:
        """As Tracker."""
        self._opened.config.update({name: _parse(value) for name, value in values.items()}, allow_val_change=True)

    def set_tags(self, values: Mapping[str, str]) -> None:
        """W&B's own tags are labels: these are values of the summary."""
        if f"{self._curve.stage}.digest" in values:  # the training is complete
            self._log_row()
        self._opened.summary.update(values)

    def describe(self, markdown: str) -> None:
        """As Tracker."""
        self._opened.notes = markdown

    def log_points(self, curve: Curve, points: Sequence[Point]) -> None:
        """Logs a row for each step. W&B measures the machine's load itself."""
        if curve != self._curve:
            return
        for point in points:
            if point.step < self._opened.starting_step:
                continue
            if point.step > self._step:
                self._log_row()
                self._step, self._row = point.step, {"_timestamp": point.time_ms / 1000}
            if point.step == self._step:
                self._row[point.name] = point.value

    def log_figures(self, values: Mapping[str, float], time_ms: int) -> None:
        """As Tracker."""
        self._opened.summary.update(values)

    def log_text(self, name: str, content: str) -> None:
        """Stores the recipe. Other texts may hold rows, which stay in this project's own servers."""
        if name == RECIPE:
            self._save(name).write_text(content, encoding="utf-8")

    def log_file(self, path: Path, folder: str) -> None:
        """Stores pictures. Reports, samples and logs may hold rows."""
        if path.suffix == ".png":
            shutil.copyfile(path, self._save(f"{folder}/{path.name}"))

    def end(self, status: str, time_ms: int) -> None:
        """Finishes the W&B run."""
        # W&B's server takes no second row of a step: the last one of a training that is not complete, whose evaluation
        # may follow, is left to the run that resumes it.
        if self._opened.offline:
            self._log_row()
        try:
            self._opened.finish(exit_code=0 if status == "FINISHED" else 1)
        except TimeoutError:
            folder = Path(self._opened.dir).parent
            self.warn(
                f"W&B lacks the end of this run (no answer in {FINISH_TIMEOUT_S:g} s): `wandb sync {folder}` sends it."
            )
        for folder in self._replaced:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _opened(self) -> wandb.Run:
        assert self._run is not None
        return self._run

    def _open(self, curve: Curve) -> None:
        name, root = f"{self.run.recipe}-{curve.key[:8]}", Path(os.environ.get("WANDB_DIR") or home())
        # By default W&B takes settings from the working directory, such as the server for the login and an own login.
        wandb_settings = wandb.setup(settings=wandb.Settings(silent=True, root_dir=str(root))).settings
        mode, address = wandb_settings.mode, wandb_settings.base_url
        if mode == "online" and (reason := _find_obstacle(address)):
            mode = "offline"
            self.warn(f"{reason}: this run is in a folder in {root / 'wandb'}, which `wandb sync` sends.")
        for entry in self._waiting:
            if entry["entry"] == "start":
                super().deliver(entry)
        with named_lock(f"wandb-{name}"):
            earlier = (f"wandb/offline-run-{'?' * 15}-{name}{suffix}" for suffix in ("", "-*"))
            replaced = [path for one in earlier for path in root.glob(one)] if mode == "offline" else []
            self._run = wandb.init(
                id=name,
                project=os.environ.get("WANDB_PROJECT") or self.run.recipe,
                name=self._name,
                group=self._group,
                dir=root,
                mode=mode,
                resume="allow",
                reinit="create_new",  # trials of a sweep run at the same time
                # By default W&B replaces this process's standard output, and sends its code and its packages.
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    x_save_requirements=False,
                    init_timeout=INIT_TIMEOUT_S,
                    finish_timeout=FINISH_TIMEOUT_S,
                    finish_timeout_raises=True,
                ),
            )
        self._replaced = [folder for folder in replaced if folder != Path(self._run.dir).parent]
        self._curve = curve
        self.url = self._run.url if mode == "online" else None

    def _save(self, name: str) -> Path:
        """Where to write a file that W&B shall have at the end of the run."""
        path = Path(self._opened.dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _log_row(self) -> None:
        if self._row:
            self._opened.log(self._row, step=self._step)
            self._row = {}


def _find_obstacle(address: str) -> str:
    """The reason why a run cannot be sent now; empty if there is none."""
    foreign = next((file for file in _FOREIGN_SETTINGS if Path(file).is_file()), None)
    if foreign and not os.environ.get("WANDB_DIR"):
        advice = "which may have come with rows, are not used (set WANDB_… variables, and remove the file)"
        return f"W&B's settings in {foreign} of the working directory, {advice}"
    if not wandb.login(prompt=False, verify=False):
        return "W&B has no login (WANDB_API_KEY)"
    try:
        requests.head(address, timeout=KNOCK_S)
    except requests.RequestException:
        return f"W&B at {without_credentials(address)} does not answer"
    return ""


def _parse(value: str) -> Any:
    """A field of the recipe: numbers as numbers, for W&B's tables and plots."""
    try:
        return json.loads(value)
    except ValueError:
        return value
