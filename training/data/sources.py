"""Sources of rows before any row is read: the files of each split, and Python objects. Imports no pyarrow."""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from training.data.file_systems import display_name, is_url, is_web, local_path, name_of
from training.data.listing import Listing, SourceFile, describe_unread, list_texts
from training.jobs.user_code import CodeField
from training.problems import Problem, UserError, nearest, on_one_line
from training.recipe.tables.formats import FORMATS, PACKED

if TYPE_CHECKING:
    from training.recipe import Data

SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods")
EXPORT = "save it as CSV (in Excel 'CSV UTF-8', in LibreOffice 'Text CSV')"

FILE_NAMES = {"train": ["train"], "validation": ["validation", "valid", "val", "dev"], "test": ["test"]}
"""The names of a split's file if the recipe does not define them."""
# Other names of files that are hardly meant to be part of train.
_LIKE_SPLITS = ("training", "trn", "validate", "eval", "evaluation", "testing", "tst", "heldout", "holdout")


def delimiter_of(file: str, data: Data) -> str:
    """Returns the delimiter of a CSV file."""
    return data.delimiter or ("\t" if ".tsv" in name_of(file).lower() else ",")


def is_conllu(file: str) -> bool:
    """Whether a file has the columns of CoNLL-U, by its name."""
    return ".conllu" in name_of(file).lower()


def reading_by_name(data: Data, paths: Sequence[str]) -> dict[str, Any]:
    """Returns what a file's name decides: the delimiter of CSV, and whether the columns are those of CoNLL-U."""
    return {
        "delimiter": [delimiter_of(path, data) for path in paths] if data.source == "csv" else data.delimiter,
        "conllu": [is_conllu(path) for path in paths] if data.source == "conll" else None,
    }


def split_names(data: Data, evaluated: Collection[str] = ()) -> dict[str, str]:
    """Returns the name of each split at the Hub or for the callable: as in data.splits; else train, validation, and
    test if it is evaluated and not held out of train."""
    if data.splits is None:
        test = ["test"] if "test" in evaluated and not data.holds_out_test else []
        return {split: split for split in ("train", "validation", *test)}
    return {split: name for split, name in data.splits.items() if isinstance(name, str)}


def find_split_files(data: Data) -> tuple[dict[str, list[SourceFile]], list[SourceFile], list[str]]:
    """Returns the files of each split, sorted by name, validation and test only if there are files for them; and,
    unless `data.splits` names files, those of a folder or glob that are in no split, and the names of folders in it.

    `data.path` is a folder, a file or a glob, here or at a URL. `data.splits` names each split's files: names with or
    without suffix, or globs, relative to that folder, or other paths and URLs. Without it, a single file is train, and
    the files of a folder or glob are assigned by their names (`train.csv`, `dev.csv`, …); if no name is of a split, all
    are train. Shards as the Hub writes them (`train-00000-of-00002.parquet`) belong to their name. Raises
    UserError with the names that were looked for and the files that exist.

    A split of a source of folders is a folder, or several.
    """
    if FORMATS[data.source].is_folder:
        return _find_text_folders(data)
    listing, suffixes = Listing(), FORMATS[data.source].suffixes
    if data.splits is not None and is_web(data.path):
        search = _Search(data, listing, data.path.rstrip("/"), [])
    else:
        search = _Search(data, listing, *listing.find_files(data.path, suffixes))
    if data.splits is not None:
        found = search.as_named(data.splits)
    else:
        found = {"train": search.there} if search.is_one_file(data.path) else search.by_name()
    if search.problems:
        raise UserError(search.problems)
    taken = {file for files in found.values() for file in files}
    if data.splits is not None:
        return found, [], []
    return found, [file for file in search.there if file not in taken], listing.unread_folders(data.path, suffixes)


def _find_text_folders(data: Data) -> tuple[dict[str, list[SourceFile]], list[SourceFile], list[str]]:
    """As `find_split_files`, for folders of texts or images: `data.path` itself is train, unless it has a folder
    `train` with folders in it. The files that are not read are those beside the splits and beside texts or images."""
    kind = "image" if data.source == "imagefolder" else "text"
    named = {split: [names] if isinstance(names, str) else names for split, names in (data.splits or {}).items()}
    if url := next(filter(is_url, map(local_path, [data.path, *itertools.chain(*named.values())])), None):
        message = f"{display_name(url)}: folders of {kind}s are read on this machine: copy the folder here."
        raise UserError.of("data", "data.path", message)
    top = os.path.abspath(os.path.expanduser(local_path(data.path)))
    if not os.path.isdir(top):
        Listing().find_files(glob.escape(data.path), ())
        message = f"{display_name(top)} is a file: name the folder that holds a folder of {kind}s for each label."
        raise UserError.of("data", "data.path", message)
    inner = sorted(entry.name for entry in os.scandir(top) if entry.is_dir() and entry.name[0] not in "._")
    if data.splits is None and "train" in inner and any(one.is_dir() for one in os.scandir(os.path.join(top, "train"))):
        named = {split: [one for one in inner if one in names] for split, names in FILE_NAMES.items()}
    elif data.splits is None:
        named = {"train": ["."]}
    found, others, problems = dict[str, list[SourceFile]](), list[SourceFile](), list[Problem]()
    for split, names in named.items():
        for name in names:
            folder = os.path.normpath(os.path.join(top, os.path.expanduser(local_path(name))))
            texts, unread = list_texts(folder) if os.path.isdir(folder) else ([], [])
            found.setdefault(split, []).append(SourceFile(folder))
            others += unread
            if not texts:
                message = (
                    f"{display_name(folder)} has no {kind} file: the folders here are {', '.join(inner) or 'none'}."
                )
                message += nearest(name, inner)
                where = "data.path" if data.splits is None else f"data.splits.{split}"
                problems.append(Problem(kind="data", where=where, message=message))
        if data.splits is None and len(names) > 1:
            message = f"the {split} split could be any of {', '.join(names)}: name its folder in data.splits.{split}."
            problems.append(Problem(kind="data", where="data.path", message=message))
    if problems:
        raise UserError(problems)
    taken = {os.path.basename(file.file) for files in found.values() for file in files}
    beside = [] if data.splits is not None or named["train"] == ["."] else [one for one in inner if one not in taken]
    return found, others, beside


