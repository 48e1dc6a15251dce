"""LoRA by peft: small matrices are trained beside a model's linear layers, whose own weights stay as they are.

They are put into the model itself, which to all others is what it was: `add`. A checkpoint holds what is trained, for
the rest is in the base model: `save_trained`. In the end they are written in peft's own form, `save`, and added up with
the weights of the base model as it came, `merged`: that is the model which is evaluated, registered and published.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D

from training.jobs.user_code import users_mistake
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from peft import LoraConfig

    from training.recipe import Lora

ADAPTER = "default"
"""What peft calls the one that a model has."""
_SETTINGS = {"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"}
# By these, peft makes a model of an adapter alone: AutoPeftModelForCausalLM. For classifiers, it would train layers
# that nobody has named.
_TASK_TYPES = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


def add(network: PreTrainedModel, lora: Lora, drawn: Sequence[str], auto_class: str, seed: int) -> None:
    """Puts adapters into the model, drawn with `seed`, and freezes all else but the layers that are trained whole:
    those that the recipe names, and those of the weights `drawn` anew.

    `lora` is the recipe's section, `auto_class` the class of transformers that loads such models. Raises UserError for
    names that are no layers of the model, and for layers that cannot be merged.
    """
    from peft import LoraConfig

    whole = _whole_layers(network, lora.modules_to_save or (), drawn)
    alike = _ending_alike(network, whole)
    kept = [name for name, _ in network.named_modules() if _within(name, alike)]
    shared = _shared_weights(network)
    config = LoraConfig(
        **lora.model_dump(include=_SETTINGS),
        target_modules=_targets(network, lora.target_modules, [*whole, *kept]),
        exclude_modules=kept or None,
        modules_to_save=whole or None,
        task_type=_TASK_TYPES.get(auto_class),
    )
    set_seed(seed)
    with users_mistake("training.lora.target_modules"):
        network.add_adapter(config, ADAPTER)
    _unwrap(network, alike, whole)
    _require_unshared(network, shared)


def unknown_layers(network: PreTrainedModel, lora: Lora) -> list[Problem]:
    """The names in the recipe's section that are no layers of the model."""
    targets = lora.target_modules
    looks = [partial(_whole_layers, network, [name], ()) for name in lora.modules_to_save or ()]
    looks += [partial(_targets, network, [name], ()) for name in (targets if isinstance(targets, list) else ())]
    problems: list[Problem] = []
    for look in looks:
        try:
            look()
        except UserError as error:
            problems += error.problems
    return problems


