"""Rules of a recipe about its rows: their source, columns and splits."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from training.problems import nearest
from training.recipe.credentials import describe_secret
from training.recipe.data_fields import MIX, OF_MIXTURE, set_names
from training.recipe.field_types import SPLITS
from training.recipe.filters import parse_filter
from training.recipe.row_split import parse_gap, parse_time
from training.recipe.rules.column_rules import (
    columns_of,
    labels_are_named,
    one_role_each,
    required_columns,
    task_type_of,
)
from training.recipe.rules.rule import MODULE_AND_NAME, Rule, WrittenRecipe
from training.recipe.tables.formats import FORMATS
from training.recipe.tables.row_checks import ALWAYS_ERRORS, LEVELS

if TYPE_CHECKING:
    from training.recipe.column_types import Form

# Common encodings, for "Did you mean"; Python's other encodings are accepted too.
_ENCODINGS = (
    *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "ascii", "latin-1", "iso-8859-15"),
    *("cp1250", "cp1251", "cp1252", "mac-roman", "koi8-r"),
    *("shift-jis", "euc-jp", "euc-kr", "gbk", "gb18030", "big5"),
)
# Python codecs that are not file encodings.
_NOT_FILE_ENCODINGS = ("idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined", "utf-7")


def _has_source(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Rows have a source and a path, or several in a mixture."""
    without = {"data.source": MIX, "data.path": ""}
    for where, value in without.items():
        if written[where] != value:
            continue
        if where == "data.path" and written.is_written(where):
            yield where, "is empty: it takes text."
        elif written["data.mix"] is None:
            yield where, f"is missing: {written.describe(where)}"


