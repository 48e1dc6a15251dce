"""Stages of tests that have no job: a function that fills a folder, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tasks.cache.stage import Call, Inputs, Stage


def stage(
    inputs: Callable[..., Inputs], where: str = "", may_repeat: bool = False
) -> Callable[[Callable[..., Mapping[str, Any]]], Stage[Any]]:
    """A cached stage. The function takes `Work` and the arguments, fills `work.out`, and returns figures; its module's
    code is in the key."""

    def decorate(make: Callable[..., Mapping[str, Any]]) -> Stage[Any]:
        def with_code(*arguments: Any) -> Inputs:
            given = inputs(*arguments)
            return replace(given, code=[make.__module__, *given.code])

        def prepare(*arguments: Any) -> Call:
            return Call(make, with_code, arguments)

        return Stage(make.__name__, prepare, cached=True, where=where, may_repeat=may_repeat)

    return decorate
