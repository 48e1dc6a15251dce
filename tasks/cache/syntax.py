"""Digest of a Python file's syntax, and the names of the modules that it imports.

The digest leaves out:

- comments, blank lines and layout;
- every statement that is only a string: the docstrings of modules, classes and functions, and those of attributes;
- texts for people, in this project's own modules alone: texts in a `raise` statement; texts given as `message=`, under
  the key "message", or to a method `warning` or `note`; and texts of a local variable that is used in no other place.

All other texts count, such as the name of a loss. In user code only the first two are left out: a variable `message`
may be a row of a chat there.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

_TEXT_METHODS = ("warning", "note")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def digest_of_syntax(tree: ast.Module, *, has_messages: bool) -> str:
    """sha256 of the syntax, hex; `has_messages` leaves out texts for people, too. Changes the tree."""
    if has_messages:
        for function in _outermost_functions(tree):
            _drop_message_variables(function)
        _WithoutMessages(tree).visit(tree)
    for node in ast.walk(tree):
        _drop_string_statements(node)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def imports(tree: ast.AST, package: str) -> Iterator[str]:
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


def _drop_string_statements(node: ast.AST) -> None:
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        if isinstance(statements, list):
            kept = [one for one in statements if not (isinstance(one, ast.Expr) and _is_text(one.value))]
            # `pass` and a docstring mean the same where nothing else stands.
            code = [one for one in kept if not isinstance(one, ast.Pass)]
            setattr(node, block, code or ([ast.Pass()] if block == "body" else []))


def _outermost_functions(tree: ast.Module | ast.ClassDef) -> Iterator[_Function]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _outermost_functions(node)
        elif isinstance(node, _Function):
            yield node


def _message_fields(node: ast.AST) -> Iterable[ast.expr]:
    """The expressions directly below the node that hold texts for people."""
    if isinstance(node, ast.Raise):
        return [] if node.exc is None else [node.exc]
    if isinstance(node, ast.Call):
        named = [keyword.value for keyword in node.keywords if keyword.arg == "message"]
        is_warning = isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_METHODS
        return named + (node.args if is_warning else [])
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "message"]
    return []


def _drop_message_variables(function: _Function) -> None:
    """Removes what gives a text to a local variable that only messages use."""
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Global | ast.Nonlocal) for node in nodes):
        return
    in_messages = {
        id(name) for node in nodes for text in _message_fields(node) for name in ast.walk(text) if _is_read(name)
    }
    used = {node.id for node in nodes if _is_read(node) and id(node) in in_messages}
    used -= {node.id for node in nodes if _is_read(node) and id(node) not in in_messages}

    def is_message(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AugAssign):
            targets, value = [statement.target], statement.value
        else:
            return False
        return all(isinstance(target, ast.Name) and target.id in used for target in targets) and _is_text(value)

    for node in nodes:
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, block, None), list):
                setattr(node, block, [one for one in statements if not is_message(one)])


def _is_read(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _is_text(node: ast.expr) -> bool:
    """Whether it is a string, perhaps with values in it, or a sum of such."""
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
