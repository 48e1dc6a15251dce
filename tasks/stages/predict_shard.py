"""Stage: the predictions of a shard of rows by a registered version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tasks.cache.code import code_behind, figures_code
from tasks.cache.digests import digest_of
from tasks.cache.stage import Work
from tasks.jobs.job import StageJob, stage
from tasks.prediction.input_rows import Shard
from tasks.prediction.shard_job import PROGRAM, ShardPredictor
from tasks.registry.model_spec import ModelSpec
from training import task_types
from training.jobs.protocol import TaskSettings
from training.programs.predict_shards import ShardResult


def _calibration(model: ModelSpec) -> dict[str, str]:
    """The digest of the version's calibration and of the code that predicts by it; nothing without one, so that such a
    version keeps its shards."""
    if model.calibration is None:
        return {}
    code = code_behind([type(model.calibration).__module__]).digests
    return {"calibration": digest_of({"stored": model.calibration.text(), "code": code})}


class ShardSettings(TaskSettings):
    """The settings of a shard's prediction; PredictShardsSettings has them for all shards of a program."""

    columns: list[str]
    max_length: int
    """Tokens a row."""
    mixed_precision: str
    batch_size: int


@stage(ShardResult)
def predict_shard(model: ModelSpec, batch_size: int, shard: Shard, predictor: ShardPredictor | None) -> StageJob:
    """Predicts every usable row of the shard, in their order. The program of `predictor` does it for all shards; a plan
    has none.

    The version's model, calibration and options, and the values that it reads; not the files, other columns, or its
    name.
    """

    def predict(work: Work, settings: ShardSettings, inputs: Mapping[str, Path]) -> ShardResult:
        assert predictor is not None, "a plan makes nothing"
        return predictor.predict(shard, work.out)

    return StageJob(
        predict,
        ShardSettings(
            **model.task,
            columns=sorted(model.columns),
            max_length=model.max_length,
            mixed_precision=model.mixed_precision,
            batch_size=batch_size,
        ),
        reads={},
        content={"rows": shard.digest, "model": model.digest, **_calibration(model)},
        code=[PROGRAM, *task_types.code_modules(model.task["task"])],
        outside=figures_code(model.task["task"]),
        users_code=task_types.user_code(model.task["task"]),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_types.load(**model.task).libraries),
    )
