"""Adapters by peft, such as LoRA: small trained weights in a model's linear layers, whose own weights are frozen.

`add` puts them into the model itself. A checkpoint holds only trained weights (`save_trained`), because the base model
has the others. After training, the adapters are saved in peft's format (`save`) and merged into the base model's
weights (`merge`): the result is the model that is evaluated, registered and published.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D

from training.jobs.user_code import blame_field
from training.problems import Problem, UserError, collected, nearest

if TYPE_CHECKING:
    from peft import PeftConfig

    from training.recipe import Lora

VERA = "VERA"
ADAPTER = "default"
"""peft's name of a model's only adapter."""
_SETTINGS = {"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"}
# With these, peft loads a model from its adapter alone (AutoPeftModelForCausalLM). For classifiers, peft would train
# layers that the recipe does not name.
_TASK_TYPES = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


def add(network: PreTrainedModel, lora: Lora, new_weights: Sequence[str], auto_class: str, seed: int) -> None:
    """Adds adapters, initialized with `seed`, and freezes all other weights except those of fully trained layers:
    lora.modules_to_save, and the layers of the newly initialized `new_weights`.

    Raises UserError for names that are no layers of the model, and for layers that cannot be merged.
    """
    trained = _fully_trained_layers(network, lora.modules_to_save or (), new_weights)
    lookalikes = _find_lookalikes(network, trained)
    excluded = [name for name, _ in network.named_modules() if _is_within(name, lookalikes)]
    names = _names_of_weights(network)
    layers: dict[str, Any] = {
        "target_modules": _target_modules(network, lora.target_modules, [*trained, *excluded], lora.peft_type),
        "modules_to_save": trained or None,
        "task_type": _TASK_TYPES.get(auto_class),
    }
    if excluded:
        _require_exclusion(network, lora, excluded)
        layers["exclude_modules"] = excluded
    with blame_field("training.lora.target_modules"):
        config = _configuration(network, lora, layers)
        set_seed(seed)
        if lora.peft_type == VERA:
            _inject(network, config)
        else:
            network.add_adapter(config, ADAPTER)
    _unwrap(network, lookalikes, trained)
    _require_unshared(network, names)


def _configuration(network: PreTrainedModel, lora: Lora, layers: Mapping[str, Any]) -> PeftConfig:
    """peft's configuration of the adapters. Raises ValueError if peft refuses it."""
    from peft import LoraConfig, PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as KNOWN

    if lora.peft_type == "LORA":
        own: dict[str, Any] = {"init_lora_weights": lora.init_lora_weights or True, "exclude_modules": None}
        return LoraConfig(**lora.model_dump(include=_SETTINGS), **own | dict(layers))
    settings = dict(lora.settings)
    if lora.peft_type == "IA3" and network.config.model_type not in KNOWN:
        settings.setdefault("feedforward_modules", [])
    if lora.peft_type == VERA:
        settings["save_projection"] = False  # each layer would save the shared matrices again; `save` adds them
    if lora.peft_type == "OFT" and "r" in settings:
        settings.setdefault("oft_block_size", 0)  # the one follows from the other
    config: PeftConfig = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(lora.peft_type)](**settings, **layers)
    return config


def _inject(network: PreTrainedModel, config: PeftConfig) -> None:
    """Adds adapters that share matrices, as add_adapter adds others. peft refuses these there, because the model alone
    would not save the matrices."""
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    PEFT_TYPE_TO_TUNER_MAPPING[PeftType(VERA)](network, config, adapter_name=ADAPTER)
    network._hf_peft_config_loaded = True
    network.set_adapter(ADAPTER)


def _require_exclusion(network: PreTrainedModel, lora: Lora, excluded: Sequence[str]) -> None:
    """Raises UserError if such adapters cannot leave out the layers."""
    if lora.peft_type == VERA:
        message = f"{lora.peft_type!r} would train {excluded[0]} of {type(network).__name__} too, whose name ends like "
        raise UserError.of("training", "training.lora.peft_type", f"{message}its head's: choose another.")


