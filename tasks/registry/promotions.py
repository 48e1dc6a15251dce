"""History of the champion's alias: every move is recorded, with its reason, and can be rolled back.

Each move is a numbered tag of the registered model, written before the alias moves. If a kill prevents the move, the
next moves show it: they start from the earlier version.

Homes that share a registry share no lock, and MLflow has no compare-and-set for aliases. So a process announces a move
by a tag with a unique name, and then reads the model again: if another move was announced, or the alias has moved, the
process withdraws its move. Of two moves that overlap, at least one process sees the other's tag. After the alias has
moved, the model is read once more: this process may have been suspended for so long that others considered it dead.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from tasks.home import find_user, home_path, named_lock
from tasks.registry.versions import (
    ALIAS_TAGS,
    MOVE,
    MOVE_TAG,
    Aliases,
    Move,
    find_version,
    need_model,
    need_version,
    read_alias_names,
    read_moves,
    read_numbered_moves,
)
from tasks.tracking.connection import connect, mlflow_errors
from training.problems import NETWORK, UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

TRIES = 5
PENDING_WAIT_S = 15.0
"""How long a move may stay pending before its process is considered dead."""
PENDING_S = 600.0
"""Age at which an announced move is considered dead without waiting; clocks of machines differ by less."""
# MLflow's databases hold 5000 characters of a registered model's tag.
LONGEST_WHY = 4000


def list_champions(moves: Sequence[Move], now: str | None) -> list[str]:
    """Lists the champions that rollbacks go back through, oldest first; the last is the present champion, `now`.

    A recorded move that never happened is skipped. A move in MLflow's UI has no record, and is inferred: each recorded
    move names the champion before it.
    """
    champions: list[str] = []
    previous: list[str] = []
    for move in moves:
        previous = _end_with(champions, previous, move.before)
        champions = _roll_list_back(previous, move.to) if move.by == "rollback" else [*previous, move.to]
    return _end_with(champions, previous, now)


def _end_with(champions: list[str], previous: list[str], champion: str | None) -> list[str]:
    """Corrects the list so that it ends with the version that was champion in fact.

    If the last move never happened, that is the list `previous` before the move. If the alias was moved in MLflow's UI,
    the champion is appended.
    """
    if champion is None or champions[-1:] == [champion]:
        return champions
    return previous if previous[-1:] == [champion] else [*champions, champion]


def _roll_list_back(champions: list[str], version: str) -> list[str]:
    """The list up to the version's last place before the present champion."""
    places = [place for place, earlier in enumerate(champions[:-1]) if earlier == version]
    return champions[: places[-1] + 1] if places else [*champions, version]


def explain_lost_alias(model: RegisteredModel, alias: str, version: str) -> str | None:
    """Explains how a user moved the champion's alias away from this version, and how to move it back; None if no user
    did, or if a later move changed it."""
    moves = [move for move in read_moves(model) if move.alias == alias and version in (move.before, move.to)]
    if not moves or moves[-1].before != version or moves[-1].by == "run":
        return None
    if str(model.aliases.get(alias)) == version:  # the move never happened
        return None
    last = moves[-1]
    why = f" ({last.why})" if last.why else ""
    return (
        f"was {alias} until {last.user} gave this alias to version {last.to} by finetune {last.by} on "
        f"{last.time[:10]}{why}: to give it back, run finetune promote {model.name} {version}."
    )


def store_alias_names(client: MlflowClient, model: RegisteredModel, names: Aliases) -> None:
    """Stores the recipe's names of the aliases in the registered model's tags."""
    for default, name in names._asdict().items():
        if model.tags.get(ALIAS_TAGS[default], default) != name:
            client.set_registered_model_tag(model.name, ALIAS_TAGS[default], name)


def set_champion_alias(
    client: MlflowClient,
    model: RegisteredModel,
    version: str,
    names: Aliases,
    *,
    by: Literal["run", "promote", "rollback"],
    why: str,
    flow_run: str | None = None,
) -> Move | None:
    """Makes the version the champion, and removes the challenger's alias from it. Returns the move; None if the version
    is the champion already.

    Raises UserError if another home moves the alias at the same time, or has moved it since `model` was read.
    """
    before = model.aliases.get(names.champion)
    if before is not None and str(before) == version:
        return None
    move = Move(
        alias=names.champion,
        before=None if before is None else str(before),
        to=version,
        by=by,
        flow_run=flow_run,
        user=find_user(),
        host=socket.gethostname(),
        home=_digest_home(),
        time=_now().isoformat(timespec="seconds"),
        why=why[:LONGEST_WHY],
    )
    number, tag = _announce(client, model.name, move)
    if str(model.aliases.get(names.challenger)) == version:
        client.delete_registered_model_alias(model.name, names.challenger)
    # Last, and in one call: a reader of the alias finds the old champion or the new one.
    client.set_registered_model_alias(model.name, names.champion, version)
    current = need_model(client, model.name)
    later = [other for n, _, other in read_numbered_moves(current) if n > number and other.alias == move.alias]
    if later and later[0].before != version:  # by a process that considered this one dead
        if _is_at(current, move.alias, version):
            client.set_registered_model_alias(model.name, move.alias, later[-1].to)
        client.delete_registered_model_tag(model.name, tag)
        raise _build_conflict(model.name, move, later[-1].to)
    return move


