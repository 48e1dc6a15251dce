"""The job of a stage: a program with its settings, and the files that it may read. The digest of the job is the stage's
key, and the program gets links to these files and to no others: what it uses is in the key by construction.

    settings      all fields, except those that are marked NotInKey where they are declared
    reads         the digests of the files
    code          the program's modules, those of the task type and metrics, and the user's
    libraries     their versions
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.cache.refs import Ref
from tasks.cache.stage import Inputs, Stage, Work
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tasks.jobs.commands import Launch, python_argv
from training.jobs.protocol import INPUTS, Settings, values_in_key


@dataclass(frozen=True)
class Files:
    """A folder that a program may read: some files of an artifact, or one of its folders as a whole."""

    folder: Path
    digests: Mapping[str, str]
    """By name in the key, such as `load_data/train.arrow`."""
    names: tuple[str, ...] | None = None
    """The files of `folder` that may be read; None: all."""

    def link(self, place: Path) -> None:
        """Makes `place` a folder of links to these files."""
        if self.names is None:
            place.symlink_to(self.folder)
            return
        place.mkdir()
        for name in self.names:
            place.joinpath(name).symlink_to(self.folder / name)


def files_of(artifact: Ref, names: Iterable[str]) -> Files:
    """These top-level files of an artifact. One that the artifact lacks is left out."""
    there = tuple(name for name in names if name in artifact.parts)
    return Files(artifact.path, {f"{artifact.stage}/{name}": artifact.parts[name] for name in there}, there)


def folder_of(artifact: Ref, name: str) -> Files:
    """A top-level folder of an artifact, such as the `model` of a training."""
    return Files(artifact.path / name, {f"{artifact.stage}/{name}": artifact.parts[name]})


@dataclass(frozen=True)
class Job:
    """A program, and everything that its output depends on."""

    program: str
    """Its module, such as `training.programs.score`."""
    settings: Settings
    reads: Mapping[str, Files]
    """By the name under which the program finds the folder in `Job.inputs`."""
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
    batches: Callable[[], BatchDivision] | None = None
    """Returns the division of batches that fits into memory. Not in the key."""

    def inputs(self) -> Inputs:
        """The content of the key."""
        read = {name: digest for files in self.reads.values() for name, digest in files.digests.items()}
        return Inputs(
            {**values_in_key(self.settings), **self.tables, "upstream": read},
            code=[self.program, *self.code],
            outside=self.outside,
            named=self.users_code,
            libraries=self.libraries,
            names=self.field_names,
        )

    def run(self, work: Work) -> dict[str, Any]:
        """Runs the program to its end, fills `work.out`, and returns its figures. Raises as `run_child` does."""
        folder = work.job / INPUTS
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, files in self.reads.items():
            files.link(folder / name)
        launched = self.launch() if self.launch else Launch(python_argv(self.program), {}, {})
        return run_child(
            work,
            self.program,
            launched.argv,
            env=launched.env,
            settings=self.settings,
            inputs={name: folder / name for name in self.reads},
            batches=self.batches() if self.batches else None,
        )


def stage(describe: Callable[..., Job]) -> Stage[Any]:
    """A cached stage: a function from the recipe and the artifacts before it to a job. Its docstring's first paragraph
    is the stage's work, the second one the content of its key, for the documentation."""

    @functools.wraps(describe)
    def make(work: Work, *arguments: Any) -> Mapping[str, Any]:
        return describe(*arguments).run(work)

    def inputs(*arguments: Any) -> Inputs:
        return describe(*arguments).inputs()

    inputs.__doc__ = (describe.__doc__ or "").partition("\n\n")[2]
    return Stage(describe.__name__, make, inputs, cached=True)
