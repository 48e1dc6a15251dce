"""Docstrings of six libraries, each with the library that it comes from: real text that every machine has.

An example to copy for rows of your own: in a recipe, `data.source: python` with `data.path:
deployments.docstrings:rows` calls `rows(split)` once for each split. `rows.fingerprint()` is optional:
rows that were read before are used again while it says the same and this file's code is the same.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# What each library is imported as, and installed as.
LIBRARIES = {
    "networkx": "networkx",
    "sqlalchemy": "sqlalchemy",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "prefect": "prefect",
    "pandas": "pandas",
}
SHORTEST, LONGEST = 20, 400  # characters of a text
MOST = 1_800  # texts of one library
VALIDATION_PERCENT = 15
SEED = 0

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def rows(split: str) -> Iterable[dict[str, str]]:
    """The rows of `train` or `validation`, mixed: `{"text": "Return the k-core of G.", "label": "networkx"}`.

    Every library has the same number of texts over both splits, and no text is in both or in two libraries.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r} is unknown: choose from train, validation")
    return [
        {"text": text, "label": library}
        for text, library in sorted(balanced().items(), key=lambda row: draw(row[0]))
        if (draw(text) % 100 < VALIDATION_PERCENT) == (split == "validation")
    ]


def fingerprint() -> str:
    """Other inputs of the rows: the versions of the libraries; none of them is imported."""
    return ", ".join(f"{name} {version(name)}" for name in LIBRARIES.values())


rows.fingerprint = fingerprint  # type: ignore[attr-defined]


@cache  # both splits are cut from the same texts
def balanced() -> dict[str, str]:
    """The library of each text; as many texts of each, those that come first in the drawn order."""
    texts = {library: texts_of(library) for library in LIBRARIES}
    libraries_with = Counter(text for found in texts.values() for text in found)
    own = {
        library: sorted((text for text in found if libraries_with[text] == 1), key=draw)
        for library, found in texts.items()
    }
    size = min(MOST, *map(len, own.values()))
    return {text: library for library, found in own.items() for text in found[:size]}


def draw(text: str) -> int:
    """A number that looks random and is always the same for a text, in whatever order texts come."""
    return int.from_bytes(sha256(f"{SEED}:{text}".encode()).digest()[:8])


def texts_of(library: str) -> set[str]:
    """The first paragraphs of the library's docstrings: MOST of them, or all where there are fewer.

    Files are read in the drawn order, so that it is the same part of the library everywhere, and only so
    far as it takes: parsing is what costs the time here.
    """
    texts: set[str] = set()
    for _, file in sorted((draw(name), file) for name, file in python_files(library).items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in a library are not our reader's concern
            texts.update(first_paragraphs(ast.parse(file.read_bytes())))
        if len(texts) >= MOST:
            break
    return texts


def first_paragraphs(node: ast.Module | Definition) -> Iterator[str]:
    """The first paragraph, on one line, of each docstring of suitable length in the tree."""
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    text = " ".join(paragraph.split())
    if SHORTEST <= len(text) <= LONGEST:
        yield text
    for child in node.body:
        if isinstance(child, Definition):
            yield from first_paragraphs(child)


def python_files(library: str) -> dict[str, Path]:
    """The library's files by their names inside it, tests left out. The library is found, not imported."""
    found = find_spec(library)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{library} is not installed: pip install {LIBRARIES[library]}")
    (folder,) = map(Path, found.submodule_search_locations)
    files = {file.relative_to(folder): file for file in folder.rglob("*.py")}
    return {name.as_posix(): file for name, file in files.items() if "tests" not in name.parts}
