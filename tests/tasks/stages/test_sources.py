"""A recipe a source, of small generated data, from source to tokens through the real stages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.cache import store
from tasks.cache.input_files import pin_files, unchanged
from tasks.cache.results import Artifact
from tasks.cache.stage import Stage, Work
from tasks.stages.load_data import load_data
from tasks.stages.load_model import load_model
from tasks.stages.resolve import pin
from tasks.stages.tokenize import tokenize
from tests.arrow import read_arrow
from tests.made import NO_WEIGHTS
from training.data.listing import SourceFile
from training.evaluation import plots
from training.problems import UserError
from training.programs.check_model import CheckedModel
from training.recipe import parse

pytestmark = pytest.mark.usefixtures("model_unchecked")

ROWS = {
    "train": [{"review": f"row {n} is {'good' if n % 3 else 'bad'},\nNA", "mark": n % 3 and 1} for n in range(40)],
    "validation": [{"review": f'new row {n}; äöü "quoted"', "mark": n % 2} for n in range(8)],
}


def table(split: str) -> pa.Table:
    return pa.Table.from_pylist(ROWS[split])


def as_csv(split: str, delimiter: str = ",", encoding: str = "utf-8") -> bytes:
    quoted = [['"{}"'.format(str(value).replace('"', '""')) for value in row.values()] for row in ROWS[split]]
    return "".join(f"{delimiter.join(line)}\r\n" for line in [["review", "mark"], *quoted]).encode(encoding)


def as_lines(split: str) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[split])


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def as_parquet(split: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table(split), sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


def as_arrow(split: str, new: Callable[..., Any] = pa.ipc.new_file) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, table(split).schema) as writer:
        writer.write_table(table(split), max_chunksize=9)
    return sink.getvalue().to_pybytes()


FILES: dict[str, tuple[str, str, Callable[[str], bytes], dict[str, Any]]] = {
    "csv": ("csv", ".csv", as_csv, {}),
    "csv with a mark of its byte order": ("csv", ".csv", lambda split: b"\xef\xbb\xbf" + as_csv(split), {}),
    "csv, semicolons": ("csv", ".csv", lambda split: as_csv(split, ";"), {"delimiter": ";"}),
    "csv, latin-1": ("csv", ".csv", lambda split: as_csv(split, encoding="latin-1"), {"encoding": "latin-1"}),
    "csv, utf-16": ("csv", ".csv", lambda split: as_csv(split, encoding="utf-16"), {"encoding": "utf-16"}),
    "tsv": ("csv", ".tsv", lambda split: as_csv(split, "\t"), {}),
    "csv, gzip": ("csv", ".csv.gz", lambda split: gzip.compress(as_csv(split)), {}),
    "tsv, zstd": ("csv", ".tsv.zst", lambda split: zstd(as_csv(split, "\t")), {}),
    "json lines": ("json", ".jsonl", as_lines, {}),
    "json lines, zstd": ("json", ".jsonl.zst", lambda split: zstd(as_lines(split)), {}),
    "a json array": ("json", ".json", lambda split: json.dumps(ROWS[split], indent=1).encode(), {}),
    "parquet": ("parquet", ".parquet", as_parquet, {}),
    "arrow": ("arrow", ".arrow", as_arrow, {}),
    "an arrow stream": ("arrow", ".arrow", lambda split: as_arrow(split, pa.ipc.new_stream), {}),
}

OBJECTS = {
    "a function": "def source(split):\n    return iter(ROWS[split])\n",
    "a mapping of splits": "source = ROWS\n",
    "a mapping of columns a split": (
        "source = {s: {k: [r[k] for r in rows] for k in ('review', 'mark')} for s, rows in ROWS.items()}\n"
    ),
    "an object that knows its length and its rows": (
        "class Rows:\n"
        "    def __init__(self, rows):\n        self.rows = rows\n"
        "    def __len__(self):\n        return len(self.rows)\n"
        "    def __getitem__(self, place):\n        return self.rows[place]\n"
        "def source(split):\n    return Rows(ROWS[split])\n"
    ),
    "a data frame": "import pandas\ndef source(split):\n    return pandas.DataFrame(ROWS[split])\n",
    "a table of Arrow": "import pyarrow\ndef source(split):\n    return pyarrow.Table.from_pylist(ROWS[split])\n",
    "sets of datasets": (
        "from datasets import Dataset, DatasetDict\n"
        "source = DatasetDict({s: Dataset.from_list(rows) for s, rows in ROWS.items()})\n"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_drawn() -> Iterator[None]:
    """No plots, which take two thirds of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_save", lambda figure, file: None)
        yield


def artifact(stage: Stage[Any], *inputs: Any) -> Any:
    """The stage's artifact for the inputs, in the store."""
    flat, _ = stage.flat_inputs(*inputs)
    with store.filling(stage.name, stage.key(flat)) as aside:
        result = stage.make(Work(stage.key(flat), aside, "run"), *inputs)
        return stage.open(store.publish(aside, stage.name, stage.key(flat), flat, result))


def to_tokens(folder: Path, data: dict[str, Any]) -> tuple[Artifact, Artifact]:
    """The artifacts of rows and of tokens."""
    recipe = parse(
        {
            "name": "any",
            "task": "sequence-classification",
            "data": {"text": ["review"], "label": "mark", **data},
            "model": {"source": "folder", "path": str(a_model(folder))},
            "tokens": {"max_length": 16},
        }
    )
    lock = pin(recipe)
    rows, model = artifact(load_data, recipe, lock), artifact(load_model, recipe, lock, None)
    return rows, artifact(tokenize, recipe, rows, model)


