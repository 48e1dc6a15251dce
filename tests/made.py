"""Artifacts as the stages before a release leave them, without any of these having run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_jsonable_python

from tasks.cache import store
from tasks.cache.results import Artifact, Comparison
from training.data.load_rows import LoadDataResult
from training.engine.fit_settings import FitResult

KEY = "k" * 40
ROWS = LoadDataResult(train_rows=120, validation_rows=2, labels=2, warnings=0)
"""The result of the stage `load_data`."""
FITTED = FitResult(
    trainable_parameters=9, micro_batch_size=8, steps=1200, epochs=3.0, train_loss=0.4321, best_step=None,
    best_metric=None, train_rows_per_second=99.9, estimated_memory_mb=None, peak_memory_mb=1,
)  # fmt: skip
"""The result of the stage `fit`."""
LABELS = b'["bad", "good"]'
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A file of safetensors without tensors."""
COMPARISON = Comparison(
    champion="small/1", metric="accuracy", split="test", rows=1872, value=0.871, champion_value=0.8603, gained=52,
    lost=32, gain=0.0107, at_least=0.0021, margin=0.0, confidence=0.95, method="mcnemar", p_value=0.019, better=True,
)  # fmt: skip
"""The result of the stage `compare` for a model that is better than version 1."""


def artifact(
    stage: str,
    files: Mapping[str, bytes],
    result: Any = None,
    made: Mapping[str, Any] | None = None,
    key: str = KEY,
) -> Artifact:
    """A stage's artifact with these files and this result, made from these inputs."""
    with store.filling(stage, key) as aside:
        for name, content in files.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(content)
        stored = store.publish(aside, stage, key, made or {}, to_jsonable_python(result))
    return stored.model_copy(update={"result": result})


def predictions(split: str, labels: Sequence[int], given: Sequence[int]) -> Artifact:
    """That of `predict`: the rows of one split with their labels and what a model gave them."""
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"label": labels, "prediction": given}), file)
    return artifact("predict", {f"{split}.parquet": file.getvalue().to_pybytes()})
