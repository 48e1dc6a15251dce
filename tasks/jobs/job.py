"""The job of a stage, and its run. A job is a program with its settings, and the files that it may read. Its digest is
the stage's key, and the program gets links to these files and to no others: what it uses is in the key by construction.

    settings      all fields, except those that are marked NotInKey where they are declared
    reads         the digests of the files
    code          the program's modules, those of the task type and metrics, and the user's
    libraries     their versions

A stage whose work needs no process of its own has a function in place of the program, which gets the same.
"""

from __future__ import annotations

import inspect
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from tasks.cache.blocks import family_of, shared_blocks
from tasks.cache.results import Artifact
from tasks.cache.stage import Inputs, Stage, Work, flat_inputs
from tasks.jobs.commands import Launch, python_argv
from tasks.jobs.engines.engine import Runner
from tasks.jobs.engines.local import LOCAL
from tasks.jobs.retries import DEFAULT_STALL_TIMEOUT_S, BatchDivision, run_child
from training.jobs.protocol import (
    INPUTS,
    Settings,
    values_in_key,
)

Result = TypeVar("Result")
Function = Callable[[Work, Any, Mapping[str, Path]], Any]
"""Gets the settings and the folders by name, fills `Work.out`, and returns the result."""


@dataclass(frozen=True)
class Files:
    """A folder that a program may read: some files of an artifact, or one of its folders as a whole."""

    folder: Path | Callable[[Work], Path]
    """The folder, or a function that finds or makes it when the program is about to run."""
    digests: Mapping[str, str]
    """By name in the key, such as `load_data/train.arrow`."""
    names: tuple[str, ...] | None = None
    """The files of `folder` that may be read; None: all."""

    def link(self, place: Path, work: Work) -> None:
        """Makes `place` a folder of links to these files."""
        folder = self.folder if isinstance(self.folder, Path) else self.folder(work)
        if self.names is None:
            place.symlink_to(folder)
            return
        place.mkdir()
        for name in self.names:
            place.joinpath(name).symlink_to(folder / name)


def files_of(artifact: Artifact, names: Iterable[str]) -> Files:
    """These top-level files of an artifact. One that the artifact lacks is left out."""
    there = tuple(name for name in dict.fromkeys(names) if name in artifact.parts)
    return Files(artifact.path, {f"{artifact.stage}/{name}": artifact.parts[name] for name in there}, there)


def folder_of(artifact: Artifact, name: str) -> Files:
    """A top-level folder of an artifact, such as the `model` of a training."""
    return Files(artifact.path / name, {f"{artifact.stage}/{name}": artifact.parts[name]})


def joined(name: str, *several: Files) -> Files:
    """The files of several folders in one, which is made in the job under this name."""

    def make(work: Work) -> Path:
        place = work.job / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for files in several:
            folder = files.folder if isinstance(files.folder, Path) else files.folder(work)
            for file in files.names or ():
                place.joinpath(file).symlink_to(folder / file)
        return place

    return Files(make, {key: digest for files in several for key, digest in files.digests.items()})


def whole(artifact: Artifact) -> Files:
    """All files of an artifact."""
    return Files(artifact.path, {artifact.stage: artifact.digest})