def quantized(
    network: PreTrainedModel,
    drawn: Sequence[str],
    load: Callable[..., tuple[PreTrainedModel, Any]],
    lora: Lora,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """The same model with its linear layers in 4 bits on this process's GPU, computing in `dtype`; but for its output
    layer, and the layers that are trained whole: those that the recipe names, and those of the weights `drawn` anew.
    `load` reads it again, with what from_pretrained is to be told."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = {*get_keys_to_not_convert(network), *map(_layer_of, drawn), *(lora.modules_to_save or ())}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=sorted(kept),
    )
    small, _ = load(quantization_config=config, device_map={"": int(os.environ.get("LOCAL_RANK", "0"))})
    with torch.no_grad():
        for name in drawn:
            small.get_parameter(name).copy_(network.get_parameter(name))
    prepared: PreTrainedModel = prepare_model_for_kbit_training(small, use_gradient_checkpointing=False)
    return prepared


def save_trained(network: PreTrainedModel, file: Path) -> None:
    """Writes what the training of a model with adapters changes: all but the frozen weights."""
    kept = {name for name, weight in network.named_parameters() if weight.requires_grad}
    kept |= {name for name, _ in network.named_buffers()}  # of those, a state dict has what is not made anew
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items() if name in kept}
    save_file(state, file, metadata={"format": "pt"})


def load_trained(network: PreTrainedModel, file: Path) -> None:
    """Puts back what `save_trained` wrote."""
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
    """Writes adapter_model.safetensors and adapter_config.json to `out`: what PeftModel.from_pretrained takes beside
    `base`, the model as it came, which `origin` names by its `path` on the Hub and `revision`; empty for one that is
    not of the Hub.

    `weights` are given where the model holds only a share of its own.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(network, weights, ADAPTER, save_embedding_layers=False)
    for layer in _ending_alike(base, network.peft_config[ADAPTER].modules_to_save or ()):
        # peft wraps these once more where it reads the file, and wants their weights there.
        state |= {f"{layer}.{name}": weight for name, weight in base.get_submodule(layer).state_dict().items()}
    out.mkdir(parents=True)
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    named = {"base_model_name_or_path": origin.get("path"), "revision": origin.get("revision"), "inference_mode": True}
    config: LoraConfig = network.peft_config[ADAPTER]
    fields = {name: sorted(v) if isinstance(v, set) else v for name, v in (config.to_dict() | named).items()}
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def merged(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """The base model, in float32, with an adapter that `save` wrote added to its weights; the same object, changed."""
    from peft import PeftModel

    found: PreTrainedModel = PeftModel.from_pretrained(base, adapter, torch_device="cpu").merge_and_unload()
    return found


def _whole_layers(network: PreTrainedModel, asked: Iterable[str], drawn: Iterable[str]) -> list[str]:
    """The full names of the layers that are trained whole."""
    there = {name for name, module in network.named_modules() if name and next(module.parameters(), None) is not None}
    found = set()
    for name in asked:
        if not (ends := _ending_with(there, name)):
            message = f"{name!r} is no layer of {type(network).__name__}: choose from {', '.join(_ends(there))}."
            raise _refused("modules_to_save", message + nearest(name, _ends(there)))
        found |= ends
    for name in drawn:
        layer = _layer_of(name)
        if layer not in there or next(network.get_submodule(layer).children(), None) is not None:
            message = f"cannot train {type(network).__name__}: its weight {name} is drawn anew, and is in no layer of "
            message += "its own. Train all weights (training.lora: null), or start from a model that has it."
            raise _refused("", message)
        found.add(layer)
    return sorted(layer for layer in found if not _within(layer, found - {layer}))


def _ending_alike(network: PreTrainedModel, whole: Sequence[str]) -> list[str]:
    """The layers that peft would train whole beside those, for their names end with the same letters, as
    pre_classifier does with classifier."""
    names = [name for name, _ in network.named_modules() if name.endswith(tuple(whole))]
    return [name for name in names if not _within(name, whole)]


def _unwrap(network: PreTrainedModel, alike: Sequence[str], whole: Sequence[str]) -> None:
    """Has the layers `alike` be what they were. Raises UserError where not just those of `whole` are trained whole."""
    from peft.utils.other import ModulesToSaveWrapper

    for name in alike:
        if isinstance(layer := network.get_submodule(name), ModulesToSaveWrapper):
            network.set_submodule(name, layer.original_module)
    wrapped = {name for name, module in network.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    if wrapped != {*whole}:
        message = f"cannot train {', '.join(whole)} of {type(network).__name__} whole, and no others: the name of one "
        message += "ends with another's. Train all weights (training.lora: null)."
        raise _refused("modules_to_save", message)


def _targets(network: PreTrainedModel, asked: Any, whole: Sequence[str]) -> Any:
    """What LoraConfig is told: None where peft knows the type of model."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    if asked is None:
        return None if network.config.model_type in KNOWN else "all-linear"
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    free = [name for name in linear if not _within(name, whole)]
    for name in [] if isinstance(asked, str) else asked:
        if not _ending_with(free, name):
            if _ending_with(linear, name):
                raise _refused("target_modules", f"{name!r} is trained whole already: leave it out.")
            message = f"{name!r} is no linear layer of {type(network).__name__}: "
            message += f"choose from {', '.join(_ends(free))}, or all-linear.{nearest(name, _ends(free))}"
            raise _refused("target_modules", message)
    return asked


def _within(name: str, layers: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{layer}.") for layer in layers)


def _ending_with(names: Iterable[str], end: str) -> set[str]:
    return {name for name in names if name == end or name.endswith(f".{end}")}


def _ends(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})


def _layer_of(weight: str) -> str:
    return weight.rpartition(".")[0]


def _shared_weights(network: PreTrainedModel) -> dict[int, list[str]]:
    """The names of each weight that has several, by its identity."""
    names = defaultdict(list)
    for name, weight in network.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name)
    return {key: several for key, several in names.items() if len(several) > 1}


def _require_unshared(network: PreTrainedModel, shared: Mapping[int, list[str]]) -> None:
    """Raises UserError where a layer that is trained has the weights of another: merged, one of the two is lost."""
    for module in network.modules():
        own = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        for weight in own.parameters() if isinstance(own, nn.Module) else ():
            if several := shared.get(id(weight)):
                message = f"cannot train these layers: {' and '.join(several)} are one weight, and what is learnt "
                message += "beside it could not be added to it. Name other target_modules and modules_to_save."
                raise _refused("", message)


def _refused(field: str, message: str) -> UserError:
    where = f"training.lora.{field}" if field else "training.lora"
    return UserError([Problem(kind="training", where=where, message=message)])
