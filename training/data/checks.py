"""Checks of single rows (ROW_CHECKS), of whole splits (SPLIT_CHECKS) and between the sets of a mixture (SET_CHECKS),
with their messages.

leakage_checks.py has those between splits, training/recipe/tables/row_checks.py the level of each: error, warning or
ignore.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, DecimalException
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_columns import flat_values, is_list, row_sums, rows_with_any
from training.data.duplicates import DuplicateTexts
from training.data.label_indices import whole_number
from training.data.mojibake import garbled_texts
from training.data.readers import Block
from training.data.row_problems import RowProblems
from training.data.row_statistics import MISSING_WORDS, SplitStatistics
from training.data.row_times import RowTimes
from training.recipe.column_types import module_of
from training.recipe.source_columns import WITHOUT_TEXT, SourceColumns, StoredColumn
from training.recipe.tables.row_checks import IMAGE_CHECKS, REFUSED_BY_TEMPLATE

if TYPE_CHECKING:
    from training.data.images import Examined
    from training.recipe.column_types import Mask

MAX_LABELS_NAMED = 5
MIN_ROWS_OF_LABELS = 20  # with fewer rows, each may have a label of its own
MAX_LABELS_PER_ROW = 0.5
LONGEST_TEXT_BYTES = 1_000_000  # several novels in one row; tokenizers take hours for one word of this length
LONGEST_DOCUMENT_BYTES = 16 * 2**20  # for task types that cut documents into blocks

_LIST = re.compile(r"""\[\s*(['"\d].*)?\]""", re.DOTALL)

RefusedRows = Callable[[pa.RecordBatch], Iterator[tuple[str, "Mask"]]]
"""Returns reasons for which the model's chat template cannot write some of the rows, each with a mask of these."""
Places = Mapping[str, int]
"""The index of each label as rows spell it."""


@dataclass(frozen=True)
class SplitProblem:
    """A problem that a check of a whole split finds."""

    where: str
    message: str


def blank_text(rows: pa.RecordBatch, wanted: SourceColumns) -> Iterator[tuple[str, Mask]]:
    """Texts that are empty or white space, and other missing values."""
    for column in wanted.contents:
        if not column.may_be_empty:
            yield (
                f"has no {_WORDS.get(column.form, 'value')} in column {column.source_name!r}",
                _missing(rows, column),
            )
        if column.form == "texts":
            yield f"has an empty text in column {column.source_name!r}", _with_blank(rows.column(column.name))


def unusable_image(check: str, rows: pa.RecordBatch, wanted: SourceColumns) -> Iterator[tuple[str, Mask]]:
    """Images that cannot be read, have more than one frame, or too many pixels, by the name of the check."""
    for column in wanted.contents:
        if column.form == "image":
            found = [examine_image(image) for image in rows.column(column.name).to_pylist()]
            reasons = [one.problem if one is not None and one.check == check else "" for one in found]
            for reason in dict.fromkeys(filter(None, reasons)):
                mask = np.array([one == reason for one in reasons])
                yield f"{reason} in column {column.source_name!r}", mask


def converted_image(rows: pa.RecordBatch, wanted: SourceColumns) -> Iterator[tuple[str, Mask, str]]:
    """Images that are turned, or whose colors are converted."""
    for column in wanted.contents:
        if column.form == "image":
            found = [examine_image(image) for image in rows.column(column.name).to_pylist()]
            for change in dict.fromkeys(change for one in found if one is not None for change in one.changes):
                mask = np.array([one is not None and change in one.changes for one in found])
                yield f"{change} in column {column.source_name!r}", mask, ""


def examine_image(image: str | None) -> Examined | None:
    """What is known of a stored image; None for a missing one."""
    if image is None:
        return None
    examined: Examined = module_of("image").examine(image)
    return examined


def long_text(rows: pa.RecordBatch, wanted: SourceColumns) -> Iterator[tuple[str, Mask]]:
    """Texts of implausible length, such as a whole file behind an unclosed quotation mark."""
    most = LONGEST_DOCUMENT_BYTES if wanted.task_type.takes_documents else LONGEST_TEXT_BYTES
    description = f"has a text of more than {most:,} bytes in column"
    has_quotes = wanted.data.source == "csv" and wanted.data.quoting == "standard"
    cause = " (is a quotation mark never closed?)" if has_quotes else ""
    for column in wanted.contents:
        values = rows.column(column.name)
        if column.form == "texts":
            long = row_sums(values, pc.binary_length(flat_values(values))) > most
            yield f"has texts of more than {most:,} bytes together in column {column.source_name!r}", long
        elif column.name in wanted.texts:
            too_long = pc.greater(pc.binary_length(values), most).fill_null(False)
            yield f"{description} {column.source_name!r}{cause}", too_long.to_numpy(zero_copy_only=False)


def missing_label(rows: pa.RecordBatch, wanted: SourceColumns) -> Iterator[tuple[str, Mask]]:
    """Labels that are null, empty or white space. An empty list of labels is a valid value."""
    for column in wanted.columns:
        if column.is_label and not column.target:
            yield f"has no label in column {column.source_name!r}", _missing(rows, column)
        if column.form == "labels":
            yield f"has an empty label in column {column.source_name!r}", _with_blank(rows.column(column.name))


def garbled_text(rows: pa.RecordBatch, wanted: SourceColumns) -> Iterator[tuple[str, Mask, str]]:
    """Texts and labels that an earlier program damaged: UTF-8 read in another encoding (`CafÃ©`), U+FFFD, and byte
    order marks."""
    for column in wanted.columns:
        if column.form in WITHOUT_TEXT:
            continue
        values = rows.column(column.name)
        row_of = pc.list_parent_indices(values).to_numpy() if is_list(values.type) else np.arange(len(values))
        masks: dict[str, Mask] = {}
        examples: dict[str, str] = {}
        for place, description, example in garbled_texts(flat_values(values)):
            masks.setdefault(description, np.zeros(len(values), bool))[row_of[place]] = True
            examples.setdefault(description, example)
        for description, mask in masks.items():
            yield f"{description} in column {column.source_name!r}", mask, examples[description]


_WORDS = {"text": "text", "texts": "texts", "image": "image"}


def _missing(rows: pa.RecordBatch, column: StoredColumn) -> Mask:
    """Returns the rows without a value in a column."""
    values = rows.column(column.name)
    if column.form in ("text", "label"):
        is_missing = _is_blank(values)
    elif column.form == "texts":
        is_missing = pc.equal(pc.list_value_length(values), 0).fill_null(True)
    else:
        is_missing = values.is_null()
    mask: Mask = is_missing.to_numpy(zero_copy_only=False)
    return mask


def _with_blank(lists: pa.Array) -> Mask:
    """Returns the rows with at least one blank text in their list."""
    return rows_with_any(lists, _is_blank(flat_values(lists)))


def _is_blank(column: pa.Array) -> pa.Array:
    return pc.equal(pc.utf8_trim_whitespace(column), "").fill_null(True)


def no_rows(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """A split without rows."""
    if statistics.corrected and statistics.held_out is not None:
        return  # rows left out for a problem may have belonged here
    of_label = " of a known label" if statistics.labels else ""
    if not statistics.rows and statistics.held_out is not None:
        drawn = "row" if statistics.wanted.split_column is None else "group"
        message = (
            f"no {drawn} of train{of_label} fell into the {statistics.held_out:g} of them that are held out: give more "
            f"{drawn}s, or raise data.{statistics.split}_size."
        )
        yield SplitProblem(f"data.{statistics.split}_size", message)
    elif not statistics.rows:
        removed = " once it is filtered" if statistics.filtered else ""
        empty = f" ({_list_files(statistics.without_rows)})" if statistics.without_rows else ""
        message = f"the {statistics.split} split has no rows{of_label}{removed}{empty}: choose another or, for test, "
        message += "leave it out."
        yield SplitProblem(f"data.splits.{statistics.split}", message)


def empty_file(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Files without rows next to others that have some, such as an export that found nothing."""
    if statistics.without_rows and (statistics.rows or statistics.left_out or statistics.filtered):
        files = statistics.without_rows
        like = f" ({len(files):,} files like this: {_list_files(files)})" if len(files) > 1 else ""
        yield SplitProblem(files[0], f"has no rows{like}: leave it out of {statistics.split}, or export it anew.")


def _list_files(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LABELS_NAMED:,} more" if len(names) > MAX_LABELS_NAMED else ""
    return ", ".join(names[:MAX_LABELS_NAMED]) + more


def unknown_label(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels for which the model has no output."""
    # Without rows of train, no label is known: that is the problem.
    unknown = [label for label in statistics.labels if label not in places] if places else []
    for label in unknown[:MAX_LABELS_NAMED]:
        if count := statistics.labels[label]:
            rows = "1 row" if count == 1 else f"{count:,} rows"
            names = list(_names(places).values())
            choices = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
            hint = (
                " On the Hub, -1 marks rows whose labels are withheld: leave this split out." if label == "-1" else ""
            )
            if alike := next((name for name in names if _appearance(name) == _appearance(label)), None):
                hint = f" Write it as {_show_label(alike)}, not as {_show_label(label)}."
            message = f"label {label!r} ({rows} of {statistics.split}) is unknown: choose from {choices}.{hint}"
            yield SplitProblem(statistics.first[label], message)
    if (unnamed := len(unknown) - MAX_LABELS_NAMED) > 0:
        yield SplitProblem(
            f"data.splits.{statistics.split}", f"{unnamed:,} more labels of {statistics.split} are unknown."
        )


def single_label(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Training rows that all have the same label, or the same number to predict."""
    for column, value in statistics.only_number.items():
        left_out = statistics.corrected and statistics.left_out  # rows that may have other numbers
        counts = statistics.split == "train" and statistics.rows and column.form == "number"
        if counts and value is not None and not left_out:
            message = f"the train split has only the number {value:g}: it needs rows of at least two different numbers."
            yield SplitProblem(column.field, message)
    labels = [label for label in statistics.labels if label in places]
    unread = statistics.left_out - statistics.labels_left_out.total()  # rows that may have other labels
    has_one = len({places[label] for label in labels}) < 2 and not (statistics.corrected and unread > 0)
    if statistics.wanted.labels and statistics.split == "train" and statistics.rows and has_one:
        has = f"only the label {labels[0]!r}" if labels else "no known label"
        message = f"the train split has {has}: it needs rows of at least two labels."
        yield SplitProblem(statistics.wanted.labels.field, message)


def label_per_row(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels that nearly every row has for itself, such as an id, or the text itself. A trial of a few rows, by
    data.limit, may have many labels."""
    column, entries = statistics.wanted.labels, statistics.labels.total()
    if column is None or statistics.split != "train" or entries < MIN_ROWS_OF_LABELS:
        return
    if statistics.wanted.data.limit is None and len(statistics.labels) > MAX_LABELS_PER_ROW * entries:
        unit = "rows" if column.form == "label" else "entries"
        has = f"{len(statistics.labels):,} different values in {entries:,} {unit}"
    elif statistics.repeats_text > MAX_LABELS_PER_ROW * statistics.rows:
        has = f"the text itself in {statistics.repeats_text:,} of {statistics.rows:,} rows"
    else:
        return
    message = (
        f"column {column.source_name!r} has {has}, so it holds no labels that a model can learn: set {column.field} to "
        "the column of labels; for numbers to predict, set task: regression. If these are the labels, set "
        "data.checks.label_per_row: warning."
    )
    yield SplitProblem(column.field, message)


def absent_label(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels of the model without a row in a split: they are not learned, or not evaluated. Likewise ratings."""
    for column, value in statistics.only_number.items():
        unread = statistics.corrected and statistics.left_out  # rows that may be rated otherwise
        if column.form == "boolean" and statistics.rows and value is not None and not unread:
            other, only = ("false", "true") if value else ("true", "false")
            effect = "the model learns from one kind" if statistics.split == "train" else "its figures cover one kind"
            message = f"all rows of {statistics.split} are rated {only}, and none {other}: {effect}; add rows of both."
            yield SplitProblem(f"data.splits.{statistics.split}", message)
    absent = _absent_labels(statistics, places)
    has_unknown = any(label not in places for label in statistics.labels)  # these may be the absent labels, misspelt
    if statistics.rows and absent and not has_unknown:
        effect = "the model cannot learn them" if statistics.split == "train" else "its figures do not cover them"
        message = f"the {statistics.split} split has no row of {_join(absent)}: {effect}; "
        message += "add rows, or name other labels."
        yield SplitProblem(f"data.splits.{statistics.split}", message)


def mixed_labels(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels that are whole numbers in some rows and words in others, as in two files that were joined."""
    numbers = [label for label in statistics.labels if whole_number(label) or label.lstrip("-").isdecimal()]
    words = [label for label in statistics.labels if label not in numbers]
    if numbers and words and statistics.split == "train" and not statistics.named:
        word, number = min(words, key=statistics.labels.__getitem__), min(numbers, key=statistics.labels.__getitem__)
        rarer = min(word, number, key=statistics.labels.__getitem__)
        message = (
            f"the labels of train are numbers in some rows ({number!r}) and words in others ({word!r}), each a "
            "separate label: write them all in one way."
        )
        yield SplitProblem(statistics.first[rarer], message)


def float_labels(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels that are whole numbers written otherwise, such as `1.0`, as programs write them next to missing values."""
    others = [label for label in statistics.labels if (whole_number(label) or label) != label]
    others = [label for label in others if label in places and places.get(str(whole_number(label))) == places[label]]
    if others:
        rows = _rows(sum(statistics.labels[label] for label in others))
        examples = " and ".join(f"{label!r} as {whole_number(label)!r}" for label in others[:2])
        message = (
            f"{rows} of {statistics.split} with a label that has a decimal point or a sign: since all labels are whole "
            f"numbers, it counts without them ({examples})."
        )
        yield SplitProblem(statistics.first[others[0]], message)


def broken_label(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels with a tab, a line break or another control character, as if a part of the text belonged to them: the file
    may have another delimiter in these rows."""
    broken = [label for label in statistics.labels if any(unicodedata.category(one) == "Cc" for one in label)]
    if broken and statistics.split == "train":
        rows = sum(statistics.labels[label] for label in broken)
        message = (
            f"{len(broken):,} of {len(statistics.labels):,} labels of train have a tab, a line break or another "
            f"control character in them ({_rows(rows)}, such as {broken[0]!r}), each a label for itself: write labels "
            "without them; if they separate columns, write the rows with one delimiter."
        )
        yield SplitProblem(statistics.first[broken[0]], message)


def listed_labels(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels that are lists of labels as Python or JSON writes them, such as `['war', 'drama']`, in one cell of CSV."""
    listed = [label for label in statistics.labels if _LIST.fullmatch(label)]
    if listed and statistics.split == "train":
        rows = sum(statistics.labels[label] for label in listed)
        message = (
            f"{len(listed):,} of {len(statistics.labels):,} labels of train are lists ({_rows(rows)}, such as "
            f"{listed[0]!r}), and each list counts as one label: for several labels a row, set task: "
            'multi-label-classification, with cells of JSON such as ["war", "drama"].'
        )
        yield SplitProblem(statistics.first[listed[0]], message)


def similar_labels(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Labels that differ only by case or spaces, such as `pos` and `Pos `, or by characters that look alike, such as
    `é` as one character and as two: the model learns each as its own label."""
    if statistics.split != "train":
        return
    groups: dict[str, dict[int, str]] = {}
    for label in filter(places.__contains__, statistics.labels):
        groups.setdefault(_appearance(label), {}).setdefault(places[label], label)
    for labels in (list(group.values()) for group in groups.values()):
        if len(labels) > 1:
            rarest = min(labels, key=statistics.labels.__getitem__)
            by_case = len({"".join(label.split()).casefold() for label in labels}) == 1
            differ = "differ only by case or spaces" if by_case else "look alike"
            spellings = ", ".join(
                f"{repr(label) if by_case else _show_label(label)} ({_rows(statistics.labels[label])})"
                for label in labels
            )
            message = f"labels of train {differ}: {spellings}; if they mean the same, write them alike."
            yield SplitProblem(statistics.first[rarest], message)


# Cyrillic and Greek letters that look like Latin ones, and the minus sign.
_LATIN = str.maketrans("аеорсухіјѕАВЕКМНОРСТХІЈЅοΑΒΕΖΗΙΚΜΝΟΡΤΥΧ−", "aeopcyxijsABEKMHOPCTXIJSoABEZHIKMNOPTYX-")  # noqa: RUF001


def _appearance(label: str) -> str:
    """Returns the same text for labels that look alike: without case, spaces and invisible characters, in Unicode's
    form NFKC (UAX #15), with one sort of dash, and numbers by their value."""
    visible = "".join(filter(_is_visible, unicodedata.normalize("NFKC", label)))
    text = unicodedata.normalize("NFKC", visible.translate(_LATIN).casefold())
    text = "".join("-" if unicodedata.category(character) == "Pd" else character for character in text)
    try:
        return str(Decimal(text.replace(",", ".")).normalize(Context(prec=max(1, len(text)))))  # floats would round
    except DecimalException:
        return text


def _is_visible(character: str) -> bool:
    is_variant = "\ufe00" <= character <= "\ufe0f"
    return not (character.isspace() or is_variant or unicodedata.category(character) in ("Cf", "Cc"))


def _show_label(label: str) -> str:
    """Returns a label with the code points of its characters beyond ASCII."""
    points = " ".join(f"U+{ord(character):04X}" for character in label if not character.isascii())
    return f"{label!r} with {points}" if points else repr(label)


def missing_word(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Words such as NA for a missing value, which count as ordinary texts and labels."""
    for label in statistics.labels:
        if label.strip().lower() in MISSING_WORDS:
            message = (
                f"the word {label!r} is the label of {_rows(statistics.labels[label])} of {statistics.split}, and "
                f"counts as one: if it means a missing value, take these rows out, such as by data.filter."
            )
            yield SplitProblem(statistics.first[label], message)
    for (name, word), (count, first) in statistics.missing_words.items():
        message = (
            f"the word {word!r} is all the text of {_rows(count)} of {statistics.split} (column {name!r}), and counts "
            "as one: if it means a missing value, take these rows out, such as by data.filter."
        )
        yield SplitProblem(first, message)


def duplicates(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Rows that repeat the text of an earlier row of the split, which weights it more."""
    if equal := texts.within(statistics.split):
        later, earlier = equal.first
        split = statistics.split
        rows = f"1 row of {split} repeats" if equal.count == 1 else f"{equal.count:,} rows of {split} repeat"
        message = (
            f"{rows} the text of an earlier row (this one {earlier.relative_to(later)}: "
            f"{equal.text}): remove what was not meant to count more than once."
        )
        yield SplitProblem(str(later), message)


def conflicting_labels(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Equal texts with different labels: one label is wrong, or the text is ambiguous. Likewise an answer that
    is rated true in one row and false in another, and a pair of answers that two rows prefer in opposite ways."""
    if equal := texts.conflicts(statistics.split):
        later, earlier = equal.first
        if statistics.wanted.labels is None:
            rows = "1 judgement has its" if equal.count == 1 else f"{equal.count:,} judgements have their"
            message = (
                f"{rows} opposite in another row of {statistics.split} (this one {earlier.relative_to(later)} the "
                f"other way round: {equal.text}): correct the wrong ones."
            )
            yield SplitProblem(str(later), message)
            return
        subject = "1 text has" if equal.count == 1 else f"{equal.count:,} texts have"
        message = (
            f"{subject} different labels in different rows of {statistics.split} ({later.label} here, "
            f"{earlier.label} in {earlier.relative_to(later, 'row')}: {equal.text}): correct the wrong ones."
        )
        yield SplitProblem(str(later), message)


def disjoint_labels(labels: Sequence[set[str]], names: Sequence[str]) -> Iterator[SplitProblem]:
    """Two sets of a mixture whose train rows have no label in common, as if each spelt the same labels in its way."""
    for index, found in enumerate(labels):
        for earlier in range(index):
            if found and labels[earlier] and found.isdisjoint(labels[earlier]):
                message = (
                    f"the labels of {names[index]!r} ({_join(sorted(found))}) and of {names[earlier]!r} "
                    f"({_join(sorted(labels[earlier]))}) have none in common: spell them alike in the rows, or, where "
                    "they are different labels, set data.checks.disjoint_labels: ignore."
                )
                yield SplitProblem(f"data.mix[{index}]", message)
                break


def different_labels(labels: Sequence[set[str]], names: Sequence[str]) -> Iterator[SplitProblem]:
    """A set of a mixture whose train rows lack labels that another set has: the model may learn to tell the sets apart
    instead."""
    known = set[str]().union(*labels)
    for index, found in enumerate(labels):
        others = [other for other in labels if other and other is not found]
        if found and (lacking := sorted(known - found)) and not any(map(found.isdisjoint, others)):
            message = f"{names[index]!r} has no row of {_join(lacking)}, which another set has."
            yield SplitProblem(f"data.mix[{index}]", message)


def _absent_labels(statistics: SplitStatistics, places: Mapping[str, int]) -> list[str]:
    """Returns the model's labels without a row in the split, as rows spell them."""
    present = {places[label] for label in statistics.labels if label in places}
    return [name for place, name in _names(places).items() if place not in present]


def _names(places: Places) -> dict[int, str]:
    """Returns the first spelling of each label, by its index and in the order of these."""
    return dict(sorted({place: label for label, place in reversed([*places.items()])}.items()))


def _join(labels: list[str]) -> str:
    more = f" and {len(labels) - MAX_LABELS_NAMED} more labels" if len(labels) > MAX_LABELS_NAMED else ""
    return ", ".join(map(repr, labels[:MAX_LABELS_NAMED])) + more


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


RowCheck = Callable[[pa.RecordBatch, SourceColumns], Iterator[tuple[str, "Mask"]]]
SplitCheck = Callable[[SplitStatistics, Places, DuplicateTexts], Iterator[SplitProblem]]

ROW_CHECKS: dict[str, RowCheck] = {
    "blank_text": blank_text,
    "long_text": long_text,
    "missing_label": missing_label,
    **{check: partial(unusable_image, check) for check in IMAGE_CHECKS},
}
"""Each takes the rows of one block and yields descriptions of problems, each with the mask of its rows."""

RowRemark = Callable[[pa.RecordBatch, SourceColumns], Iterator[tuple[str, "Mask", str]]]

ROW_REMARKS: dict[str, RowRemark] = {
    "garbled_text": garbled_text,
    "converted_image": converted_image,
}
"""The same for rows that are kept, with an example."""

SPLIT_CHECKS: dict[str, SplitCheck] = {
    "no_rows": no_rows,
    "empty_file": empty_file,
    "unknown_label": unknown_label,
    "single_label": single_label,
    "label_per_row": label_per_row,
    "absent_label": absent_label,
    "mixed_labels": mixed_labels,
    "float_labels": float_labels,
    "broken_label": broken_label,
    "listed_labels": listed_labels,
    "similar_labels": similar_labels,
    "missing_word": missing_word,
    "duplicates": duplicates,
    "conflicting_labels": conflicting_labels,
}
"""Each takes the statistics of a split, the index of each label as rows spell it, and the duplicates."""

SetCheck = Callable[[Sequence[set[str]], Sequence[str]], Iterator[SplitProblem]]

SET_CHECKS: dict[str, SetCheck] = {
    "disjoint_labels": disjoint_labels,
    "different_labels": different_labels,
}
"""Each takes the labels in the train rows of each set of a mixture, and the names of the sets."""

LEAVES_OUT = (
    *("encoding", "ragged", "malformed", "type", "missing_image", *ROW_CHECKS, "missing_time", "unknown_label"),
    REFUSED_BY_TEMPLATE,
)
"""The checks of unusable rows: unless the level is error, the rows are left out."""


def usable_rows(
    block: Block,
    statistics: SplitStatistics,
    row_problems: RowProblems,
    times: RowTimes | None = None,
    refused_rows: RefusedRows | None = None,
) -> Block:
    """Returns the block without unusable rows; adds the problems that the reader and the row checks found. `times`
    reads the time of each row, if rows are split by time. Rows that `refused_rows` finds are unusable too."""
    for problem in block.row_problems:
        row_problems.add(block.where, problem.check, problem.description, [problem.row], problem.value)
    statistics.left_out += len(block.row_problems)
    for remark in block.remarks:
        row_problems.add(block.where, remark.check, remark.description, [remark.row], remark.value)
    found = ((check, *one) for check, find in ROW_CHECKS.items() for one in find(block.rows, statistics.wanted))
    block = _leave_out(block, found, statistics, row_problems)
    if times is not None:
        block = _leave_out(*times.read(block), statistics, row_problems)
    block = _leave_out(block, statistics.wanted.task_type.row_problems(block.rows), statistics, row_problems)
    if refused_rows is not None and block.rows.num_rows:
        refused = (
            (REFUSED_BY_TEMPLATE, f"is refused by the model's chat template ({reason})", mask)
            for reason, mask in refused_rows(block.rows)
        )
        block = _leave_out(block, refused, statistics, row_problems)
    for check, remark_on in ROW_REMARKS.items():
        for description, mask, example in remark_on(block.rows, statistics.wanted):
            row_problems.add(block.where, check, description, block.numbers[mask].tolist(), example)
    return block


def _leave_out(
    block: Block,
    found: Iterable[tuple[str, str, Mask] | tuple[str, str, Mask, str]],
    statistics: SplitStatistics,
    row_problems: RowProblems,
) -> Block:
    has_problem = np.zeros(block.rows.num_rows, bool)
    for check, description, mask, *values in found:
        row_problems.add(block.where, check, description, block.numbers[mask].tolist(), *values)
        has_problem |= mask
    if not has_problem.any():
        return block
    statistics.left_out += int(has_problem.sum())
    if statistics.wanted.labels:
        labels = block.rows.column(statistics.wanted.labels.name).filter(pa.array(has_problem))
        statistics.labels_left_out.update(flat_values(labels).drop_null().to_pylist())
    return block.filter(~has_problem)
