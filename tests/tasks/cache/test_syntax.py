"""Edits of a file that change its digest, and edits of text for people, which do not."""

from __future__ import annotations

import ast

import pytest

from tasks.cache.syntax import digest_of_syntax

MODULE = '''
"""A module."""
from training.problems import Problem, UserError

LOSS = "focal"
"""An attribute."""


class Task:
    """A class."""

    loss: str = "cross_entropy"

    def check(self, loss, events):
        if loss != "focal":
            message = f"{loss!r} is unknown: "
            message += "choose from focal."
            raise UserError.of("recipe", "training.loss", message)
        if loss == "none":
            return UserError.of("recipe", "training.loss", "is none")
        if loss is None:
            raise ValueError(f"no loss, but {loss}")
        events.warning("a warning")
        events.write({"kind": "note", "message": "a note"})
        suffix = "of rows"
        events.warning(f"mean {suffix}")
        return loss + suffix


def one():
    pass
'''


def digest(text: str, *, has_messages: bool = True) -> str:
    return digest_of_syntax(ast.parse(text), has_messages=has_messages)


def edited(old: str, new: str) -> str:
    assert old in MODULE
    return MODULE.replace(old, new)


STRINGS = {
    "a docstring": ('"""A class."""', '"""Another class."""'),
    "a docstring where none stood": (
        "    def check(self, loss, events):",
        '    def check(self, loss, events):\n        "x"',
    ),
    "a docstring in place of pass": ("    pass", '    """Nothing."""'),
    "no docstring": ('"""A module."""', ""),
    "a string under an attribute": ('"""An attribute."""', '"""The loss."""'),
    "a string under an attribute where none stood": (
        'loss: str = "cross_entropy"',
        'loss: str = "cross_entropy"\n    "x"',
    ),
    "a comment": ("    pass", "    pass  # nothing"),
}
MESSAGES = {
    "a variable": ("is unknown: ", "is not known: "),
    "a variable in one piece": ('f"{loss!r} is unknown: "\n            message += "choose from focal."', '"unknown"'),
    "a value in a message": ("choose from focal.", "choose another."),
    "an exception": ('f"no loss, but {loss}"', '"no loss"'),
    "an error that is returned": ("is none", "is missing"),
    "a warning": ("a warning", "another warning"),
    "a note": ("a note", "another note"),
    "a field that a message names": ("training.loss", "training.losses"),
}
CODE = {
    "a constant": ('LOSS = "focal"', 'LOSS = "focal_loss"'),
    "a default": ("cross_entropy", "mean_squared"),
    "a condition": ('loss != "focal"', 'loss != "dice"'),
    "a variable that is in a message": ('"of rows"', '"of texts"'),
    "another exception": ("ValueError", "TypeError"),
    "the condition of a message": ("loss is None", "not loss"),
    "the kind of an event": ('"kind": "note"', '"kind": "warning"'),
}


@pytest.mark.parametrize("edit", STRINGS)
def test_a_comment_or_a_string_that_is_a_statement_does_not_count(edit: str) -> None:
    for has_messages in (True, False):
        assert digest(edited(*STRINGS[edit]), has_messages=has_messages) == digest(MODULE, has_messages=has_messages)


@pytest.mark.parametrize("edit", MESSAGES)
def test_a_message_does_not_count_in_this_project_and_counts_in_user_code(edit: str) -> None:
    assert digest(edited(*MESSAGES[edit])) == digest(MODULE)
    assert digest(edited(*MESSAGES[edit]), has_messages=False) != digest(MODULE, has_messages=False)


@pytest.mark.parametrize("edit", CODE)
def test_a_text_that_can_shape_bytes_counts(edit: str) -> None:
    assert digest(edited(*CODE[edit])) != digest(MODULE)
