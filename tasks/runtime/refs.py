"""What stages hand to each other: small frozen values, never the data itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.runtime import settings


class Ref(BaseModel):
    """A finished artifact."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """The stage that made it."""
    key: str
    """Digest of the ingredients: its name in the store."""
    digest: str
    """Digest of the content, files under `log/` apart: equal digests are equal bytes."""
    parts: dict[str, str] = Field(default_factory=dict)
    """Digest of each top-level file or folder of the content."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """A few numbers worth showing."""

    @property
    def location(self) -> str:
        """The artifact's folder, relative to the home."""
        return f"artifacts/{self.kind}/{self.key}"

    @property
    def path(self) -> Path:
        """The artifact's folder, absolute."""
        return settings.home() / self.location


class FilePin(BaseModel):
    """A file, pinned by content."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Its path, absolute, or its URL."""
    sha256: str


class HubPin(BaseModel):
    """A repository of the Hub, pinned to a commit."""

    model_config = ConfigDict(frozen=True)

    name: str
    """What the commit is the commit of: `owner/name@revision`."""
    commit: str


class Pins(BaseModel):
    """What the recipe's names meant when the run began."""

    model_config = ConfigDict(frozen=True)

    data_hub: HubPin | None = None
    data_files: dict[str, list[FilePin]] = Field(default_factory=dict)
    """Split to its files, in reading order."""
    data_fingerprint: str | None = None
    """What a Python callable's own `fingerprint()` said."""
    model_hub: HubPin | None = None
    model_files: dict[str, FilePin] = Field(default_factory=dict)
    """Name inside the model folder to its file."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    num_processes: int = 1
    num_machines: int = 1
    notes: list[str] = Field(default_factory=list)
    """What the user should know of how the names were resolved, such as an offline pin."""


class Check(BaseModel):
    """One figure held against what it must reach."""

    model_config = ConfigDict(frozen=True)

    figure: str
    """`split.metric`."""
    value: float
    minimum: float

    @property
    def held(self) -> bool:
        """Whether the figure reaches its minimum."""
        return self.value >= self.minimum


class Verdict(BaseModel):
    """What the gate decided, with its evidence."""

    model_config = ConfigDict(frozen=True)

    promote: bool
    checks: list[Check]


class Version(BaseModel):
    """A version in the model registry."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    alias: str
    promoted: bool
    """Whether the alias points to it now."""