def image_folder(data: Data) -> str | None:
    """Returns the folder from which paths in a column of images start: that of the files, or the one that holds them.
    None for sources without local files, and for folders of images, whose rows have no paths."""
    if data.source not in FORMATS or FORMATS[data.source].is_folder or is_url(local_path(data.path)):
        return None
    path = os.path.abspath(os.path.expanduser(local_path(data.path)))
    if os.path.isdir(path):
        return path
    folder = os.path.dirname(path)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder


class _Search:
    """The search for the files of each split, with all problems."""

    def __init__(self, data: Data, listing: Listing, folder: str, there: list[SourceFile]) -> None:
        self._suffixes, self._listing = FORMATS[data.source].suffixes, listing
        self._folder, self.there = folder, there
        self.problems: list[Problem] = []

    def is_one_file(self, path: str) -> bool:
        """Whether the path names a file rather than a folder or a glob."""
        path = local_path(path)
        file = path if is_url(path) else os.path.abspath(os.path.expanduser(path))
        return [found.file for found in self.there] == [file]

    def as_named(self, splits: Mapping[str, str | list[str]]) -> dict[str, list[SourceFile]]:
        """Returns each split's files by the recipe's names for them, in any folder."""
        found: dict[str, list[SourceFile]] = {}
        for split, names in splits.items():
            files: dict[SourceFile, None] = {}
            for index, name in enumerate([names] if isinstance(names, str) else names):
                where = f"data.splits.{split}" + ("" if isinstance(names, str) else f"[{index}]")
                files |= dict.fromkeys(self._choose(split, [name], where))
            for other, taken in found.items():
                for file in files.keys() & dict.fromkeys(taken).keys():
                    self._add_problem(
                        f"data.splits.{split}", f"{display_name(file.file)} is in {other} as well: each file has one."
                    )
            found[split] = list(files)
        return found

    def by_name(self) -> dict[str, list[SourceFile]]:
        """Assigns the files that exist to splits by their names; all to train if no name is of a split."""
        found: dict[str, list[SourceFile]] = {}
        for split, names in FILE_NAMES.items():
            if files := self._choose(split, names, "data.path", needed=False):
                found[split] = files
        taken = {file for files in found.values() for file in files}
        like = [file for file in self.there if file not in taken and _is_like_a_split(file.name)]
        if self.problems:
            return found
        if "train" not in found:
            if self.there and not found and not like:
                return {"train": self.there}
            self._add_problem("data.path", self._missing("train", FILE_NAMES["train"], anywhere=False))
        elif "validation" not in found and like:  # holding rows out of train instead would surprise
            self._add_problem("data.path", self._missing("validation", FILE_NAMES["validation"], anywhere=False))
        return found

    def _choose(self, split: str, names: list[str], where: str, needed: bool = True) -> list[SourceFile]:
        """Returns the files that match one of a split's names."""
        forms = self._patterns(names, anywhere=needed)
        try:
            hits = {form: files for form in forms if (files := self._matching(form, anywhere=needed))}
        except UserError as error:  # a file system that does not answer
            self.problems += error.problems
            return []
        if len(hits) > 1:
            some = ", ".join(display_name(file.file) for found in hits.values() for file in found[:2])
            self._add_problem(where, f"the {split} split could be any of {some}: name its file in data.splits.{split}.")
        elif not hits and needed:
            self._add_problem(where, self._missing(split, names, anywhere=True))
        return next(iter(hits.values()), [])

    def _patterns(self, names: Iterable[str], anywhere: bool) -> list[str]:
        """Returns the globs for a split's names; on the web, which lists no folders, the names themselves."""
        forms = []
        for name in names:
            forms.append(name)
            is_on_web = is_web(name) or (is_web(self._folder) and not os.path.isabs(name))
            if not (anywhere and is_on_web):
                forms += [glob.escape(name) + suffix for suffix in self._suffixes]
                forms += [f"{glob.escape(name)}[-_][0-9]*{suffix}" for suffix in self._suffixes]
        return forms

    def _matching(self, form: str, anywhere: bool) -> list[SourceFile]:
        if anywhere:
            return self._listing.find_named(self._folder, form)
        return [file for file in self.there if fnmatchcase(file.name, form)]

    def _missing(self, split: str, names: list[str], anywhere: bool) -> str:
        forms = [form for form in self._patterns(names, anywhere) if form in names or not form.endswith((*PACKED,))]
        looked = ", ".join(re.sub(r"(\[0-9\])+", "*", form).replace("[[]", "[") for form in forms)
        if self._suffixes[-1].endswith((*PACKED,)) and len(forms) > len(names):
            looked += f" (also {' and '.join(PACKED)})"
        have = ", ".join(on_one_line(file.name) for file in self.there[:20]) or f"no such file{self._other_files()}"
        near = nearest(names[0], [text for file in self.there for text in (file.name, _stem(file.name))])
        return (
            f"no {split} file in {display_name(self._folder)}: looked for {looked}; there is {have}. "
            f"Name it in data.splits.{split}.{near}{self._inner_folders()}"
        )

    def _inner_folders(self) -> str:
        """Returns the sentence on the folders with rows in a folder that has no such file itself."""
        folders = [] if self.there else self._listing.unread_folders(self._folder, self._suffixes)
        return f" {describe_unread(self._folder, folders)}." if folders else ""

    def _other_files(self) -> str:
        """Returns the files of a local folder that has none of the source's format."""
        if is_url(self._folder) or not os.path.isdir(self._folder):
            return ""
        there = (entry.name for entry in os.scandir(self._folder) if entry.is_file() and entry.name[0] != ".")
        names = sorted(map(on_one_line, there))
        sheet = next((name for name in names if name.lower().endswith(SPREADSHEETS)), None)
        advice = f" ({sheet} is a spreadsheet: {EXPORT})" if sheet else ""
        return f", only {', '.join(names[:5])}{advice}" if names else ""

    def _add_problem(self, where: str, message: str) -> None:
        self.problems.append(Problem(kind="data", where=where, message=message))


