"""Blocks cast to the task type's columns, filtered and limited. Rows with values that do not convert are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_columns import (
    NESTED,
    Wrong,
    from_arrow,
    from_json,
    half_character_problem,
    is_list,
    plain,
    split_cells,
    texts_as_json,
    with_label_names,
)
from training.data.filtering import filter_mask
from training.data.ipc_files import IMAGES_IN_BLOCK
from training.data.mojibake import is_single_byte, misread_texts
from training.data.readers import Block, MissingColumns
from training.data.row_dicts import BOOLEANS, WHOLE_NUMBER
from training.data.row_problems import RowProblem, shorten
from training.problems import Problem, UserError
from training.recipe.column_types import Form, module_of
from training.recipe.filters import Filter, parse_filter
from training.recipe.source_columns import SourceColumns, StoredColumn

if TYPE_CHECKING:
    from training.recipe.column_types import Column, Mask

UNCODED_TYPES: Mapping[Form, pa.DataType] = {
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "label": pa.string(),
    "labels": pa.list_(pa.string()),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "value": pa.string(),
    "content": pa.string(),
    "image": pa.string(),
}
"""The types of columns while labels are still names."""
ARROW = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
LARGEST_NUMBER = float(np.finfo(np.float32).max)
"""The largest number that a model computes with."""
_THOUSANDS = (r"^\s*[+-]?[1-9]\d{0,2}\.\d{3}\s*$", r"^\s*[+-]?\d{1,3}\s*$", r"^\s*$")
"""Patterns of a number with one point that may separate thousands, of one below 1,000, and of none."""
_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


@dataclass(frozen=True)
class CastBlock:
    """A block with the task type's columns in the types of UNCODED_TYPES, null for missing values."""

    block: Block
    filtered: int
    """The number of rows that the filter removed."""


def cast_blocks(blocks: Iterable[Block], wanted: SourceColumns) -> Iterator[CastBlock]:
    """Casts, filters and limits blocks as the recipe defines.

    Raises UserError for columns of a type that the task type does not take, and for an invalid comparison in the
    filter; after the last block, MissingColumns for columns that a file of mappings lacks.
    """
    data = wanted.data
    row_filter = parse_filter(data.filter) if data.filter else None
    remaining = data.limit
    column_problems: dict[str, tuple[Problem, ...]] = {}
    for block in small_blocks(blocks, wanted):
        column_problems[block.where] = block.column_problems
        cast = _cast_block(block, wanted, row_filter, remaining)
        if remaining is not None:
            remaining -= cast.block.rows.num_rows
        yield cast
        if remaining == 0:
            break
    if files := [where for where, problems in column_problems.items() if problems]:
        raise MissingColumns([problem for where in files for problem in column_problems[where]], files)


def small_blocks(blocks: Iterable[Block], wanted: SourceColumns) -> Iterator[Block]:
    """The same blocks, cut so that the images of one fit into memory if rows have images."""
    if not wanted.has_images:
        yield from blocks
        return
    for block in blocks:
        yield from block.parts(IMAGES_IN_BLOCK)


def convert_block(block: Block, wanted: SourceColumns) -> tuple[pa.RecordBatch, list[RowProblem]]:
    """Returns all rows of a block, converted as the recipe defines, with null for values that do not convert; and the
    first problem of each row that has one.

    Raises UserError for columns of a type that the task type does not take.
    """
    plain_columns = [plain(column) for column in block.rows.columns]
    rows = pa.RecordBatch.from_arrays(plain_columns, names=block.rows.schema.names)
    problems: dict[int, RowProblem] = {}
    for problem in block.row_problems:
        problems.setdefault(problem.row, problem)
    _need_casts(rows.schema, wanted, block.where)
    for name in rows.schema.names:
        for convert in (_decode, _cast, _parse_nested, _read_images):
            column, problems_by_place = convert(name, rows.column(name), wanted, block)
            for place, description in problems_by_place.items():
                number = int(block.numbers[place])
                problems.setdefault(number, RowProblem(number, *description))
            rows = rows.set_column(rows.schema.names.index(name), name, column)
    _need_types(rows.schema, wanted, block.where)
    return rows, list(problems.values())


