"""`training.extra`: which fields of the installed TrainingArguments a recipe may set, and why."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

# Fields of TrainingArguments that are not a recipe's to set, by the reason.
_SET_BY_PROJECT = {
    "the project chooses where a run writes and what it is called": "output_dir run_name",
    "metrics go to MLflow; see MLFLOW_TRACKING_URI": (
        "report_to project trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "publishing is a step of its own, after the model has earned it": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "checkpoints are made each training.checkpoint_interval_s and at each evaluation": (
        "save_strategy save_steps save_total_limit save_only_model save_on_each_node enable_jit_checkpoint"
    ),
    "a run that was stopped goes on by itself when started again": (
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"
    ),
    "the flow decides what is trained, evaluated and predicted": "do_train do_eval do_predict",
    "it follows from compute.mixed_precision": "bf16 fp16",
    "it follows from compute.strategy and compute.num_processes": (
        "use_cpu local_rank accelerator_config parallelism_config fsdp fsdp_config deepspeed ddp_backend"
    ),
    "it would change how many rows make a step; set per_device_train_batch_size": "auto_find_batch_size",
    "the project makes the batches: each row once an epoch, ordered by training.seed": (
        "remove_unused_columns label_names length_column_name train_sampling_strategy dataloader_drop_last data_seed"
    ),
    "evaluation while training needs all predictions": (
        "prediction_loss_only batch_eval_metrics eval_do_concat_batches include_for_metrics"
    ),
    "the command shows progress itself": "disable_tqdm log_level log_level_replica",
}
# Stacks that are out of scope: the words that give them away, and what to use today.
_OUT_OF_SCOPE = {
    "TPUs are not supported; train on an NVIDIA GPU or a CPU": "tpu xla tpu_num_cores tpu_metrics_debug",
    "TensorFlow is not supported; name a PyTorch model with safetensors weights": "tensorflow tf keras",
    "FairScale is no longer developed; use compute.strategy: fsdp": "fairscale sharded_ddp",
    "Apex is no longer needed; use compute.mixed_precision: bf16 or fp16": (
        "apex fp16_opt_level fp16_backend half_precision_backend"
    ),
}


@functools.cache
def arguments() -> dict[str, str]:
    """The fields of the installed TrainingArguments, with their annotations, read from source: no import."""
    # Only the package itself can be looked up without importing it.
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations, "transformers is not installed"
    source = Path(next(iter(spec.submodule_search_locations)), "training_args.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == "TrainingArguments")
    return {
        line.target.id: ast.unparse(line.annotation)
        for line in body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def set_by_project(name: str) -> str | None:
    """Why that field of TrainingArguments is not the recipe's to set, or None where it is."""
    return next((why for why, names in _SET_BY_PROJECT.items() if name in names.split()), None)


def out_of_scope(name: str) -> str | None:
    """What to use instead of the stack that a field or value belongs to, or None where it is in scope."""
    words = {name.lower(), *name.lower().replace("-", "_").split("_")}
    return next((f"is out of scope: {why}." for why, given in _OUT_OF_SCOPE.items() if words & {*given.split()}), None)


def fits(value: Any, annotation: str) -> bool:
    """Whether a YAML value suits a field so annotated; what YAML cannot spell is left to transformers."""
    kinds = {"None": type(None), "bool": bool, "int": int, "str": str, "dict": dict, "list": list}
    named = [kind.split("[")[0].strip() for kind in annotation.split("|")]
    if type(value) is int and "float" in named:
        return True
    known = {**kinds, "float": float}
    return any(kind not in known or type(value) is known[kind] for kind in named)
