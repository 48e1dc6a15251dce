"""Where rows come from, settled before any is read: files found, callables named. Needs no pyarrow."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from training.data.file_systems import display_name, is_url, is_web, local, name_of
from training.data.listing import Listing, SourceFile, joined
from training.jobs.user_code import Place
from training.problems import Problem, UserError, nearest
from training.recipe.tables.formats import FORMATS, PACKED

if TYPE_CHECKING:
    from training.recipe import Data

SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods")
EXPORT = "save it as CSV (in Excel 'CSV UTF-8', in LibreOffice 'Text CSV')"

FILE_NAMES = {"train": ["train"], "validation": ["validation", "valid", "val", "dev"], "test": ["test"]}
"""What a split's file is called where the recipe does not say."""
# Names that are none of these, but of files that are hardly meant to be trained on unseen.
_LIKE_SPLITS = ("training", "trn", "validate", "eval", "evaluation", "testing", "tst", "heldout", "holdout")


def delimiter_of(file: str, data: Data) -> str:
    """What separates the columns of a CSV file."""
    return data.delimiter or ("\t" if ".tsv" in name_of(file).lower() else ",")


def split_names(data: Data, evaluated: Collection[str] = ()) -> dict[str, str]:
    """The name of each split at the Hub or for the callable: as in data.splits; else train, validation, and test if it
    is evaluated and no rows are held out for it, by their own names."""
    if data.splits is None:
        test = ["test"] if "test" in evaluated and not data.test_size else []
        return {split: split for split in ("train", "validation", *test)}
    return {split: name for split, name in data.splits.items() if isinstance(name, str)}


def find(data: Data) -> dict[str, list[SourceFile]]:
    """The files of each split in the order of their names; validation and test only where there are files for them.

    `data.path` is a folder, a file or a glob, here or at a URL. `data.splits` gives each split's files: names with or
    without suffix, or globs, seen from that folder, or other paths and URLs. Without it a file is train whatever it is
    called, and the files of a folder or glob are known by their names (`train.csv`, `dev.csv`, …); where no name tells,
    all are train. Shards as the Hub writes them (`train-00000-of-00002.parquet`) belong to their name. Raises
    UserError with what was looked for and what is there.
    """
    listing, suffixes = Listing(), FORMATS[data.source].suffixes
    if data.splits is not None and is_web(data.path):
        search = _Search(data, listing, data.path.rstrip("/"), [])
    else:
        search = _Search(data, listing, *listing.covered(data.path, suffixes))
    if data.splits is not None:
        found = search.as_named(data.splits)
    else:
        found = {"train": search.there} if search.is_one_file(data.path) else search.by_name()
    if search.problems:
        raise UserError(search.problems)
    return found


class _Search:
    """For the files of each split, with all that is wrong on the way."""

    def __init__(self, data: Data, listing: Listing, folder: str, there: list[SourceFile]) -> None:
        self._suffixes, self._listing = FORMATS[data.source].suffixes, listing
        self._folder, self.there = folder, there
        self.problems: list[Problem] = []

    def is_one_file(self, path: str) -> bool:
        """Whether the path names a file, rather than a folder or a glob: it is taken whatever it is called."""
        path = local(path)
        file = path if is_url(path) else os.path.abspath(os.path.expanduser(path))
        return [found.file for found in self.there] == [file]

    def as_named(self, splits: Mapping[str, str | list[str]]) -> dict[str, list[SourceFile]]:
        """Each split's files by the names that the recipe has for them; they may lie anywhere."""
        found: dict[str, list[SourceFile]] = {}
        for split, names in splits.items():
            files: dict[SourceFile, None] = {}
            for index, name in enumerate([names] if isinstance(names, str) else names):
                where = f"data.splits.{split}" + ("" if isinstance(names, str) else f"[{index}]")
                files |= dict.fromkeys(self._chosen(split, [name], where))
            for other, taken in found.items():
                for file in files.keys() & dict.fromkeys(taken).keys():
                    self._tell(
                        f"data.splits.{split}", f"{display_name(file.file)} is in {other} as well: each file has one."
                    )
            found[split] = list(files)
        return found

    def by_name(self) -> dict[str, list[SourceFile]]:
        """Each split's files among those that are there, known by their names; or all as train, where no name tells."""
        found: dict[str, list[SourceFile]] = {}
        for split, names in FILE_NAMES.items():
            if files := self._chosen(split, names, "data.path", needed=False):
                found[split] = files
        taken = {file for files in found.values() for file in files}
        like = [file for file in self.there if file not in taken and _is_like_a_split(file.name)]
        if self.problems:
            return found
        if "train" not in found:
            if self.there and not found and not like:
                return {"train": self.there}
            self._tell("data.path", self._absent("train", FILE_NAMES["train"], anywhere=False))
        elif "validation" not in found and like:  # to hold rows out of train instead would be a surprise
            self._tell("data.path", self._absent("validation", FILE_NAMES["validation"], anywhere=False))
        return found

    def _chosen(self, split: str, names: list[str], where: str, needed: bool = True) -> list[SourceFile]:
        """The files that one of a split's names stands for."""
        forms = self._forms(names, anywhere=needed)
        try:
            hits = {form: files for form in forms if (files := self._matching(form, anywhere=needed))}
        except UserError as error:  # of a file system that does not answer
            self.problems += error.problems
            return []
        if len(hits) > 1:
            some = ", ".join(display_name(file.file) for found in hits.values() for file in found[:2])
            self._tell(where, f"the {split} split could be any of {some}: name its file in data.splits.{split}.")
        elif not hits and needed:
            self._tell(where, self._absent(split, names, anywhere=True))
        return next(iter(hits.values()), [])

    def _forms(self, names: Iterable[str], anywhere: bool) -> list[str]:
        """The globs by which a split's files may be meant; on the web, which lists nothing, the name itself."""
        forms = []
        for name in names:
            forms.append(name)
            if not glob.has_magic(name) and not (anywhere and is_web(joined(self._folder, name))):
                forms += [name + suffix for suffix in self._suffixes]
                forms += [f"{name}[-_][0-9]*{suffix}" for suffix in self._suffixes]
        return forms

    def _matching(self, form: str, anywhere: bool) -> list[SourceFile]:
        if anywhere:
            return self._listing.matching(joined(self._folder, form))
        return [file for file in self.there if fnmatchcase(file.name, form)]

    def _absent(self, split: str, names: list[str], anywhere: bool) -> str:
        forms = [form for form in self._forms(names, anywhere) if form in names or not form.endswith((*PACKED,))]
        looked = ", ".join(re.sub(r"(\[0-9\])+", "*", form) for form in forms)
        if self._suffixes[-1].endswith((*PACKED,)) and len(forms) > len(names):
            looked += f" (also {' and '.join(PACKED)})"
        have = ", ".join(file.name for file in self.there[:20]) or f"nothing of the kind{self._of_other_kinds()}"
        near = nearest(names[0], [text for file in self.there for text in (file.name, _stem(file.name))])
        return (
            f"no {split} file in {display_name(self._folder)}: looked for {looked}; there is {have}. "
            f"Name it in data.splits.{split}.{near}"
        )

    def _of_other_kinds(self) -> str:
        """The files of a local folder without any of the source's; nothing where there are none either."""
        if is_url(self._folder) or not os.path.isdir(self._folder):
            return ""
        names = sorted(entry.name for entry in os.scandir(self._folder) if entry.is_file() and entry.name[0] != ".")
        sheet = next((name for name in names if name.lower().endswith(SPREADSHEETS)), None)
        advice = f" ({sheet} is a spreadsheet: {EXPORT})" if sheet else ""
        return f", only {', '.join(names[:5])}{advice}" if names else ""

    def _tell(self, where: str, message: str) -> None:
        self.problems.append(Problem(kind="data", where=where, message=message))