def _cast_block(block: Block, wanted: SourceColumns, row_filter: Filter | None, remaining: int | None) -> CastBlock:
    rows, problems = convert_block(block, wanted)
    numbers, remarks = block.numbers, (*block.remarks, *_thousands(block, wanted))
    if problems:
        is_valid = np.isin(numbers, [problem.row for problem in problems], invert=True)
        rows, numbers = rows.filter(pa.array(is_valid)), numbers[is_valid]
    mask = np.ones(rows.num_rows, bool) if row_filter is None else mask_of(row_filter, rows, block.where)
    places = np.flatnonzero(mask)
    if remaining is not None and len(places) >= remaining:
        # Rows behind the last kept row are not read, so their problems do not count.
        mask, places = mask[: places[remaining - 1] + 1], places[:remaining]
        problems = [problem for problem in problems if problem.row <= numbers[places[-1]]]
        remarks = tuple(remark for remark in remarks if remark.row <= numbers[places[-1]])
    if len(places) < rows.num_rows:
        rows, numbers = rows.take(pa.array(places)), numbers[places]
    # A cast value is a label, not the index of one.
    names = () if wanted.labels is None or wanted.labels.source_name in wanted.data.cast else block.label_names
    of_split = rows.column(wanted.split_column) if wanted.split_column is not None else None
    arrays = {column.name: to_stored_type(rows.column(column.source_name), column, names) for column in wanted.columns}
    slices = block.slices
    if slices and len(numbers) < len(block.numbers):
        is_kept = pa.array(np.isin(block.numbers, numbers, assume_unique=True))
        slices = {name: values.filter(is_kept) for name, values in slices.items()}
    rows = pa.RecordBatch.from_pydict(arrays)
    block = replace(
        block,
        rows=rows,
        numbers=numbers,
        row_problems=tuple(problems),
        remarks=remarks,
        slices=slices,
        label_names=names,
        split_values=of_split,
    )
    return CastBlock(block, len(mask) - len(places))


def mask_of(row_filter: Filter, rows: pa.RecordBatch, where: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns the rows that meet the filter. Raises UserError for a comparison that a column's type does not allow."""
    try:
        mask: np.ndarray[Any, np.dtype[np.bool_]] = filter_mask(row_filter, rows).to_numpy(zero_copy_only=False)
    except ValueError as error:
        raise UserError.of("data", "data.filter", f"{where}: {error}") from error
    return mask


def _decode(name: str, column: pa.Array, wanted: SourceColumns, block: Block) -> tuple[pa.Array, Wrong]:
    """Decodes bytes."""
    if not any(check(column.type) for check in _BYTES) or wanted.form_of(name) == "image":
        return column, {}
    decoded, invalid = decode_texts(column)
    encoding = wanted.data.encoding
    garbled = misread_texts(decoded, encoding) if is_single_byte(encoding) else {}
    wrong: Wrong = {
        place: ("encoding", f"is UTF-8, not {encoding}", f" (column {name!r}: {shorten(meant)})")
        for place, meant in garbled.items()
    }
    if block.spelt and wanted.data.source != "csv":  # Python texts, which were decoded before
        return decoded, wrong | dict.fromkeys(invalid, half_character_problem(name))
    description = f"is not {'UTF-8' if encoding == 'utf-8' else encoding} text"
    return decoded, wrong | {place: ("encoding", description, f" (column {name!r})") for place in invalid}


def _cast(name: str, column: pa.Array, wanted: SourceColumns, block: Block) -> tuple[pa.Array, Wrong]:
    """Casts a column, if the recipe or the task type requires it. An empty text becomes a missing value."""
    if name not in wanted.casts or not _is_cast(column.type, to := ARROW[wanted.casts[name]]):
        return column, {}
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), to), {}
    values = column
    if to != pa.string() and any(check(column.type) for check in _TEXT):
        values = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
        if to == pa.int64():  # as for JSON: Arrow itself reads 0x1F as a number, and not +5
            is_number = pc.match_substring_regex(values, f"^{WHOLE_NUMBER.pattern}$")
            digits = pc.replace_substring_regex(pc.utf8_ltrim(values, "+"), r"\..*", "")
            values = pc.if_else(is_number, digits, "no number")
    cast, invalid = _convert(values, to, _cast_fails(to))
    if pa.types.is_temporal(values.type) and to == pa.string():  # Arrow does not raise here but writes a text about it
        failed = pc.starts_with(cast, "<value out of range").fill_null(False)
        invalid = sorted({*invalid, *pc.indices_nonzero(failed).to_pylist()})
    beyond: Wrong = {}
    if wanted.form_of(name) == "number":
        invalid = sorted({*invalid, *pc.indices_nonzero(pc.invert(pc.is_finite(cast))).to_pylist()})
        description = f"holds a number beyond ±{LARGEST_NUMBER:.3g}, the range of 32-bit floats, in column {name!r}"
        places = pc.indices_nonzero(pc.greater(pc.abs(cast), LARGEST_NUMBER)).to_pylist()
        beyond = {place: ("type", description, f": {_format_value(column[place])}") for place in places}
    if to == pa.bool_() and not pa.types.is_boolean(values.type):  # Arrow takes any number for true
        spelt = pc.utf8_lower(values.cast(pa.float64(), safe=False).cast(pa.string()) if _is_number(values) else values)
        known = pc.is_in(spelt, value_set=pa.array([*BOOLEANS]))
        invalid = sorted({*invalid, *pc.indices_nonzero(pc.and_(values.is_valid(), pc.invert(known))).to_pylist()})
    description = f"holds no {wanted.cast_in_words(name)} in column {name!r}"
    return cast, beyond | {place: ("type", description, f": {_format_value(column[place])}") for place in invalid}


