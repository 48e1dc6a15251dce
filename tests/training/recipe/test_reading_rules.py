"""How rows are read for a registered version: by the fields of its recipe, by those of all sets, and by options."""

from __future__ import annotations

from typing import Any

import pytest

from training.problems import UserError
from training.recipe import Data
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.validation import override_reading

TASK = {"task": "sequence-classification", "options": {}}
CSV = {"source": "csv", "path": "rows.csv", "text": ["text"], "label": "label"}


def rules(**data: Any) -> ReadingRules:
    return ReadingRules.of(Data.model_validate({**CSV, **data}))


def mixture(*sets: dict[str, Any], **data: Any) -> ReadingRules:
    entries = [{"name": f"set{place}", **CSV, **fields} for place, fields in enumerate(sets)]
    return ReadingRules.of(Data.model_validate({**data, "mix": entries}))


def override(given: ReadingRules, **values: Any) -> ReadingRules:
    named = {name.replace("__", "."): value for name, value in values.items()}
    return override_reading(given, named, TASK, {"text": "text"})


def test_fields_of_the_recipe_hold_and_those_of_a_format_only_for_its_files() -> None:
    own = rules(delimiter=";", encoding="cp1252", rename={"body": "text"}, filter="stars > 2", limit=5)
    found = own.data("csv")
    assert (found.delimiter, found.encoding, found.rename, found.filter) == (
        ";",
        "cp1252",
        {"body": "text"},
        "stars > 2",
    )
    assert found.limit is None
    for other in ("json", "parquet", TEXT_LINES):
        assert own.data(other).encoding == "utf-8" and own.data(other).rename == {"body": "text"}


def test_rules_survive_their_storage_as_json() -> None:
    own = override(rules(header=["text", "label"], quoting="none"), filter=None, delimiter="|")
    assert ReadingRules.model_validate_json(own.model_dump_json()) == own


def test_an_option_replaces_a_field_or_adds_to_one_of_several_names() -> None:
    own = rules(delimiter=";", rename={"a": "b"}, filter="n > 1", checks={"line_breaks": "error"})
    found = override(own, delimiter="|", rename__body="text", filter=None, checks__stray_quotes="ignore").data("csv")
    assert found.delimiter == "|" and found.rename == {"a": "b", "body": "text"} and found.filter is None
    assert found.checks == {"line_breaks": "error", "stray_quotes": "ignore"}
    assert override(own, text=["body"]).columns({"text": "text"}) == {"text": "body"}
    assert override(own, encoding="cp1252").data("json").encoding == "cp1252"


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"delimeter": ";"}, ["data.delimeter: does not shape rows: choose from", "Did you mean 'delimiter'?"]),
        ({"limit": 3}, ["data.limit: does not shape rows"]),
        (
            {"delimiter": ";;", "filter": "n >"},
            ["data.delimiter: ';;'", "data.filter: "],
        ),
        ({"encoding": "utf8x"}, ["data.encoding: 'utf8x' is not a text encoding"]),
        ({"header": ["a", "a"]}, ["data.header: 'a' is listed twice"]),
        ({"cast": {"text": "int64"}}, ["data.cast.text: 'int64' is not a type for a text column"]),
        ({"checks": {"stray": "ignore"}}, ["data.checks.stray: no such check"]),
        ({"text": ["a", "b"]}, ["data.text: the model does not read 'text_pair': it reads text."]),
        ({"rename": {"text": "words"}}, ["data.text: 'text' is renamed to 'words'"]),
        ({"source": ["csv"]}, ["data.source: ['csv'] is no format of files: choose from csv"]),
    ],
)
def test_mistakes_in_options_are_named_as_in_a_recipe_all_at_once(values: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        override(rules(), **values)
    for message in messages:
        assert message in str(raised.value)
    assert {problem.kind for problem in raised.value.problems} == {"option"}


def test_an_option_about_a_format_that_no_file_has_is_refused() -> None:
    own = override(rules(), delimiter=";")
    own.require_used(["csv", "json"])
    with pytest.raises(UserError, match=r"data\.delimiter: is for files of csv and conll, and there are none"):
        own.require_used(["json", TEXT_LINES])


def test_the_format_of_a_file_is_that_of_its_name_unless_the_recipe_or_an_option_says_otherwise() -> None:
    assert [rules().format_of(name) for name in ("a.tsv.gz", "a.txt", "a.orc")] == ["csv", TEXT_LINES, None]
    assert [rules(path="data/train.dat").format_of(name) for name in ("a.dat", "a.txt", "a.json")] == [
        "csv",
        TEXT_LINES,
        "json",
    ]
    assert override(rules(), source="json").format_of("a.txt") == "json"
    with pytest.raises(UserError, match=r"data\.source: 'hub' is no format of files: choose from csv, json"):
        override(rules(), source="hub")


def test_sets_of_a_mixture_give_what_they_share_and_the_rest_needs_an_option() -> None:
    own = mixture({"delimiter": ";", "rename": {"body": "text"}}, {"rename": {"review": "text"}})
    with pytest.raises(UserError, match=r"data\.delimiter: differs among .*set0: ';'; set1: the default"):
        own.data("csv")
    found = override(own, delimiter=",").data("csv")
    assert found.delimiter == "," and found.rename == {"body": "text", "review": "text"}
    assert own.data("json").rename == found.rename
    with pytest.raises(UserError, match=r"data\.cast"):
        mixture({"cast": {"n": "int64"}}, {"cast": {"n": "string"}}).data("csv")


def test_sets_that_are_filtered_differently_matter_only_where_rows_are_filtered() -> None:
    own = mixture({"filter": "n > 1"}, {})
    assert own.data("csv", needs_filter=False).filter is None and own.has_filter
    with pytest.raises(UserError, match=r"data\.filter: differs among"):
        own.data("csv")
    assert not override(own, filter=None).has_filter


def test_a_version_of_the_hub_or_of_code_has_the_defaults_of_every_format() -> None:
    own = ReadingRules.of(Data.model_validate({"source": "hub", "path": "a/b", "text": ["text"], "label": "label"}))
    assert own.data("csv").delimiter is None and own.data("json").encoding == "utf-8"
    assert ReadingRules().data("csv").quoting == "standard"
