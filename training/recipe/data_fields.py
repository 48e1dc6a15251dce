"""The section `data` of a recipe: one set of rows, or a mixture of several.

An entry of `data.mix` has the fields of `data` for its own source. The value of a field that it leaves out is that of
`data`: `section_of_set` makes it a whole data section.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from training.jobs.protocol import NotInKey
from training.problems import Problem
from training.recipe.field_types import (
    CodeName,
    ColumnType,
    NameIn,
    NameOrNames,
    NamesOrFile,
    RunsCode,
    Section,
    SetName,
    Text,
)
from training.recipe.row_split import RowSplit
from training.recipe.tables.formats import SOURCES
from training.recipe.tables.row_checks import Level

MIX = "mix"
"""The value of data.source for a mixture, and the field with its sets."""
DATASET = "dataset"
"""The slice of a mixture whose groups are the sets, by name."""
OF_MIXTURE = ("mix", "weight_by", "stopping_strategy", "mix_seed")
"""Fields of `data` that a set does not have."""
OF_SET = ("name", "weight", "epochs")
"""Fields of a set that `data` does not have."""
SHARED = ("label_names", "checks", "corrections", "corpus", "negatives", "unlabelled")
"""Fields that are the same for all sets, because they are about the rows of all sets together."""
_FIELD = re.compile(r"(?<![\w./-])data\.([a-z_]+)")
_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?(\.[a-z]{2,7})?(\.gz|\.zst)?$")

MAX_RANGE = 1_000_000
"""The largest number of documents of a query that are counted."""
PLACE = NotInKey("the digests of the files are in the key, or the commit and the names on the Hub")


class _Rows(Section):
    """The source of one set of rows, and the columns to use."""

    source: Annotated[str, NameIn(SOURCES)]
    """The kind of source, as `data.source`."""
    path: Annotated[CodeName, PLACE]
    """The set's dataset on the Hub, files or object, as `data.path`."""
    config: Annotated[str | None, PLACE] = None
    """The subset of a Hub dataset, such as `sst2` of `nyu-mll/glue`."""
    revision: Annotated[str | None, PLACE] = None
    """Branch, tag or commit of a Hub dataset (null: main). It is pinned to a commit before rows are read."""
    splits: Annotated[dict[str, NameOrNames] | None, PLACE] = None
    """The Hub split, or the file or files (of folders of texts or images the folder or folders), of train and
    optionally of validation and test (null: found by name; without such names, all files are train). Without a
    validation split, rows of train are held out."""
    validation_size: float = Field(default=0.1, gt=0, le=10**15)
    """Share of the train rows held out for validation if there is no validation split. A hash of the text chooses the
    rows, unless `split` says otherwise: equal texts stay together, and old rows stay in their split when rows are
    added. 1 or more is a number of rows, for `split.by: time` only."""
    test_size: float = Field(default=0.0, ge=0, le=10**15)
    """Share of the train rows held out for test if there is no test split, chosen as for validation."""
    split: Annotated[RowSplit | None, NotInKey("it is in the key if it is set")] = None
    """The choice of the rows that are held out: by groups of rows, or by time (null: by rows)."""

    @property
    def holds_out_test(self) -> bool:
        """Whether rows of train become test if the source has no such split."""
        return self.test_size > 0 or (self.split is not None and self.split.test_from is not None)

    delimiter: Annotated[str | None, NotInKey("the delimiter of each file is in the key")] = Field(
        default=None, min_length=1, max_length=1
    )
    """The character between the columns of a CSV file (null: the one that a first line such as `sep=;` names, else a
    tab in .tsv files and a comma in others) or of a CoNLL file (null: tabs, in lines without one any white space)."""
    maxsplit: int | None = Field(default=None, ge=1)
    """How many delimiters of a line of CSV separate columns, from the left, as in Python's `str.split`: with 1, a line
    `LABEL a text` has the two columns `LABEL` and `a text`. It needs `quoting: none` (null: all delimiters do)."""
    quoting: Literal["standard", "none"] = "standard"
    """The meaning of quotation marks in a CSV file. standard: they enclose fields that hold delimiters, line breaks or
    doubled quotation marks, and are removed. none: they are ordinary text, and each line is a row."""
    header: list[Text] | None = Field(default=None, min_length=1)
    """The column names of a CSV file without a header row, in order (null: the first row has the names). A row may end
    early if only columns that the recipe does not use are missing. The names of all columns of a CoNLL file (null:
    those of CoNLL-U in .conllu files; in others `tokens`, the first column, and `tags`, the last)."""
    encoding: Text = "utf-8"
    """The text encoding of CSV, JSON, CoNLL and text files: utf-8, utf-16, latin-1, cp1252, …"""
    rename: dict[Text, Text] = Field(default_factory=dict)
    """New names of columns by their old names. All other fields use the new names."""
    cast: dict[Text, ColumnType] = Field(default_factory=dict)
    """Types to convert columns to, by column: string, int64, float64 or bool."""
    filter: Text | None = None
    """The condition that rows must meet, such as `stars >= 4 and language in ("en", "de") and not text == ""`."""
    limit: int | None = Field(default=None, ge=1, le=10**15)
    """The largest number of rows of each split; the first ones are used. For trials."""
    text: list[Text] | None = Field(default=None, min_length=1, max_length=2)
    """The text column, or the two columns of a pair of texts, in the model's order (null: for task types without a text
    column)."""
    label: Text | None = None
    """The column of labels: names or whole numbers; lists of them or any numbers for some task types (null: for task
    types without labels)."""
    columns: dict[Text, Text] = Field(default_factory=dict)
    """The columns of task types that need more than text and label, by their role: `{source: en, target: de}`. A
    required column that is left out is the one with the role's name."""
    label_separator: Text | None = None
    """The separator of several labels in one cell, such as the comma of `4,27` (null: such a cell is a JSON list)."""
    max_file_gb: Annotated[float, NotInKey("a larger file is refused")] = Field(default=20.0, gt=0)
    """The largest unpacked size of one file in gigabytes. A small packed file may unpack to any size."""


