"""The names that the installed DeepSpeed knows in its configuration, read from its source: importing it takes seconds.

DeepSpeed refuses an unknown name inside the groups that are pydantic models, once training has begun, and passes
over any other in silence.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_MODEL = "DeepSpeedConfigModel"
_GROUPS = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "bf16": "DeepSpeedBF16Config",
    "fp16": "DeepSpeedFP16Config",
    "comms_logger": "CommsLoggerConfig",
    "compile": "CompileConfig",
    "hybrid_engine": "HybridEngineConfig",
    "tensorboard": "TensorBoardConfig",
    "wandb": "WandbConfig",
    "csv_monitor": "CSVConfig",
    "comet": "CometConfig",
}
"""Groups of fields that are a pydantic model of DeepSpeed's; what is in others is not known by name."""


def unknown_names(config: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The dotted names in the configuration that DeepSpeed does not know, with those that it does know there.
    None where it is not installed."""
    known = _top_level() if config else frozenset()
    for name, value in config.items() if known else ():
        if name not in known:
            yield name, sorted(known)
        elif name in _GROUPS and isinstance(value, Mapping):
            yield from _unknown_in(_GROUPS[name], value, f"{name}.")


def _unknown_in(model: str, values: Mapping[str, Any], above: str) -> Iterator[tuple[str, list[str]]]:
    fields = _models().get(model)
    for name, value in values.items() if fields else ():
        assert fields is not None
        if name not in fields:
            yield above + name, sorted(fields)
        elif fields[name] and isinstance(value, Mapping):
            yield from _unknown_in(fields[name], value, f"{above}{name}.")


@functools.cache
def _sources() -> tuple[ast.Module, ...]:
    """The files in which DeepSpeed says what its configuration is; none where it is not installed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return ()
    root = Path(next(iter(spec.submodule_search_locations)))
    files = {path for pattern in ("*config*.py", "constants.py") for path in root.rglob(pattern)}
    inference = root / "inference"  # another program's configuration
    return tuple(ast.parse(path.read_bytes()) for path in sorted(files) if inference not in path.parents)


@functools.cache
def _models() -> dict[str, dict[str, str]]:
    """The pydantic models by their names: each field, its alias too, and the model that it holds, if any."""
    classes = {
        node.name: node
        for tree in _sources()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == _MODEL for base in node.bases)
    }
    return {name: dict(_fields(node, classes.keys())) for name, node in classes.items()}


def _fields(node: ast.ClassDef, models: Any) -> Iterator[tuple[str, str]]:
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        words = {word.id for word in ast.walk(line.annotation) if isinstance(word, ast.Name)}
        holds = next((model for model in models if model in words), "")
        yield line.target.id, holds
        for keyword in line.value.keywords if isinstance(line.value, ast.Call) else ():
            if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
                yield str(keyword.value.value), holds


@functools.cache
def _top_level() -> frozenset[str]:
    """Names that may stand at the top: those that DeepSpeed looks up in the configuration as a whole, and, for it does
    so by constants, all of these. Rather a few too many than one too few."""
    if not _sources():
        return frozenset()
    constants = {
        line.value.value
        for tree in _sources()
        for line in tree.body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
    }
    keys = [key for tree in _sources() for node in ast.walk(tree) for key in _looked_up(node)]
    found = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return frozenset(name for name in constants | found | _GROUPS.keys() if name.isidentifier())


def _looked_up(node: ast.AST) -> list[ast.expr]:
    """The key that this expression looks up in the configuration as a whole."""
    if isinstance(node, ast.Subscript) and _is_whole(node.value):
        return [node.slice]
    if isinstance(node, ast.Compare) and _is_whole(node.comparators[0]):
        return [node.left]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_whole(node.func.value):
        return node.args[:1]  # param_dict.get("name", default)
    return []


def _is_whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "param_dict"
