"""What MLflow's server runs of a model whose task transformers has no pipeline for: MLflow loads this file.

Beside it lie the model's folder, as the MLflow artifact `model`, and the code that asks it: the package `training`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pyarrow as pa


class Served(mlflow.pyfunc.PythonModel):
    """Asks the model about the rows of a data frame, which has the task type's columns; its answers are a mapping a
    row."""

    def load_context(self, context: Any) -> None:
        """Loads the model, safetensors."""
        from training import task_types
        from training.engine.serving import Predictor

        say, folder = context.model_config, Path(context.artifacts["model"])
        self._predictor = Predictor(task_types.from_settings(say), folder, folder, say["max_length"])

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """An answer a row. Without types: from them MLflow would make a signature of its own."""
        return self._predictor.predict(pa.RecordBatch.from_pandas(model_input, preserve_index=False))


mlflow.models.set_model(Served())
