"""The user's mistakes: what is wrong, where, what is allowed, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

NETWORK = "network"
"""The kind of a problem that may be gone when the same is tried again: nothing in the recipe is wrong."""


class Problem(BaseModel):
    """One thing that only the user can mend."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """Which part found it: recipe, data, model, tokens, training, compute, release, hub; or NETWORK."""
    where: str
    """The field (`training.learning_rate`), the file with its row, or the name that is wrong."""
    message: str
    """The value, what is allowed, and the next step, in one or two sentences."""


class UserError(Exception):
    """All problems of one input, found together. Shown without a traceback; never retried."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{p.where}: {p.message}" for p in self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...]]]:
        # Exception's own pickling would hand the joined text back to __init__.
        return type(self), (self.problems,)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of the allowed names, or nothing where none is near."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
