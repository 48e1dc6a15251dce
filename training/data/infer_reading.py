"""How the rows of a source are read, inferred from the source: its kind, splits, encoding, and the dialect of CSV.

The rows themselves are read by the reader of the format, as a run would read them.
"""

from __future__ import annotations

import codecs
import csv
import glob
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from training.data.csv_files import NUMBER
from training.data.decoding import open_text
from training.data.file_systems import is_url, name_of
from training.data.hub_datasets import names_of_splits
from training.data.listing import TEXT_SUFFIX, Listing, SourceFile, list_texts, text_label
from training.data.prediction_rows import InputColumns
from training.data.readers import load_reader
from training.data.sources import FILE_NAMES, delimiter_of, find_split_files, load_object
from training.local_files import open_local
from training.problems import UserError
from training.recipe.column_types import RowSpecification
from training.recipe.data_fields import Data
from training.recipe.tables.formats import FORMATS, IMAGE_SUFFIXES, PACKED, SOURCES

SAMPLE_ROWS = 3000
_HEAD_BYTES = 1_000_000
_TEXTS_TO_DECODE = 500
_MANY_TEXTS = 10
"""Texts in folders of labels for each table beside these folders, which then is no table of the rows."""
_DELIMITERS = (",", "\t", ";", "|")
_LONG_NAME = 60
_WORDS_OF_NAME = 5


@dataclass(frozen=True)
class Choice:
    """The value of a field of the recipe, and how sure it is."""

    value: Any
    reason: str = ""
    """Why; empty for a value that is no guess."""
    second: str = ""
    """The second-best value, as it is written in YAML."""


@dataclass
class FirstRows:
    """Some rows of a source with all their columns."""

    fields: dict[str, Choice]
    """Fields of the recipe's section `data`, without columns."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """The values of each column, None for missing ones."""
    splits: Sequence[str] = ("train",)
    problems: Counter[str] = field(default_factory=Counter)
    """Rows with a problem that the reader finds, such as too few columns, by check."""
    has_names: bool = True
    """Whether the source names its columns."""

    @property
    def data(self) -> dict[str, Any]:
        """The fields' values."""
        return {name: choice.value for name, choice in self.fields.items()}

    @property
    def unreadable(self) -> int:
        """Rows with such a problem."""
        return self.problems.total()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return max(map(len, self.columns.values()), default=0)


def is_on_hub(path: str) -> bool:
    """Whether this may be the name of a data set of the Hub: `owner/name`, and no path here or name of a file."""
    suffixes = (TEXT_SUFFIX, *(suffix for source in SOURCES.values() for suffix in source.suffixes))
    is_file = os.path.exists(path) or path.lower().endswith(suffixes)
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None and not is_file


def sample_hub(path: str, commit: str, config: str | None = None) -> FirstRows:
    """Reads up to SAMPLE_ROWS rows of the training split of a data set of the Hub. Raises UserError."""
    found = {"source": Choice("hub"), "path": Choice(path)} | ({"config": Choice(config)} if config else {})
    data, pinned = Data(source="hub", path=path, config=config), {"commit": commit}
    there = names_of_splits(data, pinned)
    named = {split: name for split in FILE_NAMES if (name := _name_like(split, there))}
    if "train" not in named:
        named["train"] = there[0]
    found["splits"] = Choice(named, f"the data set has the splits {', '.join(there)}", "others of them")
    sample = FirstRows(found, splits=[*named])
    _read(sample, pinned)
    return sample


def _name_like(split: str, names: Sequence[str]) -> str | None:
    """The split's name among some, such as train_sft for train."""
    known = FILE_NAMES[split]
    exact = next((name for name in names if name.lower() in known), None)
    return exact or next((name for name in names if {*re.findall("[a-z]+", name.lower())} & {*known}), None)


