"""Optional packages that a library imports though nobody here needs them, kept out for the seconds that they cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent(package: str) -> Iterator[None]:
    """Inside, `package` cannot be found or imported, unless it was imported before."""
    hidden = package not in sys.modules
    if hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]
