"""Digests of a stage's code: they change with an edit that can change the output, and not with a reformat.

Imports are followed from the stage's roots through this project's packages and the user's modules, which are found as
in the programs of jobs. Installed libraries are not followed: the versions of their distributions are inputs. All other
modules are the user's, including those found through PYTHONPATH or an editable install.

The digest of a file covers its syntax. It leaves out:

- comments, blank lines and layout;
- every statement that is only a string: the docstrings of modules, classes and functions, and those of attributes;
- messages, in this project's own modules alone: texts in a `raise` statement; texts given to a variable or a parameter
  `message`, under the key "message", to `UserError.of`, or to a method `warning` or `note`.

All other texts count, such as the name of a loss. In user code only the first two are left out: a variable `message`
may be a row of a chat there.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipimport import zipimporter

from tasks.cache.digests import Digests
from tasks.home import home_path
from training.jobs.search_path import LIBRARIES, OWN_PACKAGES, PROJECT, find_module, search_path
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.recipe import Recipe

OUTSIDE = (
    # Start, display, storage and release of a run.
    "flows",
    "tasks",
    # Start, supervision and end of programs.
    "training.jobs",
    # Messages.
    "training.problems",
    # The recipe's fields and tables: the values that a stage reads are inputs.
    "training.recipe",
    # Files of batch predictions: the digest of the rows that are read is an input, and no stage writes them.
    *("training.data.prediction_rows", "training.data.prediction_files"),
    # `finetune init`, which writes a recipe and no artifact.
    "training.data.infer_reading",
    # Plots, and measurements of speed and memory.
    *("training.evaluation.plots", "training.engine.throughput", "training.engine.estimation"),
)
"""Rooms and modules that cannot change the output of any stage."""
INSIDE = (
    "tasks.stages",
    # They read and check rows.
    *(f"training.recipe.{name}" for name in ("column_types", "filters", "row_split", "source_columns")),
    "training.recipe.tables.row_checks",
    # The options of a task type.
    "training.recipe.task_specification",
    # The blocks in which rows are kept.
    "training.jobs.blocks",
    # The order of tags.
    "training.evaluation.tags",
)
"""Rooms and modules below those that make an output nevertheless."""
_LIBRARY_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_TEXT_METHODS = ("warning", "note")
_NAME = re.compile(r"^Name: *(\S+)", re.MULTILINE)
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)
"""The name and the version of a distribution in its METADATA, which takes a millisecond to parse."""


def figures_code(task: str) -> list[str]:
    """The room that the project's task types import only for figures and baselines; a user's may use it elsewhere."""
    return [] if ":" in task else ["training.evaluation"]


class Code(NamedTuple):
    """The code behind some modules."""

    files: Mapping[str, Source]
    """By path, such as `training/tokenization/encoder.py`."""
    distributions: Sequence[str]
    """The distributions that the user's modules import."""

    @property
    def digests(self) -> dict[str, str]:
        """`{"training/tokenization/encoder.py": digest, …}`"""
        return {name: source.digest for name, source in self.files.items()}


class Source(NamedTuple):
    """A file of code."""

    file: Path
    digest: str


def code_behind(roots: Iterable[str], outside: Sequence[str] = ()) -> Code:
    """The files of these modules and their imports, without installed libraries.

    Args:
        roots: dotted module names. Raises ModuleNotFoundError if one has no source file.
        outside: rooms and modules of the project to leave out, in addition to OUTSIDE.
    """
    _forget_folders()
    found: dict[str, Source] = {}
    working_directory = search_path()[-1]
    # Each name with whether the working directory is searched for it: libraries find no modules there.
    waiting, libraries = [(root, True) for root in roots], set[str]()
    seen: set[tuple[str, bool]] = set()
    if missing := [root for root, here in waiting if _module(root, here=here) is None]:
        raise ModuleNotFoundError(f"no source file of {', '.join(missing)}")
    while waiting:
        name, here = waiting.pop()
        module = None if (name, here) in seen else _module(name, here=here)
        seen.add((name, here))
        if module is None or _is_outside(name, outside) or module.name in found:
            continue
        digest, imports = _read(module, _state(module.file))
        if digest != _EMPTY:
            found[module.name] = Source(module.file, digest)
        from_here = module.file == Path(working_directory, module.name)
        waiting.extend((imported, from_here) for imported in imports)
        # Importing a.b.c runs a/__init__ and a/b/__init__ first.
        waiting.extend((name.rsplit(".", n)[0], here) for n in range(1, name.count(".") + 1))
        if not _is_own(name):
            libraries.update(top for top in {name.partition(".")[0] for name in imports} if _is_library(top))
    return Code(dict(sorted(found.items())), sorted({one for top in libraries for one in _distributions(top)}))