def a_model(folder: Path) -> Path:
    """A model folder with a word-piece tokenizer. Nobody here looks at the weights."""
    from training.programs.create_model import train_wordpiece

    model = folder / "model"
    model.mkdir()
    texts = [row["review"] for rows in ROWS.values() for row in rows]
    train_wordpiece(lambda: iter(texts), 120).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (model / "config.json").write_text('{"model_type": "bert"}')
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    return model


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of rows and tokens that every source must give."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_HOME", str(folder / "home"))
        patch.setattr("tasks.stages.load_model.require_model", lambda *_, **__: CheckedModel())
        for split in ROWS:
            (folder / f"{split}.parquet").write_bytes(as_parquet(split))
        rows, tokens = to_tokens(folder, {"source": "parquet", "path": str(folder)})
        read = read_arrow(rows.path / "train.arrow")
        assert read["text"].to_pylist() == [row["review"] for row in ROWS["train"]]
        assert read["label"].to_pylist() == [row["mark"] for row in ROWS["train"]]
    return rows.digest, tokens.digest


@pytest.mark.slow
@pytest.mark.parametrize("case", FILES)
def test_files_of_every_form_give_the_same_rows_and_tokens(
    case: str, tmp_path: Path, home: Path, expected: tuple[str, str]
) -> None:
    source, suffix, write, more = FILES[case]
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ROWS:
        (folder / f"{split}{suffix}").write_bytes(write(split))
    rows, tokens = to_tokens(tmp_path, {"source": source, "path": str(folder), **more})
    assert (rows.digest, tokens.digest) == expected


@pytest.mark.parametrize("case", OBJECTS)
def test_python_objects_of_every_sort_give_the_same_rows_and_tokens(
    case: str, tmp_path: Path, home: Path, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"source_{abs(hash(case))}"
    (tmp_path / f"{module}.py").write_text(f"ROWS = {ROWS!r}\n{OBJECTS[case]}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows, tokens = to_tokens(tmp_path, {"source": "python", "path": f"{module}:source"})
    assert (rows.digest, tokens.digest) == expected


def test_a_url_gives_the_same_rows_and_tokens(tmp_path: Path, home: Path, expected: tuple[str, str]) -> None:
    import fsspec

    for split in ROWS:
        fsspec.filesystem("memory").pipe(f"/bucket/reviews/{split}.parquet", as_parquet(split))
    rows, tokens = to_tokens(tmp_path, {"source": "parquet", "path": "memory://bucket/reviews"})
    assert (rows.digest, tokens.digest) == expected


def test_a_file_a_split_and_several_files_a_split_give_the_same_rows(
    tmp_path: Path, home: Path, expected: tuple[str, str]
) -> None:
    for part, rows in {"old": ROWS["train"][:25], "new": ROWS["train"][25:], "other": ROWS["validation"]}.items():
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = {"train": ["old", "new.jsonl"], "validation": "oth*.jsonl"}
    rows, _ = to_tokens(tmp_path, {"source": "json", "path": str(tmp_path), "splits": splits})
    assert rows.digest == expected[0]


@pytest.mark.parametrize("where", ["here", "at a URL"])
def test_rows_that_change_between_pin_and_read_are_not_stored_under_the_old_name(
    where: str, tmp_path: Path, home: Path
) -> None:
    import fsspec

    path = str(tmp_path / "rows.jsonl") if where == "here" else "memory://changing/rows.jsonl"
    with fsspec.open(path, "wb") as file:
        file.write(as_lines("train"))
    data = {"source": "json", "path": path, "text": ["review"], "label": "mark"}
    model = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}
    recipe = parse({"name": "any", "task": "sequence-classification", "data": data, "model": model})
    lock = pin(recipe)
    with fsspec.open(path, "wb") as file:
        file.write(as_lines("train") * 2)
    with pytest.raises(UserError, match=r"rows\.jsonl: has changed since this run began: start another one"):
        artifact(load_data, recipe, lock)
    assert not any((home / "artifacts" / "load_data").iterdir())


@pytest.mark.parametrize("source", ["a file", "a folder of texts"])
@pytest.mark.parametrize("swaps", [0, 1])
def test_a_file_that_is_another_one_while_it_is_read_is_not_stored_under_its_name(
    source: str, swaps: int, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "rows" / "good").mkdir(parents=True)
    file, other, aside = tmp_path / "rows" / "good" / "a.txt", tmp_path / "other", tmp_path / "aside"
    file.write_text("a")
    other.write_text("b")
    place = file if source == "a file" else tmp_path / "rows"
    expected = pytest.raises(UserError, match="has changed since this run began") if swaps else nullcontext()
    with expected, unchanged(pin_files([SourceFile(str(place))])):
        for _ in range(swaps):
            file.rename(aside)
            other.rename(file)
            file.rename(other)
            aside.rename(file)
    assert file.read_text() == "a"


def test_a_renamed_file_is_another_only_where_its_name_determines_how_it_is_read(tmp_path: Path, home: Path) -> None:
    keys = set()
    for name in ("one.csv", "two.csv", "three.tsv"):
        (tmp_path / name).write_bytes(as_csv("train"))
        data = {"source": "csv", "path": str(tmp_path / name), "text": ["review"], "label": "mark"}
        model = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}
        recipe = parse({"name": "any", "task": "sequence-classification", "data": data, "model": model})
        keys.add(load_data.key(load_data.flat_inputs(recipe, pin(recipe))[0]))
    assert len(keys) == 2