def _stem(name: str) -> str:
    """`train` of `train.csv.gz`."""
    known = sorted((suffix for form in FORMATS.values() for suffix in form.suffixes), key=len, reverse=True)
    return next((name.removesuffix(suffix) for suffix in known if name.endswith(suffix)), name)


def _is_like_a_split(name: str) -> bool:
    """Whether a file may well be meant as one split: `reviews-test.csv`, `trian.csv`, `training.csv`."""
    known = [*_LIKE_SPLITS, *(name for names in FILE_NAMES.values() for name in names)]
    return any(
        word in known
        or any(sorted(word) == sorted(other) for other in known)
        or any(word[0] == close[0] for close in difflib.get_close_matches(word, known, cutoff=0.8))
        for word in re.findall(r"[a-z]+", _stem(name.lower()))
    )


def load_object(name: str) -> Any:
    """The object that `module:name` names, importable from the working directory too: one that gives rows.

    That is a callable, to be called with each split's name; a mapping of splits to rows; or the rows themselves
    (`is_rows`), all train. Raises UserError when there is no such module or name, when importing it fails, or when it
    is none of these.
    """
    return _PLACE.load(name)


def is_rows(value: Any) -> bool:
    """Whether it is rows itself: it has a length, and gives each row by its number (a list, a Dataset)."""
    if isinstance(value, (str, bytes, Mapping, type)):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _gives_rows(value: Any) -> bool:
    return callable(value) or isinstance(value, Mapping) or is_rows(value)


def object_splits(data: Data, evaluated: Collection[str] = ()) -> dict[str, str]:
    """The splits that the object `data.path` gives, each with its name there.

    A function is called for the splits of `split_names`, a mapping has names of its own, and anything else is rows of
    train.
    """
    found: Any = load_object(data.path)
    if is_splits(found, data):
        names = data.splits or {split: split for split in FILE_NAMES if split in found}
        return {split: str(name) for split, name in names.items()}
    whole = is_rows(found) or isinstance(found, Mapping)
    return {"train": "train"} if whole else split_names(data, evaluated)


def is_splits(found: Any, data: Data) -> bool:
    """Whether it holds rows by the name of their split, like a DatasetDict, and not values by that of their column."""
    names = {*FILE_NAMES, *map(str, (data.splits or {}).values())}
    return isinstance(found, Mapping) and not set(found).isdisjoint(names)


def fingerprint(rows: Any) -> str | None:
    """What the object says its rows depend on (`rows.fingerprint()`), or None where it says nothing."""
    ask = getattr(rows, "fingerprint", None)
    if ask is None:
        return None
    try:
        answer = ask()
    except Exception as error:
        raise _PLACE.refused(f"its fingerprint() failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise _PLACE.refused(f"fingerprint() gave {type(answer).__name__}: it must give a text.")
    return answer


_PLACE = Place(
    kind="data",
    where="data.path",
    example="my_rows:rows",
    accepted="a function of a split's name, a mapping of splits to rows, or rows with a length and an index",
    fits=_gives_rows,
)
