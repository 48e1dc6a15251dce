"""Where rows come from, settled before any is read: files found, callables named. Needs no pyarrow."""

from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from training.recipe import Data

SUFFIXES = {"csv": [".csv"], "json": [".jsonl", ".ndjson", ".json"], "parquet": [".parquet"]}

# What a split's file is called where the recipe does not say; train and validation must be there.
FILE_NAMES = {"train": ["train"], "validation": ["validation", "valid", "val", "dev"], "test": ["test"]}
REQUIRED = ("train", "validation")


def split_names(data: Data) -> dict[str, str]:
    """What each split is called at the Hub or by the callable: as the recipe says, else by its own name."""
    return dict(data.splits) if data.splits else {split: split for split in REQUIRED}


def find_files(data: Data) -> dict[str, list[Path]]:
    """The files of each split, absolute and in the order of their names.

    `data.path` is a folder, a file or a glob. `data.splits` gives each split's file, its name without
    suffix, or a glob, seen from that folder; without it files are known by their names (`train.csv`,
    `dev.csv`, …). Shards as the Hub writes them (`train-00000-of-00002.parquet`) belong to their name.
    Raises UserError with what was looked for and what is there.
    """
    folder, there = _look(data)
    if data.splits is None:
        wanted = {split: names for split, names in FILE_NAMES.items()}
    else:
        wanted = {split: [name] for split, name in data.splits.items()}
    found: dict[str, list[Path]] = {}
    problems: list[Problem] = []
    for split, names in wanted.items():
        forms = [form for name in names for form in _forms(name, SUFFIXES[data.source])]
        hits = {form: files for form in forms if (files := _matches(folder, form, data, there))}
        where = f"data.splits.{split}" if data.splits else "data.path"
        if len(hits) > 1:
            problems.append(Problem(kind="data", where=where, message=_ambiguous(split, hits)))
        elif hits:
            found[split] = next(iter(hits.values()))
        elif data.splits is not None or split in REQUIRED:
            message = _absent(split, forms, folder, there, names)
            problems.append(Problem(kind="data", where=where, message=message))
    if problems:
        raise UserError(problems)
    return found


def shown(path: Path | str) -> str:
    """A path as a message names it: from the working directory where it lies below, else in full."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _look(data: Data) -> tuple[Path, list[Path]]:
    """The folder that names are seen from, and the files of the source's kind that `data.path` covers."""
    path = Path(os.path.abspath(os.path.expanduser(data.path)))
    suffixes = SUFFIXES[data.source]
    if path.is_dir():
        return path, sorted(file for file in path.iterdir() if file.suffix in suffixes and file.is_file())
    if path.is_file():
        return path.parent, [path]
    if not glob.has_magic(str(path)):
        near = nearest(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        message = f"{data.path!r} does not exist ({path}): name a file, a folder or a glob.{near}"
        raise UserError([Problem(kind="data", where="data.path", message=message)])
    folder = path
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder, sorted(file for file in _glob(str(path)) if file.is_file())


def _forms(name: str, suffixes: list[str]) -> list[str]:
    """The globs by which a split's files may be meant."""
    if glob.has_magic(name):
        return [name]
    digits = "[0-9]" * 5
    shards = [f"{name}-{digits}-of-{digits}{suffix}" for suffix in suffixes]
    return [name, *(name + suffix for suffix in suffixes), *shards]


def _matches(folder: Path, form: str, data: Data, there: list[Path]) -> list[Path]:
    found = sorted(file for file in _glob(os.path.join(glob.escape(str(folder)), form)) if file.is_file())
    # A split that the recipe names may lie anywhere; one known by name only must be among what the path
    # covers.
    return found if data.splits else [file for file in found if file in there]


def _glob(pattern: str) -> list[Path]:
    return [Path(file) for file in glob.glob(pattern, recursive=True)]


def _ambiguous(split: str, hits: dict[str, list[Path]]) -> str:
    files = ", ".join(shown(file) for found in hits.values() for file in found[:2])
    return f"the {split} split could be any of {files}: name its file in data.splits.{split}."


def _absent(split: str, forms: list[str], folder: Path, there: list[Path], names: list[str]) -> str:
    looked = ", ".join(re.sub(r"(\[0-9\])+", "*", form) for form in forms)
    have = ", ".join(file.name for file in there[:20]) or "nothing of the kind"
    near = nearest(names[0], [text for file in there for text in (file.name, file.stem)])
    return (
        f"no {split} file in {shown(folder)}: looked for {looked}; there is {have}. "
        f"Name it in data.splits.{split}.{near}"
    )


def load_callable(name: str) -> Callable[..., Any]:
    """The object that `module:name` names, importable from the working directory too.

    Raises UserError when there is no such module or name, when importing it fails, or when it is no callable.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise _refused(f"{name!r} names no callable: write module:function, for example my_rows:rows.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file beside the recipe shadows no library
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise _refused(f"importing {module_name!r} failed: {error}") from error
        near = nearest(missing.rpartition(".")[2], _modules_beside(missing))
        raise _refused(f"{name!r}: there is no module {missing!r} here or installed.{near}") from error
    except Exception as error:
        raise _refused(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(attribute, offered)
        raise _refused(f"{module_name!r} has no {attribute!r}: it has {', '.join(offered) or 'none'}.{near}")
    found: Callable[..., Any] = getattr(module, attribute)
    if not callable(found):
        raise _refused(f"{name!r} is of type {type(found).__name__}: it must be callable.")
    return found


def fingerprint(function: Callable[..., Any]) -> str | None:
    """What the callable says its rows depend on (`function.fingerprint()`), or None where it says nothing."""
    ask = getattr(function, "fingerprint", None)
    if ask is None:
        return None
    try:
        answer = ask()
    except Exception as error:
        raise _refused(f"its fingerprint() failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise _refused(f"fingerprint() gave {type(answer).__name__}: it must give a text.")
    return answer


def _refused(message: str) -> UserError:
    return UserError([Problem(kind="data", where="data.path", message=message)])


def _modules_beside(missing: str) -> Iterable[str]:
    """The modules that lie where the missing one was looked for."""
    parent = missing.rpartition(".")[0]
    folders = [Path(entry) for entry in sys.modules[parent].__path__] if parent else [Path.cwd()]
    for folder in folders:
        yield from (file.stem for file in folder.glob("*.py"))
        yield from (file.parent.name for file in folder.glob("*/*.py"))
