"""Bad input: one message that names the place, the value and the next step; exit 2; nothing stored; no traceback."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from flows.cli.main import main
from tasks.home import MARK
from tests.arrow import write_arrow

TRAIN = "text,label\none,a\ntwo,b\n"
VALID = "text,label\nthree,a\nfour,b\n"
LINES = '{"text": "one", "label": "a"}\n{"text": "two", "label": "b"}\n'

Content = str | bytes | Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """Files, their fields of the recipe, and the words that the messages must contain."""

    expected: tuple[str, ...]
    train: Content = TRAIN
    validation: Content | None = VALID
    suffix: str = ".csv"
    source: str = "csv"
    data: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Content] = field(default_factory=dict)


def csv(rows: str | bytes, *expected: str, **more: Any) -> Case:
    return Case(expected, b"text,label\n" + (rows.encode() if isinstance(rows, str) else rows), **more)


def lines(train: str | bytes, *expected: str, **more: Any) -> Case:
    return Case(expected, train, LINES, ".jsonl", "json", **more)


def python(code: str, *expected: str, **more: Any) -> Case:
    data = {"path": "bad_rows:rows", **more}
    return Case(expected, TRAIN, None, source="python", data=data, more={"bad_rows.py": code})


def parquet(columns: dict[str, Any], *expected: str, **more: Any) -> Case:
    def write(path: Path) -> None:
        pq.write_table(pa.table(columns), path)

    return Case(expected, write, write, ".parquet", "parquet", **more)


def gzip_of(content: str) -> bytes:
    return gzip.compress(content.encode())


def cut(write: Callable[[Path], None], size: int) -> Callable[[Path], None]:
    def write_less(path: Path) -> None:
        write(path)
        path.write_bytes(path.read_bytes()[:size])

    return write_less


def arrow(path: Path) -> None:
    table = pa.table({"text": ["one", "two"] * 500, "label": ["a", "b"] * 500})
    write_arrow(path, table)


FIX = "correct or remove it, or leave it out: data.checks."
CASES: dict[str, Case] = {
    # CSV
    "a row with too many fields": csv(
        "one,a\ntwo,b,c\n", f"train.csv row 3: has 3 fields where the header has 2: {FIX}ragged: warning"
    ),
    "a row with too few fields": csv("one,a\ntwo\n", "train.csv row 3: has 1 fields where the header has 2"),
    "a quotation mark that is never closed": csv('one,a\n"two,b\nthree,c\n', "train.csv", "mark never closed?"),
    "bytes that are no text": csv(b"\xe9n,a\ntwo,b\n", "train.csv row 2: is not UTF-8 text (column 'text')"),
    "UTF-16": Case(("train.csv", "UTF-16", "data.encoding: utf-16"), TRAIN.encode("utf-16")),
    "nothing": Case(("data.splits.train: the train split has no rows (train.csv): choose another",), ""),
    "a header alone": csv("", "data.splits.train: the train split has no rows"),
    "no such column": csv(
        "one,a\ntwo,b\n",
        "data.text: train.csv has no column 'texts': it has text, label. Did you mean 'text'?",
        data={"text": ["texts"]},
    ),
    "a column twice": Case(
        ("data.text: train.csv has 2 columns called 'text': rename all but one",), "text,text,label\none,x,a\ntwo,y,b\n"
    ),
    "another delimiter": Case(
        ("data.delimiter: the header of train.csv is one column, 'text;label': set data.delimiter: ';'",),
        "text;label\none;a\n",
    ),
    "an empty text": csv(
        "one,a\n,b\ntwo,b\n", f"train.csv row 3: has no text in column 'text': {FIX}blank_text: warning"
    ),
    "blank texts": csv(
        "one,a\n  ,b\n\t,b\ntwo,b\n", "train.csv row 3: has no text in column 'text' (2 rows like this: 3, 4)"
    ),
    "a row below blank lines": csv("one,a\n\n\n,b\ntwo,b\n", "train.csv row 5: has no text in column 'text'"),
    "a header without an end": Case(("train.csv: has a header of more than 2,097,152 characters",), "x" * 3_000_000),
    "a quotation mark in the header": Case(
        ("train.csv: has no header that can be read (field larger", "mark never closed?"),
        'text,"label\n' + "one,a\n" * 40_000,
    ),
    "many labels that training never saw": Case(
        ("validation.csv row 2: label 'x0'", "data.splits.validation: 995 more labels of validation are unknown"),
        validation="text,label\n" + "".join(f"t{n},x{n}\n" for n in range(1000)),
    ),
    "names that do not fit the numbers": csv(
        "one,1\ntwo,2\nthree,3\n",
        "data.label_names: 4 names do not match the labels of train, 1, 2, 3",
        validation="text,label\nx,1\ny,2\n",
        data={"label_names": ["a", "b", "c", "d"]},
    ),
    "a check that cannot be turned off": Case(
        ("data.checks.no_rows: is always an error",), data={"checks": {"no_rows": "warning"}}
    ),
    "no label": csv(
        "one,a\nnew,\ntwo,b\n", f"train.csv row 3: has no label in column 'label': {FIX}missing_label: warning"
    ),
    "a label that training never saw": Case(
        ("validation.csv row 3: label 'c' (1 row of validation) is unknown: choose from a, b",),
        validation="text,label\nthree,a\nfour,c\nfive,b\n",
    ),
    "one label only": csv(
        "one,a\ntwo,a\n", "data.label: the train split has only the label 'a'", validation="text,label\nx,a\n"
    ),
    "texts for labels": csv(
        "".join(f"t,{n}\n" for n in range(10_002)), "data.label: column 'label' has more than 10000 different values"
    ),
    "a text without an end": csv(
        "one,a\n" + "x" * 1_500_000 + ",b\ntwo,b\n",
        "train.csv row 3: has a text of more than 1,000,000 bytes in column 'text' (is a quotation mark never closed?)",
    ),
    "a row without an end": csv(
        "one,a\n" + "x" * 9_000_000 + ",b\n", "train.csv: has a row of more than 2,097,152 bytes after row 2"
    ),
    "a bomb": Case(
        ("train.csv.gz", "data.max_file_gb"),
        gzip_of(TRAIN + "one,a\n" * 100_000),
        suffix=".csv.gz",
        validation=gzip_of(VALID),
        data={"max_file_gb": 0.0001},
    ),
    "a packed file that was cut": Case(
        ("train.csv.gz",), gzip_of(TRAIN * 50)[:-12], suffix=".csv.gz", validation=gzip_of(VALID)
    ),
    "a name that says packed": Case(("train.csv.gz", "gz"), TRAIN, suffix=".csv.gz", validation=gzip_of(VALID)),
    "a spreadsheet": Case(
        ("train.csv: is no text but a zip archive or a spreadsheet: unpack it, or save it as CSV (in Excel 'CSV ",),
        b"PK\x03\x04" + b"\0" * 100,
    ),
    "a spreadsheet in another encoding": Case(
        ("train.csv: is no text but a zip",), b"PK\x03\x04" + b"\0" * 100, data={"encoding": "cp1252"}
    ),
    "a spreadsheet by its name": Case(
        ("rows.xlsx: is a spreadsheet: save it as CSV (in Excel",),
        data={"splits": {"train": "rows.xlsx", "validation": "validation.csv"}},
        more={"rows.xlsx": lambda path: path.write_bytes(b"PK\x03\x04" + b"\0" * 100) and None},
    ),
    "a source that is a spreadsheet": Case(
        ("data.source: 'xlsx' is not read: save the spreadsheet as CSV, and set data.source: csv",), source="xlsx"
    ),
    "a value that cannot be cast": Case(
        ("train.csv row 3: holds no int64 in column 'n': 'many'", "data.checks.type: warning"),
        "text,label,n\none,a,1\ntwo,b,many\n",
        "text,label,n\nx,a,1\ny,b,2\n",
        data={"cast": {"n": "int64"}, "filter": "n > 0"},
    ),
    "a cast of nothing": Case(
        ("data.cast.stars: train.csv has no column 'stars': it has text, label",), data={"cast": {"stars": "int64"}}
    ),
    "a new name for nothing": Case(
        ("data.rename: train.csv has no column 'review': it has text, label",), data={"rename": {"review": "text"}}
    ),
    "a filter of nothing": Case(
        ("data.filter: train.csv has no column 'stars': it has text, label",), data={"filter": "stars > 3"}
    ),
    "a filter that compares text with numbers": Case(
        ("data.filter: train.csv: ", "'label'", "data.cast.label"), data={"filter": "label > 3"}
    ),
    "a filter that takes all": Case(
        ("data.splits.train: the train split has no rows once it is filtered",), data={"filter": "label == 'z'"}
    ),
    "a filter that is none": Case(("data.filter:", "=="), data={"filter": "label = 'a'"}),
    "an encoding that is none": Case(("data.encoding: 'utf-88'", "utf-8"), data={"encoding": "utf-88"}),
    "a check that is none": Case(
        ("data.checks.duplicate", "Did you mean 'duplicates'?"), data={"checks": {"duplicate": "error"}}
    ),
    "no such file": Case(
        ("data.splits.validation", "dew", "Did you mean"),
        data={"splits": {"train": "train.csv", "validation": "dew.csv"}},
        more={"dev.csv": VALID},
    ),
    "a file that may be another split": Case(
        ("data.path", "validating.csv"), validation=None, more={"validating.csv": VALID}
    ),
    "two files for one split": Case(("data.path: the validation split could be any of",), more={"dev.csv": VALID}),
    "a secret in the URL": Case(
        ("data.path: holds a user's name or password"), data={"path": "s3://me:hunter2@bucket/rows"}
    ),
    "too few rows to hold out": Case(
        ("data.validation_size: no row of train fell into the 0.001",), validation=None, data={"validation_size": 0.001}
    ),
    # The same text
    "repeated texts, where they are an error": csv(
        "one,a\ntwo,b\none,a\n",
        "train.csv row 4: 1 row of train repeats",
        "(this one repeats row 2: 'one')",
        data={"checks": {"duplicates": "error"}},
    ),
    "different labels for a text": csv(
        "one,a\ntwo,b\none,b\n",
        "train.csv row 4: 1 text has different labels",
        "'b' here, 'a' in row 2",
        data={"checks": {"conflicting_labels": "error"}},
    ),
    "rows of train in validation": Case(
        ("validation.csv row 2: 1 row of validation is in train, too (this one repeats row 2 of train.csv:",),
        validation="text,label\none,a\nx,b\n",
        data={"checks": {"shared_rows": "error"}},
    ),
    # JSON
    "a line that is no JSON": lines(
        LINES + '{"text": "x", label}\n', "train.jsonl row 3: is not JSON (", "column 15", f"{FIX}malformed: warning"
    ),
    "a line that is no object": lines(
        LINES + '["x", "a"]\n', "train.jsonl row 3: is no mapping of columns to values but of type list"
    ),
    "a type that changes late": lines(
        LINES * 10_001 + '{"text": 5, "label": "a"}\n',
        "train.jsonl row 20003: holds int in column 'text' where a text belongs: 5",
    ),
    "a label that changes its type": lines(
        LINES + '{"text": "x", "label": 1}\n',
        "train.jsonl row 3: holds int in column 'label' where the rows before hold a text: 1",
    ),
    "a label that is a fraction": lines(
        '{"text": "x", "label": 0.5}\n' + LINES,
        "row 1: holds float in column 'label' where a text or whole number belongs: 0.5",
    ),
    "half a character": lines(
        LINES + '{"text": "\\ud800", "label": "a"}\n',
        "train.jsonl row 3: holds half a character (such as \\ud83d without its other half) in column 'text'",
    ),
    "null that is not NA": lines(
        LINES + '{"text": null, "label": "a"}\n', "train.jsonl row 3: has no text in column 'text'"
    ),
    "a line without an end": lines(
        LINES + '{"text": "' + "x" * 20_000_000 + '", "label": "a"}\n',
        "train.jsonl row 3: has more than 16 MiB: correct or remove it",
    ),
    "an array that was cut": lines(
        '[{"text": "one", "label": "a"}, {"text": "tw', "train.jsonl: is not a JSON array to its end: after row 1"
    ),
    "a number of thousands of digits": lines(
        LINES + '{"text": "x", "label": ' + "9" * 5000 + "}\n", "train.jsonl row 3: is not JSON that can be read"
    ),
    "a number that no machine holds": lines(
        LINES + '{"text": "x", "label": ' + "9" * 30 + "}\n", "train.jsonl row 3: holds int in column 'label'"
    ),
    "an array of something else": lines(
        '[1, {"text": "one", "label": "a"}, {"text": "two", "label": "b"}]',
        "train.jsonl row 1: is no mapping of columns to values but of type int: 1",
    ),
    # Parquet and Arrow
    "what is no Parquet": Case(("train.parquet: is not readable as Parquet",), TRAIN, VALID, ".parquet", "parquet"),
    "Parquet that was cut": Case(
        ("train.parquet: is not readable as Parquet",),
        cut(lambda path: pq.write_table(pa.table({"text": ["one"], "label": ["a"]}), path), 300),
        VALID,
        ".parquet",
        "parquet",
    ),
    "labels that are fractions": parquet(
        {"text": ["one", "two"], "label": [0.5, 1.0]},
        "data.label: column 'label' of train.parquet is of type double: it must hold text or whole numbers",
        "data.cast.label: int64",
    ),
    "texts that are lists": parquet(
        {"text": [["one"], ["two"]], "label": ["a", "b"]}, "data.text: column 'text' of train.parquet is of type list"
    ),
    "what is no Arrow": Case(("train.arrow: is not readable as Arrow",), TRAIN, VALID, ".arrow", "arrow"),
    "Arrow that was cut": Case(("train.arrow: is not readable as Arrow",), cut(arrow, 3000), arrow, ".arrow", "arrow"),
    # Python
    "a function that fails": python(
        "def rows(split):\n    raise KeyError('x')\n",
        "bad_rows:rows('train'): failed in bad_rows.py line 2: KeyError: 'x'",
    ),
    "a function that fails in the middle": python(
        "def rows(split):\n    yield {'text': 'one', 'label': 'a'}\n    1 / 0\n",
        "bad_rows:rows('train') row 2: failed in bad_rows.py line 3: ZeroDivisionError",
    ),
    "a function that gives nothing": python(
        "def rows(split):\n    return None\n",
        "bad_rows:rows('train'): gave NoneType: it must give an iterable of mappings",
    ),
    "a module that ends the program": python(
        "import sys\nsys.exit(0)\n", "data.path: importing 'bad_rows' failed: SystemExit: 0"
    ),
    "an object whose length fails": python(
        "class Rows:\n"
        "    def __len__(self):\n        raise OSError('gone')\n"
        "    def __getitem__(self, place):\n        return {}\n"
        "rows = Rows()\n",
        "bad_rows:rows: failed in bad_rows.py line 3: OSError: gone",
    ),
    "splits without train": python(
        "rows = {'validation': [{'text': 'x', 'label': 'a'}]}\n",
        "data.splits.train: there are no rows for train: bad_rows:rows has validation",
    ),
    "a function that does not import": python(
        "import no_such_module\n", "data.path: importing 'bad_rows' failed: No module named 'no_such_module'"
    ),
    "a name that is not there": python(
        "def row(split):\n    return []\n", "data.path: 'bad_rows' has no 'rows'", "Did you mean 'row'?"
    ),
    "columns of unequal length": python(
        "rows = {'train': {'text': ['one', 'two'], 'label': ['a']}}\n",
        "bad_rows:rows['train']: has columns of unequal length (text 2, label 1)",
    ),
}


def write(case: Case, folder: Path) -> Path:
    """The case's files, and its recipe."""
    contents: dict[str, Content | None] = {
        f"train{case.suffix}": case.train,
        f"validation{case.suffix}": case.validation,
    }
    for name, content in (contents | case.more).items():
        if callable(content):
            content(folder / name)
        elif content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    recipe = {
        "name": "bad",
        "task": "sequence-classification",
        "data": {"source": case.source, "path": ".", "text": ["text"], "label": "label", **case.data},
        "model": {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}},
    }
    entry = {"name": "bad", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe}}
    file = folder / "bad.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    return file


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("model_unchecked")
def test_bad_input_is_reported_and_leaves_nothing(
    name: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bad_rows", raising=False)
    file = write(CASES[name], tmp_path)
    assert main(["check", str(file)]) == 2
    printed = "".join(capsys.readouterr())
    for words in CASES[name].expected:
        assert words in printed
    assert "Traceback" not in printed and "hunter2" not in printed
    left = [path for path in home.rglob("*") if path.name not in ("digests.db", MARK)]
    assert not [path for path in left if path.is_file()], left
