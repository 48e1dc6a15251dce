"""Stage: the predictions of a shard of rows by a registered version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.stage import Inputs, Work, stage
from tasks.prediction.scan import Shard
from tasks.prediction.shard_job import PROGRAM, ShardPredictor
from tasks.registry.prediction_job import ModelSpec
from training import task_types


def inputs(model: ModelSpec, batch_size: int, shard: Shard, predictor: ShardPredictor | None) -> Inputs:
    """The version's model and options, and the values that it reads; not the files, other columns, or its name."""
    task = model.task["task"]
    return Inputs(
        {
            "task": task,
            "options": dict(model.task["options"]),
            "columns": sorted(model.columns),
            "tokens": {"max_length": model.max_length},
            "compute": {"mixed_precision": model.mixed_precision},
            "batch_size": batch_size,
            "upstream": {"model": model.digest},
            "rows": shard.digest,
        },
        code=[PROGRAM, *task_types.code_modules(task)],
        outside=figures_code(task),
        named=task_types.user_code(task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_types.load(**model.task).libraries),
    )


@stage(inputs)
def predict_shard(
    work: Work, model: ModelSpec, batch_size: int, shard: Shard, predictor: ShardPredictor | None
) -> Mapping[str, Any]:
    """Predicts every usable row of the shard, in their order. The program of `predictor` does it for all shards."""
    assert predictor is not None, "a plan makes nothing"
    return predictor.predict(shard, work.out)