class _MixedSet(_Rows):
    name: SetName | None = None
    """The set's name in tables and slices (null: the last part of its path)."""
    weight: float | None = Field(default=None, gt=0, le=1_000_000)
    """The set's share of the mixture, in proportion to the weights of the other sets. Either all sets have one, or
    none."""
    epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """How often the set's training rows are passed in one epoch of the mixture; 0.5 takes half of them (null: 1 in a
    mixture without weights). With weights, one set may have it: its passes fix the size of the mixture."""


def _of_set(name: str, field: Any) -> Any:
    """Returns a field of `data` as a field of one set, in which null stands for the value in `data`."""
    description = f"As `data.{name}`, for this set alone (null: the value of `data.{name}`)."
    marks = [mark for mark in field.metadata if isinstance(mark, NotInKey)]
    others = [mark for mark in field.metadata if mark not in marks]
    kind = (Annotated[field.annotation, *others] if others else field.annotation) | None
    return Annotated[kind, *marks] if marks else kind, Field(default=None, description=description)


if TYPE_CHECKING:
    MixedSet = _MixedSet
else:
    MixedSet = create_model(
        "MixedSet",
        __base__=_MixedSet,
        __doc__="One set of rows in a mixture, with its own source and columns.",
        **{name: _of_set(name, field) for name, field in _Rows.model_fields.items() if name not in ("source", "path")},
    )


EVALUATED = ("validation", "test")