def _thousands(block: Block, wanted: SourceColumns) -> Iterator[RowProblem]:
    """Numbers of a text column with a point that may separate thousands: three digits follow every point, and numbers
    without a point are below 1,000, as in `2.155` and `6`."""
    if block.spelt and wanted.data.source != "csv":  # the decimal points of JSON
        return
    for name in (name for name in block.rows.schema.names if wanted.casts.get(name) == "float64"):
        column = plain(block.rows.column(name))
        if not any(check(column.type) for check in _BYTES):
            continue
        grouped, small, blank = (pc.match_substring_regex(column, pattern) for pattern in _THOUSANDS)
        known = pc.or_(pc.or_(grouped, small), blank)
        if pc.all(known).as_py() and pc.any(small).as_py() and (places := pc.indices_nonzero(grouped).to_pylist())[1:]:
            description = f"holds a number in column {name!r} whose point may separate thousands"
            for place in places:
                text = column[place].as_py().decode()
                value = f": {text!r} is read as {float(text):g}, next to numbers without a point"
                yield RowProblem(int(block.numbers[place]), "thousands", description, value)


def _is_number(column: pa.Array) -> bool:
    return pa.types.is_integer(column.type) or pa.types.is_floating(column.type)


def _format_value(value: pa.Scalar) -> str:
    try:
        return shorten(value.as_py())
    except (ValueError, OverflowError, LookupError):  # Python has no object for the time or its zone
        return f"a {value.type} out of range"


def _parse_nested(name: str, column: pa.Array, wanted: SourceColumns, block: Block) -> tuple[pa.Array, Wrong]:
    """Converts lists, and values to their JSON."""
    if (form := wanted.form_of(name)) is None or form not in NESTED:
        return column, {}
    separator = wanted.data.label_separator if form == "labels" else None
    is_json = block.spelt and wanted.data.source != "csv"
    if separator is not None and not is_json and any(check(column.type) for check in _TEXT):
        return split_cells(separator, column, name)
    if form == "content" and block.spelt and not is_json:
        column = texts_as_json(column)
    if block.spelt:
        return from_json(column, name, form, separator)
    return from_arrow(column, name, form, block.label_names)


def _read_images(name: str, column: pa.Array, wanted: SourceColumns, block: Block) -> tuple[pa.Array, Wrong]:
    """Converts paths of images, their bytes, and objects of both to the base64 of the files."""
    if wanted.form_of(name) != "image":
        return column, {}
    read: tuple[pa.Array, Wrong] = module_of("image").read_images(
        column, name, block.image_folder or wanted.image_folder
    )
    return read


def _convert(column: pa.Array, to: pa.DataType, is_bad: Callable[[Any], bool]) -> tuple[pa.Array, list[int]]:
    """Returns the column in another type, null where a value does not convert, and the positions of these values."""
    try:
        return column.cast(to), []
    except pa.ArrowException:
        is_invalid = np.fromiter((is_bad(value) for value in column), bool, len(column))
        valid = pc.if_else(pa.array(is_invalid), pa.scalar(None, column.type), column)
        # A column of an unknown time zone does not cast even if all its values are null.
        cast = pa.nulls(len(valid), to) if is_invalid.all() else valid.cast(to)
        return cast, np.flatnonzero(is_invalid).tolist()


