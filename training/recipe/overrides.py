"""Reads deployment files and `--set` into the mapping from which a recipe is validated."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from training.problems import Problem, UserError, nearest
from training.recipe.field_types import is_list_of_sections, section_of

_INDEXED = re.compile(r"(\w+)\[(\d+)\]")
ENTRYPOINT, SWEEP_ENTRYPOINT = "flows.finetune:finetune", "flows.sweep:sweep"
MOST_CHARACTERS = 10_000_000
"""Of a YAML file with its aliases written out: a few lines of aliases of aliases would fill the memory."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader; it reads `3e-5` as a number, and refuses a field that is written twice, and aliases that make
    too much of a file."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count_characters(node, {}) > MOST_CHARACTERS:
            message = f"its aliases make more than {MOST_CHARACTERS:,} characters of it"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """The text; JSON's two escapes of one character, as in `"\\ud83d\\ude42"`, are that character."""
        text = super().construct_scalar(node)
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            message = f"{text!r} has half a character"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for index, key in enumerate(names):
            if any(key.value == earlier.value for earlier in names[:index]):
                message = f"{key.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
        return super().construct_mapping(node, deep=deep)


def _count_characters(node: yaml.Node, counted: dict[int, int]) -> int:
    """Returns the characters of a node with its aliases written out, and one for each node in it. Raises
    ConstructorError for a node within itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in counted:
        counted[id(node)] = -1
        inner = node.value if isinstance(node, yaml.SequenceNode) else [one for pair in node.value for one in pair]
        counted[id(node)] = 1 + sum(_count_characters(one, counted) for one in inner)
    if counted[id(node)] < 0:
        raise yaml.constructor.ConstructorError(None, None, "it is an alias of what it is in", node.start_mark)
    return counted[id(node)]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_set(settings: Iterable[str]) -> dict[str, Any]:
    """Returns the overrides in `--set a.b=value` arguments. Values are YAML; the last value of a name wins.

    Raises UserError for all arguments without a name, a `=` or a readable value together.
    """
    overrides: dict[str, Any] = {}
    problems: list[Problem] = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        try:
            if not equals or not name.strip():
                raise ValueError("write it as section.field=value, such as training.learning_rate=3e-5.")
            overrides[name.strip()] = yaml.load(value, _Loader)
        except ValueError as error:
            problems.append(Problem(kind="recipe", where="--set", message=f"{setting!r}: {error}"))
        except (yaml.YAMLError, RecursionError, AttributeError):
            message = f"{setting!r}: the value is not YAML; put it in quotes if it is text."
            problems.append(Problem(kind="recipe", where="--set", message=message))
    if problems:
        raise UserError(problems)
    return overrides


def merge(
    values: Mapping[str, Any], overrides: Mapping[str, Any], recipe: type[BaseModel]
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns a copy of `values` with the overrides applied, and problems of overrides that point inside a plain value.

    An unknown name is merged too, so that validation reports it like one in the file.
    """
    merged, problems = dict(values), []
    for name, value in overrides.items():
        path = _path(name, recipe)
        if path is not None and (message := _index_out_of_range(merged, path)):
            problems.append(Problem(kind="recipe", where=name, message=message))
        elif path is None:
            parent = name.rpartition(".")[0]
            message = f"cannot be set: {parent!r} has no fields."
            problems.append(Problem(kind="recipe", where=name, message=message))
        elif (
            isinstance(section := merged.get(path[0], {}), Mapping)
            and len(path) > 2
            and isinstance(text := section.get(path[1]), str)
        ):
            message = f"cannot be set: {path[0]}.{path[1]} is {text!r}, which has no fields."
            problems.append(Problem(kind="recipe", where=name, message=message))
        else:
            merged = _set_value(merged, path, value)
    return merged, problems


def _index_out_of_range(values: Mapping[str, Any], path: Sequence[Any]) -> str | None:
    """Returns why a path with an index points nowhere; None if it points into a list, or has no index."""
    found: Any = values
    for step, part in enumerate(path):
        if isinstance(part, int):
            entries = len(found) if isinstance(found, list) else 0
            if part >= entries:
                return f"cannot be set: {'.'.join(map(str, path[:step]))} has {entries} entries, counted from 0."
            found = found[part]
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return None


