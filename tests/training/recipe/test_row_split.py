"""The rules of data.split."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.recipe.test_recipe import PLAIN, problems
from training.recipe import parse

BY_GROUP = {"by": "group", "column": "customer"}
BY_TIME = {"by": "time", "column": "day"}


def with_data(**data: Any) -> dict[str, Any]:
    return {**PLAIN, "data": {**PLAIN["data"], **data}}


@pytest.mark.parametrize(
    "data",
    [
        {"split": None},
        {"split": {"by": "rows"}},
        {"split": BY_GROUP},
        {"split": {"by": "group", "column": "text"}},
        {"split": BY_TIME, "validation_size": 500, "test_size": 0.2},
        {"split": {**BY_TIME, "validation_from": "2026-05-01", "test_from": "2026-06-01T00:00", "gap": "12h"}},
        {"split": {**BY_TIME, "validation_from": 3, "test_from": 4.5, "gap": 1}},
        {"split": {"by": "group", "column": "who"}, "rename": {"customer": "who"}},
    ],
)
def test_rows_are_split_by_group_or_by_time(data: dict[str, Any]) -> None:
    assert parse(with_data(**data)).data.split == parse(parse(with_data(**data)).model_dump()).data.split


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"split": {"by": "group"}}, {"data.split.column": "is missing: name the column with the group of each row."}),
        ({"split": {"by": "time"}}, {"data.split.column": "is missing: name the column with the time of each row."}),
        (
            {"split": {"by": "rows", "column": "customer"}},
            {"data.split.column": "'customer' has no effect with `by: rows`: leave it out, or set data.split.by."},
        ),
        (
            {"split": {"by": "group", "column": "label"}},
            {
                "data.split.column": "'label' is the column of labels, and no label would be in two splits: name "
                "another column."
            },
        ),
        (
            {"split": BY_GROUP, "rename": {"customer": "who"}},
            {"data.split.column": "'customer' is renamed to 'who' (data.rename): use that name."},
        ),
        (
            {"split": {**BY_GROUP, "gap": "7d"}},
            {"data.split.gap": "'7d' has no effect with `by: group`: leave it out, or set data.split.by: time."},
        ),
        (
            {"split": {**BY_TIME, "gap": "7 days", "test_from": "May", "validation_from": "2026-02-30"}},
            {
                "data.split.gap": "'7 days' is no duration: write one such as 7d or 12h (units: s, m, h, d, w), or a "
                "number.",
                "data.split.test_from": "'May' is no time: write one such as 2026-05-01 or 2026-05-01T12:00+02:00, or "
                "a number.",
                "data.split.validation_from": "'2026-02-30' is no time: day is out of range for month.",
            },
        ),
        (
            {"split": {**BY_TIME, "validation_from": "2026-06-01", "test_from": "2026-05-01"}},
            {"data.split.test_from": "2026-05-01 is not after validation_from, 2026-06-01: test follows validation."},
        ),
        (
            {"split": {**BY_TIME, "validation_from": "2026-06-01", "test_from": 7}},
            {"data.split.test_from": "7 and validation_from, 2026-06-01, are not both times: write them alike."},
        ),
        (
            {"split": {**BY_TIME, "test_from": "2026-05-01"}, "test_size": 0.1},
            {"data.split.test_from": "'2026-05-01' contradicts data.test_size, 0.1: leave one out."},
        ),
        (
            {"validation_size": 500},
            {
                "data.validation_size": "500 is out of range: it must be below 1. Rows are held out by a hash, and a "
                "number of them would move when rows are added; for the newest rows, set data.split.by: time."
            },
        ),
        (
            {"split": BY_TIME, "test_size": 10.5},
            {"data.test_size": "10.5 is no whole number of rows: a share of them is below 1."},
        ),
        (
            {"split": {**BY_TIME, "gap": "soon"}, "validation_size": 2.5},
            {
                "data.validation_size": "2.5 is no whole number of rows: a share of them is below 1.",
                "data.split.gap": "'soon' is no duration: write one such as 7d or 12h (units: s, m, h, d, w), or a "
                "number.",
            },
        ),
        ({"split": "group"}, {"data.split": "'group' is of the wrong type: it takes a mapping of fields."}),
        (
            {"split": {"by": "groups"}},
            {"data.split.by": "'groups' is unknown: choose from rows, group, time. Did you mean 'group'?"},
        ),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_meant_is_reported_with_all_its_fields(
    data: dict[str, Any], found: dict[str, str]
) -> None:
    assert problems(with_data(**data)) == found


def test_test_is_a_split_of_the_recipe_if_it_begins_at_a_time() -> None:
    evaluation = {"splits": ["validation", "test"]}
    splits = {"train": "train.csv"}
    by_time = {**with_data(split={**BY_TIME, "test_from": "2026-05-01"}, splits=splits), "evaluation": evaluation}
    assert parse(by_time).data.holds_out_test
    assert "evaluation.splits[1]" in problems({**with_data(split=BY_TIME, splits=splits), "evaluation": evaluation})


def test_a_set_of_a_mixture_may_be_split_in_its_own_way() -> None:
    sets = [{"source": "csv", "path": "a", "split": {"by": "group"}}, {"source": "csv", "path": "b"}]
    data = {"text": ["text"], "label": "label", "mix": sets, "split": BY_TIME}
    assert problems({**PLAIN, "data": data}) == {
        "data.mix[0].split.column": "is missing: name the column with the group of each row."
    }