def find_unfit_layers(network: PreTrainedModel, lora: Lora) -> list[Problem]:
    """The problems of names in `lora` that are no layers of the model, or layers that share a weight with others."""
    problems: list[Problem] = []
    targets = lora.target_modules
    named: list[tuple[Callable[..., Any], str]] = [(_fully_trained_layers, name) for name in lora.modules_to_save or ()]
    named += [(_target_modules, name) for name in (targets if isinstance(targets, list) else ())]
    for find, name in named:
        with collected(problems):
            find(network, [name], ())
    layers = set[str]().union(*(_find_suffix(dict(network.named_modules()), name) for _, name in named))
    shared = [names for names in _names_of_weights(network).values() if len(names) > 1]
    if unfit := [names for names in shared if any(_is_within(_layer_of(name), layers) for name in names)]:
        problems.append(_shared_weight(unfit[0]))
    return problems


def quantize(
    network: PreTrainedModel,
    new_weights: Sequence[str],
    load: Callable[..., tuple[PreTrainedModel, Any, Any]],
    lora: Lora,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """The same model on this process's GPU with its linear layers in 4 bits, which compute in `dtype`; except its
    output layer, lora.modules_to_save, and the layers of the newly initialized `new_weights`. `load` loads the model
    again with arguments of from_pretrained."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.base import get_keys_to_not_convert

    excluded = {*get_keys_to_not_convert(network), *map(_layer_of, new_weights), *(lora.modules_to_save or ())}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=sorted(excluded),
    )
    quantized, *_ = load(quantization_config=config, device_map={"": int(os.environ.get("LOCAL_RANK", "0"))})
    with torch.no_grad():
        for name in new_weights:
            quantized.get_parameter(name).copy_(network.get_parameter(name))
    prepared: PreTrainedModel = prepare_model_for_kbit_training(quantized, use_gradient_checkpointing=False)
    return prepared


def save_trained(network: PreTrainedModel, file: Path) -> None:
    """Writes the trained weights and the buffers of a model with adapters."""
    saved = {name for name, weight in network.named_parameters() if weight.requires_grad}
    saved |= {name for name, _ in network.named_buffers()}  # those that are in the state dict
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items() if name in saved}
    save_file(state, file, metadata={"format": "pt"})


def load_trained(network: PreTrainedModel, file: Path) -> None:
    """Loads a file of `save_trained`."""
    found = load_file(file)
    wanted = {name for name, weight in network.named_parameters() if weight.requires_grad}
    if wanted - found.keys() or network.load_state_dict(found, strict=False).unexpected_keys:
        raise ValueError(f"{file} is not of this model's adapters")


def save(
    network: PreTrainedModel,
    base: PreTrainedModel,
    out: Path,
    origin: Mapping[str, str],
    weights: dict[str, torch.Tensor] | None,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json to `out`, for PeftModel.from_pretrained with the model
    `base`. `origin` has the `path` and `revision` of the base model on the Hub, or is empty. `weights` are given if
    those of the network are sharded."""
    from peft import get_peft_model_state_dict

    config: PeftConfig = network.peft_config[ADAPTER]
    state = get_peft_model_state_dict(network, weights, ADAPTER, save_embedding_layers=False)
    for layer in _find_lookalikes(base, config.modules_to_save or ()):
        # peft wraps these again when it loads the file, and needs their weights.
        state |= {f"{layer}.{name}": weight for name, weight in base.get_submodule(layer).state_dict().items()}
    out.mkdir(parents=True)
    projections = _projections(network)
    state = {f"base_model.model.{name}": tensor for name, tensor in state.items()} | projections
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    named: dict[str, Any] = {"save_projection": True} if projections else {}
    named |= {"base_model_name_or_path": origin.get("path"), "revision": origin.get("revision"), "inference_mode": True}
    fields = {name: sorted(v) if isinstance(v, set) else v for name, v in (config.to_dict() | named).items()}
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _projections(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The matrices that all adapters of VeRA share, under their names in peft's form; empty for other adapters."""
    layer = next((module for module in network.modules() if getattr(module, "vera_A", None) is not None), None)
    names = ("vera_A", "vera_B") if layer is not None else ()
    return {f"base_model.{name}": getattr(layer, name)[ADAPTER] for name in names}


def merge(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """The base model, in float32, with an adapter of `save` merged into its weights. Changes and returns `base`."""
    from peft import PeftModel

    merged: PreTrainedModel = PeftModel.from_pretrained(base, adapter, torch_device="cpu").merge_and_unload()
    return merged


def _fully_trained_layers(network: PreTrainedModel, named: Iterable[str], new_weights: Iterable[str]) -> list[str]:
    """The full names of the layers whose weights are all trained."""
    layers = {name for name, module in network.named_modules() if name and next(module.parameters(), None) is not None}
    found = set()
    for name in named:
        if not (matches := _find_suffix(layers, name)):
            message = f"{name!r} is no layer of {type(network).__name__}: choose from {', '.join(_last_parts(layers))}."
            raise UserError.of(
                "training", "training.lora.modules_to_save", message + nearest(name, _last_parts(layers))
            )
        found |= matches
    for name in new_weights:
        layer = _layer_of(name)
        if layer not in layers or next(network.get_submodule(layer).children(), None) is not None:
            message = f"cannot train {type(network).__name__}: its new weight {name} is in no layer without other "
            message += "layers. Train all weights (training.lora: null), or start from a model that has it."
            raise UserError.of("training", "training.lora", message)
        found.add(layer)
    return sorted(layer for layer in found if not _is_within(layer, found - {layer}))


def _find_lookalikes(network: PreTrainedModel, trained: Sequence[str]) -> list[str]:
    """The layers that peft would also train, because it compares only the ends of names: pre_classifier for
    classifier."""
    names = [name for name, _ in network.named_modules() if name.endswith(tuple(trained))]
    return [name for name in names if not _is_within(name, trained)]


def _unwrap(network: PreTrainedModel, lookalikes: Sequence[str], trained: Sequence[str]) -> None:
    """Restores the lookalike layers. Raises UserError if peft trains other layers than `trained`."""
    from peft.utils.other import ModulesToSaveWrapper

    for name in lookalikes:
        if isinstance(layer := network.get_submodule(name), ModulesToSaveWrapper):
            network.set_submodule(name, layer.original_module)
    wrapped = {name for name, module in network.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    if wrapped != {*trained}:
        message = f"cannot train {', '.join(trained)} of {type(network).__name__} and no other layers, because the "
        message += "name of one ends with another's. Train all weights (training.lora: null)."
        raise UserError.of("training", "training.lora.modules_to_save", message)


def _target_modules(network: PreTrainedModel, named: Any, trained: Sequence[str], kind: str = "LORA") -> Any:
    """The recipe's layers; or None if peft has defaults for the model type, else all linear layers."""
    from peft.utils import constants

    if named is None:
        defaults = getattr(constants, f"TRANSFORMERS_MODELS_TO_{kind}_TARGET_MODULES_MAPPING")
        return None if network.config.model_type in defaults else "all-linear"
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    free = [name for name in linear if not _is_within(name, trained)]
    for name in [] if isinstance(named, str) else named:
        if not _find_suffix(free, name):
            if _find_suffix(linear, name):
                raise UserError.of(
                    "training",
                    "training.lora.target_modules",
                    f"all weights of {name!r} are trained already: leave it out.",
                )
            message = f"{name!r} is no linear layer of {type(network).__name__}: "
            message += f"choose from {', '.join(_last_parts(free))}, or all-linear.{nearest(name, _last_parts(free))}"
            raise UserError.of("training", "training.lora.target_modules", message)
    return named


def _is_within(name: str, layers: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{layer}.") for layer in layers)


def _find_suffix(names: Iterable[str], suffix: str) -> set[str]:
    return {name for name in names if f".{name}".endswith(f".{suffix}")}


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({last for name in names if not (last := name.rpartition(".")[2]).isdigit()})


def _layer_of(weight: str) -> str:
    return weight.rpartition(".")[0]


def _require_unshared(network: PreTrainedModel, names: Mapping[int, list[str]]) -> None:
    """Raises UserError if a trained layer shares a weight, given the names of each weight's identity: merging would
    lose one of the two."""
    for module in network.modules():
        own = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        for weight in own.parameters() if isinstance(own, nn.Module) else ():
            if len(shared := names.get(id(weight), ())) > 1:
                raise UserError([_shared_weight(shared)])


def _names_of_weights(network: PreTrainedModel) -> dict[int, list[str]]:
    """The names of each weight, by its identity."""
    names = defaultdict(list)
    for name, weight in network.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name)
    return names


def _shared_weight(names: Iterable[str]) -> Problem:
    message = f"cannot train these layers: {' and '.join(names)} are one weight, so adapters of one cannot be merged. "
    message += "Name other target_modules and modules_to_save."
    return Problem(kind="training", where="training.lora", message=message)