def _path(name: str, recipe: type[BaseModel]) -> list[Any] | None:
    """Returns the keys of a dotted name; None if it points inside a plain value. A key may contain dots:
    `training.class_weights.a.b` ends in `a.b`. An entry of a list of sections has an index: `data.mix[1].weight`."""
    first, _, rest = name.partition(".")
    if (indexed := _INDEXED.fullmatch(first)) and (field := recipe.model_fields.get(indexed[1])):
        section = section_of(field) if is_list_of_sections(field) else None
        inside = _path(rest, section) if section and rest else []
        return None if section is None or inside is None else [indexed[1], int(indexed[2]), *inside]
    field = recipe.model_fields.get(first)
    if field is None or not rest:
        return [first, *rest.split(".", 1)] if rest else [first]
    if is_list_of_sections(field):
        return None
    if section := section_of(field):
        rest_of_path = _path(rest, section)
        return None if rest_of_path is None else [first, *rest_of_path]
    for alternative in _alternatives(field.annotation):
        if get_origin(alternative) is dict:
            is_nested = get_args(alternative)[1] is Any or get_origin(get_args(alternative)[1]) is dict
            return [first, *(rest.split(".") if is_nested else [rest])]
    return None


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yields an annotation and the parts that it combines by `|` or Annotated."""
    yield annotation
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for side in get_args(annotation):
            yield from _alternatives(side)


def _set_value(values: Mapping[str, Any], path: Sequence[Any], value: Any) -> dict[str, Any]:
    name, *rest = path
    if not rest:
        return {**values, name: value}
    inner: Any = values.get(name)
    if isinstance(rest[0], int):
        index, *below = rest
        entry = _set_value(inner[index], below, value) if below and isinstance(inner[index], Mapping) else value
        return {**values, name: [*inner[:index], entry, *inner[index + 1 :]]}
    if inner is not None and not isinstance(inner, Mapping):
        return dict(values)  # validation reports a section that is no mapping
    return {**values, name: _set_value(inner or {}, rest, value)}


def read_entry(file: Path, entrypoint: str, name: str | None = None) -> dict[str, Any]:
    """Returns the `parameters` of the file's entry for the flow with this entrypoint, which include `recipe`.

    Raises UserError if the file cannot be read, has no such entry, or has several and `name` is None.
    """
    entries = read_entries(file)
    candidates = {entry.get("name"): entry for entry in entries if entry.get("entrypoint") == entrypoint}
    all_entries = ", ".join(f"{entry.get('name')} ({entry.get('entrypoint')})" for entry in entries) or "none"
    if not candidates:
        raise UserError.of("recipe", str(file), f"no entry with `entrypoint: {entrypoint}`; entries: {all_entries}.")
    if name is None and len(candidates) > 1:
        choices = ", ".join(map(str, candidates))
        raise UserError.of(
            "recipe", str(file), f"several entries deploy {entrypoint}: choose one by --entry, of {choices}."
        )
    if name is not None and name not in candidates:
        raise UserError.of(
            "recipe",
            str(file),
            f"no entry {name!r} for {entrypoint}; entries: {all_entries}.{nearest(name, map(str, candidates))}",
        )
    chosen = candidates[name] if name is not None else next(iter(candidates.values()))
    parameters = chosen.get("parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("recipe"), dict):
        raise UserError.of(
            "recipe", str(file), f"entry {chosen.get('name')!r} has no `parameters.recipe` with the fields of a recipe."
        )
    if not isinstance(parameters.get("overrides", {}), dict):
        raise UserError.of(
            "recipe", str(file), f"entry {chosen.get('name')!r}: `parameters.overrides` maps dotted names to values."
        )
    return parameters


def read_entries(file: Path) -> list[dict[str, Any]]:
    """Returns the entries of a deployment file. Raises UserError if it cannot be read or is no deployment file."""
    document = read_yaml(file)
    entries = document.get("deployments") if isinstance(document, dict) else None
    if entries is None and isinstance(document, dict) and len({"task", "data", "model"} & document.keys()) > 1:
        entry = f"- {{name: NAME, entrypoint: {ENTRYPOINT}, parameters: {{recipe: …}}}}"
        message = f"is a recipe alone. Make it the recipe of an entry `{entry}` below `deployments:`, as in "
        raise UserError.of("recipe", str(file), f"{message}deployments/demo.yaml.")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError.of("recipe", str(file), "not a Prefect deployment file: it needs a list `deployments:`.")
    return entries


def read_yaml(file: Path, read: Callable[[str], bytes] | None = None) -> Any:
    """Returns the content of a YAML file, whose bytes `read` may return. Raises UserError if it cannot be read; for a
    syntax error with its line."""
    try:
        content = file.read_bytes() if read is None else read(str(file))
        return yaml.load(content.decode("utf-8"), _Loader)
    except FileNotFoundError:
        others = [str(other) for pattern in ("*.yaml", "*.yml") for other in file.parent.glob(pattern)]
        raise UserError.of("recipe", str(file), f"no such file.{nearest(str(file), others)}") from None
    except OSError as error:
        raise UserError.of("recipe", str(file), f"cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError.of("recipe", str(file), f"is not UTF-8 text (byte {error.start}).") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise UserError.of("recipe", where, f"is not YAML: {error.problem}.") from None
    except RecursionError:
        raise UserError.of("recipe", str(file), "is not YAML that can be read: its brackets are too deep.") from None
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # a date that does not exist, or is none
        raise UserError.of("recipe", str(file), f"is not YAML: {error}.") from None
