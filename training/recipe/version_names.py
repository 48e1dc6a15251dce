"""Names of registered models and their versions: `NAME`, `NAME@alias` or `NAME/version`."""

from __future__ import annotations

import re
from typing import NamedTuple

VERSION_NAME = re.compile(r"[^@/]+(@[^@/]+|/[1-9]\d*)?")
"""The forms of the name."""


class VersionName(NamedTuple):
    """The parts of a name; alias and version are empty if they are not given."""

    name: str
    alias: str
    version: str


def split_version_name(text: str) -> VersionName:
    """Splits `NAME`, `NAME@alias` or `NAME/version` into its parts."""
    name, at, alias = text.partition("@")
    name, _, version = (name, "", "") if at else name.partition("/")
    return VersionName(name, alias, version)
