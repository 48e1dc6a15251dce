"""Filters of training/recipe/filters.py, evaluated on rows.

As in SQL, a missing value is neither equal nor unequal to any value: only `is None` selects its rows.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from training.problems import nearest
from training.recipe.filters import CASTS, Filter, is_value

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}


def filter_mask(row_filter: Filter, rows: pa.Table | pa.RecordBatch) -> pa.BooleanArray:
    """Whether each row is used: true or false, never missing.

    Raises ValueError if a column is absent, or if its type does not compare with the value in the filter.
    """
    mask = _evaluate(row_filter.tree, rows).fill_null(False)
    return mask.combine_chunks() if isinstance(mask, pa.ChunkedArray) else mask


def _evaluate(node: ast.expr, rows: Any) -> Any:
    """Returns the value of a condition for each row: true, false or missing."""
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
        column, value = (right_node, left_node) if is_value(left_node) else (left_node, right_node)
        name, kind = ast.unparse(column), (right if column is right_node else left).type
        if isinstance(column, ast.Call):
            next_step = "it is a number, so write a number"
        elif is_value(value):
            next_step = f"set data.cast.{name}: {CASTS[type(ast.literal_eval(value))]}, or write a value of its type"
        else:
            next_step = "set data.cast of one of them to the type of the other"
        raise ValueError(
            f"column {name!r} is {kind} and does not compare with {ast.unparse(value)}: {next_step} ({error})."
        ) from error


def _operand(node: ast.expr, rows: Any) -> Any:
    """Returns a column, the lengths of its texts, or a value."""
    if is_value(node):
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
