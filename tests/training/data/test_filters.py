"""The rows that a filter takes, and its messages about mistakes."""

from __future__ import annotations

import datetime
import pickle
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from tests.raised import raised_problems
from training.data.filtering import filter_mask
from training.recipe import parse
from training.recipe.filters import parse_filter

DAY = datetime.datetime(2026, 1, 31)
ROWS = pa.table(
    {
        "text": ["good film", "", None, "bad film"],
        "stars": pa.array([5, 3, None, 1], pa.int8()),
        "share": [0.5, 1.0, float("nan"), None],
        "seen": [True, False, None, True],
        "language": pa.array(["en", "de", None, "fr"]).dictionary_encode(),
        "day": pa.array([DAY, DAY + datetime.timedelta(days=1), None, DAY], pa.timestamp("us")),
        "title": pa.array(["good film", "b", "c", None], pa.large_string()),
        "empty": pa.nulls(4),
        "words": [["a"], ["b"], None, []],
    }
)


def taken(text: str, rows: Any = ROWS) -> list[int]:
    """The numbers of the rows that the filter takes."""
    mask = filter_mask(parse_filter(text), rows)
    assert isinstance(mask, pa.BooleanArray) and mask.null_count == 0
    return [row for row, true in enumerate(mask.to_pylist()) if true]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("stars >= 3", [0, 1]),
        ("3 <= stars < 5", [1]),
        ("stars != 5", [1, 3]),
        ("stars == -1 or 1 == stars", [3]),
        ("stars > 2.5", [0, 1]),
        ("stars < 300", [0, 1, 3]),
        ("share <= 0.5", [0]),
        ("stars in (1, 5)", [0, 3]),
        ("stars not in [1, 5]", [1]),
        ('language in ("en", "de") and not text == ""', [0]),
        ("language is None or stars is not None and stars < 3", [2, 3]),
        ("not (stars > 2 or seen)", []),
        ("not seen", [1]),
        ("seen == True", [0, 3]),
        ('"film" in text', [0, 3]),
        ('"good" not in text', [1, 3]),
        ("len(text) > 0", [0, 3]),
        ("title == text", [0]),
        ('day <= "2026-01-31"', [0, 3]),
        ('"2026-01-31" < day <= "2026-12-31"', [1]),
        ("empty == 1 or empty", []),
        ("empty is None", [0, 1, 2, 3]),
        ("  stars == 5\n  or stars == 1\n", [0, 3]),
    ],
)
def test_a_filter_takes_the_rows_that_match(text: str, rows: list[int]) -> None:
    assert taken(text) == rows
    assert taken(text, ROWS.combine_chunks().to_batches()[0]) == rows


def test_a_filter_of_no_rows_takes_none() -> None:
    assert taken("stars == 1 or empty == 1", ROWS.slice(0, 0)) == []


def test_a_filter_lists_its_columns_and_can_be_sent_to_another_process() -> None:
    found = parse_filter('len(b) > 2 and a in ("x",) and "y" in c and b is not None')
    assert found.columns == ("b", "a", "c")
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stars = 4", "'=' at character 7 of 'stars = 4' is not understood: write ==."),
        ("a == 1 AND b == 2", "'AND' at character 8 of 'a == 1 AND b == 2' is not understood: write and."),
        ("a == 1 && b == 2", "'&' at character 9 of 'a == 1 && b == 2' is not understood: write and."),
        ("(a == 1) | (b == 2)", "at character 1 of '(a == 1) | (b == 2)' is not understood: write or between two"),
        ("a == null", "'null' at character 6 of 'a == null' is not understood: write None."),
        ("seen == true", "'true' at character 9 of 'seen == true' is not understood: write True."),
        ("a == None", "'None' at character 6 of 'a == None' is not understood: write `is None` or `is not None`."),
        ("a is 4", "'4' at character 6 of 'a is 4' is not understood: `is` and `is not` are for None"),
        ("a in ()", "'()' at character 6 of 'a in ()' is not understood: list values"),
        ("a in b", "'b' at character 6 of 'a in b' is not understood: after `in` write a list of values"),
        ("'ä' == a and 'ü' == 'x'", "\"'ü'\" at character 14 of"),
        ("a == 'x", '"\'" at character 6 of "a == \'x" is not understood: unterminated string literal'),
        ("(a == 1", "'(' at character 1 of '(a == 1' is not understood: '(' was never closed"),
        ("class == 1", "'class' at character 1 of 'class == 1' is not understood: invalid syntax"),
        ("my-column == 1", "'my-column' at character 1 of 'my-column == 1' is not understood: a column whose name is"),
        ("a >=", "'a >=' breaks off: a filter compares columns with values (==,"),
        ("", "'' breaks off: a filter compares"),
        ("open('x') == 1", "\"open('x')\" at character 1"),
        ("len(a, b) == 1", "'len(a, b)' at character 1"),
        ("a.b() == 1", "'a.b()' at character 1"),
        ("[x for x in a]", "'[x for x in a]' at character 1"),
        ("a == b'x'", "a value is a text in quotes, a number, True or False."),
        ("len(a)", "'len(a)' at character 1"),
        ("a == -'x'", "\"-'x'\" at character 6"),
        ("a == -True", "'-True' at character 6"),
        ("not " * 100_000 + "a", "a filter of 400,001 characters is nested too deeply"),
    ],
)
def test_a_syntax_error_is_reported_with_its_place_and_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_filter(text)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("text == 4", "column 'text' is string and does not compare with 4: set data.cast.text: int64, or write a"),
        ("text > 0.5", "column 'text' is string and does not compare with 0.5: set data.cast.text: float64, or"),
        ("text == True", "column 'text' is string and does not compare with True: set data.cast.text: bool, or"),
        ("stars == '4'", "column 'stars' is int8 and does not compare with '4': set data.cast.stars: string, or write"),
        ("seen in (0, 1)", "column 'seen' is bool and does not compare with 0: set data.cast.seen: int64, or write"),
        ("text == stars", "column 'text' is string and does not compare with stars: set data.cast of one of them"),
        ("day > 5", "column 'day' is timestamp[us] and does not compare with 5: "),
        ("day > 'May'", "column 'day' is timestamp[us] and does not compare with 'May': "),
        ("words == 'a'", "column 'words' is list<"),
        ("len(text) > 'a'", "column 'len(text)' is int32 and does not compare with 'a': it is a number, so write a"),
        ("len(stars) > 1", "column 'stars' is int8, and len() is of text: set data.cast.stars: string."),
        ("'1' in stars", "column 'stars' is int8 and does not compare with '1': set data.cast.stars: string, or"),
        ("text", "column 'text' is string and is no condition: set data.cast.text: bool, or compare"),
        ("stars < 36893488147419103232", "36893488147419103232 has more than 64 bits."),
        ("starz > 1", "there is no column 'starz': there is text, stars, share, "),
    ],
)
def test_an_impossible_comparison_is_reported_with_the_column_and_its_type(text: str, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        taken(text)
    assert words in str(raised.value)


def test_a_wrong_filter_is_a_mistake_of_the_recipe() -> None:
    data = {"source": "csv", "path": "reviews", "text": ["text"], "label": "label", "filter": "stars = 4"}
    model = {"source": "folder", "path": "models/small"}
    (problem,) = raised_problems(parse, {"name": "r", "task": "sequence-classification", "data": data, "model": model})
    assert problem.where == "data.filter" and problem.message.endswith("is not understood: write ==.")


def test_reading_a_filter_loads_no_pyarrow() -> None:
    program = "import sys; from training.recipe import filters; filters.parse_filter('a == 1'); "
    program += "print('pyarrow' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "False"
