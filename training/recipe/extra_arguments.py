"""The fields of the installed TrainingArguments that `training.extra` may set, and the reasons against the others."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

# Fields of TrainingArguments that a recipe cannot set, by reason.
_SET_BY_PROJECT = {
    "the project chooses the folder and the name of a run": "output_dir run_name",
    "metrics go to MLflow (MLFLOW_TRACKING_URI) and to the trackers in training.report_to": (
        "project trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "publishing is a separate stage, after the gate: release.hub": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "checkpoints are written every training.checkpoint_interval_s seconds and at each evaluation": (
        "save_strategy save_steps save_total_limit save_only_model save_on_each_node enable_jit_checkpoint"
    ),
    "a run that was stopped resumes by itself when started again": (
        "ignore_data_skip restore_callback_states_from_checkpoint"
    ),
    "the flow decides what is trained, evaluated and predicted": "do_train do_eval do_predict",
    "it follows from compute.mixed_precision": "bf16 fp16",
    "evaluation while training computes as training does": "bf16_full_eval fp16_full_eval",
    "it follows from compute.strategy and compute.num_processes": (
        "use_cpu local_rank accelerator_config parallelism_config fsdp fsdp_config deepspeed ddp_backend"
    ),
    "a process that hangs is stopped after compute.stall_timeout_s": "ddp_timeout",
    "it would change how many rows make a step; set per_device_train_batch_size": "auto_find_batch_size",
    "each row of an optimizer step counts alike already, over all processes": "average_tokens_across_devices",
    "the project makes the batches: each row once an epoch, ordered by training.seed": (
        "remove_unused_columns label_names length_column_name train_sampling_strategy dataloader_drop_last data_seed "
        "dataloader_in_order"
    ),
    "workers that outlive an epoch draw other random numbers than those of a resumed run": (
        "dataloader_persistent_workers"
    ),
    "predictions leave the GPU with each batch": "eval_accumulation_steps",
    "evaluation while training needs all predictions": (
        "prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object include_for_metrics"
    ),
    "the project chooses among the kernels of training.use_liger_kernel": "liger_kernel_config",
    "it is for GaLore and APOLLO, and a run with these cannot resume": "optim_target_modules",
    "the command shows its own progress": "disable_tqdm",
    "each process has its own log, on every machine": "log_on_each_node",
    "MLflow records the machine's memory": "skip_memory_metrics",
    "in transformers 5.23 it fails at the first boolean attention mask": "debug",
}

ACCEPTED = {
    "lr_scheduler_kwargs": "settings of the scheduler by their names",
    "optim_args": "settings of the optimizer, such as `momentum=0.9`; settings that it does not read are refused",
    "adam_beta1": "for optimizers that have it",
    "adam_beta2": "for optimizers that have it",
    "adam_epsilon": "for optimizers that have it",
    "tf32": "matrix products in TF32 on a GPU",
    "activation_checkpointing": "less memory and more computation; the weights are the same",
    "activation_checkpointing_kwargs": "with activation_checkpointing",
    "gradient_checkpointing": "the older name of activation_checkpointing",
    "gradient_checkpointing_kwargs": "with gradient_checkpointing",
    "torch_compile": "a resumed run may end with other weights, with a warning",
    "torch_compile_backend": "turns torch_compile on",
    "torch_compile_mode": "turns torch_compile on",
    "use_cache": "written into the model's config.json",
    "neftune_noise_alpha": "noise on the embeddings while training",
    "torch_empty_cache_steps": "on a GPU",
    "logging_strategy": "when a training loss is recorded",
    "logging_first_step": "whether the first step is recorded too",
    "logging_nan_inf_filter": "whether NaN and infinite losses are left out of the records; false by default",
    "include_num_input_tokens_seen": "recorded with the loss",
    "log_level": "level of transformers in the job's log",
    "log_level_replica": "the same for the other processes, each with its own log",
    "eval_delay": "epochs, or with `eval_strategy: steps` steps, before the first evaluation",
    "eval_on_start": "an evaluation before the first step, not repeated when a run resumes",
    "full_determinism": "deterministic on a GPU, and slower",
    "dataloader_num_workers": "processes that make batches; the batches are the same",
    "dataloader_pin_memory": "on a GPU",
    "dataloader_prefetch_factor": "with dataloader_num_workers",
    "dataloader_multiprocessing_context": "with dataloader_num_workers",
    "ddp_find_unused_parameters": "with several processes",
    "ddp_bucket_cap_mb": "with several processes",
    "ddp_broadcast_buffers": "with several processes",
    "ddp_static_graph": "with several processes",
}
"""The fields that training.extra accepts, with a note each. Fields of a later transformers are accepted too."""

# Out-of-scope frameworks: the supported alternative, and the words that identify them.
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
    """Returns the annotations of the installed TrainingArguments by field, parsed from source without an import."""
    # find_spec of a submodule would import the package.
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
    """Returns why a recipe cannot set a field of TrainingArguments; None if it can."""
    return next((why for why, names in _SET_BY_PROJECT.items() if name in names.split()), None)


def out_of_scope(name: str) -> str | None:
    """Returns the supported alternative to an out-of-scope field or value; None if it is in scope."""
    words = {name.lower(), *name.lower().replace("-", "_").split("_")}
    return next((f"is out of scope: {why}." for why, names in _OUT_OF_SCOPE.items() if words & {*names.split()}), None)


def fits(value: Any, annotation: str) -> bool:
    """Whether a YAML value fits a field with this annotation; transformers itself checks types that YAML lacks."""
    known = {"None": type(None), "bool": bool, "int": int, "float": float, "str": str, "dict": dict, "list": list}
    names = [kind.split("[")[0].strip() for kind in annotation.split("|")]
    if type(value) is int and "float" in names:
        return True
    return any(kind not in known or type(value) is known[kind] for kind in names)
