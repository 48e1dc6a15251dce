"""The expressions of `data.filter`, the condition for rows to be used.

    stars >= 4 and language in ("en", "de") and not text == ""

The syntax is a part of Python's. Names are columns; texts, numbers, True and False are values. Comparisons: ==, !=, <,
<=, >, >= (also chained, `1 <= stars <= 3`), `in` and `not in` with a list of values or, for text, with a column
(`"good" in review`), `is None` and `is not None`. They are joined by `and`, `or`, `not` and parentheses. A boolean
column may stand alone, and `len(review)` is the number of characters. Nothing is ever called.

As in SQL, a missing value is neither equal nor unequal to anything: only `is None` selects such rows.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
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
# Other languages' spellings, and Python's.
_FOREIGN = {
    "=": "==",
    "<>": "!=",
    "=>": ">=",
    "=<": "<=",
    "!": "not",
    "&": "and",
    "|": "or",
    "~": "not",
    "true": "True",
    "false": "False",
    "null": "None",
    "none": "None",
    **{word.upper(): word for word in ("and", "or", "not", "in", "is")},
}
_KINDS = {str: "text", int: "number", float: "number", bool: "truth"}
_LARGEST = 2**63


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

        try:
            found = _truth(self._tree, rows).fill_null(False)
        except pa.ArrowException as error:
            raise ValueError(f"{self.text!r} cannot be computed: {error}") from error
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def parse_filter(text: str) -> Filter:
    """The filter in this text.

    Raises ValueError with the first wrong word, its position in the text (characters, from 1), and what is allowed.
    """
    text = " ".join(text.splitlines()).strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on the escapes in a literal
            tree = ast.parse(text, mode="eval").body
        columns = tuple(dict.fromkeys(_columns_of_condition(text, tree)))
    except SyntaxError as error:
        raise _misspelt(text, error) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"a filter of {len(text):,} characters is nested too deeply: {ALLOWED}.") from None
    return Filter(text, columns, tree)


# Syntax


def _columns_of_condition(text: str, node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _columns_of_condition(text, part)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            yield from _columns_of_condition(text, part)
        case ast.Compare(left=left, ops=ops, comparators=others):
            for one, op, other in zip([left, *others], ops, others, strict=False):
                yield from _columns_of_comparison(text, one, op, other)
        case ast.Name():
            yield _column(text, node)
        case _:
            raise _wrong(text, node)


def _columns_of_comparison(text: str, one: ast.expr, op: ast.cmpop, other: ast.expr) -> Iterator[str]:
    if isinstance(op, ast.Is | ast.IsNot):
        if not (isinstance(other, ast.Constant) and other.value is None and isinstance(one, ast.Name)):
            raise _wrong(text, other, "`is` and `is not` are for None: compare values by == and !=")
        yield _column(text, one)
    elif isinstance(op, ast.In | ast.NotIn) and isinstance(other, ast.Tuple | ast.List):
        kinds = {_kind_of_value(text, entry) for entry in other.elts}
        if len(kinds) != 1:
            raise _wrong(text, other, "list values of one kind, such as (1, 2) or ('a', 'b')")
        yield _column(text, one)
    elif isinstance(op, ast.In | ast.NotIn):
        if not (isinstance(one, ast.Constant) and isinstance(one.value, str) and isinstance(other, ast.Name)):
            raise _wrong(text, other, "after `in` write a list of values, such as ('a', 'b')")
        yield _column(text, other)
    else:
        sides = [side for side in (one, other) if not _is_value(side)]
        for side in (one, other):
            if side not in sides:
                _kind_of_value(text, side)
        if not sides:
            raise _wrong(text, one, "one side of a comparison must be a column, whose name has no quotes")
        for side in sides:
            yield _column(text, side)


def _column(text: str, node: ast.expr) -> str:
    """The column behind a name or the length of one."""
    match node:
        case ast.Name(id=name) if name not in _FOREIGN:
            return name
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name() as inner], keywords=[]):
            return _column(text, inner)
        case ast.Attribute() | ast.BinOp() | ast.Subscript():
            raise _wrong(text, node, "a column whose name is no plain word is given one by data.rename")
        case _:
            raise _wrong(text, node)


def _is_value(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
    return isinstance(node, ast.Constant)


def _kind_of_value(text: str, node: ast.expr) -> str:
    if not _is_value(node):
        raise _wrong(text, node, "here stands a value: a text in quotes, a number, True or False")
    value = _value(node)
    if value is None:
        raise _wrong(text, node, "write `is None` or `is not None`")
    if type(value) not in _KINDS or (isinstance(value, int) and not -_LARGEST <= value < _LARGEST):
        raise _wrong(text, node, "a value is a text in quotes, a number of at most 64 bits, True or False")
    return _KINDS[type(value)]


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(node)


def _wrong(text: str, node: ast.expr, instead: str | None = None) -> ValueError:
    word = ast.get_source_segment(text, node) or text
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        instead = f"write {'and' if isinstance(node.op, ast.BitAnd) else 'or'} between two comparisons"
    if isinstance(node, ast.Name):
        instead = f"write {_FOREIGN[node.id]}" if node.id in _FOREIGN else instead
    place = len(text.encode()[: node.col_offset].decode()) + 1
    return ValueError(f"{word!r} at character {place} of {text!r} is not understood: {instead or ALLOWED}.")


def _misspelt(text: str, error: SyntaxError) -> ValueError:
    place = len(text) + 1 if error.offset == 0 else error.offset or 1  # 0: at the end
    found = re.match(r"\w+|<>|=>|=<|\S", text[place - 1 :])
    if found is None:
        return ValueError(f"{text!r} breaks off: {ALLOWED}.")
    word = found.group()
    if word in _FOREIGN:
        instead = f"write {_FOREIGN[word]}"
    elif "unterminated" in error.msg:
        instead = "the text that begins here is not closed"
    elif "never closed" in error.msg:
        instead = "what is opened here is not closed"
    elif word == "`" or keyword.iskeyword(word):
        instead = f"{ALLOWED}. A column of such a name is given another by data.rename"
    else:
        instead = ALLOWED
    return ValueError(f"{word!r} at character {place} of {text!r} is not understood: {instead}.")


# Evaluation


def _truth(node: ast.expr, rows: Any) -> Any:
    """The value of a valid condition for each row: true, false or missing."""
    import pyarrow.compute as pc

    match node:
        case ast.BoolOp(op=op, values=parts):
            join: Callable[[Any, Any], Any] = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            return reduce(join, (_truth(part, rows) for part in parts))
        case ast.UnaryOp(operand=part):
            return pc.invert(_truth(part, rows))
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            return reduce(pc.and_kleene, (_compared(one, op, other, rows) for one, op, other in pairs))
    alone = _Side(node, rows)
    if alone.kind not in ("truth", "nothing"):
        mend = f"set data.cast.{alone.name}: bool, or compare it with a value"
        raise ValueError(f"{alone.described} and stands as a condition of its own: {mend}.")
    return alone.value.cast("bool")


def _compared(one: ast.expr, op: ast.cmpop, other: ast.expr, rows: Any) -> Any:
    import pyarrow.compute as pc

    negated = isinstance(op, ast.NotIn | ast.IsNot)
    if isinstance(op, ast.Is | ast.IsNot):
        missing = pc.is_null(_Side(one, rows).value)
        return pc.invert(missing) if negated else missing
    if isinstance(op, ast.In | ast.NotIn) and isinstance(other, ast.Tuple | ast.List):
        equals = (_of_one_kind(one, entry, rows, "equal") for entry in other.elts)
        found = reduce(pc.or_kleene, equals)
        return pc.invert(found) if negated else found
    if isinstance(op, ast.In | ast.NotIn):
        within = _Side(other, rows)
        if within.kind != "text":
            raise ValueError(f"{within.described} and is searched for text: set data.cast.{within.name}: string.")
        found = pc.match_substring(within.value, _value(one))
        return pc.invert(found) if negated else found
    return _of_one_kind(one, other, rows, _COMPARISONS[type(op)])


def _of_one_kind(one: ast.expr, other: ast.expr, rows: Any, function: str) -> Any:
    """Compares a column with a value or a column of the same kind. Raises ValueError for other kinds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    left, right = _Side(one, rows), _Side(other, rows)
    if "nothing" in (left.kind, right.kind):
        return pa.nulls(rows.num_rows, pa.bool_())
    column, value = (left, right) if left.name else (right, left)
    mismatch = f"{column.described} and is compared with {value.as_value}"
    if column.kind == "time" and value.kind == "text" and not value.name:
        try:
            value.value, value.kind = value.value.cast(column.value.type), "time"
        except pa.ArrowInvalid as error:
            raise ValueError(f"{mismatch}: {error}.") from error
    if column.kind != value.kind or column.kind == "other":
        raise ValueError(f"{mismatch}: {_mend(column, value)}.")
    return pc.call_function(function, [left.value, right.value])


