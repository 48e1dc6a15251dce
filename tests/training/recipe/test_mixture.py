"""Mixtures in a recipe: what the sets have, and all mistakes in them at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.training.recipe.test_recipe import problems
from training.recipe import Recipe, parse
from training.recipe.data_fields import default_name
from training.recipe.field_types import named_code

MIXED: dict[str, Any] = {
    "name": "reviews",
    "task": "sequence-classification",
    "data": {
        "text": ["text"],
        "label": "label",
        "validation_size": 0.2,
        "mix": [
            {"source": "csv", "path": "rows/ours.csv", "weight": 0.7},
            {"source": "hub", "path": "me/theirs", "text": ["body"], "revision": "v2", "weight": 0.3},
        ],
    },
    "model": {"source": "folder", "path": "models/small"},
}


def mixed(*entries: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """The recipe with other fields in its sets, set by set, and beside them."""
    values = copy.deepcopy(MIXED)
    for entry, more in zip(values["data"]["mix"], entries, strict=False):
        entry |= more
    values["data"] |= beside
    return values


def test_a_set_has_the_fields_beside_mix_unless_it_has_its_own() -> None:
    ours, theirs = parse(MIXED).data.sets
    assert (ours.source, ours.path, ours.text, ours.revision, ours.mix) == (
        "csv",
        "rows/ours.csv",
        ["text"],
        None,
        None,
    )
    assert (theirs.source, theirs.path, theirs.text, theirs.revision) == ("hub", "me/theirs", ["body"], "v2")
    assert ours.validation_size == theirs.validation_size == 0.2 and ours.label == theirs.label == "label"
    (only,) = parse({**MIXED, "data": {**MIXED["data"], "mix": None, "source": "csv", "path": "rows"}}).data.sets
    assert only.path == "rows"


def test_evaluated_splits_of_another_type_are_a_mistake_of_their_own() -> None:
    assert problems(MIXED, {"evaluation.splits": 3}) == {
        "evaluation.splits": "3 is of the wrong type: it takes a list."
    }


def test_a_recipe_that_was_dumped_is_the_same_mixture_and_overrides_still_hold_for_all_sets() -> None:
    recipe = parse(MIXED)
    for dumped in (recipe.model_dump(mode="json"), recipe.model_dump(mode="json", exclude_defaults=True)):
        assert parse(dumped) == recipe
        assert [one.label for one in parse(dumped, {"data.label": "y", "data.mix[0].label": "z"}).data.sets] == [
            "z",
            "y",
        ]


def test_one_field_of_one_set_can_be_set_by_its_place_and_a_wrong_place_is_named() -> None:
    data = parse(MIXED, {"data.mix[1].weight": 0.5}).data
    assert [one.weight for one in data.mix or ()] == [0.7, 0.5]
    assert problems(MIXED, {"data.mix[2].weight": 1.0, "data.mix.weight": 1.0, "data.mix[0].wieght": 1.0}) == {
        "data.mix[2].weight": "cannot be set: data.mix has 2 entries, counted from 0.",
        "data.mix.weight": "cannot be set: 'data.mix' has no fields.",
        "data.mix[0].wieght": "no such field. Did you mean 'weight'?",
    }


@pytest.mark.parametrize(
    ("source", "path", "name"),
    [
        ("csv", "rows/ours.csv.gz", "ours"),
        ("json", "rows/ours.en.jsonl", "ours.en"),
        ("csv", "s3://bucket/2026/reviews/", "reviews"),
        ("json", "more/part*.jsonl", "part"),
        ("hub", "nyu-mll/glue", "glue"),
        ("python", "my_rows:tickets", "tickets"),
        ("csv", "*", "csv"),
    ],
)
def test_a_set_without_a_name_has_the_last_part_of_its_path(source: str, path: str, name: str) -> None:
    assert default_name(source, path) == name


def test_a_mixture_is_sliced_by_its_sets_unless_the_recipe_names_slices_or_evaluates_train() -> None:
    assert parse(MIXED).evaluation.slices == ["dataset"]
    assert parse({**MIXED, "evaluation": {"slices": ["label"]}}).evaluation.slices == ["label"]
    assert parse({**MIXED, "evaluation": {"splits": ["train", "validation"]}}).evaluation.slices == []
    assert problems({**MIXED, "evaluation": {"splits": ["train"], "slices": ["dataset"]}}) == {
        "evaluation.slices[0]": "'dataset' is not stored for train: leave train out of evaluation.splits, or the slice."
    }


def test_mistakes_in_all_sets_are_reported_together_each_by_its_place() -> None:
    values = mixed(
        {"delimiter": ";;", "cast": {"text": "int64"}, "name": "-", "weight": None},
        {"delimiter": "|", "filter": "stars >=", "label": None},
        weight_by="token",
        source="csv",
        checks={"duplicate": "error"},
    )
    found = problems(values)
    assert set(found) == {
        "data.mix[0].delimiter",
        "data.mix[0].cast.text",
        "data.mix[0].name",
        "data.mix[0].weight",
        "data.mix[1].delimiter",
        "data.mix[1].filter",
        "data.weight_by",
        "data.source",
        "data.checks.duplicate",
    }
    assert found["data.weight_by"].startswith("'token' is unknown: choose from rows, characters, tokens. Did you mean")
    assert found["data.mix[0].weight"] == "is missing: data.mix[1] has one. Give all sets a weight, or none."
    assert found["data.mix[1].delimiter"] == "'|' is for `source: csv` and `conll` only; with hub, set it to null."
    assert found["data.mix[0].name"].startswith("'-' is not a name for it: use letters, digits")
    assert found["data.source"] == "'csv' is for one set of rows: leave it out, each set in data.mix has its own."


def test_a_field_beside_mix_that_no_set_can_have_is_named_where_it_is_written() -> None:
    assert problems(mixed(label="text")) == {
        "data.label": "'text' is also a text column; the label needs another column."
    }
    assert list(problems(mixed(filter="x ="))) == ["data.filter"]


def test_a_field_of_the_wrong_type_is_the_only_mistake_reported_of_it() -> None:
    message = "'body' is of the wrong type: it takes a list. Write [body]."
    assert problems(mixed({}, {"text": "body"})) == {"data.mix[1].text": message}
    assert problems(mixed(text="body")) == {"data.text": message}
    assert problems(mixed({"cast": {"text": "int"}}))["data.mix[0].cast.text"].startswith(
        "'int' is unknown: choose from"
    )


def test_sets_whose_columns_do_not_fit_each_other_are_named_with_both() -> None:
    assert problems(mixed({}, {"text": ["a", "b"]})) == {
        "data.mix[1]": "'theirs' has the columns text, text_pair, label, and 'ours' (data.mix[0]) has text, label: "
        "all sets need the same ones."
    }


@pytest.mark.parametrize(
    ("entries", "beside", "where", "message"),
    [
        (({"name": "theirs"},), {}, "data.mix[1].name", "'theirs' is also the name of data.mix[0]"),
        (({"epochs": 2.0}, {"epochs": 1.0}), {}, "data.mix[1].epochs", "1 contradicts data.mix[0].epochs"),
        (({"epochs": 2.0},), {"stopping_strategy": "all_exhausted"}, "data.stopping_strategy", "has no effect"),
        (({"weight": None}, {"weight": None}), {"weight_by": "characters"}, "data.weight_by", "has no effect without"),
        (({}, {}), {"mix": None}, "data.source", "is missing"),
        (({"weight": 0.0},), {}, "data.mix[0].weight", "0.0 is out of range: it must be above 0."),
        (({}, {}), {"mix": []}, "data.mix", "has 0 entries"),
        (({"path": "https://me:secret@host/rows.csv"},), {}, "data.mix[0].path", "holds a user's name or password"),
    ],
)
def test_a_mixture_that_cannot_be_made_is_refused(
    entries: tuple[dict[str, Any], ...], beside: dict[str, Any], where: str, message: str
) -> None:
    assert message in problems(mixed(*entries, **beside))[where]


def test_tokens_are_refused_as_weights_for_a_model_whose_tokenizer_is_trained_on_the_mixture() -> None:
    assert parse(mixed(weight_by="tokens")).data.weight_by == "tokens"
    scratch = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 99}}
    assert problems({**mixed(weight_by="tokens"), "model": scratch}) == {
        "data.weight_by": "'tokens' need a tokenizer, and a model from scratch trains its own on the mixture: choose "
        "characters, which are close, or rows; or start from a model that has a tokenizer."
    }


def test_fields_of_a_mixture_are_refused_without_one() -> None:
    one = {"source": "csv", "path": "rows", "text": ["text"], "label": "label", "mix_seed": 3}
    assert problems({**MIXED, "data": one}) == {"data.mix_seed": "3 has no effect without data.mix: leave it out."}


def test_code_that_a_set_names_needs_consent_like_any_other() -> None:
    values = mixed({"source": "python", "path": "pandas:read_pickle"})
    assert list(named_code(Recipe, values)) == [("data.mix[0].path", "pandas:read_pickle")]