def sample_rows(path: str) -> FirstRows:
    """Reads up to SAMPLE_ROWS rows of the training split of a file, folder, glob, URL, or of an object `module:name`.

    Raises UserError if there is nothing to read.
    """
    found = _source_of(path)
    source = found["source"].value
    sample = FirstRows(found)
    if source == "python":
        _read(sample, {})
        return sample
    data = Data(**sample.data)
    splits, _, _ = find_split_files(data)
    sample.splits = [*splits]
    files = [str(file.file) for file in splits["train"]]
    if len(splits) > 1 and "splits" not in found:
        named = {split: _name_of_files(split, files) for split, files in splits.items()}
        found["splits"] = Choice(named, "files or folders have these names", "other names of them")
    if FORMATS[source].is_folder:
        found |= _encoding_of_texts(files) if source == "textfolder" else {}
        _read(sample, {"train": files})
        return sample
    if source in ("csv", "json", "conll"):
        encoding = _encoding_of(files[0], data)
        if encoding.value != "utf-8":
            found["encoding"] = encoding
    if source == "csv":
        head = _head(files[0], Data(source=source, path=path, encoding=found.get("encoding", Choice("utf-8")).value))
        usual = delimiter_of(files[0], data)
        found |= _dialect(files[0], head, usual)
        _refuse_orange(path, head, found.get("delimiter", Choice(usual)).value)
        sample.has_names = "header" not in found
    _read(sample, {"train": files})
    return sample


def _source_of(path: str) -> dict[str, Choice]:
    """The kind of source and its path."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", path) and not os.path.exists(path):
        load_object(path)
        return {"source": Choice("python"), "path": Choice(path)}
    if not (is_url(path) or os.path.exists(os.path.expanduser(path)) or set(path) & set("*?[")):
        message = f"{path!r} does not exist: give a file, folder, glob, URL, or module:name of a Python object."
        raise UserError.of("option", "PATH", message)
    place = os.path.expanduser(path)
    if os.path.isfile(place):
        return {"source": _format_of(place), "path": Choice(path)}
    return _form_of_folder(path)


def _form_of_folder(path: str) -> dict[str, Choice]:
    """The format that most files of a folder or glob have by their names, and the splits if they are folders."""
    if source := _format_by_name(path):
        return {"source": Choice(source), "path": Choice(path)}
    listing, counts = Listing(), dict[str, int]()
    for source, form in FORMATS.items():
        if form.suffixes and not form.is_folder:
            _, files = listing.find_files(path, form.suffixes)
            counts[source] = sum(file.name.lower().endswith(form.suffixes) for file in files)
    ranked = sorted((count, source) for source, count in counts.items() if count)
    tabular = [form for form in FORMATS.values() if not form.is_folder]
    known = tuple(dict.fromkeys(suffix for form in tabular for suffix in form.suffixes))
    folder = os.path.abspath(os.path.expanduser(path))
    if not ranked and not is_url(path) and not os.path.isdir(folder):
        path = _folder_of_texts(path) or path
        folder = os.path.abspath(os.path.expanduser(path))
    texts = list_texts(folder)[0] if os.path.isdir(folder) else []
    in_labels = sum(text_label(folder, file.file) is not None for file in texts if file.name.lower().endswith(".txt"))
    if ranked and in_labels <= _MANY_TEXTS * ranked[-1][0]:
        second = ranked[-2][1] if len(ranked) > 1 else ""
        reason = f"{ranked[-1][0]:,} files have this format by their names" if second else ""
        return {"source": Choice(ranked[-1][1], reason, second), "path": Choice(path)}
    tables = sum(file.name.lower().endswith(known) for file in texts)
    if not texts or tables > len(texts) / 2:
        has_folders = tables or any(map(os.path.isdir, glob.iglob(folder, recursive=True)))
        advice = (
            f"{path.rstrip('/')}/**/*" if has_folders else "a folder with a folder of texts or images for each label"
        )
        unpacked = ", ".join(suffix for suffix in known if not suffix.endswith((*PACKED,)))
        message = f"{path} has no file of rows: their names end in {unpacked}, or in {' or '.join(PACKED)} after it; "
        message += f"or give {advice}."
        raise UserError.of("option", "PATH", message)
    if sum(file.name.lower().endswith(IMAGE_SUFFIXES) for file in texts) > len(texts) / 2:
        source, noun, second = "imagefolder", "images", ""
    else:
        source, noun, second = "textfolder", "texts", "csv, with a text a line"
    reason = f"it has {len(texts):,} {noun} in folders, whose names are the labels"
    found = {"source": Choice(source, reason, ranked[-1][1] if ranked else second), "path": Choice(path)}
    inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] not in "._")
    named = {split: name for split in FILE_NAMES if (name := _name_like(split, inner))}
    if "train" in named and len({*named.values()}) == len(named) == len(inner) > 1 and "train" not in inner:
        found["splits"] = Choice(named, "the folders have the names of splits", "null  # the folders are labels")
    return found


def _folder_of_texts(pattern: str) -> str | None:
    """The folder whose texts are all that a glob matches, there or in folders that it matches; None if it matches no
    texts. Raises UserError if the folder has other texts too."""
    top = pattern
    while glob.has_magic(top):
        top = os.path.dirname(top)
    top = top or "."
    matched = set[str]()
    for place in glob.iglob(os.path.abspath(os.path.expanduser(pattern)), recursive=True):
        matched |= {file.file for file in list_texts(place)[0]} if os.path.isdir(place) else {place}
    texts = {file.file for file in list_texts(os.path.abspath(os.path.expanduser(top)))[0]}
    texts = {file for file in texts if file.lower().endswith(TEXT_SUFFIX)}
    if not texts & matched:
        return None
    if more := len(texts - matched):
        message = (
            f"{pattern} leaves out {more:,} of the {len(texts):,} texts of {top}, and a recipe reads all texts of a "
        )
        message += (
            "folder: give a folder that has no others, with a folder of texts for each label if they have labels."
        )
        raise UserError.of("option", "PATH", message)
    return top


def _name_of_files(split: str, files: Sequence[SourceFile]) -> str:
    """The name that `data.splits` has for a split's files."""
    names = (name for name in FILE_NAMES[split] if all(file.name.startswith(name) for file in files))
    return next(names, split)


