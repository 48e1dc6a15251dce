"""The scene of promotions: homes that share a registry move the champion's alias, as `finetune promote` does.

The registry answers late, not at all, or after a change had its effect; processes are killed or suspended. Each process
promotes a version of its own. Promises:

- The moves that were reported form one chain: each starts from the version to which the one before it led.
- When nothing runs any more, the alias is at the version of a reported move, or of one that was cut off. If
  none was cut off, no reported move is lost.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlflow.exceptions  # noqa: F401 - its threads are not those of simulated processes

from tasks.home import named_lock
from tasks.registry.promotions import set_champion_alias
from tasks.registry.versions import Aliases, Move
from tests.simulate.world import Machine, World
from training.problems import UserError


class NoAnswer(Exception):
    """The registry did not answer."""


class Registry:
    """The client of a registered model, and its server. MLflow's changes are single requests without conditions."""

    def __init__(self, world: World, on_alias: Callable[[str], None]) -> None:
        self.world, self._on_alias = world, on_alias
        self.tags: dict[str, str] = {}
        self.aliases: dict[str, str] = {"champion": "1"}

    def get_registered_model(self, name: str) -> Any:
        """The tags and aliases at one instant."""
        return self._request(
            "get", lambda: SimpleNamespace(name=name, tags=dict(self.tags), aliases=dict(self.aliases))
        )

    def search_registered_models(self, **options: Any) -> list[Any]:
        """None: asked only after an error."""
        return []

    def set_registered_model_tag(self, name: str, tag: str, value: str) -> None:
        """Sets a tag."""
        self._request(f"set tag {tag[-12:]}", lambda: self.tags.__setitem__(tag, value))

    def delete_registered_model_tag(self, name: str, tag: str) -> None:
        """Removes a tag."""
        self._request(f"delete tag {tag[-12:]}", lambda: self.tags.pop(tag, None))

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        """Moves an alias."""

        def move() -> None:
            self.aliases[alias] = version
            self._on_alias(version)

        self._request(f"set {alias} to {version}", move)

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        """Removes an alias."""
        self._request(f"delete {alias}", lambda: self.aliases.pop(alias, None))

    def _request(self, what: str, effect: Callable[[], Any]) -> Any:
        world, faults = self.world, self.world.faults
        world.step(f"registry {what}")
        draw = world.random.random() if world.network_is_bad else 1.0
        world.sleep(world.random.choice((0.01, 0.1, 1.0)))
        if draw < faults.server_error:
            raise NoAnswer(what)
        result = effect()
        world.sleep(world.random.choice((0.0, 0.01, 1.0)))
        if draw < faults.server_error + faults.lost_answer:
            raise NoAnswer(what)
        return result


class Promotions:
    """The scene."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.registry = Registry(world, self._moved)
        self.values = ["1"]
        """Of the alias, over time."""
        self.moves: list[Move] = []
        """The reported ones."""
        self.cut_off: set[str] = set()
        """Versions of moves that were begun and not reported."""
        self._versions = iter(range(2, 1000))
        for number in range(world.random.choice((2, 2, 3))):
            machine = world.add_machine(f"m{number}")
            machine.on_start.append(functools.partial(self._start, machine))
            for _ in range(world.random.choice((1, 2))):
                world.call_later(world.random.choice((0.0, 0.5, 5.0)), functools.partial(self._start, machine))

    def _start(self, machine: Machine) -> None:
        self.world.start(machine, "promote", self._promote)

    def _promote(self) -> None:
        version = str(next(self._versions))
        try:
            with named_lock("registry-model"):
                model = self.registry.get_registered_model("model")
                self.cut_off.add(version)
                client: Any = self.registry
                move = set_champion_alias(client, model, version, Aliases(), by="promote", why="")
            if move is not None:
                self.moves.append(move)
                self.cut_off.discard(version)
                self.world.count("moves")
        except UserError as error:
            if "at the same time" not in str(error):
                raise
            self.cut_off.discard(version)
            self.world.count("conflicts")
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        except NoAnswer:
            self.world.count("without an answer")

    def _moved(self, version: str) -> None:
        self.values.append(version)

    def check_end(self) -> None:
        """Checks the moves when nothing runs any more."""
        reported = {move.to: move for move in self.moves}
        if len({move.before for move in self.moves}) < len(self.moves):
            raise self.world.broken(f"two reported moves start from one version: {self._described()}")
        now = self.registry.aliases["champion"]
        if now != "1" and now not in reported and now not in self.cut_off:
            raise self.world.broken(f"the alias is at version {now}, whose move was refused: {self._described()}")
        if not self.cut_off:
            self.world.count("chains checked whole")
        followed = {move.before for move in self.moves}
        for version in reported:
            if version not in followed and version != now and not self.cut_off:
                raise self.world.broken(f"the move to version {version} is lost: {self._described()}")

    def _described(self) -> str:
        moves = ", ".join(f"{move.before} to {move.to}" for move in self.moves)
        return f"moves {moves}; values {', '.join(self.values)}; cut off {sorted(self.cut_off)}"


def play(world: World) -> None:
    """One seed."""
    scene = Promotions(world)
    world.run()
    scene.check_end()
