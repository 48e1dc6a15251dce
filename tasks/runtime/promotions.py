"""Who became champion, when and why: every move of the champion's alias is kept, and can be taken back.

Moves are numbered tags of the registered model. The tag is written before the alias moves: a move that a kill kept
from happening is known by what came after it.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.runtime.connection import connect, exclusive, failures_told
from tasks.runtime.versions import ALIAS_TAGS, Aliases, aliases_of, need_model, need_version, problem, versions_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

MOVE_TAG = "finetune.move."
# MLflow's databases hold 5000 characters of a registered model's tag.
LONGEST_WHY = 4000


class Move(BaseModel):
    """One move of the champion's alias."""

    model_config = ConfigDict(frozen=True)

    alias: str
    before: str | None
    """The version that had it."""
    to: str
    """The version that got it."""
    by: Literal["run", "promote", "rollback"]
    """A run whose model earned it, or the command of a person."""
    flow_run: str | None = None
    user: str
    host: str
    time: str
    """When, in UTC: 2026-01-31T12:00:00+00:00."""
    why: str = ""


def moves_of(model: RegisteredModel) -> list[Move]:
    """The moves that are kept of a registered model, oldest first."""
    kept = {int(tag.removeprefix(MOVE_TAG)): text for tag, text in model.tags.items() if _NUMBERED.fullmatch(tag)}
    moves = []
    for _, text in sorted(kept.items()):
        try:
            moves.append(Move.model_validate_json(text))
        except ValidationError:  # edited by hand, or of a later version of the project
            continue
    return moves


_NUMBERED = re.compile(re.escape(MOVE_TAG) + r"\d+")


def champions(moves: Sequence[Move], now: str | None) -> list[str]:
    """The versions that rolling back goes through, first to last; the last one is the champion `now`.

    A move that never happened is passed over, and one that was made elsewhere, in MLflow's own pages, is taken in:
    each move says which version was champion before it.
    """
    line: list[str] = []
    earlier: list[str] = []
    for move in moves:
        earlier = _as_it_was(line, earlier, move.before)
        line = _back_to(earlier, move.to) if move.by == "rollback" else [*earlier, move.to]
    return _as_it_was(line, earlier, now)


def _as_it_was(line: list[str], earlier: list[str], champion: str | None) -> list[str]:
    """The line that ends with the champion as it was: the last move may not have happened, or others may have."""
    if champion is None or line[-1:] == [champion]:
        return line
    return earlier if earlier[-1:] == [champion] else [*line, champion]


def _back_to(line: list[str], version: str) -> list[str]:
    places = [place for place, one in enumerate(line[:-1]) if one == version]
    return line[: places[-1] + 1] if places else [*line, version]


def taken_from(model: RegisteredModel, alias: str, version: str) -> str | None:
    """The words for how a person took the champion's alias from this version; None where that is not so, or not any
    more."""
    moves = [move for move in moves_of(model) if move.alias == alias and version in (move.before, move.to)]
    if not moves or moves[-1].before != version or moves[-1].by == "run":
        return None
    if str(model.aliases.get(alias)) == version:  # the move never happened
        return None
    last = moves[-1]
    why = f" ({last.why})" if last.why else ""
    return (
        f"was {alias} until {last.user} made version {last.to} that by finetune {last.by} on {last.time[:10]}{why}: "
        f"it gets the alias back by finetune promote {model.name} {version}."
    )


def call_aliases(client: MlflowClient, model: RegisteredModel, names: Aliases) -> None:
    """Has the registered model know what its recipe calls the aliases."""
    for usual, name in names._asdict().items():
        if model.tags.get(ALIAS_TAGS[usual], usual) != name:
            client.set_registered_model_tag(model.name, ALIAS_TAGS[usual], name)


def crown(
    client: MlflowClient,
    model: RegisteredModel,
    version: str,
    names: Aliases,
    *,
    by: Literal["run", "promote", "rollback"],
    why: str,
    flow_run: str | None = None,
) -> Move | None:
    """Makes the version the champion, and no challenger any more; gives the move, None where it is champion already."""
    before = model.aliases.get(names.champion)
    if before is not None and str(before) == version:
        return None
    move = Move(
        alias=names.champion,
        before=None if before is None else str(before),
        to=version,
        by=by,
        flow_run=flow_run,
        user=_user(),
        host=socket.gethostname(),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        why=why[:LONGEST_WHY],
    )
    numbers = [int(tag.removeprefix(MOVE_TAG)) for tag in model.tags if _NUMBERED.fullmatch(tag)]
    client.set_registered_model_tag(model.name, f"{MOVE_TAG}{max(numbers, default=0) + 1}", move.model_dump_json())
    if str(model.aliases.get(names.challenger)) == version:
        client.delete_registered_model_alias(model.name, names.challenger)
    # Last, and by one call: whoever asks for the champion meets the old one or the new one.
    client.set_registered_model_alias(model.name, names.champion, version)
    return move


def promote(name: str, version: str, why: str = "", alias: str | None = None) -> str:
    """Gives the version an alias, by default the champion's; gives a sentence on what was done.

    Raises UserError for names that are not there, MlflowFailed where MLflow does not answer.
    """
    if alias is not None and (not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", alias) or _KEPT_BY_MLFLOW.fullmatch(alias)):
        raise problem(
            "--alias", f"{alias!r} is no alias: use letters, digits, - and _; not latest, nor v1 and the like."
        )
    with failures_told(), exclusive(f"registry-{name}"):
        client = connect()
        model = need_model(client, name)
        names = aliases_of(model)
        alias = alias or names.champion
        number = str(need_version(client, model, version=version).version)
        before = model.aliases.get(alias)
        if before is not None and str(before) == number:
            return f"{name} version {number} is {alias} already."
        if alias == names.champion:
            crown(client, model, number, names, by="promote", why=why)
        else:
            client.set_registered_model_alias(name, alias, number)
    return f"{name} version {number} is {alias} now{_after(before)}."


_KEPT_BY_MLFLOW = re.compile(r"latest|[vV]\d+")


def roll_back(name: str, why: str = "") -> str:
    """Makes the champion before this one champion again; gives a sentence on what was done.

    Called twice, it goes back twice. Raises UserError where there is none to go back to, MlflowFailed where MLflow
    does not answer.
    """
    with failures_told(), exclusive(f"registry-{name}"):
        client = connect()
        model = need_model(client, name)
        names = aliases_of(model)
        now = model.aliases.get(names.champion)
        if now is None:
            message = f"{name!r} has no {names.champion}: name a version, finetune promote {name} VERSION."
            raise problem("NAME", message)
        there = {str(version.version) for version in versions_of(client, name)}
        moves = [move for move in moves_of(model) if move.alias == names.champion]
        line = champions(moves, str(now))
        earlier = [version for version in line[:-1] if version in there and version != str(now)]
        if not earlier:
            message = f"version {now} of {name!r} is the first {names.champion} that is known: there is none before it."
            raise problem("NAME", f"{message} Name another: finetune promote {name} VERSION.")
        crown(client, model, earlier[-1], names, by="rollback", why=why)
    return f"{name} version {earlier[-1]} is {names.champion} again{_after(now)}."


def _after(before: object) -> str:
    return f", after version {before}" if before is not None else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user that has no name
        return str(os.getuid())