class _Side:
    """One side of a comparison: a column, the length of one, or a value."""

    def __init__(self, node: ast.expr, rows: Any) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.name = ""
        if _is_value(node):
            value = _value(node)
            self.value, self.kind = pa.scalar(value), _KINDS[type(value)]
            self.described = self.as_value = f"the {self.kind} {value!r}"
            return
        inner = node.args[0] if isinstance(node, ast.Call) else node
        assert isinstance(inner, ast.Name)  # parse_filter refuses everything else
        self.name = inner.id
        there = rows.schema.names
        if self.name not in there:
            message = f"there is no column {self.name!r}: there is {', '.join(there)}.{nearest(self.name, there)}"
            raise ValueError(message)
        self.value = rows.column(self.name)
        if pa.types.is_dictionary(self.value.type):
            self.value = self.value.cast(self.value.type.value_type)
        self.kind = _kind_of_type(self.value.type)
        self.described = f"column {self.name!r} is {self.value.type}"
        self.as_value = f"column {self.name!r}, which is {self.value.type}"
        if pa.types.is_string_view(self.value.type):
            self.value = self.value.cast(pa.large_string())
        if inner is not node:
            if self.kind not in ("text", "nothing"):
                raise ValueError(f"{self.described}, and len() is of text: set data.cast.{self.name}: string.")
            self.value, self.kind = pc.utf8_length(self.value.cast(pa.large_string())), "number"
            self.described, self.as_value = f"len({self.name}) is a number", f"len({self.name}), a number"


