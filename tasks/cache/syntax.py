"""Digest of a Python file's syntax, and the names of the modules that it imports.

The digest leaves out:

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
from collections.abc import Iterable, Iterator
from typing import Any

_TEXT_METHODS = ("warning", "note")


def digest_of_syntax(tree: ast.Module, *, has_messages: bool) -> str:
    """sha256 of the syntax, hex; `has_messages` leaves out messages, too. Changes the tree."""
    if has_messages:
        _WithoutMessages(tree).visit(tree)
    for node in ast.walk(tree):
        _drop_strings(node, has_messages)
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
