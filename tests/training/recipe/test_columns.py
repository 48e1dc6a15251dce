"""The columns that a recipe names, held against those that its kind wants."""

from __future__ import annotations

from typing import Any

import pytest

from training.problems import UserError
from training.recipe import parse

KINDS = "tests.training.rows.kinds:"


def told(kind: str, data: dict[str, Any], **more: Any) -> dict[str, str]:
    """What is wrong, by field."""
    data = {"source": "json", "path": "rows", **data}
    recipe = {"name": "own", "kind": kind, "data": data, "model": {"source": "folder", "path": "base"}, **more}
    try:
        parse(recipe)
    except UserError as error:
        return {problem.where: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("sequence-classification", {"text": ["a", "b"], "label": "y"}),
        (f"{KINDS}Lines", {"text": ["text"]}),
        (f"{KINDS}Tagging", {}),
        (f"{KINDS}Tagging", {"columns": {"tags": "ner"}, "label_names": ["O", "B"], "checks": {"uneven": "warning"}}),
        (f"{KINDS}Chatting", {}),
        (f"{KINDS}Chatting", {"columns": {"output": "answer", "input": "context"}}),
    ],
)
def test_a_recipe_names_what_its_kind_wants_and_no_more_than_it_must(kind: str, data: dict[str, Any]) -> None:
    assert told(kind, data) == {}


@pytest.mark.parametrize(
    ("kind", "data", "where", "message"),
    [
        ("sequence-classification", {"text": ["a"]}, "data.label",
         "is missing: The column of labels: names, or whole numbers; for some kinds lists of them, or any numbers."),
        (f"{KINDS}Lines", {}, "data.text",
         "is missing: The text column, or the two columns of a pair of texts, in the model's order."),
        (f"{KINDS}Lines", {"text": ["text"], "label": "y"}, "data.label",
         f"'y' is of no use as label: kind {KINDS}Lines wants text. Leave it out."),
        (f"{KINDS}Lines", {"text": ["text", "other"]}, "data.text",
         f"'other' is of no use as a second text: kind {KINDS}Lines wants text. Leave it out."),
        (f"{KINDS}Lines", {"text": ["text"], "label_names": ["a", "b"]}, "data.label_names",
         f"are of no use: kind {KINDS}Lines wants text, and no label has a name. Leave them out."),
        (f"{KINDS}Lines", {"text": ["text"], "columns": {"text": "line"}}, "data.columns.text",
         "has a field of its own: set data.text."),
        (f"{KINDS}Tagging", {"columns": {"tokens": "words"}}, "data.columns.tokens",
         f"no such column: kind {KINDS}Tagging wants words, tags."),
        (f"{KINDS}Tagging", {"columns": {"words": "tags"}}, "data.columns.tags",
         "'tags' is also data.columns.words: each column is one thing to the kind."),
        (f"{KINDS}Tagging", {"rename": {"tags": "ner"}}, "data.columns.tags",
         "'tags' is renamed to 'ner' (data.rename): use that name."),
        (f"{KINDS}Tagging", {"cast": {"tags": "string"}}, "data.cast.tags",
         "'string' is no type for a column of lists or objects: it is not cast, so leave it out."),
        (f"{KINDS}Chatting", {"columns": {"messages": "m", "output": "o"}}, "data.columns",
         f"messages and output do not go together: kind {KINDS}Chatting wants messages; or instruction, "
         "input (if there is one), output."),
        (f"{KINDS}Absent", {}, "kind",
         f"'{KINDS[:-1]}' has no 'Absent': it has SequenceClassification, Tagging, Chatting, Lines, Mute."),
        (f"{KINDS}Mute", {}, "kind", f"'{KINDS}Mute' cannot be made: it wants a voice."),
        (f"{KINDS}Tags", {}, "kind",
         f"'{KINDS}Tags' is the class Tags: it must be a subclass of training.kinds.base.Kind."),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_kind_is_told_once_with_what_it_wants(
    kind: str, data: dict[str, Any], where: str, message: str
) -> None:
    assert {name: text.partition(" Did you")[0] for name, text in told(kind, data).items()} == {where: message}


def test_a_column_of_the_kind_is_no_slice() -> None:
    evaluation = {"metrics": ["accuracy"], "slices": ["ner"]}
    message = (
        "'ner' is a column that the kind has as tags: choose another, or length_bucket for groups by their length."
    )
    assert told(f"{KINDS}Tagging", {"columns": {"tags": "ner"}}, evaluation=evaluation) == {
        "evaluation.slices[0]": message
    }
