"""The columns that a recipe names, held against those that its task type wants."""

from __future__ import annotations

from typing import Any

import pytest

from training.problems import UserError
from training.recipe import parse

TASK_TYPES = "tests.training.data.task_types:"


def problems_of(task: str, data: dict[str, Any], **more: Any) -> dict[str, str]:
    """The message of each mistake by its field."""
    data = {"source": "json", "path": "rows", **data}
    recipe = {"name": "own", "task": task, "data": data, "model": {"source": "folder", "path": "base"}, **more}
    try:
        parse(recipe)
    except UserError as error:
        return {problem.where: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("task", "data"),
    [
        ("sequence-classification", {"text": ["a", "b"], "label": "y"}),
        (f"{TASK_TYPES}Lines", {"text": ["text"]}),
        (f"{TASK_TYPES}Tagging", {}),
        (
            f"{TASK_TYPES}Tagging",
            {"columns": {"tags": "ner"}, "label_names": ["O", "B"], "checks": {"uneven": "warning"}},
        ),
        (f"{TASK_TYPES}Chatting", {}),
        (f"{TASK_TYPES}Chatting", {"columns": {"output": "answer", "input": "context"}}),
    ],
)
def test_a_recipe_names_what_its_kind_wants_and_no_more_than_it_must(task: str, data: dict[str, Any]) -> None:
    assert problems_of(task, data) == {}


@pytest.mark.parametrize(
    ("task", "data", "where", "message"),
    [
        ("sequence-classification", {"text": ["a"]}, "data.label",
         "is missing: The column of labels: names or whole numbers; lists of them or any numbers for some task "
         "types."),
        (f"{TASK_TYPES}Lines", {}, "data.text",
         "is missing: The text column, or the two columns of a pair of texts, in the model's order."),
        (f"{TASK_TYPES}Lines", {"text": ["text"], "label": "y"}, "data.label",
         f"'y' has no effect as label: task {TASK_TYPES}Lines takes text. Leave it out."),
        (f"{TASK_TYPES}Lines", {"text": ["text", "other"]}, "data.text",
         f"'other' has no effect as a second text: task {TASK_TYPES}Lines takes text. Leave it out."),
        (f"{TASK_TYPES}Lines", {"text": ["text"], "label_names": ["a", "b"]}, "data.label_names",
         f"have no effect: task {TASK_TYPES}Lines takes text, and its labels have no names. Leave this field out."),
        (f"{TASK_TYPES}Lines", {"text": ["text"], "columns": {"text": "line"}}, "data.columns.text",
         "has its own field: set data.text."),
        (f"{TASK_TYPES}Tagging", {"columns": {"tokens": "words"}}, "data.columns.tokens",
         f"no such column: task {TASK_TYPES}Tagging takes words, tags."),
        (f"{TASK_TYPES}Tagging", {"columns": {"words": "tags"}}, "data.columns.tags",
         "'tags' is also data.columns.words: each column has one role."),
        (f"{TASK_TYPES}Tagging", {"rename": {"tags": "ner"}}, "data.columns.tags",
         "'tags' is renamed to 'ner' (data.rename): use that name."),
        (f"{TASK_TYPES}Tagging", {"cast": {"tags": "string"}}, "data.cast.tags",
         "'string' is not a type for a column of lists or objects: leave it out."),
        (f"{TASK_TYPES}Chatting", {"columns": {"messages": "m", "output": "o"}}, "data.columns",
         f"messages and output cannot be combined: task {TASK_TYPES}Chatting takes messages; or instruction, "
         "input (if there is one), output."),
        (f"{TASK_TYPES}Absent", {}, "task",
         f"'{TASK_TYPES[:-1]}' has no 'Absent': it has SequenceClassification, Tagging, Chatting, Lines, Mute."),
        (f"{TASK_TYPES}Mute", {}, "task", f"'{TASK_TYPES}Mute' cannot be made: it wants a voice."),
        (f"{TASK_TYPES}Tags", {}, "task",
         f"'{TASK_TYPES}Tags' is the class Tags: it must be a subclass of training.task_types.task_type.TaskType."),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_the_task_type_is_reported_once_with_what_is_expected(
    task: str, data: dict[str, Any], where: str, message: str
) -> None:
    assert {name: text.partition(" Did you")[0] for name, text in problems_of(task, data).items()} == {where: message}


def test_a_column_of_the_kind_is_no_slice() -> None:
    evaluation = {"metrics": ["accuracy"], "slices": ["ner"]}
    message = "'ner' is a column that the task type uses as tags: choose another, or length_bucket for groups by their"
    message += " length."
    assert problems_of(f"{TASK_TYPES}Tagging", {"columns": {"tags": "ner"}}, evaluation=evaluation) == {
        "evaluation.slices[0]": message
    }
