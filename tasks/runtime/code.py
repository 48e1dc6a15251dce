"""Digests of the code behind a stage, so that an edit which can change its bytes is noticed, and a reformat is not.

From the roots that a stage names, imports are followed through this project's own packages and through the user's
modules in the working directory. Each file counts as its syntax tree without comments and docstrings. Installed
libraries are not followed: their versions are ingredients of their own.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tasks.runtime import settings
from tasks.runtime.digests import Digests
from training.problems import Problem, UserError

PROJECT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("flows", "tasks", "training")

# Code that decides how a stage is run, shown or described, not what it makes. A recipe's values are ingredients
# already, so the module that reads them is not.
NOT_INGREDIENTS = (
    "flows",
    "tasks.runtime",
    "training.estimate",
    "training.kinds.names",
    "training.pictures",
    "training.problems",
    "training.processes",
    "training.program",
    "training.protocol",
    "training.recipe",
    "training.room",
    "training.speed",
    "training.supervise",
)


def code_digests(roots: Iterable[str]) -> dict[str, str]:
    """`{"training/tokens.py": digest, …}` of the roots' files and of all that they import from here.

    Args:
        roots: dotted module names. Raises ModuleNotFoundError for one that has no source file here.
    """
    found: dict[str, str] = {}
    waiting = list(roots)
    seen: set[str] = set()
    if missing := [root for root in waiting if _source(root) is None]:
        raise ModuleNotFoundError(f"no source file of {', '.join(missing)}")
    while waiting:
        name = waiting.pop()
        source = None if name in seen else _source(name)
        seen.add(name)
        if source is None or _is_left_out(name):
            continue
        base, path = source
        shown = path.relative_to(base).as_posix()
        if shown in found:
            continue
        found[shown], imports = _read(path, name, _state(path))
        waiting.extend(imports)
        # Importing a.b.c runs a/__init__ and a/b/__init__ first.
        waiting.extend(name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
    return dict(sorted(found.items()))


def users_code(named: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The modules of objects of the user's that have a source file here, and the distributions that the others are of.

    `named` has `module:name` by the field that says so; words without a colon are the project's own names, and what is
    the Hub's is pinned by its name. Raises UserError for all whose module is neither here nor installed.
    """
    here, distributions, problems = [], [], []
    for where, name in named.items():
        module, colon, _ = name.partition(":")
        if not colon or module == "hub":
            continue
        if _source(module) is not None:
            here.append(module)
        elif found := importlib.metadata.packages_distributions().get(module.partition(".")[0]):
            distributions += found
        else:
            message = f"{name!r}: there is no module {module!r} in {Path.cwd()} or installed."
            problems.append(Problem(kind="recipe", where=where, message=message))
    if problems:
        raise UserError(problems)
    return here, distributions


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of distributions, and Python's own `major.minor`."""
    versions = {name: importlib.metadata.version(name) for name in names}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
    return versions


class GitCommit(NamedTuple):
    """What is checked out in the working directory."""

    commit: str
    dirty: bool
    """Whether files that git knows differ from it."""


def git_commit() -> GitCommit | None:
    """The commit of the working directory; None where it is in no repository of git, or there is no git."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # looking must not get in the way of who works there

    def said(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        return GitCommit(said("rev-parse", "HEAD"), bool(said("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):
        return None


def _is_left_out(name: str) -> bool:
    return any(name == out or name.startswith(out + ".") for out in NOT_INGREDIENTS)


def _source(name: str) -> tuple[Path, Path] | None:
    """The folder that the name is looked up in, and the module's file; None where it is not ours or the user's."""
    # Installed as a wheel, the project lies beside every library: only its own packages are looked up there.
    bases = (PROJECT,) if name.partition(".")[0] in OWN_PACKAGES else (Path.cwd(), *_users_folders(tuple(sys.path)))
    for base in bases:
        stem = base.joinpath(*name.split("."))
        for path in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
            if path.is_file():
                return base, path
    return None


@cache
def _users_folders(searched: tuple[str, ...]) -> tuple[Path, ...]:
    """Where Python looks for modules, the folders of libraries and of this project's packages apart."""
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]

    def is_users(folder: Path) -> bool:
        inside = folder != PROJECT and folder.is_relative_to(PROJECT)  # Prefect puts the flow's own folder there
        return folder.is_dir() and not inside and not any(folder.is_relative_to(library) for library in libraries)

    return tuple(filter(is_users, dict.fromkeys(map(Path, filter(None, searched)))))


@cache
def _read(path: Path, name: str, state: tuple[int, ...]) -> tuple[str, tuple[str, ...]]:
    """A file's digest and the names it imports; `state` makes an edited file a new question.

    To parse all of a training's code takes most of a second, so the answer is remembered in the home, too, for as long
    as it would be found in the same way.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found_by = f" code of {package} {platform.python_version()} {_state(Path(__file__))}"
    digest, *imports = Digests(settings.home_path()).derived(path, found_by, partial(_parsed, package)).split()
    return digest, tuple(imports)


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _parsed(package: str, path: Path) -> str:
    """The digest of a file's syntax, and the names it imports, all apart by spaces."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    imports = dict.fromkeys(_imports(tree, package))
    for node in ast.walk(tree):
        _drop_docstring(node)
    return " ".join([hashlib.sha256(ast.dump(tree).encode()).hexdigest(), *imports])


def _imports(tree: ast.AST, package: str) -> Iterable[str]:
    """What is imported, but for types alone."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            # `from package import name` may mean a module of that package.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _drop_docstring(node: ast.AST) -> None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        node.body[0] = ast.Pass()
