"""Replaces the files that a recipe names by fields of the recipe: files of label names, and in the compute section
the files of `accelerate config` and DeepSpeed.

The recipe that is shown, stored and run names no such file. Relative paths start from the working directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from training.local_files import read_local
from training.problems import Problem, UserError, collected, relocated
from training.recipe.accelerate_file import Refusal, translate
from training.recipe.overrides import read_yaml


class ExpandedRecipe:
    """A recipe's values with its referenced files replaced by fields.

    `problems` lists mistakes in the files, and fields in which a file contradicts the recipe.
    """

    def __init__(self, written: Mapping[str, Any]) -> None:
        self.values = dict(written)
        self.problems: list[Problem] = []
        self._places: dict[str, str] = {}  # the place in the file, by the recipe field that it sets
        self._read_label_names()
        self._expand("accelerate", self._translate_accelerate)
        self._expand("deepspeed", self._read_deepspeed)

    def locate(self, problem: Problem) -> Problem:
        """Returns the problem with its place in the file, if a file set the field."""
        for field, place in self._places.items():
            if problem.where == field:
                return problem.model_copy(update={"where": f"{place.removesuffix(': ')} ({field})"})
            if problem.where.startswith((f"{field}.", f"{field}[")):
                return problem.model_copy(update={"where": f"{place}{problem.where[len(field) :].lstrip('.')}"})
        return problem

    def _expand(self, name: str, expand: Callable[[str, str], None]) -> None:
        compute = self.values.get("compute")
        file = compute.get(name) if isinstance(compute, Mapping) else None
        if not isinstance(compute, Mapping) or not isinstance(file, str) or not file:
            return
        self.values["compute"] = {field: value for field, value in compute.items() if field != name}
        with collected(self.problems):
            expand(file, self._places.pop(f"compute.{name}", f"compute.{name}"))

    def _read_label_names(self) -> None:
        data = self.values.get("data")
        file = data.get("label_names") if isinstance(data, Mapping) else None
        if not isinstance(data, Mapping) or not isinstance(file, str):
            return
        with collected(self.problems):
            self.values["data"] = {**data, "label_names": read_names(file, "data.label_names")}
            self._places["data.label_names"] = file

    def _translate_accelerate(self, file: str, where: str) -> None:
        with relocated(lambda field: f"{where}: {field}"):
            content = read_yaml(Path(os.path.expanduser(file)), read_local)
        if not isinstance(content, Mapping):
            raise UserError.of(
                "recipe", where, f"{file!r} is not a mapping of fields: name a file that `accelerate config` wrote."
            )
        for translation in translate(content):
            if isinstance(translation, Refusal):
                self._add(f"{file}: {translation.field}", translation.message)
            else:
                self._set(
                    f"{file}: {translation.field}", translation.written, translation.recipe_field, translation.value
                )

    def _read_deepspeed(self, file: str, where: str) -> None:
        content = _read_json(os.path.expanduser(file), where)
        self._set(file, content, "compute.deepspeed", content)
        self._places["compute.deepspeed"] = f"{file}: "
        if where == "compute.deepspeed":
            return
        # Named in accelerate's file, it also sets the strategy and the offloading.
        for place, written, name, value in _find_sharing(content):
            self._set(f"{file}: {place}", written, f"compute.{name}", value)

    def _set(self, where: str, written: Any, recipe_field: str, value: Any) -> None:
        """Sets a field of the recipe, unless the recipe has another value there."""
        section, _, name = recipe_field.partition(".")
        fields = self.values.get(section, {})
        if not isinstance(fields, Mapping):
            return
        before = self._value(section, name)
        if name in fields and before != value:
            place = self._places.get(recipe_field)
            other = f"{place} makes it {before!r}" if place else f"the recipe has it as {before!r}"
            self._add(where, f"{written!r} makes {recipe_field} {value!r}, and {other}: leave one of them out.")
            return
        self.values[section] = {**fields, name: value}
        self._places.setdefault(recipe_field, where)

    def _value(self, section: str, name: str) -> Any:
        value = self.values.get(section, {}).get(name)
        return "no" if value is False and name in ("mixed_precision", "offload") else value  # a bare `no` of YAML

    def _add(self, where: str, message: str) -> None:
        self.problems.append(Problem(kind="recipe", where=where, message=message))


def read_names(file: str, where: str) -> list[str]:
    """Reads a list of names: one a line, or a JSON list of texts in a .json file. Raises UserError."""
    try:
        text = read_local(os.path.expanduser(file)).decode("utf-8-sig")
        names = _parse(text, file, where) if file.endswith(".json") else [line.strip() for line in text.splitlines()]
    except OSError as error:
        raise UserError.of(
            "recipe", where, f"{file!r} cannot be read: {error.strerror}; name a file, or write [a, b]."
        ) from None
    except UnicodeDecodeError:
        raise UserError.of("recipe", where, f"{file!r} is not UTF-8 text: save it as UTF-8.") from None
    while isinstance(names, list) and names and names[-1] == "":  # blank lines at the end
        names.pop()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError.of(
            "recipe", where, f'{file!r} is no list of names: write a name a line, or in JSON ["a", "b"].'
        )
    if "" in names:
        raise UserError.of(
            "recipe", where, f"{file!r} has no name in line {names.index('') + 1}: each line is the name of a label."
        )
    if len(names) < 2:
        raise UserError.of("recipe", where, f"{file!r} lists {len(names)}: it takes at least 2 names.")
    return names


def _find_sharing(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields the strategy and the offloading of a DeepSpeed configuration: its field and value, then the recipe's."""
    zero = content.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    if (stage := zero.get("stage")) in (1, 2, 3):
        yield "zero_optimization.stage", stage, "strategy", f"deepspeed-zero{stage}"
    groups = [zero.get(f"offload_{name}") for name in ("optimizer", "param")]
    devices = [group.get("device", "none") if isinstance(group, Mapping) else "none" for group in groups]
    if devices in (["cpu", "none"], ["cpu", "cpu"]):
        yield "zero_optimization.offload_optimizer", "cpu", "offload", "all" if devices[1] == "cpu" else "optimizer"


def _read_json(file: str, where: str) -> dict[str, Any]:
    try:
        content = _parse(read_local(file).decode("utf-8-sig"), file, where)
    except OSError as error:
        raise UserError.of("recipe", where, f"{file!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError.of("recipe", where, f"{file!r} is not UTF-8 text: save it as UTF-8.") from None
    if not isinstance(content, dict):
        raise UserError.of("recipe", where, f"{file!r} is not a mapping of fields: name a DeepSpeed configuration.")
    return content


def _parse(text: str, file: str, where: str) -> Any:
    """Returns the content of a JSON file. Raises UserError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError.of("recipe", where, f"{file!r} is not JSON: line {error.lineno}: {error.msg}.") from None
    except (ValueError, RecursionError):
        message = f"{file!r} has brackets in brackets, or a number of digits, without end: name another file."
        raise UserError.of("recipe", where, message) from None
