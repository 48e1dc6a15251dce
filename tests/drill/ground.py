"""Where a drill takes place: generated rows, a recipe, a Prefect server, and runs that can be distinguished."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import training
from tasks.reports.stage_summaries import STAGES
from tests.flows.small import command, environment, write_project
from tests.processes import argv
from training.jobs.processes import JOB_LINK, descendants, die_with_parent

ROOT = Path(training.__path__[0]).parent
MARK = "FINETUNE_DRILL"
"""The environment variable that names the run to which a process belongs."""
# A training of some seconds with many steps, evaluations and checkpoints.
SETTINGS = (
    "training.num_train_epochs=100",
    "training.eval_strategy=steps",
    "training.eval_steps=125",
    "training.logging_steps=50",
    "training.checkpoint_interval_s=0.3",
)
_TWO = "compute.num_processes=2"
_SHORT = "training.num_train_epochs=40"  # their steps and checkpoints take longer
_MIXTURE = (
    "data={text: [text], label: label, stopping_strategy: all_exhausted, mix: ["
    "{source: csv, path: PROJECT/train.csv, weight: 0.7}, {source: csv, path: PROJECT/validation.csv, weight: 0.3}]}"
)
WAYS: dict[str, tuple[str, ...]] = {
    "1": ("compute.num_processes=1",),
    "2": (_TWO,),
    "loop": (_TWO, "training.engine=accelerate"),
    "random": (_TWO, "training.collator=tests.training.own:Masked"),
    "mixture": (_TWO, _MIXTURE),
    "fsdp": (_TWO, "compute.strategy=fsdp", _SHORT),
    **(
        {name: (_TWO, f"compute.strategy=deepspeed-{name}", _SHORT) for name in ("zero2", "zero3")}
        if importlib.util.find_spec("deepspeed")
        else {}
    ),
}
"""How a drill trains, by name: in one process or two, by the plain loop, in batches that draw random
numbers, on a mixture of sets, by each strategy. PROJECT stands for the folder of the rows."""
ROW_STATES = {"ran", "cached", "resumed", "skipped", "failed"}


class Run:
    """One `finetune run`, started."""

    def __init__(self, mark: str, home: Path, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.mark = mark
        self.home = home
        self.out = folder / "out.json"
        self.process = process
        self.started = time.monotonic()
        self._table, self._notes = folder / "stdout", folder / "stderr"

    def stage(self) -> str:
        """The stage that it is in, by its table, without stages that only some runs have: `start` before the first
        line, `end` after the last."""
        words = [line.split() for line in self._table.read_text().splitlines() if line.startswith("  ")]
        ended = [row[0] for row in words if len(row) > 1 and row[0] in STAGES and row[1] in ROW_STATES]
        walked = [name for name, entry in STAGES.items() if name in ended or not entry.is_optional]
        return ["start", *walked[1:], "end"][walked.index(ended[-1]) + 1 if ended else 0]

    def result(self) -> dict[str, Any]:
        """The content of the file of `--json`."""
        return dict(json.loads(self.out.read_text()))

    def printed(self) -> str:
        """The output of the run."""
        return self._table.read_text() + self._notes.read_text()

    def ending(self) -> str:
        """The last lines of the output, and the folder of the rest."""
        return "\n".join(["", *self.printed().splitlines()[-15:], f"(all of it: {self.out.parent})"])

    def ended_within(self, seconds: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        return self.process.wait(seconds)


class Ground:
    """A folder with the rows and the recipe; every run in it is known by a mark of its own.

    Args:
        folder: empty, or not there yet.
        server: the URL of a Prefect server, for the runs that do not bring their own.
        settings: fields of the recipe that all runs replace, as `--set` takes them.
    """

    def __init__(self, folder: Path, server: str, settings: Sequence[str] = SETTINGS) -> None:
        self.folder = folder
        self._server, self._settings = server, settings
        self.file = write_project(folder / "project")
        self._runs = 0

    def start(
        self,
        home: Path,
        *settings: str,
        embedded: bool = False,
        inside: tuple[str, ...] = (),
        verb: str = "run",
        file: Path | None = None,
        **more: str,
    ) -> Run:
        """Starts a run of the recipe.

        Args:
            home: its FINETUNE_HOME.
            settings: fields of the recipe in addition to those of all runs.
            embedded: whether it starts a Prefect server of its own.
            inside: what goes before the command, such as `nsenter`.
            verb: the command of `finetune`.
            file: another deployment file than that of the recipe.
            more: environment variables in addition to this process's.
        """
        chosen = [setting.replace("PROJECT", str(self.file.parent)) for setting in (*self._settings, *settings)]
        sets = [word for setting in chosen for word in ("--set", setting)]
        return self.command(home, verb, str(file or self.file), *sets, embedded=embedded, inside=inside, **more)

    def command(
        self, home: Path, *words: str, embedded: bool = False, inside: tuple[str, ...] = (), **more: str
    ) -> Run:
        """Starts `finetune` with these words and `--json`. The other arguments are those of `start`."""
        self._runs += 1
        mark = f"{os.getpid()}-{self._runs}"
        folder = self.folder / "runs" / str(self._runs)
        folder.mkdir(parents=True)
        env = environment(home, **{"PYTHONPATH": str(ROOT), MARK: mark, **more})
        if not embedded:
            env["PREFECT_API_URL"] = self._server
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            process = subprocess.Popen(
                [*inside, *command(*words, "--json", str(folder / "out.json"))],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=die_with_parent,  # a drill that is stopped leaves nothing behind
            )
        return Run(mark, home, folder, process)

    def prepared(self, name: str, finished: Path) -> Path:
        """A new home with the stages before `fit` taken from a finished one."""
        for stage in ("load_data", "load_model", "tokenize"):
            shutil.copytree(finished / "artifacts" / stage, self.folder / name / "artifacts" / stage)
        (self.folder / name).chmod(0o700)
        return self.folder / name


def victims(flow: int) -> dict[str, list[int]]:
    """The living processes of a run by part: flow, fork server, supervisor, launcher, rank, or program if nothing
    launches one; waiting launcher, with its supervisor and ranks, until it has its job."""
    found = {"flow": [flow]}
    for supervisor in descendants(flow):
        words = argv(supervisor)
        if words[1:3] == ["-m", "training.jobs.fork_server"]:
            found["fork server"] = [supervisor]
        if words[1:3] != ["-m", "training.jobs.supervise"]:
            continue
        below = {pid: argv(pid) for pid in descendants(supervisor)}
        folder = Path(words[-1])
        if folder.parent.name == "waiting" and not (folder / JOB_LINK).exists():
            found["waiting launcher"] = [supervisor, *below]
            continue
        found["supervisor"] = [supervisor]
        launched = [pid for pid, words in below.items() if "training.programs.accelerate_launch" in words]
        programs = [pid for pid, words in below.items() if "-m" in words and pid not in launched]
        parts = {"launcher": launched, "rank" if launched else "program": programs}
        found |= {part: pids for part, pids in parts.items() if pids}
    return found


def newest_checkpoint(home: Path) -> int:
    """The step of the newest checkpoint of any job; 0 without one."""
    return max((int(path.name.split("-")[1]) for path in checkpoints(home)), default=0)


def checkpoints(home: Path) -> list[Path]:
    """The checkpoints of all jobs."""
    return list(home.glob("jobs/*/checkpoints/checkpoint-*"))


def wait_until(condition: Callable[[], bool], run: Run, within_s: float = 180.0) -> None:
    """Waits while the run goes on. Raises RuntimeError with what it printed when it ends, or does not get there."""
    deadline = time.monotonic() + within_s
    while not condition():
        if run.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended, or did not get far enough within {within_s:g} s: {run.ending()}")
        time.sleep(0.01)
