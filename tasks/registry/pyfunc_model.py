"""The Python model that MLflow serves if transformers has no pipeline for the task: MLflow loads this file.

It is stored with the model's folder, the MLflow artifact `model`, and with the package `training`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pyarrow as pa


class Served(mlflow.pyfunc.PythonModel):
    """Predicts the rows of a data frame with the task type's columns, a mapping a row."""

    def load_context(self, context: Any) -> None:
        """Loads the model from safetensors."""
        from training import task_types
        from training.engine.predictor import Predictor
        from training.evaluation.stored_calibration import FILE, Calibration

        settings, folder = context.model_config, Path(context.artifacts["model"])
        calibration = Calibration.read(folder) if (folder / FILE).is_file() else None
        task_type = task_types.from_settings(settings)
        self._predictor = Predictor(task_type, folder, folder, settings["max_length"], calibration=calibration)

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """The predictions. The method has no types: from types MLflow would derive another signature."""
        return self._predictor.predict(pa.RecordBatch.from_pandas(model_input, preserve_index=False))


mlflow.models.set_model(Served())
