"""Trust: whose keys may sign the versions of which registered models.

<home>/trust.yaml    made with the home's own key, and edited by people

unsigned: warn         # or refuse: what no trusted key has signed
keys:
  - name: this home
    models: ["*"]      # patterns of names in the registry
    revoked: 2026-11-01T00:00:00Z    # what it signed from then on is refused
    key: |
      -----BEGIN PUBLIC KEY-----
      …
"""

from __future__ import annotations

import socket
from datetime import UTC, date, datetime, time
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tasks.home import find_user, home, home_path, named_lock
from tasks.signatures.keys import key_id, parse_public_key, write_public_key
from training.jobs.protocol import write_atomically
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

FILE = "trust.yaml"


class TrustedKey(BaseModel):
    """A public key, and what it may sign."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Whose it is, for messages."""
    key: str
    """In PEM."""
    models: list[str] = Field(default_factory=list)
    """Patterns of the names of registered models."""
    revoked: datetime | None = None
    """The time from which its signatures are refused."""

    @field_validator("key")
    @classmethod
    def _is_key(cls, text: str) -> str:
        parse_public_key(text)
        return text

    @field_validator("revoked", mode="before")
    @classmethod
    def _begin_of_day(cls, value: object) -> object:
        is_day = isinstance(value, date) and not isinstance(value, datetime)
        return datetime.combine(value, time()) if is_day else value  # type: ignore[arg-type]

    @field_validator("revoked")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @cached_property
    def public(self) -> EllipticCurvePublicKey:
        """The key itself."""
        return parse_public_key(self.key)

    @cached_property
    def id(self) -> str:
        """By which bundles name it."""
        return key_id(self.public)

    def may_sign(self, model: str) -> bool:
        """Whether it may sign versions of this registered model."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    @property
    def may_sign_artifacts(self) -> bool:
        """Whether it may sign what a shared store has, which belongs to no registered model."""
        return "*" in self.models

    def is_revoked(self, signed_at: datetime) -> bool:
        """Whether a signature of this time is refused."""
        return self.revoked is not None and signed_at >= self.revoked


class Trust(BaseModel):
    """The content of trust.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unsigned: Literal["warn", "refuse"] = "warn"
    """What no trusted key has signed: a warning, or an error."""
    keys: list[TrustedKey] = Field(default_factory=list)

    @field_validator("keys")
    @classmethod
    def _are_other_keys(cls, keys: list[TrustedKey]) -> list[TrustedKey]:
        first: dict[str, TrustedKey] = {}
        for key in keys:
            if (other := first.setdefault(key.id, key)) is not key:
                raise ValueError(f"{other.name!r} and {key.name!r} are the same key: write one entry, with all models")
        return keys

    @property
    def by_id(self) -> dict[str, TrustedKey]:
        """The keys by id."""
        return {key.id: key for key in self.keys}


def read_trust() -> Trust:
    """The home's trust; nobody is trusted, and unsigned versions are warned of, if the home has none. Raises UserError
    with all mistakes in the file."""
    file = home_path() / FILE
    try:
        return Trust.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except FileNotFoundError:
        return Trust()
    except ValidationError as error:
        raise UserError(
            Problem(kind="signature", where=f"{file}: {'.'.join(map(str, one['loc']))}", message=_explain(one["msg"]))
            for one in error.errors(include_url=False)
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError.of("signature", str(file), f"cannot be read: {error}. Mend it, or restore it.") from error


def _explain(message: str) -> str:
    return f"{message.removeprefix('Value error, ')}. Allowed: name, key, models, revoked of each key; unsigned."


def pin_own_key(key: EllipticCurvePublicKey, unsigned: Literal["warn", "refuse"]) -> None:
    """Writes the home's trust.yaml, with this key, if there is none."""
    file = home() / FILE
    with named_lock(FILE):
        if file.exists():
            return
        own = {"name": f"{find_user()} on {socket.gethostname()}", "models": ["*"]}
        text = yaml.safe_dump({"unsigned": unsigned, "keys": [own | {"key": write_public_key(key)}]}, sort_keys=False)
        write_atomically(file, text.encode())


def trust_file() -> Path:
    """The file, for messages."""
    return home_path() / FILE
