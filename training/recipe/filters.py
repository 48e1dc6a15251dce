"""The expressions of `data.filter`, the condition for rows to be used.

    stars >= 4 and language in ("en", "de") and not text == ""

The syntax is a part of Python's. Names are columns; texts, numbers, True and False are values. Comparisons: ==, !=, <,
<=, >, >= (also chained, `1 <= stars <= 3`), `in` and `not in` with a list of values or, for text, with a column
(`"good" in review`), `is None` and `is not None`. They are joined by `and`, `or`, `not` and parentheses. A boolean
column may stand alone, and `len(review)` is the number of characters. No other function can be called.

As in SQL, a missing value is neither equal nor unequal to any value: only `is None` selects its rows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ALLOWED = (
    "a filter compares columns with values (==, !=, <, <=, >, >=, in, not in, is None, is not None) and joins that "
    "by and, or, not"
)
# Spellings in other languages, and the Python equivalents.
_FOREIGN = {
    "=": "==",
    "<>": "!=",
    "!": "not",
    "&": "and",
    "|": "or",
    "true": "True",
    "false": "False",
    "null": "None",
    **{word.upper(): word for word in ("and", "or", "not", "in", "is")},
}
CASTS = {str: "string", bool: "bool", int: "int64", float: "float64"}
"""The type in `data.cast` for a column that is compared with a value."""


@dataclass(frozen=True)
class Filter:
    """A parsed filter, made by `parse_filter`."""

    text: str
    columns: tuple[str, ...]
    """The columns that it reads, without repetition, in the order of first use."""
    tree: ast.expr = field(repr=False, compare=False)
    """For training/data/filtering.py, which evaluates it."""


def parse_filter(text: str) -> Filter:
    """Returns the filter in this text.

    Raises ValueError with the first wrong word, its position in the text (characters, from 1), and the allowed syntax.
    """
    text = " ".join(text.splitlines()).strip()
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _syntax_error(text, error) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"a filter of {len(text):,} characters is nested too deeply: {ALLOWED}.") from None
    return Filter(text, tuple(dict.fromkeys(_columns_of_condition(text, tree))), tree)


def _columns_of_condition(text: str, node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _columns_of_condition(text, part)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            yield from _columns_of_condition(text, part)
        case ast.Compare(left=left, ops=ops, comparators=others):
            for first, op, second in zip([left, *others], ops, others, strict=False):
                yield from _columns_of_comparison(text, first, op, second)
        case ast.Name():
            yield _column(text, node)
        case _:
            raise _not_understood(text, node)


def _columns_of_comparison(text: str, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Iterator[str]:
    if isinstance(op, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Constant) and right.value is None and isinstance(left, ast.Name)):
            raise _not_understood(text, right, "`is` and `is not` are for None: compare values by == and !=")
        yield _column(text, left)
    elif isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List):
        for entry in right.elts:
            _need_value(text, entry)
        if not right.elts:
            raise _not_understood(text, right, "list values, such as ('a', 'b')")
        yield _column(text, left)
    elif isinstance(op, ast.In | ast.NotIn):
        if not (isinstance(left, ast.Constant) and isinstance(left.value, str) and isinstance(right, ast.Name)):
            raise _not_understood(text, right, "after `in` write a list of values, such as ('a', 'b')")
        yield _column(text, right)
    else:
        columns = [side for side in (left, right) if not is_value(side)]
        for side in (left, right):
            if side not in columns:
                _need_value(text, side)
        if not columns:
            raise _not_understood(text, left, "one side of a comparison must be a column, whose name has no quotes")
        for side in columns:
            yield _column(text, side)


def _column(text: str, node: ast.expr) -> str:
    """Returns the column of a name, or of `len` of a name."""
    match node:
        case ast.Name(id=name) if name not in _FOREIGN:
            return name
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name() as argument], keywords=[]):
            return _column(text, argument)
        case ast.Attribute() | ast.BinOp() | ast.Subscript():
            raise _not_understood(
                text, node, "a column whose name is no plain word needs another name: set data.rename"
            )
        case _:
            raise _not_understood(text, node)


def is_value(node: ast.expr) -> bool:
    """Whether a part of a filter is a text, a number, True, False or None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
    return isinstance(node, ast.Constant)


def _need_value(text: str, node: ast.expr) -> None:
    if isinstance(node, ast.Constant) and node.value is None:
        raise _not_understood(text, node, "write `is None` or `is not None`")
    if not is_value(node) or type(ast.literal_eval(node)) not in CASTS:
        raise _not_understood(text, node, "a value is a text in quotes, a number, True or False")


def _not_understood(text: str, node: ast.expr, instead: str = ALLOWED) -> ValueError:
    word = ast.get_source_segment(text, node) or text
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        instead = f"write {'and' if isinstance(node.op, ast.BitAnd) else 'or'} between two comparisons"
    if isinstance(node, ast.Name) and node.id in _FOREIGN:
        instead = f"write {_FOREIGN[node.id]}"
    place = len(text.encode()[: node.col_offset].decode()) + 1
    return ValueError(f"{word!r} at character {place} of {text!r} is not understood: {instead}.")


def _syntax_error(text: str, error: SyntaxError) -> ValueError:
    place = len(text) + 1 if error.offset == 0 else error.offset or 1  # 0: at the end
    match = re.match(r"\w+|<>|\S", text[place - 1 :])
    if match is None:
        return ValueError(f"{text!r} breaks off: {ALLOWED}.")
    word = match.group()
    instead = f"write {_FOREIGN[word]}" if word in _FOREIGN else f"{error.msg}; {ALLOWED}"
    return ValueError(f"{word!r} at character {place} of {text!r} is not understood: {instead}.")