def code_digests(roots: Iterable[str]) -> dict[str, str]:
    """The digests of `code_behind`."""
    return code_behind(roots).digests


def metrics_code(recipe: Recipe, names: Iterable[str]) -> dict[str, str]:
    """These metrics by the fields of the recipe that name them, for `users_code`."""
    fields = {name: f"evaluation.metrics[{index}]" for index, name in enumerate(recipe.evaluation.metrics)}
    return {fields.get(name, "release.gate.compare"): name for name in names}


def users_code(named: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The user's modules among the named objects, and the distributions of installed ones.

    `named` has `module:name` by recipe field. Names without a colon are the project's; names of the Hub pin their
    content. Raises UserError with every module that is not found.
    """
    _forget_folders()
    here, distributions, problems = [], [], []
    for where, name in named.items():
        module, colon, _ = name.partition(":")
        if not colon or module == "hub":
            continue
        if _module(module) is not None:
            here.append(module)
        elif _is_library(top := module.partition(".")[0]) and find_module(module):
            distributions += _distributions(top)
        else:
            message = f"{name!r}: there is no module {module!r} in {Path.cwd()} or installed."
            problems.append(Problem(kind="recipe", where=where, message=message))
    if problems:
        raise UserError(problems)
    return here, distributions


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of distributions, and Python's own `major.minor`."""
    versions = {name: _version(importlib.metadata.distribution(name)) for name in names}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
    return versions


def _version(distribution: importlib.metadata.Distribution) -> str:
    """The installed version, by a search: `distribution.version` parses the metadata, which are pages of text, as an
    email."""
    found = _VERSION.search(distribution.read_text("METADATA") or "")
    return found[1] if found else distribution.version


class GitCommit(NamedTuple):
    """The commit that is checked out in the working directory."""

    commit: str
    dirty: bool
    """Whether tracked files differ from the commit."""


def git_commit() -> GitCommit | None:
    """The commit of the working directory; None without a git repository or git.

    The repository may have come with rows, and its configuration names programs. None of them is run: no monitor of
    files, hook, filter or transport, and no git in submodules. HEAD, objects and refs in the working directory itself
    are no repository, as everybody who may write to a shared folder can put them there.
    """
    overrides = ["safe.bareRepository=explicit", "core.fsmonitor=false", f"core.hooksPath={os.devnull}"]

    def run_git(*arguments: str, check: bool = True) -> str:
        # git status must not block the user's own commands.
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
        first = int(env.get("GIT_CONFIG_COUNT", 0))
        for number, setting in enumerate(overrides, first):
            # Not by -c: a name may contain a "=".
            env[f"GIT_CONFIG_KEY_{number}"], _, env[f"GIT_CONFIG_VALUE_{number}"] = setting.rpartition("=")
        return subprocess.run(
            ["git", *arguments],
            env=env | {"GIT_CONFIG_COUNT": str(first + len(overrides))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
            timeout=10,
        ).stdout.strip()

    try:
        commit = run_git("rev-parse", "HEAD")
        listed = run_git("config", "--null", "--show-scope", "--name-only", "--get-regexp", r"^filter\.", check=False)
        scopes_and_names = listed.split("\0")
        pairs = zip(scopes_and_names[::2], scopes_and_names[1::2], strict=False)
        overrides += [f"{name}=" for scope, name in pairs if scope in ("local", "worktree")]
        return GitCommit(commit, bool(run_git("status", "--porcelain", "-uno", "--ignore-submodules=dirty")))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _is_outside(name: str, more: Sequence[str]) -> bool:
    """Whether the longest of the rooms that hold the module is outside."""
    rooms = [room for room in (*OUTSIDE, *INSIDE, *more) if f"{name}.".startswith(f"{room}.")]
    return bool(rooms) and max(rooms, key=len) not in INSIDE


class _Module(NamedTuple):
    """A module of the project or the user."""

    dotted: str
    name: str
    """Its path below the folder that it is imported from, which may be moved."""
    file: Path
    """The whole archive for a module in an archive."""
    loader: Any
    """Reads the source of a module in an archive; None for other modules."""


def _module(dotted: str, *, here: bool = True) -> _Module | None:
    """The module, searched for in the working directory if `here`; None for a library, a namespace package or a missing
    module."""
    if _is_own(dotted):  # an installed wheel of the project lies in the folder of libraries
        stem = dotted.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if os.path.isfile(f"{PROJECT}/{name}"):  # pathlib takes longer, and few of the imported names are modules
                return _Module(dotted, name, PROJECT / name, None)
        return None
    spec = find_module(dotted, here=here) if _is_users(dotted.partition(".")[0], here) else None
    if spec is None or not spec.has_location or spec.origin is None or _in_libraries(spec):
        return None
    name = dotted.replace(".", "/") + ("/__init__" if spec.submodule_search_locations is not None else "")
    if archive := getattr(spec.loader, "archive", None):
        return _Module(dotted, f"{name}.py", Path(archive), spec.loader)
    return _Module(dotted, name + Path(spec.origin).suffix, Path(spec.origin), None)


def _is_own(dotted: str) -> bool:
    return dotted.partition(".")[0] in OWN_PACKAGES


@cache
def _is_users(top: str, here: bool) -> bool:
    """Whether a top-level module exists outside the folders of libraries."""
    spec = find_module(top, here=here)
    return spec is not None and not _in_libraries(spec)


def _is_library(top: str) -> bool:
    """Whether a top-level module is an installed library, and not of the standard library."""
    spec = None if _is_own(top) or top in sys.stdlib_module_names else find_module(top)
    return spec is not None and _in_libraries(spec)


def _in_libraries(spec: ModuleSpec) -> bool:
    """Whether a module, or all parts of a namespace package, lie in a folder of libraries or in Python itself."""
    if spec.submodule_search_locations is not None and not spec.has_location:
        return all(map(_is_in_libraries, spec.submodule_search_locations))
    return not spec.has_location or spec.origin is None or _is_in_libraries(spec.origin)


def _is_in_libraries(path: str) -> bool:
    names_one = not LIBRARIES.isdisjoint(path.split(os.sep))
    return names_one or any(Path(path).is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def _distributions(top: str) -> list[str]:
    """The distributions that installed a module."""
    folders = [Path(entry) for entry in search_path() if _is_in_libraries(entry) and Path(entry).is_dir()]
    return sorted({one for folder in folders for one in _read_distributions(folder, _state(folder)).get(top, ())})


@cache
def _read_distributions(folder: Path, state: tuple[int, ...]) -> Mapping[str, Sequence[str]]:
    # Listing reads hundreds of files, so the result is cached. An installation or removal changes the folder.
    listing = Digests(home_path()).derived(folder, " distributions", _list_distributions)
    return dict(json.loads(listing))


def _list_distributions(folder: Path) -> str:
    by_module: dict[str, set[str]] = {}
    for one in importlib.metadata.distributions(path=[str(folder)]):
        # By its lines: `one.files` makes a path of each, which takes seconds in an environment of 100,000 files.
        record = one.read_text("RECORD")
        files = map(str, one.files or ()) if record is None else record.splitlines()
        tops = {file.lstrip('"').partition(",")[0].partition("/")[0].partition(".")[0] for file in files}
        name = _NAME.search(one.read_text("METADATA") or "")
        for top in tops | set((one.read_text("top_level.txt") or "").split()):
            by_module.setdefault(top, set()).add(name[1] if name else one.name)
    return json.dumps({top: sorted(names) for top, names in by_module.items()})


def _forget_folders() -> None:
    """Makes Python list folders again: its cached lists may lack a new file."""
    _is_users.cache_clear()
    for finder in list(sys.path_importer_cache.values()):  # an import in another thread adds to it
        if isinstance(finder, FileFinder | zipimporter):
            finder.invalidate_caches()


@cache
def _read(module: _Module, state: tuple[int, ...]) -> tuple[str, tuple[str, ...]]:
    """A module's digest and the names that it imports. A new `state` makes the cache miss.

    Parsing all code of a training takes most of a second, so the result is also cached in the home.
    """
    package = module.dotted if Path(module.name).stem == "__init__" else module.dotted.rpartition(".")[0]
    inside = f" {module.name}" if module.loader else ""
    parser = f" code of {package}{inside} {platform.python_version()} {_state(Path(__file__))}"
    memory = Digests(home_path())
    digest, *imports = memory.derived(module.file, parser, lambda _: _parse(package, module)).split()
    return digest, tuple(imports)


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _parse(package: str, module: _Module) -> str:
    """The digest of a module's syntax and the names that it imports, separated by spaces; for a module without source
    the digest of its bytes."""
    content: bytes | str | None = module.file.read_bytes()
    if module.loader is not None:
        content = module.loader.get_source(module.dotted)
    if content is None or not module.name.endswith(".py"):
        return hashlib.sha256(module.file.read_bytes()).hexdigest()
    tree = ast.parse(content, filename=str(module.file))
    imported = dict.fromkeys(imported_modules(tree, package))
    return " ".join([digest_of_syntax(tree, has_messages=_is_own(module.dotted)), *imported])


def digest_of_syntax(tree: ast.Module, *, has_messages: bool) -> str:
    """sha256 of the syntax, hex; `has_messages` leaves out messages, too. Changes the tree."""
    if has_messages:
        _WithoutMessages(tree).visit(tree)
    for node in ast.walk(tree):
        _drop_strings(node, has_messages)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that are imported, except for types alone."""
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


def _drop_strings(node: ast.AST, has_messages: bool) -> None:
    """Removes the statements below the node that are only strings, or only assign a text to a message."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        if isinstance(statements, list):
            kept = [one for one in statements if not (isinstance(one, ast.Expr) and _is_text(one.value))]
            kept = [one for one in kept if not (has_messages and _is_message_variable(one))]
            # `pass` and a docstring mean the same where nothing else stands.
            code = [one for one in kept if not isinstance(one, ast.Pass)]
            setattr(node, block, code or ([ast.Pass()] if block == "body" else []))


def _message_fields(node: ast.AST) -> Iterable[ast.expr]:
    """The expressions directly below the node that hold messages."""
    if isinstance(node, ast.Raise):
        return [] if node.exc is None else [node.exc]
    if isinstance(node, ast.Call):
        named = [keyword.value for keyword in node.keywords if keyword.arg == "message"]
        of_text = isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_METHODS
        return named + (node.args if of_text or ast.unparse(node.func) == "UserError.of" else [])
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "message"]
    return []


def _is_message_variable(statement: ast.stmt) -> bool:
    """Whether the statement assigns a text to a variable `message`."""
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AugAssign):
        targets, value = [statement.target], statement.value
    else:
        return False
    return all(isinstance(target, ast.Name) and target.id == "message" for target in targets) and _is_text(value)


def _is_text(node: ast.expr) -> bool:
    """Whether the expression is a string or an f-string, or a sum of them."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) and _is_text(node.right)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


class _WithoutMessages(ast.NodeTransformer):
    """Replaces each text in a message by an empty one."""

    def __init__(self, tree: ast.Module) -> None:
        self._messages = [text for node in ast.walk(tree) for text in _message_fields(node)]
        self._ids = {*map(id, self._messages)}
        self._inside = False

    def visit(self, node: ast.AST) -> Any:
        was_inside = self._inside
        self._inside = was_inside or id(node) in self._ids
        is_blank = self._inside and isinstance(node, ast.expr) and _is_text(node)
        result = ast.Constant("") if is_blank else self.generic_visit(node)
        self._inside = was_inside
        return result


_EMPTY = digest_of_syntax(ast.parse(""), has_messages=False)
"""Of a file without code."""