def _data_source(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    source = written["data.source"]
    if source != "hub":
        if written["data.config"] is not None:
            yield "data.config", f"{written['data.config']!r} is for `source: hub` only; with {source}, set it to null."
        yield from revision(written, "data")
    path = written["data.path"]
    if source == "python" and not MODULE_AND_NAME.fullmatch(path):
        yield "data.path", f"{path!r} is not the name of a Python object: with `source: python`, write module:name."


def revision(written: WrittenRecipe, section: str) -> Iterator[tuple[str, str]]:
    """A section has a revision only if its source is the Hub."""
    # "main" is the default, so a Hub recipe that names it can be pointed at a folder by one override.
    if written[f"{section}.revision"] not in (None, "main"):
        source, revision = written[f"{section}.source"], written[f"{section}.revision"]
        yield f"{section}.revision", f"{revision!r} is for `source: hub` only; with {source}, set it to null."


def _filter(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if (text := written["data.filter"]) is not None:
        try:
            parse_filter(text)
        except ValueError as error:
            yield "data.filter", str(error)


def _label_separator(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    separator = written["data.label_separator"]
    if separator is not None and not any(column.form == "labels" for column in columns_of(written)):
        message = f"{separator!r} is for several labels in a row, and task {written['task']} has none: set it to null."
        yield "data.label_separator", message


def _label_names(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    names = written["data.label_names"] or []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "data.label_names", f"{name!r} is listed twice; each label is listed once."


def _corrections(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if (file := written["data.corrections"]) is None:
        return
    if not any(column.is_correctable for column in columns_of(written)):
        yield (
            "data.corrections",
            f"{file!r} is for rows with labels, and task {written['task']} has none: set it to null.",
        )


def _corpus(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if (file := written["data.corpus"]) is not None and task_type_of(written).corpus_column is None:
        message = f"{file!r} has documents for task embedding with anchors and positives, and task {written['task']} "
        yield "data.corpus", f"{message}with these options searches none: set it to null."


def _secrets(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    fields = ["data.path", "data.corrections", "data.corpus", "data.unlabelled"]
    fields += ["release.gate.must_hold.path"] if written["release.gate.must_hold"] is not None else []
    places = [(where, written[where]) for where in fields if written[where] is not None]
    for name, paths in (written["data.splits"] or {}).items():
        places += [(f"data.splits.{name}", value) for value in (paths if isinstance(paths, list) else [paths])]
    for where, value in places:
        if message := describe_secret(value, "recipes"):
            yield where, message


def _splits(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    splits, source = written["data.splits"], written["data.source"]
    if splits is None:
        return
    hints = {name: nearest(name, SPLITS) for name in splits if name not in SPLITS}
    for name, hint in hints.items():
        yield f"data.splits.{name}", f"no such split: choose from {', '.join(SPLITS)}.{hint}"
    if "train" not in splits and not any("'train'" in hint for hint in hints.values()):
        yield "data.splits.train", "is missing: training needs a train split."
    for name, value in splits.items():
        if name not in hints and isinstance(value, list) and source not in FORMATS:
            yield f"data.splits.{name}", f"{value} is for files only; with `source: {source}`, name one split."


def holds_out_test(written: WrittenRecipe) -> bool:
    """Whether rows of train become test if the source has no such split."""
    by_time = written.is_written("data.split.test_from") and written["data.split.test_from"] is not None
    return by_time or bool(written["data.test_size"])


def _split(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """The fields of data.split fit its `by`."""
    if written["data.split"] is None:
        return
    by, column = written["data.split.by"], written["data.split.column"]
    if by == "rows" and column is not None:
        yield "data.split.column", f"{column!r} has no effect with `by: rows`: leave it out, or set data.split.by."
    elif by != "rows" and column is None:
        yield "data.split.column", f"is missing: name the column with the {by} of each row."
    elif any(one.source_name == column and one.is_label for one in columns_of(written)):
        message = f"{column!r} is the column of labels, and no label would be in two splits: name another column."
        yield "data.split.column", message
    for name in ("validation_from", "test_from", "gap"):
        where = f"data.split.{name}"
        value = written[where]
        if value is not None and by != "time":
            yield where, f"{value!r} has no effect with `by: {by}`: leave it out, or set data.split.by: time."
        elif value is not None:
            try:
                parse_gap(value) if name == "gap" else parse_time(value)
            except ValueError as error:
                yield where, str(error)


def _split_times(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Validation begins before test, and a split begins either at a time or by its size."""
    if written["data.split"] is None or written["data.split.by"] != "time":
        return
    starts = {name: written[f"data.split.{name}_from"] for name in ("validation", "test")}
    for name, value in starts.items():
        size, default = written[f"data.{name}_size"], written.fields("data")[f"{name}_size"].get_default()
        if value is not None and size != default:
            yield f"data.split.{name}_from", f"{str(value)!r} contradicts data.{name}_size, {size:g}: leave one out."
    if None not in starts.values():
        validation, test = (parse_time(value) for value in starts.values())
        if "number" in (validation.kind, test.kind) and validation.kind != test.kind:
            message = (
                f"{starts['test']} and validation_from, {starts['validation']}, are not both times: write them alike."
            )
            yield "data.split.test_from", message
        elif test.value <= validation.value:
            message = f"{starts['test']} is not after validation_from, {starts['validation']}: test follows validation."
            yield "data.split.test_from", message


def _held_out(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    sizes = {name: written[f"data.{name}_size"] for name in ("validation", "test")}
    by = written["data.split.by"] if written.is_written("data.split.by") else "rows"
    counts = [name for name, size in sizes.items() if size >= 1]
    for name in counts:
        if by != "time":
            message = (
                f"{sizes[name]:g} is out of range: it must be below 1. Rows are held out by a hash, and a number of "
                "them would move when rows are added; for the newest rows, set data.split.by: time."
            )
            yield f"data.{name}_size", message
        elif not float(sizes[name]).is_integer():
            yield f"data.{name}_size", f"{sizes[name]:g} is no whole number of rows: a share of them is below 1."
    if not counts and sizes["validation"] + sizes["test"] >= 1:
        message = (
            f"{sizes['test']:g} is out of range: with validation_size {sizes['validation']:g} it leaves no rows to "
        )
        message += "train on"
        yield "data.test_size", f"{message}; together they must be below 1."


def _text_files(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    source, delimiter, encoding = written["data.source"], written["data.delimiter"], written["data.encoding"]
    read_fields = FORMATS[source].fields if source in FORMATS else ()
    for name in dict.fromkeys(
        field for other in FORMATS.values() for field in other.fields if field not in read_fields
    ):
        default = written.fields("data")[name].get_default()
        if name != "encoding" and (value := written[f"data.{name}"]) != default:
            shown = "null" if default is None else default
            yield f"data.{name}", f"{value!r} is for {_list_formats(name)} only; with {source}, set it to {shown}."
    names = written["data.header"] or []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "data.header", f"{name!r} is listed twice; use each name once."
    if written["data.maxsplit"] is not None and source == "csv" and written["data.quoting"] != "none":
        yield "data.maxsplit", f"{written['data.maxsplit']} is for lines without quoted fields: set data.quoting: none."
    if delimiter is not None and "delimiter" in read_fields and (not delimiter.isascii() or delimiter in '"\r\n\0'):
        yield "data.delimiter", f"{delimiter!r} cannot separate columns: use one ASCII character, such as ; or |."
    try:
        codec = " ".encode(encoding) and codecs.lookup(encoding).name
        if codec in _NOT_FILE_ENCODINGS:
            raise LookupError(codec)
    except (LookupError, ValueError):  # unknown, or not an encoding of text as bytes
        example = "utf-8, utf-16, latin-1, cp1252"
        message = f"{encoding!r} is not a text encoding: use one such as {example}.{nearest(encoding, _ENCODINGS)}"
        yield "data.encoding", message
        return
    if codec != "utf-8" and "encoding" not in read_fields:
        message = f"{encoding!r} is for {_list_formats('encoding')} only; with {source}, leave it out."
        yield "data.encoding", message


def _list_formats(field: str) -> str:
    """Returns `source: csv` and `json`, for example."""
    first, *others = (f"`{name}`" for name, file_format in FORMATS.items() if field in file_format.fields)
    *leading, last = [f"`source: {first[1:]}", *others]
    return f"{', '.join(leading)} and {last}" if leading else last


def _renamed(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    rename = written["data.rename"]
    new = list(rename.values())
    for name in sorted({name for name in new if new.count(name) > 1}):
        old = " and ".join(repr(key) for key, value in rename.items() if value == name)
        yield "data.rename", f"{old} are both renamed to {name!r}: use each name once."
    used = [(column.field, column.source_name) for column in columns_of(written)]
    used += [(f"data.cast.{name}", name) for name in written["data.cast"]]
    used += [("data.split.column", written["data.split.column"])] if written["data.split"] else []
    for where, name in used:
        if name in rename and name not in new:
            yield where, f"{name!r} is renamed to {rename[name]!r} (data.rename): use that name."


def _cast(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    cast = written["data.cast"]
    for column in columns_of(written):
        to, where = cast.get(column.source_name), f"data.cast.{column.source_name}"
        if to is None or to in _CASTS[column.form]:
            continue
        if column.form == "text":
            yield where, f"{to!r} is not a type for a text column: cast it to string, or not at all."
        elif column.form == "label":
            yield where, f"{to!r} is not a type for the label: cast it to string, int64 or bool."
        elif column.form == "number":
            yield where, f"{to!r} is not a type for a column of numbers: cast it to float64 or int64, or not at all."
        elif column.form == "boolean":
            yield where, f"{to!r} is not a type for a column of true and false: leave it out."
        else:
            values = "images" if column.form == "image" else "lists or objects"
            yield where, f"{to!r} is not a type for a column of {values}: leave it out."


_CASTS: dict[Form, tuple[str, ...]] = {
    "text": ("string",),
    "label": ("string", "int64", "bool"),
    "number": ("float64", "int64"),
    "boolean": ("bool",),
    **dict.fromkeys(("texts", "labels", "value", "content", "image"), ()),
}
"""The types to which columns of a form may be cast."""


def _checks(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    checks = written["data.checks"]
    known = [*LEVELS, *task_type_of(written).checks] if checks else []
    for name in checks:
        if name in ALWAYS_ERRORS:
            yield f"data.checks.{name}", "is always an error: without these rows nothing could be trained or evaluated."
        elif name not in known:
            yield f"data.checks.{name}", f"no such check: choose from {', '.join(known)}.{nearest(name, known)}"


READING_RULES: tuple[Rule, ...] = (_text_files, one_role_each, _filter, _renamed, _cast, _label_separator, _checks)
"""The rules about how the rows of files are read."""
DATA_RULES: tuple[Rule, ...] = (
    _has_source,
    _secrets,
    _data_source,
    _text_files,
    required_columns,
    one_role_each,
    _filter,
    _renamed,
    _cast,
    _label_names,
    _corrections,
    _corpus,
    _label_separator,
    labels_are_named,
    _splits,
    _held_out,
    _split,
    _split_times,
    _checks,
)


def _needs_mixture(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields of a mixture have no effect without one."""
    if written["data.mix"] is None:
        for name in OF_MIXTURE[1:]:
            if (value := written[f"data.{name}"]) != written.fields("data")[name].get_default():
                yield f"data.{name}", f"{value!r} has no effect without data.mix: leave it out."


def _sources(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """A mixture has no source of its own."""
    if written["data.mix"] is None:
        return
    if (source := written["data.source"]) != MIX:
        yield "data.source", f"{source!r} is for one set of rows: leave it out, each set in data.mix has its own."
    if path := written["data.path"]:
        yield "data.path", f"{path!r} is for one set of rows: leave it out, each set in data.mix has its own."


def _names(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    names = set_names(written["data.mix"] or ())
    for index, name in enumerate(names):
        if name in names[:index]:
            first = f"data.mix[{names.index(name)}]"
            yield f"data.mix[{index}].name", f"{name!r} is also the name of {first}: give each set its own name."


def _weights(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Either all sets have a weight, or none; the size of a mixture is set once."""
    entries = written["data.mix"] or ()
    weighted = [entry.get("weight") is not None for entry in entries]
    fixed = [index for index, entry in enumerate(entries) if entry.get("epochs") is not None]
    if any(weighted) and not all(weighted):
        first = weighted.index(True)
        for index in [index for index, has in enumerate(weighted) if not has]:
            message = f"is missing: data.mix[{first}] has one. Give all sets a weight, or none."
            yield f"data.mix[{index}].weight", message
        return
    if not entries:
        return
    if any(weighted):
        for index in fixed[1:]:
            message = f"{entries[index]['epochs']:g} contradicts data.mix[{fixed[0]}].epochs: with weights, the passes "
            yield f"data.mix[{index}].epochs", f"{message}of one set fix those of all others. Leave one of them out."
    if (strategy := written["data.stopping_strategy"]) != "first_exhausted" and (fixed or not any(weighted)):
        reason = f"data.mix[{fixed[0]}].epochs fixes the size" if fixed else "without weights all sets are passed"
        yield "data.stopping_strategy", f"{strategy!r} has no effect: {reason}. Leave it out."
    if (unit := written["data.weight_by"]) != "rows" and not any(weighted):
        yield "data.weight_by", f"{unit!r} has no effect without weights: give each set in data.mix a weight."


def _tokens(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Tokens are counted before there is a mixture on which a tokenizer could be trained."""
    if written["data.mix"] and written["data.weight_by"] == "tokens" and written["model.source"] == "scratch":
        message = (
            "'tokens' need a tokenizer, and a model from scratch trains its own on the mixture: choose characters, "
        )
        yield "data.weight_by", f"{message}which are close, or rows; or start from a model that has a tokenizer."


MIX_RULES: tuple[Rule, ...] = (_needs_mixture, _sources, _names, _weights, _tokens)


def unfitting_columns(sets: Sequence[WrittenRecipe], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields a problem for each set whose columns are not those of the first set, by their role for the task type.

    Raises InvalidFieldError if a field that names columns is invalid.
    """
    roles = [[column.name for column in columns_of(written)] for written in sets]
    for index, found in enumerate(roles):
        if found != roles[0]:
            message = f"{names[index]!r} has the columns {', '.join(found)}, and {names[0]!r} (data.mix[0]) has "
            yield f"data.mix[{index}]", f"{message}{', '.join(roles[0])}: all sets need the same ones."
