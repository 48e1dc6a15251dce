"""The user's mistakes that a call reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from training.problems import Problem, UserError


def raised_problems(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Problem]:
    """The problems of the UserError that the call raises."""
    with pytest.raises(UserError) as raised:
        function(*args, **kwargs)
    return list(raised.value.problems)
