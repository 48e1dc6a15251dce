"""A user's callback that slows training down until a file exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

QUICK = "quick"
"""The file in the home folder that ends the slow training."""


class Slowly(TrainerCallback):  # type: ignore[misc]
    """Waits at each step."""

    STEP_S = 1.0
    """Two minutes for all steps of the small recipe: a machine with other work cancels a run late."""

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        """After each step."""
        if not (Path(os.environ["FINETUNE_HOME"]) / QUICK).exists():
            time.sleep(self.STEP_S)


class HalfAMinute(Slowly):
    """Waits for more than half a minute in all steps of the small recipe."""

    STEP_S = 0.3
