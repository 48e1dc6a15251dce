"""Splits by time: the newest rows are test, and the newest before them validation."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import report_of, rows_of
from training.data.load_rows import load
from training.data.row_times import format_time
from training.recipe import Data
from training.recipe.row_split import parse_gap, parse_time

Row = dict[str, Any]
FIRST = date(2026, 1, 1)


def day(number: int) -> str:
    return (FIRST + timedelta(days=number)).isoformat()


def rows_of_days(days: list[Any], seed: int = 0) -> list[Row]:
    """A row for each day, whose text begins with its number."""
    draw = random.Random(seed)
    return [{"text": f"{number} row", "label": draw.choice("ab"), "day": one} for number, one in enumerate(days)]


def write(file: Path, rows: list[Row]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def by_time(split: dict[str, Any] | None = None, **more: Any) -> Data:
    fields = {"source": "json", "path": "-", "text": ["text"], "label": "label"}
    return Data.model_validate({**fields, "split": {"by": "time", "column": "day", **(split or {})}, **more})


def split(folder: Path, data: Data, rows: list[Row] | None = None, **files: list[str]) -> dict[str, list[int]]:
    """The numbers of the rows of each split, in order."""
    if rows is not None:
        folder.mkdir()
        files = {"train": [write(folder / "rows.jsonl", rows)]}
    load(data, CLASSIFICATION, files, folder / "out")
    splits = report_of(folder / "out")["rows"]
    return {name: [int(row["text"].split()[0]) for row in rows_of(folder / "out", name)] for name in splits}


def test_the_newest_rows_are_held_out_and_keep_the_order_of_the_source(tmp_path: Path) -> None:
    days = [day(number) for number in range(100)]
    rows = rows_of_days(days)
    random.Random(1).shuffle(rows)
    found = split(tmp_path / "in", by_time(test_size=0.2), rows)
    order = [int(row["text"].split()[0]) for row in rows]
    assert found["test"] == [number for number in order if number >= 80]
    assert found["validation"] == [number for number in order if 70 <= number < 80]
    assert found["train"] == [number for number in order if number < 70]
    report = report_of(tmp_path / "in" / "out")
    assert report["split"]["times"] == {
        "train": [day(0), day(69)],
        "validation": [day(70), day(79)],
        "test": [day(80), day(99)],
    }
    assert report["held_out"] == {"validation": 0.1, "test": 0.2}


def test_a_whole_number_from_1_on_is_a_number_of_rows(tmp_path: Path) -> None:
    found = split(tmp_path / "in", by_time(validation_size=7, test_size=5), rows_of_days([day(n) for n in range(50)]))
    assert found == {"train": [*range(38)], "validation": [*range(38, 45)], "test": [*range(45, 50)]}


def test_rows_of_equal_time_are_in_one_split(tmp_path: Path) -> None:
    found = split(
        tmp_path / "in", by_time(validation_size=3, test_size=5), rows_of_days([day(n // 4) for n in range(40)])
    )
    assert found == {"train": [*range(28)], "validation": [*range(28, 32)], "test": [*range(32, 40)]}


def test_the_first_and_the_last_day_of_calendars_are_times(tmp_path: Path) -> None:
    days = ["0001-01-01", *(day(number) for number in range(18)), "9999-12-31"]
    found = split(tmp_path / "in", by_time(validation_size=1, test_size=1), rows_of_days(days))
    assert found == {"train": [*range(18)], "validation": [18], "test": [19]}


def test_splits_begin_at_the_times_that_the_recipe_names(tmp_path: Path) -> None:
    rows = rows_of_days([day(n) for n in range(100)])
    found = split(tmp_path / "in", by_time({"validation_from": day(60), "test_from": date(2026, 3, 22)}), rows)
    assert found == {"train": [*range(60)], "validation": [*range(60, 80)], "test": [*range(80, 100)]}


def test_rows_nearer_than_the_gap_are_in_no_split_and_counted(tmp_path: Path) -> None:
    rows = rows_of_days([day(n) for n in range(100)])
    found = split(tmp_path / "in", by_time({"gap": "3d"}, validation_size=10, test_size=10), rows)
    assert found == {"train": [*range(76)], "validation": [*range(78, 88)], "test": [*range(90, 100)]}
    assert report_of(tmp_path / "in" / "out")["split"]["in_gap"]["train"] == 4
    numbers = [{**row, "day": number * 0.5} for number, row in enumerate(rows)]
    found = split(tmp_path / "numbers", by_time({"gap": 1.5, "validation_from": 40}), numbers)
    assert found == {"train": [*range(78)], "validation": [*range(80, 100)]}


def test_the_window_moves_on_with_new_rows_and_no_row_of_train_becomes_test_again(tmp_path: Path) -> None:
    rows = rows_of_days([day(n) for n in range(120)])
    before = split(tmp_path / "before", by_time(test_size=20), rows[:90])
    after = split(tmp_path / "after", by_time(test_size=20), rows)
    assert not {*before["train"]} & ({*after["test"]} | {*after["validation"]})
    assert min(after["test"]) > min(before["test"])


def test_rows_of_the_same_times_are_split_alike_in_files_of_all_types(tmp_path: Path) -> None:
    moments = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=7 * n) for n in range(60)]
    rows = rows_of_days([moment.isoformat() for moment in moments])
    random.Random(2).shuffle(rows)
    expected = split(tmp_path / "expected", by_time(test_size=0.2), rows)
    naive = [moment.replace(tzinfo=None) for moment in moments]
    forms: dict[str, tuple[str, Any]] = {
        "csv": ("csv", [moment.strftime("%Y-%m-%d %H:%M:%SZ") for moment in moments]),
        "offsets": ("csv", [moment.astimezone(_zone(n)).isoformat() for n, moment in enumerate(moments)]),
        "unix": ("json", [moment.timestamp() for moment in moments]),
        "seconds": ("parquet", pa.array(naive, pa.timestamp("s"))),
        "nanoseconds": ("parquet", pa.array(moments, pa.timestamp("ns", "Europe/Paris"))),
        "whole": ("arrow", pa.array([int(moment.timestamp() * 1e9) for moment in moments], pa.int64())),
    }
    for name, (source, times) in forms.items():
        by_number = {
            f"{n} row": one for n, one in enumerate(times.to_pylist() if isinstance(times, pa.Array) else times)
        }
        column = [by_number[row["text"]] for row in rows]
        file = tmp_path / f"{name}.{source}"
        if isinstance(times, pa.Array):
            table = pa.table({"text": [r["text"] for r in rows], "label": [r["label"] for r in rows]})
            table = table.append_column("day", pa.array(column, times.type))
            if source == "parquet":
                pq.write_table(table, file)
            else:
                with pa.OSFile(str(file), "wb") as opened, pa.ipc.new_stream(opened, table.schema) as writer:
                    writer.write_table(table)
        elif source == "csv":
            lines = [f"{row['text']},{row['label']},{one}" for row, one in zip(rows, column, strict=True)]
            file.write_text("\n".join(["text,label,day", *lines]) + "\n")
        else:
            write(file, [{**row, "day": one} for row, one in zip(rows, column, strict=True)])
        assert split(tmp_path / name, by_time(source=source, test_size=0.2), train=[str(file)]) == expected, name


def _zone(number: int) -> Any:
    return timezone(timedelta(minutes=30 * (number % 20 - 10)))


def test_objects_of_python_have_times_of_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / f"times_{tmp_path.name}.py"
    module.write_text(
        "from datetime import date, datetime, timedelta\nimport numpy as np\nimport pandas as pd\n"
        "DAYS = [date(2026, 1, 1) + timedelta(days=n) for n in range(50)]\n"
        "def rows(times):\n"
        "    return [{'text': f'{n} row', 'label': 'ab'[n % 2], 'day': one} for n, one in enumerate(times)]\n"
        "DATES = rows(DAYS)\n"
        "TIMES = rows([datetime(2026, 1, 1) + timedelta(days=n) for n in range(50)])\n"
        "NUMPY = rows([np.datetime64(day) for day in DAYS])\n"
        "PANDAS = rows([pd.Timestamp(day) for day in DAYS])\n"
        "TABLE = pd.DataFrame(PANDAS)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("DATES", "TIMES", "NUMPY", "PANDAS", "TABLE"):
        found = split(tmp_path / name, by_time(source="python", path=f"{module.stem}:{name}", test_size=0.2))
        assert found == {"train": [*range(35)], "validation": [*range(35, 40)], "test": [*range(40, 50)]}, name


@pytest.mark.parametrize(
    ("value", "check", "words"),
    [
        (None, "missing_time", "has no time in column 'day'"),
        (" ", "missing_time", "has no time in column 'day'"),
        ("1 May 2026", "type", "holds no time such as 2026-05-01 or 2026-05-01T10:30:00+02:00 in column 'day': '1 May"),
        ("2026-02-30", "type", "holds no time such as"),
        (
            "2026-02-03T10:00Z",
            "type",
            "holds a time with a zone in column 'day', where rows before hold a time without",
        ),
        (3, "type", "holds a number in column 'day', where rows before hold a time without a zone: '3'"),
    ],
)
def test_a_time_that_is_missing_unreadable_or_of_another_kind_is_a_problem_of_its_row(
    tmp_path: Path, value: Any, check: str, words: str
) -> None:
    rows = rows_of_days([day(n) for n in range(40)])
    rows[20]["day"] = value
    (problem,) = raised_problems(split, tmp_path / "in", by_time(), rows)
    assert (problem.check, problem.where, problem.level) == (check, f"{tmp_path}/in/rows.jsonl row 21", "error")
    assert words in problem.message
    found = split(tmp_path / "left", by_time(checks={check: "warning"}), rows)
    assert sorted(number for numbers in found.values() for number in numbers) == [n for n in range(40) if n != 20]
    assert report_of(tmp_path / "left" / "out")["left_out"]["train"] == 1


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"split": {"validation_from": 7}}, "data.split.validation_from",
         "'7' is a number, and each row has a time without a zone in column 'day'"),
        ({"split": {"gap": 2}}, "data.split.gap", "'2' is a number"),
        ({"split": {"test_from": "2026-01-20T00:00Z"}}, "data.split.test_from", "is a time with a zone"),
        ({"split": {"validation_from": "2027-01-01"}}, "data.split.validation_from",
         "2027-01-01 leaves validation without rows, of 40 rows from 2026-01-01 to 2026-02-09"),
        ({"validation_size": 0.001}, "data.validation_size", "0.001 leaves validation without rows"),
        ({"validation_size": 30, "test_size": 10}, "data.split", "no row is left to train on"),
        ({"split": {"gap": "50d"}}, "data.split", "with a gap of 50d. Hold fewer rows out"),
    ],
)  # fmt: skip
def test_a_split_that_does_not_fit_the_rows_says_so(
    tmp_path: Path, fields: dict[str, Any], where: str, words: str
) -> None:
    rows = rows_of_days([day(n) for n in range(40)])
    (problem,) = raised_problems(split, tmp_path / "in", by_time(**fields), rows)
    assert problem.where == where and words in problem.message


def test_a_time_of_zero_is_named_in_the_message(tmp_path: Path) -> None:
    rows = rows_of_days([float(n - 40) for n in range(40)])
    (problem,) = raised_problems(split, tmp_path / "in", by_time({"validation_from": 0.0}), rows)
    assert problem.message.startswith("0 leaves validation without rows, of 40 rows from -40 to -1")


def test_a_time_without_a_zone_in_the_recipe_is_in_utc_where_rows_have_zones(tmp_path: Path) -> None:
    rows = rows_of_days([f"{day(n // 2)}T{'01' if n % 2 else '23'}:30:00+02:00" for n in range(40)])
    found = split(tmp_path / "in", by_time({"validation_from": day(10)}), rows)
    # 01:30 in summer time of day 10 is still day 9 in UTC.
    assert 20 in found["validation"] and 21 in found["train"]


def test_columns_for_slices_stay_with_their_rows(tmp_path: Path) -> None:
    rows = [{**row, "genre": f"g{n % 7}"} for n, row in enumerate(rows_of_days([day(n) for n in range(100)]))]
    random.Random(3).shuffle(rows)
    found = split(tmp_path / "in", by_time(test_size=0.3), rows)
    slices = read_arrow(tmp_path / "in" / "out" / "test.slices.arrow")["genre"].to_pylist()
    assert slices == [f"g{number % 7}" for number in found["test"]]


def test_each_set_of_a_mixture_is_cut_at_its_own_times(tmp_path: Path) -> None:
    files = [
        {"train": [write(tmp_path / f"{name}.jsonl", rows_of_days([day(n + later) for n in range(50)]))]}
        for name, later in (("old", 0), ("new", 400))
    ]
    entries = [{"source": "json", "path": name, "name": name} for name in ("old", "new")]
    shared = {"text": ["text"], "label": "label", "split": {"by": "time", "column": "day"}, "test_size": 10}
    load(Data.model_validate({**shared, "mix": entries}), CLASSIFICATION, files, tmp_path / "out")
    numbers = [int(row["text"].split()[0]) for row in rows_of(tmp_path / "out", "test")]
    assert numbers == [*range(40, 50)] * 2
    assert report_of(tmp_path / "out")["split"]["times"]["test"] == [day(40), day(449)]


def test_many_blocks_wait_on_disk_and_leave_nothing_there(tmp_path: Path) -> None:
    rows = rows_of_days([day(n % 300) for n in range(25_000)])
    found = split(tmp_path / "in", by_time(test_size=0.1), rows)
    assert found["train"] == sorted(found["train"])
    assert all(number % 300 >= 269 for number in found["test"]) and sum(map(len, found.values())) == 25_000
    assert sorted(path.name for path in (tmp_path / "in" / "out").iterdir()) == [
        "labels.json", "log", "slices.json", "test.arrow", "test.slices.arrow", "train.arrow", "validation.arrow",
        "validation.slices.arrow",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "written", ["2026-05-01", "2026-05-01T12:30", "2026-05-01 12:30:01.5Z", "2026-05-01T12:30+02:00"]
)
def test_a_time_of_the_recipe_is_read_as_it_is_shown(written: Any) -> None:
    value, kind = parse_time(written)
    assert parse_time(format_time(value, kind)).value == pytest.approx(value, abs=1e6)


@pytest.mark.parametrize("wrong", ["yesterday", "2026-13-01", "2026-1-1", "20260101", "12:30"])
def test_other_words_are_no_time(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}' is no time"):
        parse_time(wrong)


def test_durations_have_a_unit() -> None:
    assert [parse_gap(text).value / 1e6 for text in ("90s", "1.5m", "2h", "7d", "1w")] == [90, 90, 7200, 604800, 604800]
    for wrong in ("7", "7 days", "-1d", "d"):
        with pytest.raises(ValueError, match="is no duration"):
            parse_gap(wrong)
