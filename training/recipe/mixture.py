"""Mixtures of several sets of rows: how the entries of `data.mix` become whole data sections, and their names.

An entry has the fields of `data` for its own source. The value of a field that it leaves out is that of `data`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from training.problems import Problem

MIX = "mix"
"""The value of data.source for a mixture, and the field with its sets."""
DATASET = "dataset"
"""The slice of a mixture whose groups are the sets, by name."""
OF_MIXTURE = ("mix", "weight_by", "stopping_strategy", "mix_seed")
"""Fields of `data` that a set does not have."""
OF_SET = ("name", "weight", "epochs")
"""Fields of a set that `data` does not have."""
SHARED = ("label_names", "checks")
"""Fields that are the same for all sets, because they are about the rows of all sets together."""
_FIELD = re.compile(r"(?<![\w./-])data\.([a-z_]+)")
_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?(\.[a-z]{2,7})?(\.gz|\.zst)?$")


def entries_of(data: Any) -> list[Mapping[str, Any]]:
    """Returns the entries of `data.mix` as written; none without a mixture, or if one is no mapping."""
    found = data.get(MIX) if isinstance(data, Mapping) else None
    if not isinstance(found, Sequence) or isinstance(found, str):
        return []
    return list(found) if all(isinstance(entry, Mapping) for entry in found) else []


def section_of_set(data: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data section of one set: its own fields, and the others from `data`."""
    common = {name: value for name, value in data.items() if name not in ("source", "path", *OF_MIXTURE)}
    return common | {name: value for name, value in entry.items() if value is not None and name not in OF_SET}


def default_name(source: Any, path: Any) -> str:
    """Returns the name of a set that has none: the last part of its path, without suffix."""
    text = str(path).rstrip("/")
    text = text.rpartition(":")[2] if source == "python" else PurePosixPath(text).name
    name = re.sub(r"[^\w.-]+", "-", text if source in ("hub", "python") else _SUFFIX.sub("", text), flags=re.ASCII)
    return name.strip("-_.") or str(source)


def set_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the name of each set."""
    return [str(entry.get("name") or default_name(entry.get("source"), entry.get("path"))) for entry in entries]


def locate(problem: Problem, index: int, entry: Mapping[str, Any], common: Collection[str]) -> Problem:
    """Returns a problem of one set with the names of its fields in the mixture: `data.mix[1].text` for `data.text`.

    Args:
        entry: The set's own fields.
        common: The fields that `data` has for all sets without their own.
    """

    def place(match: re.Match[str]) -> str:
        name = match[1]
        own = entry.get(name) is not None
        is_common = name in SHARED or name in OF_MIXTURE or (name in common and not own)
        return match[0] if is_common else f"data.{MIX}[{index}].{name}"

    where, message = _FIELD.sub(place, problem.where), _FIELD.sub(place, problem.message)
    return problem.model_copy(update={"where": where, "message": message})


def locate_all(
    problems: Iterable[Problem], index: int, entry: Mapping[str, Any], common: Collection[str]
) -> Iterator[Problem]:
    """Yields the problems of one set, each by `locate`."""
    return (locate(problem, index, entry, common) for problem in problems)
