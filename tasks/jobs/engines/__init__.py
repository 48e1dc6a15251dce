"""The engines by name. Other modules call `engine_of`, and use the methods of `Engine` only."""

from __future__ import annotations

from functools import lru_cache

from tasks.jobs.engines.engine import Engine
from tasks.jobs.engines.local import LOCAL
from tasks.jobs.engines.ray_engine import RayEngine

DEFAULT_WAIT_S = 600.0


@lru_cache
def engine_of(cluster: str | None, address: str | None = None, wait_s: float = DEFAULT_WAIT_S) -> Engine:
    """The engine that `compute.cluster` of a recipe, or `cluster` of a batch prediction, names: `ray`, or None for this
    machine. One object for each, because it keeps what has started early.

    Args:
        cluster: the engine's name.
        address: `host:port`, if it is a cluster that runs already.
        wait_s: the longest wait for machines.
    """
    return LOCAL if cluster is None else RayEngine(address, wait_s)
