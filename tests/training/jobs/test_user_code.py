"""Objects that a recipe names as `module:name`: each mistake is the user's, with the field and the next step."""

from __future__ import annotations

import pytest

from tests.raised import raised_problems
from training.jobs.user_code import CodeField, is_function_of

FIELD = CodeField("training", "training.loss", "my_losses:hinge", "a function of two arguments", is_function_of(2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hinge", "'hinge' is no module:name: write for example my_losses:hinge."),
        ("tests.arrows:hinge", "there is no module 'tests.arrows' here or installed. Did you mean 'arrow'?"),
        ("tests.arrow.inner:hinge", "there is no module 'tests.arrow.inner' here or installed."),
        ("tests.arrow:write", "'tests.arrow' has no 'write': it has "),
        ("pathlib:Path", "'pathlib:Path' is the class Path: it must be a function of two arguments."),
    ],
)
def test_a_name_that_names_nothing_usable_is_the_users_mistake(name: str, message: str) -> None:
    """`tests.arrow` is a module, not a package: it has no modules that the user may have meant."""
    (problem,) = raised_problems(lambda: FIELD.load(name))
    assert problem.where == "training.loss" and message in problem.message