def _encoding_of_texts(folders: Sequence[str]) -> dict[str, Choice]:
    """Another encoding than UTF-8, if more of the first texts with other than ASCII characters are in it."""
    wrong, right, examples = 0, 0, list[bytes]()
    for text in islice((text for folder in folders for text in list_texts(folder)[0]), _TEXTS_TO_DECODE):
        with open(open_local(text.file), "rb") as file:
            read = file.read(_HEAD_BYTES)
        if not read.isascii() and not read.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            try:
                codecs.getincrementaldecoder("utf-8")().decode(read)
                right += 1
            except UnicodeDecodeError:
                wrong += 1
                examples.append(read)
    if wrong <= right:
        return {}
    reason = f"{wrong:,} of the first texts are not in UTF-8, and {right:,} others with such characters are"
    return {"encoding": _single_byte_encoding(b"".join(examples), reason)}


def _format_of(path: str) -> Choice:
    """The format of a file, by its name or its content."""
    if source := _format_by_name(path):
        return Choice(source)
    with open(open_local(path), "rb") as file:
        first = file.read(8)
    if first.startswith((b"PAR1", b"ARROW1")):
        return Choice("parquet" if first.startswith(b"PAR1") else "arrow", "its first bytes")
    text = _head(path, Data(source="csv", path=path))
    if text.lstrip().startswith(("{", "[")):
        return Choice("json", "it begins as JSON", "csv")
    if _is_conll(text):
        return Choice("conll", "it has a word a line, and blank lines between sentences", "csv")
    return Choice("csv", "it has a row a line", "conll")


def _format_by_name(path: str) -> str | None:
    name = name_of(path).lower()
    return next((source for source, form in FORMATS.items() if form.suffixes and name.endswith(form.suffixes)), None)


def _head(file: str, data: Data) -> str:
    """The first lines of a file of text."""
    with open_text(file, data) as raw:
        read = raw.read(_HEAD_BYTES)
    text = read.decode("utf-8", "replace")
    return text if len(read) < _HEAD_BYTES else text[: text.rfind("\n") + 1]


def _is_conll(text: str) -> bool:
    """Whether there are blank lines between groups of short lines with the same number of columns."""
    lines = [line for line in text.splitlines() if not line.startswith(("-DOCSTART-", "# "))][:2000]
    widths = Counter(len(line.split()) for line in lines if line.strip())
    blank = sum(not line.strip() for line in lines)
    (width, most), *_ = widths.most_common(1) or [(0, 0)]
    return width > 1 and most >= 0.95 * widths.total() and blank >= len(lines) / 100


def _encoding_of(file: str, data: Data) -> Choice:
    """UTF-8 unless the bytes are something else."""
    try:
        with open_text(file, data) as raw:
            read = raw.read(_HEAD_BYTES)
    except UserError:  # in UTF-16
        return Choice("utf-16", "its first bytes")
    read = read[: read.rfind(b"\n") + 1] or read
    try:
        read.decode()
    except UnicodeDecodeError as error:
        return _single_byte_encoding(read, f"byte 0x{error.object[error.start]:02x} is not UTF-8")
    return Choice("utf-8")


