"""The parameters of a batch prediction: all mistakes in one report, each with the value and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.raised import raised_problems
from training.recipe import parse_batch_prediction

GIVEN: dict[str, Any] = {"model": "reviews", "input": ["inbox"], "output": "answers"}


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("reviews", ("reviews", "", "")),
        ("reviews@live", ("reviews", "live", "")),
        ("reviews/12", ("reviews", "", "12")),
    ],
)
def test_a_model_is_named_with_an_alias_or_a_version_or_alone(model: str, parts: tuple[str, str, str]) -> None:
    found = parse_batch_prediction(GIVEN | {"model": model})
    assert (found.name, found.alias, found.version) == parts


def test_an_output_with_the_suffix_of_a_file_is_one_file() -> None:
    assert [parse_batch_prediction(GIVEN | {"output": out}).is_single_file for out in ("a.csv", "s3://b/a.jsonl")] == [
        True,
        True,
    ]
    assert not parse_batch_prediction(GIVEN | {"output": "answers.d"}).is_single_file


@pytest.mark.parametrize(
    ("wrong", "where", "words"),
    [
        ({"modl": "x"}, "modl", "no such field. Did you mean 'model'?"),
        ({"model": "a@b@c"}, "model", "write NAME, NAME@ALIAS or NAME/VERSION"),
        ({"model": "a/live"}, "model", "write NAME, NAME@ALIAS or NAME/VERSION"),
        ({"input": []}, "input", "it takes at least 1"),
        ({"input": "inbox"}, "input", "Write [inbox]."),
        ({"output": "x {{ y }}"}, "output", "Prefect templates parameters"),
        ({"max_error_rate": 1.5}, "max_error_rate", "must be at most 1"),
        ({"format": "xml"}, "format", "choose from parquet, csv, jsonl, openai"),
        ({"format": "csv", "output": "a.jsonl"}, "format", "the suffix of a.jsonl decides"),
        ({"format": "openai", "output": "a.csv"}, "output", "ends in .jsonl"),
        ({"task": "sequence-classification"}, "task", "write module:Class, or leave it out"),
        ({"shard_rows": 0}, "shard_rows", "must be at least 1"),
        ({"cluster_address": "here"}, "cluster_address", "use host:port of the head of the cluster"),
    ],
)
def test_a_mistake_names_the_field_and_what_is_allowed(wrong: dict[str, Any], where: str, words: str) -> None:
    (problem,) = raised_problems(parse_batch_prediction, GIVEN | wrong)
    assert problem.where == where and words in problem.message


def test_all_mistakes_are_reported_together() -> None:
    problems = raised_problems(parse_batch_prediction, {"model": "reviews", "batch_size": 0, "keeep": []})
    assert {problem.where for problem in problems} == {"input", "output", "batch_size", "keeep"}