@dataclass(frozen=True)
class StageJob:
    """A program, and everything that its output depends on."""

    program: str | Function
    """Its module, such as `training.programs.score`, or the function that runs in this process."""
    settings: Settings
    reads: Mapping[str, Files]
    """By the name under which the program finds the folder in `Job.inputs`."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Values that name content which a function reads elsewhere, such as the digests of files at URLs."""
    tables: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the recipe's tables that the program looks up by name: their modules are not part of its code."""
    code: Sequence[str] = ()
    """Modules that the program imports by name."""
    outside: Sequence[str] = ()
    """Rooms and modules imported by the code that cannot change the output with these settings."""
    users_code: Mapping[str, str] = field(default_factory=dict)
    """The user's objects that the program loads, `module:name` by recipe field."""
    libraries: Sequence[str] = ()
    """Distributions whose version can change the output."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The recipe's names of settings that are called otherwise, for the reasons of a plan."""
    launch: Callable[[], Launch] | None = None
    """Returns the command that starts the program; without, Python runs it as one process. Not in the key."""
    batches: Callable[[Path], BatchDivision] | None = None
    """Returns the division of batches that fits into memory, from the folder `model` of `reads`. Not in the key."""
    secrets: Callable[[], Mapping[str, str]] | None = None
    """Returns variables of the program that no file may hold. Not in the key."""
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    """Seconds without progress after which the program is started again. Not in the key."""
    runner: Callable[[Work, Mapping[str, Path]], Runner[Any]] | None = None
    """Returns the runner of the program, from the folders of the artifacts by name; without, it runs on this machine.
    Not in the key."""
    blocks_without: tuple[str, ...] | None = None
    """For a program that computes rows in blocks: the names in the key, or sections of names, that change no block.
    Jobs that differ in these alone share blocks (tasks/cache/blocks.py). None: it has no blocks."""
    around: Callable[[Work], AbstractContextManager[None]] | None = None
    """Returns a context in which the program runs, such as the upload of its checkpoints. Not in the key."""
    show: Callable[[Work, Any], None] | None = None
    """Gets the result too, as JSON values, and tells what is in the filled folder: warnings, and pictures in its `log`,
    which is no part of the artifact's content. Not in the key."""

    def inputs(self) -> Inputs:
        """The content of the key. Raises ValueError if two values have one name: the key would lack one of them."""
        read = {name: digest for files in self.reads.values() for name, digest in files.digests.items()}
        parts = [values_in_key(self.settings), self.content, self.tables, {"upstream": read}]
        names = Counter(name for part in parts for name in part)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{', '.join(twice)} would be two values of one name in a key")
        own = self.program if isinstance(self.program, str) else self.program.__module__
        return Inputs(
            {name: value for part in parts for name, value in part.items()},
            code=[own, *self.code],
            outside=self.outside,
            named=self.users_code,
            libraries=self.libraries,
            names=self.field_names,
        )

    def run(self, work: Work) -> Any:
        """Runs the program to its end, fills `work.out`, and returns the result as JSON values. Raises as `run_child`
        does."""
        inputs = self.link_inputs(work, work.job / INPUTS)
        with self.around(work) if self.around else nullcontext(), self._shared_blocks(work):
            if isinstance(self.program, str):
                result = self._run_child(work, self.program, inputs)
            else:
                result = to_jsonable_python(self.program(work, self.settings, inputs))
        if self.show:
            self.show(work, result)
        return result

    def _shared_blocks(self, work: Work) -> AbstractContextManager[None]:
        if self.blocks_without is None:
            return nullcontext()
        return shared_blocks(work, family_of(flat_inputs(self.inputs()), self.blocks_without))

    def link_inputs(self, work: Work, folder: Path) -> dict[str, Path]:
        """Makes the new folder with links to what the program may read; returns the places by name."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, files in self.reads.items():
            files.link(folder / name, work)
        return {name: folder / name for name in self.reads}

    def _run_child(self, work: Work, program: str, inputs: Mapping[str, Path]) -> Any:
        launched = self.launch() if self.launch else Launch(python_argv(program), {}, {})
        places = {name: files.folder for name, files in self.reads.items() if isinstance(files.folder, Path)}
        return run_child(
            work,
            program,
            launched.argv,
            env={**launched.env, **(self.secrets() if self.secrets else {})},
            settings=self.settings,
            inputs=inputs,
            batches=self.batches(inputs["model"]) if self.batches else None,
            stall_timeout_s=self.stall_timeout_s,
            before_try=lambda: launched.write(work.job),
            runner=self.runner(work, places) if self.runner else LOCAL,
        )


def stage(
    gives: type[Result], *, where: str = "", may_repeat: bool = False
) -> Callable[[Callable[..., StageJob]], Stage[Artifact[Result]]]:
    """A cached stage: a function from the recipe and the artifacts before it to a job. Its docstring's first paragraph
    is the stage's work, the second one the content of its key, for the documentation.

    `gives` is the type of the program's result; `where` and `may_repeat` are those of Stage.
    """

    def decorate(describe: Callable[..., StageJob]) -> Stage[Artifact[Result]]:
        work, _, rest = (inspect.getdoc(describe) or "").partition("\n\n")
        return Stage(
            describe.__name__,
            describe,
            cached=True,
            gives=gives,
            where=where,
            may_repeat=may_repeat,
            description=work,
            key_description=rest.partition("\n\n")[0],
        )

    return decorate


def job_of(stage: Stage[Any], *arguments: Any) -> StageJob:
    """The job of a cached stage, without running it."""
    job = stage.prepare(*arguments)
    assert isinstance(job, StageJob), f"{stage.name} has no job"
    return job