def _single_byte_encoding(read: bytes, reason: str) -> Choice:
    """The likeliest encoding of bytes that are not UTF-8."""
    letters = [one for one in read.decode("cp1251", "replace") if one.isalpha()]
    if letters and sum("\u0430" <= one <= "\u044f" for one in letters) > len(letters) / 3:
        return Choice("cp1251", f"{reason}, and its letters are Cyrillic", "koi8-r")
    try:
        read.decode("cp1252")
    except UnicodeDecodeError as error:
        undefined = f"{reason}; cp1252 has no character for byte 0x{read[error.start]:02x}"
        return Choice("latin-1", undefined, "cp1252")
    return Choice("cp1252", reason, "latin-1")


def _dialect(file: str, head: str, usual: str) -> dict[str, Choice]:
    """Delimiter, quoting and header of a CSV file, where they are not the usual ones; `usual` is the delimiter."""
    lines = [line for line in head.splitlines() if line.strip()][:2000]
    found: dict[str, Choice] = {}
    quoting = "standard" if _is_quoted(head) else "none"
    shares = {delimiter: _share_of_rows(lines, delimiter, quoting) for delimiter in _DELIMITERS}
    share, best = max((share, -place) for place, share in enumerate(shares.values()))
    delimiter = _DELIMITERS[-best]
    if first := re.fullmatch(r"sep=(.)", lines[0].strip().lower() if lines else ""):
        delimiter, share = first[1], 1.0
    if share < 0.9:
        if split := _first_word_is_label(lines):
            separator, labels = split
            reason = f"lines begin with one of {labels:,} labels and {separator!r}"
            found["delimiter"] = Choice(separator, reason)
            found["maxsplit"] = Choice(1, reason)
            found["quoting"] = Choice("none", "with maxsplit, each line is a row")
            found["header"] = Choice(["label", "text"], "its first line is a row")
            return found
        if Path(file).suffix not in (".csv", ".tsv"):
            reason = "its lines have no columns in common"
            found["delimiter"] = Choice("\x1f", f"{reason}: a character that texts do not hold")
            found["quoting"] = Choice("none", reason)
            found["header"] = Choice(["text"], reason)
            return found
        delimiter = usual
    elif delimiter != usual and not first:
        others = sorted((one for one in shares if one != delimiter), key=lambda one: -shares[one])
        reason = f"{share:.0%} of the lines then have the same number of columns"
        found["delimiter"] = Choice(delimiter, reason, _quoted(others[0]))
    if quoting == "none":
        found["quoting"] = Choice("none", "quotation marks stand inside fields, and some are never closed", "standard")
    rows = list(islice(csv.reader(lines, delimiter=delimiter, **_csv_options(quoting)), 2000))
    if first:
        rows = rows[1:]
    if rows and (reason := _not_a_header(rows)):
        names = [f"column_{number}" for number in range(1, len(rows[0]) + 1)]
        found["header"] = Choice(names, reason, "null  # the first row has the names")
    return found


_ORANGE_TYPES = ("continuous", "c", "discrete", "d", "string", "s", "time", "t", "basket")
_ORANGE_ROLES = ("", "class", "c", "meta", "m", "multiclass", "i", "ignore")


def _refuse_orange(path: str, head: str, delimiter: str) -> None:
    """Raises UserError for a file of Orange, whose second and third rows are types and roles of columns."""
    rows = list(islice(csv.reader(head.splitlines()[:3], delimiter=delimiter), 3))
    if len(rows) < 3 or len({*map(len, rows)}) > 1:
        return
    types, roles = ([cell.strip().lower() for cell in row] for row in rows[1:])
    known = sum(cell in _ORANGE_TYPES for cell in types)  # the values of a discrete column may stand there too
    if known >= len(types) / 2 and all(role in _ORANGE_ROLES or "=" in role for role in roles):
        stem, suffix = os.path.splitext(path)
        message = (
            f"the rows 2 and 3 of {path} are types ({rows[1][0]}) and roles of columns, as Orange writes them, and "
        )
        message += (
            f"no data. Give a copy without them: sed 2,3d {shlex.quote(path)} > {shlex.quote(f'{stem}-rows{suffix}')}"
        )
        raise UserError.of("option", "PATH", message)


def _csv_options(quoting: str) -> dict[str, Any]:
    return {"quoting": csv.QUOTE_NONE} if quoting == "none" else {}


def _share_of_rows(lines: Sequence[str], delimiter: str, quoting: str) -> float:
    """The share of rows with the commonest number of columns; 0 if that is one column."""
    try:
        widths = Counter(
            map(len, csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, **_csv_options(quoting)))
        )
    except csv.Error:
        return 0.0
    (width, rows), *_ = widths.most_common(1) or [(1, 0)]
    return rows / widths.total() if width > 1 else 0.0


