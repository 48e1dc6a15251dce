"""Optional packages that a library imports though nobody here needs them, kept out for the seconds that they cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent(package: str) -> Iterator[None]:
    """Inside, `package` cannot be found or imported, unless it was imported before.

    Libraries that ask for it again each time find it afterwards. Those that ask when they are imported remember the
    answer for as long as the process lasts: accelerate and transformers, first imported inside, lack their parts for
    deepspeed from then on, and though they say that it is there, nothing can be trained by it; evaluate lacks its
    evaluators. So a process that needs the package later imports such libraries first, outside.
    """
    hidden = package not in sys.modules
    if hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]
