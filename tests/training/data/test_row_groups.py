"""Splits by group: all rows of a customer, ticket or document are in one split, and stay there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION, Tagging
from tests.training.data.test_load import report_of, rows_of
from training.data.ipc_files import groups_file
from training.data.load_rows import load
from training.problems import Problem
from training.recipe import Data

Row = dict[str, Any]
SPLITS = ("train", "validation", "test")


def rows_of_customers(customers: int, each: int, seed: int = 0) -> list[Row]:
    """Texts that differ, `each` of a customer, whose number is in the text."""
    draw = random.Random(seed)
    return [
        {"text": f"customer {customer} writes {draw.random()}", "label": draw.choice("ab"), "customer": customer}
        for customer in range(customers)
        for _ in range(each)
    ]


def write(file: Path, rows: list[Row]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def by_group(**more: Any) -> Data:
    fields = {"source": "json", "path": "-", "text": ["text"], "label": "label", "test_size": 0.2}
    return Data.model_validate({**fields, "split": {"by": "group", "column": "customer"}, **more})


def split(folder: Path, data: Data, **files: list[str]) -> dict[str, list[str]]:
    """The texts of each split."""
    load(data, CLASSIFICATION, files, folder)
    return {name: [row["text"] for row in rows_of(folder, name)] for name in report_of(folder)["rows"]}


def sides(texts: dict[str, list[str]]) -> dict[str, set[str]]:
    """The splits of each customer."""
    found: dict[str, set[str]] = {}
    for name, of_split in texts.items():
        for text in of_split:
            found.setdefault(text.split()[1], set()).add(name)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_group_changes_its_split_while_rows_arrive_in_any_order_and_in_other_files(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    old, new = rows_of_customers(60, 8, seed), rows_of_customers(90, 4, seed + 100)
    before = sides(split(tmp_path / "before", by_group(), train=[write(tmp_path / "old.jsonl", old)]))
    arrived = [*old, *new]
    draw.shuffle(arrived)
    cut = draw.randrange(1, len(arrived))
    files = [write(tmp_path / f"{n}.jsonl", part) for n, part in enumerate((arrived[:cut], arrived[cut:]))]
    after = sides(split(tmp_path / "after", by_group(), train=files))
    assert len(before) == 60 and len(after) == 90
    assert all(len(splits) == 1 for splits in after.values())
    assert before.items() <= after.items()
    assert {name for splits in after.values() for name in splits} == set(SPLITS)


def test_the_report_counts_the_groups_of_each_split(tmp_path: Path) -> None:
    rows = rows_of_customers(50, 4)
    found = sides(split(tmp_path / "out", by_group(), train=[write(tmp_path / "rows.jsonl", rows)]))
    counts = {name: sum(splits == {name} for splits in found.values()) for name in SPLITS}
    assert report_of(tmp_path / "out")["split"]["groups"] == counts


def group_hashes(folder: Path, name: str) -> list[int]:
    return list(read_arrow(folder / groups_file(name))["group"].to_pylist())


def test_each_row_has_a_hash_of_its_group(tmp_path: Path) -> None:
    rows = rows_of_customers(50, 4) + [{"text": f"nobody {n}", "label": "a", "customer": None} for n in range(40)]
    random.Random(1).shuffle(rows)
    found = split(tmp_path / "out", by_group(), train=[write(tmp_path / "rows.jsonl", rows)])
    for name in SPLITS:
        hashes = group_hashes(tmp_path / "out", name)
        whose = [text if "nobody" in text else text.split()[1] for text in found[name]]
        assert len(set(zip(whose, hashes, strict=True))) == len(set(whose)) == len(set(hashes))
    split(tmp_path / "plain", by_group(split=None), train=[str(tmp_path / "rows.jsonl")])
    assert not [*(tmp_path / "plain").glob("*.groups.arrow")]


def test_rows_that_are_left_out_for_an_unknown_label_have_no_group(tmp_path: Path) -> None:
    train, others = rows_of_customers(10, 4), rows_of_customers(8, 4, seed=3)
    others = [
        {**row, "customer": row["customer"] + 100, "label": "z" if n % 5 == 0 else "a"} for n, row in enumerate(others)
    ]
    files = {"train": [write(tmp_path / "train.jsonl", train)], "validation": [write(tmp_path / "v.jsonl", others)]}
    split(tmp_path / "out", by_group(test_size=0.0, checks={"unknown_label": "warning"}), **files)
    kept = [row["customer"] - 100 for row in others if row["label"] != "z"]
    assert len(set(zip(group_hashes(tmp_path / "out", "validation"), kept, strict=True))) == 8


def test_rows_of_a_set_without_groups_are_groups_of_their_own_in_a_mixture(tmp_path: Path) -> None:
    write(tmp_path / "grouped.jsonl", rows_of_customers(20, 5))
    write(tmp_path / "alone.jsonl", [{**row, "text": f"alone {row['text']}"} for row in rows_of_customers(100, 1)])
    grouped = {"split": {"by": "group", "column": "customer"}}
    mix = [
        {"source": "json", "name": name, "path": name, **more} for name, more in (("grouped", grouped), ("alone", {}))
    ]
    data = Data.model_validate({"text": ["text"], "label": "label", "validation_size": 0.3, "mix": mix})
    files = [{"train": [str(tmp_path / f"{name}.jsonl")]} for name in ("grouped", "alone")]
    load(data, CLASSIFICATION, files, tmp_path / "out")
    texts = [row["text"] for row in rows_of(tmp_path / "out", "validation")]
    whose = [text if text.startswith("alone") else text.split()[1] for text in texts]
    hashes = group_hashes(tmp_path / "out", "validation")
    assert len(set(whose)) == len(set(zip(whose, hashes, strict=True))) == len(set(hashes)) < len(texts)


def as_csv(folder: Path, rows: list[Row], spell: Callable[[int], Any]) -> tuple[str, str]:
    lines = ["text,label,customer", *(f"{row['text']},{row['label']},{spell(row['customer'])}" for row in rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return "csv", str(folder / "rows.csv")


def as_json(folder: Path, rows: list[Row], spell: Callable[[int], Any]) -> tuple[str, str]:
    return "json", write(folder / "rows.jsonl", [{**row, "customer": spell(row["customer"])} for row in rows])


def as_table(rows: list[Row], kind: pa.DataType) -> pa.Table:
    table = pa.Table.from_pylist(rows)
    number = table.column("customer")
    coded = pa.types.is_dictionary(kind)
    values = number.cast(kind.value_type).dictionary_encode() if coded else number.cast(kind)
    return table.set_column(2, "customer", values)


def as_parquet(kind: pa.DataType) -> Callable[..., tuple[str, str]]:
    def write_parquet(folder: Path, rows: list[Row], spell: Callable[[int], Any]) -> tuple[str, str]:
        pq.write_table(as_table(rows, kind), folder / "rows.parquet")
        return "parquet", str(folder / "rows.parquet")

    return write_parquet


def as_arrow(folder: Path, rows: list[Row], spell: Callable[[int], Any]) -> tuple[str, str]:
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file:
        table = as_table(rows, pa.decimal128(22, 2))
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return "arrow", str(folder / "rows.arrow")


FORMS: dict[str, tuple[Callable[..., tuple[str, str]], Callable[[int], Any]]] = {
    "csv": (as_csv, str),
    "csv of floats": (as_csv, lambda number: f" {number}.0 "),
    "json": (as_json, int),
    "json of all types": (as_json, lambda number: [number, float(number), str(number)][number % 3]),
    "parquet of numbers": (as_parquet(pa.int32()), int),
    "parquet of floats": (as_parquet(pa.float64()), int),
    "parquet of texts": (as_parquet(pa.string()), int),
    "parquet of coded texts": (as_parquet(pa.dictionary(pa.int8(), pa.string())), int),
    "arrow of decimals": (as_arrow, int),
}


@pytest.mark.parametrize("form", FORMS)
def test_equal_values_are_one_group_in_files_of_all_types(tmp_path: Path, form: str) -> None:
    rows = rows_of_customers(40, 3)
    expected = split(tmp_path / "expected", by_group(), train=[write(tmp_path / "expected.jsonl", rows)])
    write_form, spell = FORMS[form]
    source, file = write_form(tmp_path, rows, spell)
    assert split(tmp_path / "out", by_group(source=source), train=[file]) == expected


def test_objects_of_python_and_tables_of_pandas_are_split_as_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of_customers(40, 3)
    expected = split(tmp_path / "expected", by_group(), train=[write(tmp_path / "expected.jsonl", rows)])
    module = tmp_path / f"customers_{tmp_path.name}.py"
    module.write_text(
        f"import pandas as pd\nROWS = {rows!r}\n"
        "TABLE = pd.DataFrame(ROWS).assign(customer=lambda rows: rows.customer.astype('category'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ROWS", "TABLE"):
        data = by_group(source="python", path=f"{module.stem}:{name}")
        assert split(tmp_path / name, data) == expected


def test_the_column_has_the_name_and_type_that_the_recipe_gives_it(tmp_path: Path) -> None:
    rows = rows_of_customers(40, 3)
    file = write(tmp_path / "rows.jsonl", rows)
    expected = split(tmp_path / "expected", by_group(), train=[file])
    data = by_group(rename={"customer": "who"}, cast={"who": "float64"}, split={"by": "group", "column": "who"})
    assert split(tmp_path / "out", data, train=[file]) == expected


def test_a_group_may_be_a_text_that_the_model_reads(tmp_path: Path) -> None:
    rows = [{"text": f"premise {n // 5}", "other": f"hypothesis {n}", "label": "ab"[n % 2]} for n in range(200)]
    data = by_group(text=["text", "other"], split={"by": "group", "column": "text"})
    found = split(tmp_path / "out", data, train=[write(tmp_path / "rows.jsonl", rows)])
    assert all(len(splits) == 1 for splits in sides(found).values())


def test_words_of_a_sentence_name_their_document(tmp_path: Path) -> None:
    words = [f"w{n}\tO\tdoc{n // 4}\nx\tB-A\tdoc{n // 4}\n\n" for n in range(120)]
    (tmp_path / "rows.conll").write_text("".join(words))
    columns = {"words": "words", "tags": "tags"}
    fields = {"source": "conll", "path": "-", "header": ["words", "tags", "document"], "columns": columns}
    data = Data.model_validate({**fields, "split": {"by": "group", "column": "document"}, "validation_size": 0.3})
    load(data, Tagging(), {"train": [str(tmp_path / "rows.conll")]}, tmp_path / "out")
    documents = {
        name: {int(row["words"][0][1:]) // 4 for row in rows_of(tmp_path / "out", name)}
        for name in ("train", "validation")
    }
    assert documents["train"] and documents["validation"] and not documents["train"] & documents["validation"]


def test_a_row_without_a_group_is_a_group_of_its_own_and_is_reported(tmp_path: Path) -> None:
    rows = rows_of_customers(30, 4)
    without = [
        {"text": f"nobody {n} writes", "label": "ab"[n % 2], "customer": [None, "", " "][n % 3]} for n in range(90)
    ]
    found = split(tmp_path / "out", by_group(), train=[write(tmp_path / "rows.jsonl", rows + without)])
    assert sides(found)["0"] != set(SPLITS) and sum(map(len, found.values())) == 210
    plain = split(tmp_path / "plain", by_group(split=None), train=[write(tmp_path / "without.jsonl", without)])
    assert {name: [text for text in texts if "nobody" in text] for name, texts in found.items()} == plain
    problems = [Problem(**one) for one in report_of(tmp_path / "out")["problems"]]
    (problem,) = [one for one in problems if one.check == "missing_group"]
    assert "has no value in column 'customer' (90 rows like this: 121, 122, 123, …): each is a group" in problem.message
    assert sum(report_of(tmp_path / "out")["split"]["without_group"].values()) == 90


def test_groups_of_several_splits_of_the_source_are_counted_and_shown(tmp_path: Path) -> None:
    rows = rows_of_customers(10, 3)
    train, validation = [row for row in rows if row["customer"] < 8], [row for row in rows[15:]][::-1]
    validation = [{**row, "text": row["text"] + " again"} for row in validation]
    files = {
        "train": [write(tmp_path / "train.jsonl", train)],
        "validation": [write(tmp_path / "validation.jsonl", validation)],
    }
    split(tmp_path / "out", by_group(test_size=0.0), **files)
    (problem,) = [Problem(**one) for one in report_of(tmp_path / "out")["problems"] if one["check"] == "shared_groups"]
    assert (problem.level, problem.where) == ("warning", f"{tmp_path}/validation.jsonl row 7")
    assert problem.message.startswith("9 rows of validation are of 3 groups with rows in train, too (this one of '7',")
    assert f"like row 22 of {tmp_path}/train.jsonl)" in problem.message
    refused = by_group(test_size=0.0, checks={"shared_groups": "error"})
    errors = [one for one in raised_problems(split, tmp_path / "no", refused, **files) if one.level == "error"]
    assert [one.check for one in errors] == ["shared_groups"]


def test_a_column_that_is_not_there_or_holds_lists_is_an_error_that_names_the_field(tmp_path: Path) -> None:
    rows = rows_of_customers(5, 2)
    file = write(tmp_path / "rows.jsonl", rows)
    (problem,) = raised_problems(
        split, tmp_path / "a", by_group(split={"by": "group", "column": "custmer"}), train=[file]
    )
    assert problem.where == "data.split.column" and problem.message.endswith("Did you mean 'customer'?")
    pq.write_table(pa.Table.from_pylist([{**row, "customer": [1, 2]} for row in rows]), tmp_path / "rows.parquet")
    data = by_group(source="parquet")
    (problem,) = raised_problems(split, tmp_path / "b", data, train=[str(tmp_path / "rows.parquet")])
    assert problem.where == "data.split.column" and "it must hold single values" in problem.message


def test_too_few_groups_to_hold_any_out_say_so(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", rows_of_customers(2, 50))
    problems = raised_problems(split, tmp_path / "out", by_group(validation_size=0.01, test_size=0.0), train=[file])
    assert "no group of train fell into the 0.01 of them that are held out: give more groups" in problems[0].message


def nearest_label(text: str, known: list[tuple[set[str], str]]) -> str:
    words = set(text.split())
    return max(known, key=lambda one: len(words & one[0]) / len(words | one[0]))[1]


def test_paraphrases_of_a_customer_flatter_a_random_split_and_not_one_by_groups(tmp_path: Path) -> None:
    """Ten texts a customer in the same words, whose label is drawn by the toss of a coin: no model can know the labels
    of new customers, and 0.5 is the truth."""
    draw = random.Random(4)
    words = [f"w{n}" for n in range(400)]
    rows: list[Row] = []
    for customer in range(120):
        own, label = draw.sample(words, 12), draw.choice("ab")
        rows += [{"text": " ".join(draw.sample(own, 9)), "label": label, "customer": customer} for _ in range(10)]
    file = write(tmp_path / "rows.jsonl", rows)
    accuracy = dict[str, float]()
    for by in ("rows", "group"):
        data = by_group(validation_size=0.25, test_size=0.0, **({"split": None} if by == "rows" else {}))
        load(data, CLASSIFICATION, {"train": [file]}, tmp_path / by)
        train, held_out = (rows_of(tmp_path / by, name) for name in ("train", "validation"))
        known = [(set(row["text"].split()), row["label"]) for row in train]
        accuracy[by] = sum(nearest_label(row["text"], known) == row["label"] for row in held_out) / len(held_out)
    assert accuracy["rows"] > 0.97
    # Customers are independent, not their ten rows: about 30 tosses of a coin.
    assert abs(accuracy["group"] - 0.5) < 2 * 0.5 / 30**0.5
