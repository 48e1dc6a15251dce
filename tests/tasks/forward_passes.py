"""Forward passes of stages whose program computes rows in blocks: they are counted, in the process of the test."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_jsonable_python

from tasks.cache.stage import Work
from tasks.home import home
from tasks.jobs import job as jobs
from training.engine import inference
from training.jobs.protocol import EVENTS, OUTPUT, Events, Job


class Forwards:
    """The blocks that programs have computed, by their numbers of rows."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.kill_after = 1000
        """The number of blocks after which a program is killed."""

    def count(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if len(self.blocks) == self.kill_after:
                raise KeyboardInterrupt
            self.blocks.append(len(arguments[2]))
            return compute(*arguments, **named)

        return counted

    def taken(self) -> list[int]:
        """The blocks since the last call."""
        found, self.blocks = self.blocks, []
        return found


def count_forwards(monkeypatch: pytest.MonkeyPatch, rows_in_block: str, block: int) -> Forwards:
    """Runs the programs of jobs here, with blocks of `block` rows; `rows_in_block` names their constant."""
    found = Forwards()

    def run_here(work: Work, program: str, argv: Any, *, settings: Any, inputs: Any, **_: Any) -> Any:
        shutil.rmtree(work.job / OUTPUT, ignore_errors=True)
        (work.job / OUTPUT).mkdir(parents=True)
        values, places = settings.model_dump(mode="json"), {name: str(path) for name, path in inputs.items()}
        job = Job(program=program, key=work.key, settings=values, inputs=places)
        result = importlib.import_module(program).main(work.job, job, Events(work.job / EVENTS))
        shutil.copytree(work.job / OUTPUT, work.out, dirs_exist_ok=True)
        return to_jsonable_python(result)

    monkeypatch.setattr(jobs, "run_child", run_here)
    monkeypatch.setattr(rows_in_block, block)
    monkeypatch.setattr(inference, "compute", found.count(inference.compute))
    return found


def stored_blocks() -> list[Path]:
    """The blocks of all families in the home."""
    return sorted(home().glob("blocks/*/*.arrow"))