def _stem(name: str) -> str:
    """Returns `train` for `train.csv.gz`."""
    known = sorted((suffix for form in FORMATS.values() for suffix in form.suffixes), key=len, reverse=True)
    return next((name.removesuffix(suffix) for suffix in known if name.endswith(suffix)), name)


def _is_like_a_split(name: str) -> bool:
    """Whether a file is probably meant as one split: `reviews-test.csv`, `trian.csv`, `training.csv`."""
    known = [*_LIKE_SPLITS, *(name for names in FILE_NAMES.values() for name in names)]
    return any(
        word in known
        or any(sorted(word) == sorted(other) for other in known)
        or any(word[0] == close[0] for close in difflib.get_close_matches(word, known, cutoff=0.8))
        for word in re.findall(r"[a-z]+", _stem(name.lower()))
    )


def load_object(name: str) -> Any:
    """Returns the object `module:name`, importable from the working directory too, that provides rows.

    It is a callable that takes a split's name; a mapping of splits to rows; or the rows themselves (`is_rows`), all
    train. Raises UserError if there is no such module or name, if its import fails, or if it is none of these.
    """
    return _FIELD.load(name)


def is_rows(value: Any) -> bool:
    """Whether it is rows itself: it has a length, and an index returns a row (a list, a Dataset)."""
    if isinstance(value, (str, bytes, Mapping, type)):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _provides_rows(value: Any) -> bool:
    return callable(value) or isinstance(value, Mapping) or is_rows(value)


def object_splits(data: Data, evaluated: Collection[str] = ()) -> dict[str, str]:
    """Returns the splits that the object `data.path` provides, each with its name there.

    A function provides those of `split_names`, a mapping those of its keys, and other rows are train.
    """
    found: Any = load_object(data.path)
    if is_splits(found, data):
        names = data.splits or {split: split for split in FILE_NAMES if split in found}
        return {split: str(name) for split, name in names.items()}
    whole = is_rows(found) or isinstance(found, Mapping)
    return {"train": "train"} if whole else split_names(data, evaluated)


def is_splits(found: Any, data: Data) -> bool:
    """Whether it maps splits to rows, like a DatasetDict, rather than columns to values."""
    names = {*FILE_NAMES, *map(str, (data.splits or {}).values())}
    return isinstance(found, Mapping) and not set(found).isdisjoint(names)


def fingerprint(rows: Any) -> str | None:
    """Returns the object's own fingerprint of its rows (`rows.fingerprint()`); None if it has none."""
    method = getattr(rows, "fingerprint", None)
    if method is None:
        return None
    try:
        answer = method()
    except Exception as error:
        raise _FIELD.error(f"its fingerprint() failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise _FIELD.error(f"fingerprint() gave {type(answer).__name__}: it must give a text.")
    return answer


_FIELD = CodeField(
    kind="data",
    where="data.path",
    example="my_rows:rows",
    accepted="a function of a split's name, a mapping of splits to rows, or rows with a length and an index",
    accepts=_provides_rows,
)
