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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from training.problems import nearest

if TYPE_CHECKING:
    import pyarrow as pa

ALLOWED = (
    "a filter compares columns with values (==, !=, <, <=, >, >=, in, not in, is None, is not None) and joins that "
    "by and, or, not"
)
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
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
_CASTS = {str: "string", bool: "bool", int: "int64", float: "float64"}
"""The type in `data.cast` for a column that is compared with a value."""


@dataclass(frozen=True)
class Filter:
    """A parsed filter, made by `parse_filter`."""

    text: str
    columns: tuple[str, ...]
    """The columns that it reads, without repetition, in the order of first use."""
    _tree: ast.expr = field(repr=False, compare=False)

    def mask(self, rows: pa.Table | pa.RecordBatch) -> pa.BooleanArray:
        """Whether each row is used: true or false, never missing.

        Raises ValueError if a column is absent, or if its type does not compare with the value in the filter.
        """
        import pyarrow as pa

        mask = _evaluate(self._tree, rows).fill_null(False)
        return mask.combine_chunks() if isinstance(mask, pa.ChunkedArray) else mask


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


# Syntax


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
        columns = [side for side in (left, right) if not _is_value(side)]
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


def _is_value(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
    return isinstance(node, ast.Constant)


def _need_value(text: str, node: ast.expr) -> None:
    if isinstance(node, ast.Constant) and node.value is None:
        raise _not_understood(text, node, "write `is None` or `is not None`")
    if not _is_value(node) or type(ast.literal_eval(node)) not in _CASTS:
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


# Evaluation


def _evaluate(node: ast.expr, rows: Any) -> Any:
    """Returns the value of a condition for each row: true, false or missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    match node:
        case ast.BoolOp(op=op, values=parts):
            join: Callable[[Any, Any], Any] = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            return reduce(join, (_evaluate(part, rows) for part in parts))
        case ast.UnaryOp(operand=part):
            return pc.invert(_evaluate(part, rows))
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            return reduce(pc.and_kleene, (_compare(first, op, second, rows) for first, op, second in pairs))
    column = _operand(node, rows)
    if not (pa.types.is_boolean(column.type) or pa.types.is_null(column.type)):
        name = ast.unparse(node)
        next_step = f"set data.cast.{name}: bool, or compare it with a value"
        raise ValueError(f"column {name!r} is {column.type} and is no condition: {next_step}.")
    return column.cast("bool")


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr, rows: Any) -> Any:
    import pyarrow.compute as pc

    if isinstance(op, ast.Is):
        return pc.is_null(_operand(left, rows))
    if isinstance(op, ast.IsNot):
        return pc.is_valid(_operand(left, rows))
    if not isinstance(op, ast.In | ast.NotIn):
        return _apply(_COMPARISONS[type(op)], left, right, rows)
    if isinstance(right, ast.Tuple | ast.List):
        matches = reduce(pc.or_kleene, (_apply("equal", left, entry, rows) for entry in right.elts))
    else:
        matches = _apply("match_substring", right, left, rows)
    return pc.invert(matches) if isinstance(op, ast.NotIn) else matches


def _apply(function: str, left_node: ast.expr, right_node: ast.expr, rows: Any) -> Any:
    """Calls a function of Arrow with two columns or values. Raises ValueError if their types do not fit."""
    import pyarrow as pa
    import pyarrow.compute as pc

    left, right = _operand(left_node, rows), _operand(right_node, rows)
    if pa.types.is_null(left.type) or pa.types.is_null(right.type):
        return pa.nulls(rows.num_rows, pa.bool_())
    try:
        if function == "match_substring":
            return pc.match_substring(left, right.as_py())
        if pa.types.is_temporal(left.type) and isinstance(right, pa.StringScalar):
            right = right.cast(left.type)
        if pa.types.is_temporal(right.type) and isinstance(left, pa.StringScalar):
            left = left.cast(right.type)
        return pc.call_function(function, [left, right])
    except (pa.ArrowException, TypeError) as error:
        column, value = (right_node, left_node) if _is_value(left_node) else (left_node, right_node)
        name, kind = ast.unparse(column), (right if column is right_node else left).type
        if isinstance(column, ast.Call):
            next_step = "it is a number, so write a number"
        elif _is_value(value):
            next_step = f"set data.cast.{name}: {_CASTS[type(ast.literal_eval(value))]}, or write a value of its type"
        else:
            next_step = "set data.cast of one of them to the type of the other"
        raise ValueError(
            f"column {name!r} is {kind} and does not compare with {ast.unparse(value)}: {next_step} ({error})."
        ) from error


def _operand(node: ast.expr, rows: Any) -> Any:
    """Returns a column, the lengths of its texts, or a value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is_value(node):
        try:
            return pa.scalar(ast.literal_eval(node))
        except OverflowError as error:
            raise ValueError(f"{ast.unparse(node)} has more than 64 bits.") from error
    if isinstance(node, ast.Call):
        texts = _operand(node.args[0], rows)
        try:
            return pc.utf8_length(texts.cast(pa.large_string()) if pa.types.is_null(texts.type) else texts)
        except pa.ArrowException as error:
            name = ast.unparse(node.args[0])
            message = f"column {name!r} is {texts.type}, and len() is of text: set data.cast.{name}: string."
            raise ValueError(message) from error
    name, names = ast.unparse(node), rows.schema.names
    if name not in names:
        raise ValueError(f"there is no column {name!r}: there is {', '.join(names)}.{nearest(name, names)}")
    column = rows.column(name)
    value_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return column.cast(pa.large_string() if pa.types.is_string_view(value_type) else value_type)