def _kind_of_type(stored: pa.DataType) -> str:
    """The kind of values that an Arrow type compares with; "nothing", a column of missing values, compares with all."""
    from pyarrow import types

    if types.is_string(stored) or types.is_large_string(stored) or types.is_string_view(stored):
        return "text"
    if types.is_boolean(stored):
        return "truth"
    if types.is_integer(stored) or types.is_floating(stored) or types.is_decimal(stored):
        return "number"
    if types.is_timestamp(stored) or types.is_date(stored):
        return "time"
    return "nothing" if types.is_null(stored) else "other"


def _mend(column: _Side, value: _Side) -> str:
    """The next step if a column does not compare with a value or with another column."""
    if column.kind == "other":
        return "a filter compares text, numbers, truths and times only"
    if column.kind == "text" and value.kind in ("number", "truth"):
        wanted = {"bool": "bool", "int64": "int64"}.get(str(value.value.type), "float64")
        return f"set data.cast.{column.name}: {wanted}"
    if value.name:
        return f"set data.cast.{value.name}: {'string' if column.kind == 'text' else 'float64'}"
    wanted = {"number": "a number", "truth": "True or False", "time": "a time, such as '2026-01-31'"}[column.kind]
    return f"write {wanted}" + (f", or set data.cast.{column.name}: string" if value.kind == "text" else "")
