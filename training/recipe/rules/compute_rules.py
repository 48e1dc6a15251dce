"""Rules of a recipe about training with several processes: limits of the strategies, and contradictions."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.problems import nearest
from training.recipe.rules.rule import Rule, WrittenRecipe
from training.recipe.tables.adapters import ADAPTERS, LORA
from training.recipe.tables.strategies import STRATEGIES

_RECIPE_FIELDS = {
    "zero_optimization.stage": "compute.strategy",
    "zero_optimization.offload_optimizer.device": "compute.offload",
    "zero_optimization.offload_param.device": "compute.offload",
    "optimizer": "training.optim",
    "scheduler": "training.lr_scheduler_type",
    "bf16.enabled": "compute.mixed_precision",
    "fp16.enabled": "compute.mixed_precision",
    "torch_autocast": "compute.mixed_precision",  # DeepSpeed imports the modules that it names
    "train_batch_size": "training.per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "training.per_device_train_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "training.max_grad_norm",
    "zero_force_ds_cpu_optimizer": "training.optim",
}
"""Fields of DeepSpeed's configuration that follow from fields of the recipe."""
_OF_LORA = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "quantization")
"""Fields of training.lora that other kinds of adapters do not have."""
_DEEPSPEED_NAME = re.compile(r"""(?m)(?:^    (?=\w+: )|["'])([a-z]\w*)(?=: |["'])""")
"""A field of a DeepSpeed model in its source, or a text such as "wall_clock_breakdown"."""


