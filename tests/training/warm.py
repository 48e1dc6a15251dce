"""What every training imports and works out once, done by the server of forks before it forks: half of a small one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import transformers.models.bert.modeling_bert  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from training.evaluation.plots import draw_curves

get_checkpoint_conversion_mapping("bert")
with tempfile.TemporaryDirectory() as folder:
    draw_curves([{"kind": "metrics", "step": 1, "values": {"train_loss": 1.0}}], Path(folder, "loss.png"))
