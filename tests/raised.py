"""The user's mistakes that a call reports, and what their messages must say."""

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


class Says(str):
    """Equals each message that begins like this; `…` stands for any words."""

    __hash__ = str.__hash__

    def __eq__(self, message: object) -> bool:
        first, *parts = self.split("…")
        if not isinstance(message, str) or not message.startswith(first):
            return False
        place = len(first)
        for part in parts:
            place = message.find(part, place) + len(part)
            if place < len(part):
                return False
        return True