def _strategy(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    strategy, processes = written["compute.strategy"], written["compute.num_processes"]
    # A single process uses these strategies to keep state in the CPU's memory.
    if not STRATEGIES[strategy].replicates and processes == 1 and written["compute.offload"] == "no":
        message = f"{strategy!r} shares a model among processes, and compute.num_processes is 1: raise it, set"
        yield "compute.strategy", f"{message} compute.offload, or use {_list_replicating()}."
    if reason := STRATEGIES[strategy].refused_optimizers.get(optimizer := written["training.optim"]):
        alternatives = [name for name, other in STRATEGIES.items() if optimizer not in other.refused_optimizers]
        message = f"{optimizer!r} {reason}: choose another, or set compute.strategy to {' or '.join(alternatives)}."
        yield "training.optim", message
    for field in sorted({field for other in STRATEGIES.values() for field in other.fields}):
        default = written.fields("compute")[field].get_default(call_default_factory=True)
        if field not in STRATEGIES[strategy].fields and written[f"compute.{field}"] != default:
            strategies = "` or `".join(name for name, other in STRATEGIES.items() if field in other.fields)
            yield f"compute.{field}", f"is for `strategy: {strategies}` only; with {strategy}, leave it out."


def _machines(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    machines, processes = written["compute.num_machines"], written["compute.num_processes"]
    if machines > 1 and written["compute.cluster"] is None:
        yield "compute.num_machines", f"{machines} machines need a cluster: set compute.cluster to ray, or this to 1."
    if processes != "auto" and processes % machines:
        yield "compute.num_processes", f"{processes} cannot be shared evenly by {machines} machines: give a multiple."


def _cluster(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["compute.cluster"] is None:
        if written["compute.cluster_address"] is not None:
            yield "compute.cluster_address", "is for a cluster: set compute.cluster to ray, or leave this out."
        return
    if written["training.resume_from_checkpoint"] is not None:
        message = "names a folder of this machine, which the machines of a cluster do not see: leave one of both out."
        yield "training.resume_from_checkpoint", message
    if written["release.hub"] is not None and written["release.hub.checkpoints"] != "no":
        yield "release.hub.checkpoints", "checkpoints stay on the machines of the cluster: set it to no."


def _offload(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    strategy, offload = written["compute.strategy"], written["compute.offload"]
    choices = ("no", *STRATEGIES[strategy].offloads)
    if offload not in choices:
        yield "compute.offload", f"{offload!r} is not for {strategy}: choose from {', '.join(choices)}."


def _deepspeed(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    configuration = written["compute.deepspeed"]
    known_names = _deepspeed_names() if configuration else frozenset()
    for name in _dotted_names(configuration) if known_names else ():
        if (last := name.rpartition(".")[2]) not in known_names:
            where = f"compute.deepspeed.{name}"
            yield where, f"no such field of DeepSpeed's configuration.{nearest(last, known_names)}"
    for name in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(configuration.get(name, {}), Mapping):
            yield f"compute.deepspeed.{name}", f"{configuration[name]!r} is of the wrong type: it takes a mapping."
    zero = configuration.get("zero_optimization")
    for name in ("offload_optimizer", "offload_param") if isinstance(zero, Mapping) else ():
        if not isinstance(zero.get(name) or {}, Mapping):
            where = f"compute.deepspeed.zero_optimization.{name}"
            yield where, f"{zero[name]!r} is of the wrong type: it takes a mapping, such as {{device: cpu}}."
    for name, value in _flatten(configuration):
        for field, recipe_field in _RECIPE_FIELDS.items():
            if f"{name}.".startswith(f"{field}.") and value not in ("auto", _expected_value(written, field)):
                message = f"{value!r} contradicts {recipe_field}, which is {written[recipe_field]!r}"
                yield f"compute.deepspeed.{name}", f"{message}: set that, and leave this out."


@functools.cache
def _deepspeed_names() -> frozenset[str]:
    """Returns all names that the installed DeepSpeed may read in its configuration; none if it is not installed.

    DeepSpeed ignores most unknown names. The names come from its source, because importing it takes seconds.
    """
    spec = importlib.util.find_spec("deepspeed")
    folders = spec.submodule_search_locations if spec else None
    sources = (file for folder in folders or () for file in Path(folder).rglob("*.py"))
    texts = (file.read_text("utf-8") for file in sources if "config" in file.name or file.name == "constants.py")
    return frozenset(name for text in texts for name in _DEEPSPEED_NAME.findall(text))


def _dotted_names(configuration: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of a DeepSpeed configuration, without the parameters of optimizer and scheduler."""
    for name, value in configuration.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and name != "params":
            yield from _dotted_names(value, f"{prefix}{name}.")


def _expected_value(written: WrittenRecipe, field: str) -> Any:
    """Returns the only value besides `auto` that the recipe allows for a field of DeepSpeed's configuration."""
    if field == "zero_optimization.stage":
        return int(written["compute.strategy"][-1])
    if field.startswith("zero_optimization.offload_"):
        is_offloaded = (
            written["compute.offload"]
            in {"optimizer": ("optimizer", "all"), "param": ("all",)}[field.split(".")[1][8:]]
        )
        return "cpu" if is_offloaded else "none"
    if field in ("bf16.enabled", "fp16.enabled") and written["compute.mixed_precision"] != "auto":
        return written["compute.mixed_precision"] == field[:4]
    if field in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        return written[_RECIPE_FIELDS[field]]
    return "auto"


def _flatten(configuration: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the plain values by their dotted names."""
    for name, value in configuration.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lora(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["training.lora"] is None:
        return
    quantization, strategy = written["training.lora.quantization"], written["compute.strategy"]
    if quantization is not None and written["training.lora.init_lora_weights"] == "pissa":
        yield "training.lora.init_lora_weights", "'pissa' decomposes whole weights: with quantization, set it to null."
    if quantization is not None and not STRATEGIES[strategy].replicates:
        message = f"{quantization!r} holds weights in a format that {strategy} cannot shard: use"
        yield "training.lora.quantization", f"{message} {_list_replicating()}, or set it to null."
    if written["release.hub"] is not None and written["release.hub.checkpoints"] == "every_save":
        message = (
            "'every_save' publishes whole weights, and with training.lora checkpoints hold only the trained weights:"
        )
        yield "release.hub.checkpoints", f"{message} choose checkpoint, all_checkpoints or no."


def _adapters(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields and settings belong to a kind of adapters."""
    if written["training.lora"] is None:
        return
    kind, settings = written["training.lora.peft_type"], written["training.lora.settings"]
    known = ADAPTERS[kind]
    for name in () if kind == LORA else _OF_LORA:
        if written[f"training.lora.{name}"] != written.fields("training.lora")[name].get_default():
            advice = "set it in training.lora.settings" if name in known else "leave it out"
            yield f"training.lora.{name}", f"is for `peft_type: LORA` only; with {kind}, {advice}."
    for name, value in settings.items():
        where = f"training.lora.settings.{name}"
        if kind == LORA:
            yield where, "is for another peft_type than LORA, whose settings are fields of training.lora: leave it out."
        elif name not in known:
            yield where, f"{kind} has no such setting: choose from {', '.join(known)}.{nearest(name, known)}"
        elif problem := known[name].problem(value):
            yield where, problem
    if kind == "OFT" and settings.get("r") and settings.get("oft_block_size"):
        message = "follows from settings.r and the size of a layer: leave one of both out."
        yield "training.lora.settings.oft_block_size", message


def _list_replicating() -> str:
    return " or ".join(name for name, strategy in STRATEGIES.items() if strategy.replicates)


COMPUTE_RULES: tuple[Rule, ...] = (_strategy, _machines, _cluster, _offload, _deepspeed, _lora, _adapters)
