"""Batch predictions on a Ray cluster: the engine of each program, and its problems by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.environment import BUCKETS
from tasks.home import home
from tasks.jobs.child import DEFAULT_STALL_TIMEOUT_S
from tasks.jobs.engines import Engine
from tasks.jobs.engines.ray_engine import RayEngine, find_cluster_problems, find_package_problems
from tasks.jobs.engines.ray_messages import Cluster, Program
from tasks.jobs.hardware import visible_gpus
from tasks.prediction.shard_job import PROGRAM, MakeEngine
from tasks.registry.prediction_job import ModelSpec
from training import task_types
from training.jobs.protocol import Imports
from training.problems import UserError, renamed
from training.recipe import BatchPrediction, ResolvedCompute

FIELDS = {
    "compute.cluster": "cluster",
    "compute.cluster_address": "cluster_address",
    "compute.num_machines": "processes",
}
"""The parameters in place of a recipe's fields."""


def require_cluster(prediction: BatchPrediction) -> None:
    """Raises UserError if a cluster is wanted, and Ray is missing here or nothing listens at its address."""
    problems = find_package_problems(prediction.cluster)
    problems = problems or find_cluster_problems(prediction.cluster, prediction.cluster_address)
    if problems:
        with renamed(FIELDS):
            raise UserError(problems)


def ray_engine(model: ModelSpec, prediction: BatchPrediction) -> MakeEngine:
    """Makes engines for programs on one machine of the prediction's cluster each. A machine fetches the model from the
    shared store or from this home, and reads the files of rows itself."""
    compute = ResolvedCompute(num_processes=1, mixed_precision=model.mixed_precision)
    cluster = Cluster(prediction.cluster_address, 1, 1, bool(visible_gpus()), DEFAULT_STALL_TIMEOUT_S)
    modules = ["training.engine.serving", *task_types.code_modules(model.task["task"])]
    env = {"TOKENIZERS_PARALLELISM": "true"}
    program = Program(PROGRAM, compute, env, Imports(modules=modules), BUCKETS)

    def make(folders: Mapping[str, Path], on_events: Callable[[list[dict[str, Any]]], None]) -> Engine[Any]:
        artifacts = home() / "artifacts"
        if any(artifacts not in path.parents for path in folders.values()):
            message = "'ray' is for models in the store, from which machines fetch them, and this one is in MLflow "
            message += "alone: run its recipe again, or predict on this machine."
            raise UserError.of("compute", "cluster", message)
        return RayEngine(cluster, program).bind(folders, on_events)

    return make