def _announce(client: MlflowClient, name: str, move: Move) -> tuple[int, str]:
    """Writes the move's tag when no other move of the alias is pending. Returns the tag's number and name.

    Raises UserError if the alias is no longer at the version that the move starts from.
    """
    for _ in range(TRIES):
        model = _wait_for_pending_moves(client, name, move.alias)
        if not _is_at(model, move.alias, move.before):
            break
        number = 1 + max((n for n, _, _ in read_numbered_moves(model)), default=0)
        tag = f"{MOVE_TAG}{number}-{secrets.token_hex(4)}"
        client.set_registered_model_tag(name, tag, move.model_dump_json())
        current = need_model(client, name)
        new_moves = [other for other in current.tags.keys() - model.tags.keys() - {tag} if MOVE.fullmatch(other)]
        if not new_moves and _is_at(current, move.alias, move.before):
            return number, tag
        client.delete_registered_model_tag(name, tag)
        time.sleep(random.uniform(0, 1))  # the other process backs off, too
    raise _build_conflict(name, move, need_model(client, name).aliases.get(move.alias))


def _wait_for_pending_moves(client: MlflowClient, name: str, alias: str) -> RegisteredModel:
    """Waits until no announced move of the alias is pending, or the pending ones are considered dead. Returns the
    registered model."""
    seen: dict[str, float] = {}  # an announcement, when it was first seen
    while True:
        model, now = need_model(client, name), time.monotonic()
        pending = {tag: seen.get(tag, now) for tag in _pending_tags(model, alias)}
        if all(now >= first + PENDING_WAIT_S for first in pending.values()):
            return model
        seen |= pending
        time.sleep(0.2)


def _pending_tags(model: RegisteredModel, alias: str) -> list[str]:
    """The tags of the last moves that other homes have announced recently, if the alias has not moved yet."""
    moves = read_numbered_moves(model)
    earliest = _now() - timedelta(seconds=PENDING_S)
    return [
        tag
        for number, tag, move in moves
        if number == moves[-1][0]
        and move.alias == alias
        and move.home != _digest_home()
        and _is_at(model, alias, move.before)
        and not _is_at(model, alias, move.to)
        and datetime.fromisoformat(move.time) > earliest
    ]


def _digest_home() -> str:
    return hashlib.sha256(f"{socket.gethostname()} {home_path()}".encode()).hexdigest()[:12]


def _is_at(model: RegisteredModel, alias: str, version: str | None) -> bool:
    current = model.aliases.get(alias)
    return (None if current is None else str(current)) == version


def _build_conflict(name: str, move: Move, now: object) -> UserError:
    message = (
        f"another run or person moved {move.alias!r} of {name!r} at the same time (it is at version {now} now), so "
        f"version {move.to} did not get it: run the same command again."
    )
    return UserError.of(NETWORK, "release.registry", message)


def promote(name: str, version: str, why: str = "", alias: str | None = None) -> str:
    """Sets an alias, by default the champion's, to the version. Returns a sentence for the user.

    Raises UserError for an unknown model or version, and MlflowFailed if MLflow does not answer.
    """
    if alias is not None and (not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", alias) or _RESERVED_ALIAS.fullmatch(alias)):
        raise UserError.of(
            "registry",
            "--alias",
            f"{alias!r} is no alias: use letters, digits, - and _; not latest, nor v1 and the like.",
        )
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        model = need_model(client, name)
        names = read_alias_names(model)
        alias = alias or names.champion
        number = str(need_version(client, model, version=version).version)
        before = model.aliases.get(alias)
        if before is not None and str(before) == number:
            return f"{name} version {number} is {alias} already."
        if alias == names.champion:
            set_champion_alias(client, model, number, names, by="promote", why=why)
        else:
            client.set_registered_model_alias(name, alias, number)
    return f"{name} version {number} is {alias} now{_describe_previous(before)}."


_RESERVED_ALIAS = re.compile(r"latest|[vV]\d+")


def roll_back(name: str, why: str = "") -> str:
    """Makes the previous champion the champion again; a second call goes back by one more. Returns a sentence for the
    user.

    Raises UserError if there is no previous champion, and MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        model = need_model(client, name)
        names = read_alias_names(model)
        now = model.aliases.get(names.champion)
        if now is None:
            message = f"{name!r} has no {names.champion}: name a version, finetune promote {name} VERSION."
            raise UserError.of("registry", "NAME", message)
        moves = [move for move in read_moves(model) if move.alias == names.champion]
        champions = list_champions(moves, str(now))
        candidates = (version for version in reversed(champions[:-1]) if version != str(now))
        earlier = next((version for version in candidates if find_version(client, name, version)), None)
        if earlier is None:
            message = f"version {now} of {name!r} is the first {names.champion} on record: none came before it."
            raise UserError.of("registry", "NAME", f"{message} Name another: finetune promote {name} VERSION.")
        set_champion_alias(client, model, earlier, names, by="rollback", why=why)
    return f"{name} version {earlier} is {names.champion} again{_describe_previous(now)}."


def restore_aliases(name: str, before: Mapping[str, str | None], version: str) -> str:
    """Moves the version's aliases back to the versions that had them `before`, except aliases that have been moved
    since. Returns a sentence for the user."""
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        for alias, former in before.items():
            now = need_model(client, name).aliases.get(alias)
            if str(now) != version and not (now is None and former == version):
                continue  # this run did not move the alias, or somebody has moved it since
            if former is None:
                client.delete_registered_model_alias(name, alias)
            else:
                client.set_registered_model_alias(name, alias, former)
    return f"the aliases of {name} are where they were."


def _describe_previous(before: object) -> str:
    return f", after version {before}" if before is not None else ""


def _now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)  # the clock of tests/simulate replaces time.time