def _is_quoted(head: str) -> bool:
    """Whether quotation marks enclose fields: each that opens one is closed before a delimiter or line end."""
    head = head.replace('""', "")  # a quotation mark inside a quoted field, or an empty field
    opened = re.findall(r'(?:^|[,;\t|])"(?![,;\t|]|\r?$)', head, re.MULTILINE)
    closed = re.findall(r'"(?=[,;\t|]|\r?$)', head, re.MULTILINE)
    return not (opened or closed) or min(len(opened), len(closed)) >= 0.9 * max(len(opened), len(closed)) > 0


def _first_word_is_label(lines: Sequence[str]) -> tuple[str, int] | None:
    """The separator after the first word, if few different words begin the lines, and the number of these."""
    for separator in ("\t", ",", " "):
        words = Counter(line.partition(separator)[0] for line in lines if separator in line)
        several = sum(len(line.split()) > 2 for line in lines)
        inside = sum(word in words for line in lines for word in line.split()[1:])
        if words.total() == len(lines) and 2 <= len(words) <= len(lines) / 5 and several > len(lines) / 2 > 2 * inside:
            return separator, len(words)
    return None


def _not_a_header(rows: Sequence[Sequence[str]]) -> str:
    """Why the first row has values instead of names; empty if it has names."""
    first = rows[0]
    if first == [str(number) for number in range(len(first))]:  # the names that pandas gives
        return ""
    for place, cell in enumerate(first):
        below = [row[place] for row in rows[1:] if len(row) > place]
        numbers = sum(NUMBER.fullmatch(one.strip()) is not None for one in below)
        if NUMBER.fullmatch(cell.strip()) and numbers > len(below) / 2:
            return f"the first row has the number {cell} in place of a name"
        is_long = len(cell) > _LONG_NAME or len(cell.split()) > _WORDS_OF_NAME
        if is_long and not cell.strip().endswith("?"):  # surveys have questions as names
            return f"the first row has the text {cell[:30]!r} in place of a name"
        if cell.strip() and below.count(cell) > max(1, len(below) / 1000) and len(set(below)) < len(below) / 2:
            return f"{cell!r} of the first row is also a value of other rows"
    return ""


def _quoted(delimiter: str) -> str:
    return '"\\t"' if delimiter == "\t" else f'"{delimiter}"'


def _read(sample: FirstRows, pinned: Mapping[str, Sequence[str]]) -> None:
    """Reads the rows with all columns, by the reader of the source."""
    data = Data(**sample.data, limit=SAMPLE_ROWS)
    columns = _AllColumns()
    read = 0
    for block in load_reader(data.source)(InputColumns(data, _AnyRows()), "train", pinned, columns):
        for name, values in block.slices.items():
            read_before = sample.columns.setdefault(name, [None] * read)
            read_before += [None] * (read - len(read_before)) + _as_values(values)
        read += max([len(block.numbers), *map(len, block.slices.values())])
        first = {problem.row: problem.check for problem in reversed(block.row_problems)}
        sample.problems.update(first.values())
        if read >= SAMPLE_ROWS:
            break
    if not read:
        message = f"{data.path!r} has no row that can be read"
        message += f", and {sample.unreadable:,} with problems: check how it is written." if sample.unreadable else "."
        raise UserError.of("option", "PATH", message)
    for values in sample.columns.values():
        values += [None] * (read - len(values))
        del values[SAMPLE_ROWS:]


def _as_values(values: Any) -> list[Any]:
    found = values.to_pylist() if isinstance(values, pa.Array) else list(values)
    return [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in found]


class _AnyRows(RowSpecification):
    columns: ClassVar = {}


class _AllColumns:
    """All columns of a source, as training/data/readers.py reads them beside those of a task type."""

    def of_file(self, names: Sequence[str], column_types: Sequence[pa.DataType] = ()) -> dict[str, str]:
        return {name: name for name in names}

    def of_more_rows(self, names: Sequence[str]) -> dict[str, str]:
        return self.of_file(names)

    def reads(self, name: str) -> bool:
        return True

    def of_values(self, name: str, values: list[Any]) -> list[Any]:
        return values

    def of_array(self, column: pa.Array, label_names: Sequence[str]) -> pa.Array:
        if label_names and pa.types.is_integer(column.type):
            names = dict(enumerate(label_names))
            return pa.array([names.get(one) for one in column.to_pylist()], pa.string())
        return column

    def of_rows(self, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        return iter(rows)