class Negatives(Section):
    """Documents near a query that do not belong to it, which are found among those of all training rows and added to
    the rows of the query. Names, meanings and defaults are those of sentence-transformers' mine_hard_negatives."""

    source: Literal["bm25", "base", "registry"]
    """The scores by which documents are near. bm25: the words that they share with the query, without a model. base:
    the similarity of embeddings of the base model. registry: of a version in MLflow's registry."""
    path: Annotated[Text | None, NotInKey("the digest of the version's model is in the key")] = None
    """For registry `NAME@alias` or `NAME/version` of a model of embeddings, which is pinned to a version; else null."""
    num_negatives: int = Field(default=3, ge=1, le=1000)
    """The documents that a row gets, the nearest ones first; fewer if there are not as many."""
    range_min: int = Field(default=0, ge=0, le=MAX_RANGE)
    """How many of the nearest documents are passed over, because they may answer the query although no row says so."""
    range_max: int | None = Field(default=None, ge=1, le=MAX_RANGE)
    """The number of nearest documents among which negatives are chosen (null: all)."""
    max_score: float | None = None
    """The highest score of a negative: from -1 to 1 for embeddings; of any size for bm25 (null: any)."""
    min_score: float | None = None
    """The lowest score of a negative (null: any; for bm25 above 0)."""
    absolute_margin: float | None = Field(default=None, ge=0)
    """By how much the score of a negative is at least below that of the positive, the lowest of several (null: it may
    be above)."""
    relative_margin: float | None = Field(default=None, ge=0, le=1)
    """The same as a share of the positive's score: 0.05 takes documents of at most 95 % of it (null: none)."""
    corpus: bool = False
    """Whether the documents of data.corpus are looked at too, beside those of the training rows."""
    num_candidates: int | None = Field(default=None, ge=2, le=1000)
    """For reranking: the documents of a query of validation and test become the nearest so many of all documents of the
    split, so that figures are those of this search with the reranker after it. A relevant document that the search
    does not find counts as not found (null: those that the rows have)."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits whose rows get documents."""
        return ("train",) if self.num_candidates is None else ("train", *EVALUATED)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of load_data with the rows, and with further documents."""
        return tuple(f"{name}.arrow" for name in (*self.splits, *(["corpus"] if self.corpus else [])))


class Data(_Rows):
    """The source of the rows, and the columns to use."""

    source: Annotated[str, NameIn([*SOURCES, MIX])] = MIX
    """hub: a dataset of the Hugging Face Hub. csv (also tab-separated), json (one object a line, or one array of
    objects), conll (a word and its tags a line), parquet, arrow: files; csv, json and conll may be packed by gzip or
    zstd. textfolder: a folder of texts for each label, such as `spam/1.txt`, with the columns `text`, `label` and
    `file_name`. imagefolder: the same of images, with the column `image`. python: a function or object that returns the
    rows. mix: the sets in `mix`."""
    path: Annotated[str, RunsCode(), PLACE] = ""
    """The dataset's name on the Hub; or a file, folder, glob or URL (`s3://…`, `https://…`); or `module:name`. Relative
    paths start from the working directory. Empty for a mixture."""
    label_names: NamesOrFile | None = None
    """The labels in the order of the model's outputs; or a file with one label a line, or a JSON list in a .json file
    (null: the names in the dataset, else the labels found, sorted). Labels that are whole numbers are positions in this
    list, from 0."""
    checks: dict[str, Level] = Field(default_factory=dict)
    """The level of each check of the rows by its name: error (nothing is stored), warning or ignore. Rows that cannot
    be used are left out unless their check is an error. docs/reference/checks.md lists the checks."""
    corrections: Annotated[Text | None, NotInKey("the digest of the file is in the key")] = None
    """A CSV file or URL with people's decisions about labels of train, as `finetune labels` writes it: a row with a
    label in the column `decision` gets it, one with `drop` is left out, and one with `keep` or nothing stays. Rows are
    recognised by their inputs; validation and test stay as they are (null: none)."""
    corpus: Annotated[Text | None, NotInKey("the digests of the files are in the key")] = None
    """Further documents that an evaluation of task embedding searches, beside those of the split: a file, folder or
    glob, read as the rows of data are, with the texts in the column of positives. They are relevant for no query,
    except those that rows name (null: the documents of the split alone)."""
    negatives: Annotated[Negatives | None, NotInKey("they are added to stored rows")] = None
    """Hard negatives for training rows of embedding and reranking, found by the stage `mine_negatives`:
    docs/how-to/hard-negatives.md (null: only those that the rows have)."""
    unlabelled: Annotated[Text | None, NotInKey("they are other rows than those that are stored")] = None
    """A file of rows without labels, or a folder or glob of such files, from which the model learns by the outputs of
    training.teacher. They are read as the other rows are, and are never evaluated: docs/how-to/teachers.md (null:
    none)."""
    mix: Annotated[list[MixedSet] | None, NotInKey("the sets are in the key by their names")] = Field(
        default=None, min_length=1
    )
    """The sets of a mixture, each with its own source; the other fields of `data` then hold for each set that does not
    have its own: docs/how-to/data/mixtures.md (null: one set of rows)."""
    weight_by: Literal["rows", "characters", "tokens"] = "rows"
    """The unit of the weights in `mix`. characters, tokens: long rows count more. tokens: by the model's
    tokenizer.json, without special tokens and before rows are cut; the rows are then loaded after the model, and again
    for a model with another tokenizer."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """The size of a mixture with weights, by the terms of `datasets.interleave_datasets`. first_exhausted: as large as
    it can be without repeating a row. all_exhausted: as small as it can be with every row at least once; the other sets
    repeat."""
    mix_seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed that chooses rows of sets that are not passed a whole number of times."""

    @property
    def sets(self) -> tuple[Data, ...]:
        """The sets of a mixture, each as a whole data section; without a mixture, the section itself."""
        if self.mix is None:
            return (self,)
        common = self.model_dump()
        return tuple(Data.model_validate(section_of_set(common, entry)) for entry in self.set_entries)

    @property
    def set_entries(self) -> list[dict[str, Any]]:
        """The fields of each set in `mix` itself."""
        return [entry.model_dump(exclude_none=True) for entry in self.mix or ()]

    @property
    def set_names(self) -> list[str]:
        """The name of each set in `mix`."""
        return set_names(self.set_entries)

    def locate(self, problems: Iterable[Problem], index: int) -> list[Problem]:
        """Returns problems of one set with the names of its fields here: `data.mix[1].text` for `data.text`."""
        if self.mix is None:
            return list(problems)
        fields = type(self).model_fields
        common = {name for name in fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)}
        return list(locate_all(problems, index, self.set_entries[index], common))


