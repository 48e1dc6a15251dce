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

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        """A second, two minutes for all steps of the small recipe: a machine with other work cancels a run late."""
        if not (Path(os.environ["FINETUNE_HOME"]) / QUICK).exists():
            time.sleep(1)
