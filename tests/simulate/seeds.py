"""The scenes, and one seed of them."""

from __future__ import annotations

import gc

from tests.simulate import checkpoints, outboxes, outputs, registry, stores, turns
from tests.simulate.system_calls import replaced
from tests.simulate.world import Violation, World

SCENES = {
    "stores": stores.play,
    "registry": registry.play,
    "outboxes": outboxes.play,
    "turns": turns.play,
    "outputs": outputs.play,
    "checkpoints": checkpoints.play,
}


def play_seed(scene: str, seed: int, trace: bool = False) -> World:
    """Plays one seed. The violation that it found, if any, is in the world."""
    world = World(seed, trace=trace)
    gc.disable()  # a file that the collector closes writes its buffer: a step, at a moment that earlier seeds decide
    with replaced():
        try:
            SCENES[scene](world)
        except Violation as violation:
            world.violation = violation
        finally:
            gc.enable()
    if seed % 50 == 0:
        gc.collect()
    return world