def decode_texts(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """Returns bytes as texts, null where they are not UTF-8, and the positions of these."""
    return _convert(column, pa.string(), _decoding_fails)


def _decoding_fails(value: pa.Scalar) -> bool:
    try:
        return value.is_valid and value.as_py().decode() is None
    except UnicodeDecodeError:
        return True


def _cast_fails(to: pa.DataType) -> Callable[[pa.Scalar], bool]:
    def fails(value: pa.Scalar) -> bool:
        try:
            return value.is_valid and value.cast(to) is None
        except pa.ArrowException:
            return True

    return fails


def _possible_casts(column_type: pa.DataType) -> list[str]:
    """Returns the types that columns of a type can be cast to."""
    return [name for name, to in ARROW.items() if _is_cast(column_type, to)]


def _is_cast(column_type: pa.DataType, to: pa.DataType) -> bool:
    if any(check(column_type) for check in (*_TEXT, *_BYTES)):
        return True
    if pa.types.is_dictionary(column_type):  # dictionaries of single values were decoded before
        return False
    try:
        pa.nulls(0, column_type).cast(to)
    except pa.ArrowException:
        return False
    return True


def _need_casts(schema: pa.Schema, wanted: SourceColumns, where: str) -> None:
    """Raises UserError for columns that do not cast as the recipe requires."""
    problems = []
    for name, to in wanted.data.cast.items():
        if name in schema.names and to not in (possible := _possible_casts(schema.field(name).type)):
            advice = f"choose {' or '.join(possible)}, or" if possible else "take another column, or"
            message = (
                f"column {name!r} of {where} is of type {schema.field(name).type}, which does not convert to {to}: "
                f"{advice} convert it in the source."
            )
            problems.append(Problem(kind="data", where=f"data.cast.{name}", message=message))
    if problems:
        raise UserError(problems)


def to_stored_type(values: pa.Array, column: StoredColumn, names: tuple[str, ...]) -> pa.Array:
    """Returns a column as it is stored; whole-number labels become the source's names for them."""
    if column.form == "label":
        values = with_label_names(values, names)
    values = values.cast(UNCODED_TYPES[column.form], safe=False)
    if column.may_be_empty and values.null_count and column.form in ("text", "texts"):
        values = pc.coalesce(values, pa.scalar("" if column.form == "text" else [], values.type))
    return values


def _need_types(schema: pa.Schema, wanted: SourceColumns, where: str) -> None:
    """Raises UserError for columns of a type that the task type does not take."""
    problems = []
    for column in wanted.columns:
        if column.source_name not in schema.names:  # an optional one, in a file to predict
            continue
        column_type = schema.field(column.source_name).type
        if not _fits(column_type, column.form):
            name = column.source_name
            message = f"column {name!r} of {where} is of type {column_type}: it must hold {_NEEDED[column.form]}"
            is_number = pa.types.is_floating(column_type) or pa.types.is_decimal(column_type)
            cast = "int64" if column.form == "label" and is_number else "string"
            if column.form in ("text", "label") and cast in _possible_casts(column_type):
                message += f"; to convert it, set data.cast.{name}: {cast}"
            problems.append(Problem(kind="data", where=column.field, message=f"{message}."))
    if problems:
        raise UserError(problems)


_NEEDED: Mapping[Form, str] = {
    "text": "text",
    "texts": "lists of text",
    "label": "text or whole numbers",
    "labels": "lists of text or of whole numbers",
    "number": "numbers",
    "boolean": "true or false",
    "value": "values that JSON can write",
    "content": "texts or lists of messages",
    "image": "paths of images, their bytes, or objects of bytes and path",
}


def _fits(column_type: pa.DataType, form: Form) -> bool:
    if form in ("texts", "labels"):
        return is_list(column_type) and pa.types.is_string(column_type.value_type)
    if form == "number":
        return pa.types.is_floating(column_type) or pa.types.is_integer(column_type) or pa.types.is_null(column_type)
    if form == "boolean":
        return pa.types.is_boolean(column_type) or pa.types.is_null(column_type)
    is_discrete = pa.types.is_integer(column_type) or pa.types.is_boolean(column_type)
    return any(check(column_type) for check in _TEXT) or (form == "label" and is_discrete)


Values = tuple[Any, ...]
"""The model's inputs of a row."""


class TaskColumns(Protocol):
    """The part of a task type that rows to predict depend on: see training.task_types.task_type."""

    @property
    def columns(self) -> Mapping[str, Column]: ...

    def row_problems_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]: ...


def to_batch(task_type: TaskColumns, names: Iterable[str], rows: Sequence[Values]) -> pa.RecordBatch:
    """The rows as a record batch. `names` are the task type's columns."""
    types = {name: UNCODED_TYPES[task_type.columns[name].form] for name in names}
    columns = [pa.array([row[place] for row in rows], type_) for place, type_ in enumerate(types.values())]
    return pa.RecordBatch.from_arrays(columns, names=[*types])
