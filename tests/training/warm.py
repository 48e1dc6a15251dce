"""Imports and first computations of every training, done by the server of forks: half the time of a small training."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import transformers.models.bert.modeling_bert  # noqa: F401
from accelerate.utils import imports
from mlflow.utils import requirements_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from training.engine import throughput
from training.evaluation.plots import draw_curves

# accelerate looks for its optional packages again and again.
imports._is_package_available = cache(imports._is_package_available)
# The hardware's limit from a smaller product in less time.
throughput._SIDE["cpu"], throughput.MEASURED_S = 256, 0.005
get_checkpoint_conversion_mapping("bert")
# MLflow looks through all installed files for each logged model.
requirements_utils._init_packages_to_modules_map()
requirements_utils._init_modules_to_packages_map()
with tempfile.TemporaryDirectory() as folder:
    draw_curves([{"kind": "metrics", "step": 1, "values": {"train_loss": 1.0}}], Path(folder, "loss.png"))