def entries_of(data: Any) -> list[Mapping[str, Any]]:
    """Returns the entries of `data.mix` as written; none without a mixture, or if one is no mapping."""
    found = data.get(MIX) if isinstance(data, Mapping) else None
    if not isinstance(found, Sequence) or isinstance(found, str):
        return []
    return list(found) if all(isinstance(entry, Mapping) for entry in found) else []


def section_of_set(data: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data section of one set: its own fields, and the others from `data`."""
    common = {name: value for name, value in data.items() if name not in ("source", "path", *OF_MIXTURE)}
    return common | {name: value for name, value in entry.items() if value is not None and name not in OF_SET}


def default_name(source: Any, path: Any) -> str:
    """Returns the name of a set that has none: the last part of its path, without suffix."""
    text = str(path).rstrip("/")
    text = text.rpartition(":")[2] if source == "python" else PurePosixPath(text).name
    name = re.sub(r"[^\w.-]+", "-", text if source in ("hub", "python") else _SUFFIX.sub("", text), flags=re.ASCII)
    return name.strip("-_.") or str(source)


def set_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the name of each set."""
    return [str(entry.get("name") or default_name(entry.get("source"), entry.get("path"))) for entry in entries]


def locate_all(
    problems: Iterable[Problem], index: int, entry: Mapping[str, Any], common: Collection[str]
) -> Iterator[Problem]:
    """Yields the problems of one set with the names of its fields in the mixture: `data.mix[1].text` for `data.text`.

    Args:
        entry: The set's own fields.
        common: The fields that `data` has for all sets without their own.
    """

    def place(match: re.Match[str]) -> str:
        name = match[1]
        own = entry.get(name) is not None
        is_common = name in SHARED or name in OF_MIXTURE or (name in common and not own)
        return match[0] if is_common else f"data.{MIX}[{index}].{name}"

    for problem in problems:
        where, message = _FIELD.sub(place, problem.where), _FIELD.sub(place, problem.message)
        yield problem.model_copy(update={"where": where, "message": message})
