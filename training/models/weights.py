"""The weights in a model's files: whether the files are whole, and whether they are those of the model.

A file of safetensors is the length of its header (8 bytes, little-endian), the header in JSON, and the tensors. Only
headers are read, without torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.local_files import open_regular, read_whole
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_MISSING = 0.1
"""The share of a model's weights, without its head, that may be missing. More of them are no longer this model."""
MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""
LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
"""The classes whose head is trained before fine-tuning."""
_SHOWN = 3
# An optional layer of encoders, which masked language models lack.
_POOLER = re.compile(r"(^|\.)pooler\.")
_SAVED_BY = {
    "_orig_mod.": "torch.compile adds it: save the model with model._orig_mod.save_pretrained()",
    "module.": "DistributedDataParallel adds it: save the model with model.module.save_pretrained()",
    "base_model.model.": "peft adds it: save the model with model.merge_and_unload().save_pretrained()",
}

Shapes = dict[str, list[int]]
"""The shape of each tensor by name."""


def read_shapes(files: Mapping[str, Path], field: str = "model.path") -> Shapes:
    """The tensors of the files that transformers loads, of these files of a model by name.

    Raises UserError with all files that are damaged or missing. `field` names the model in it.
    """
    damage: list[str] = []
    shapes: Shapes = {}
    for path in _loaded_files(files, damage):
        try:
            shapes |= _read_header(path)
        except (OSError, ValueError) as error:
            damage.append(f"{path} {error}: copy or download it again.")
    if not damage and WEIGHTS not in files:
        named = _read_index(files[INDEX])
        if lost := [name for name in named if name not in shapes]:
            damage.append(
                f"{files[INDEX]} names weights that its files lack, {_listed(lost)}: copy or download the model again."
            )
    if damage:
        raise UserError(Problem(kind="model", where=field, message=message) for message in damage)
    return shapes


def _loaded_files(files: Mapping[str, Path], damage: list[str]) -> list[Path]:
    if WEIGHTS in files:
        return [files[WEIGHTS]]
    if INDEX not in files:
        named = ", ".join(sorted(name for name in files if name.endswith(".safetensors"))) or "no weights"
        damage.append(f"there is neither {WEIGHTS} nor {INDEX}, but {named}: save the model with save_pretrained().")
        return []
    index = files[INDEX]
    try:
        shards = sorted({*_read_index(index).values()})
        missing = [shard for shard in map(str, shards) if shard not in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        damage.append(f"{index} is no index of weights: copy or download it again.")
        return []
    if missing:
        damage.append(f"{index} names {_listed(missing)}, not in its folder: copy or download the model again.")
    return [files[shard] for shard in shards if shard in files]


def _read_index(path: Path) -> Any:
    """The file of each weight, by its name, as the index has it."""
    with open_regular(path) as file:
        return json.loads(read_whole(file))["weight_map"]


def _read_header(path: Path) -> Shapes:
    """Raises ValueError, in words that follow the path, if the file is not whole."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"is cut off or no file of safetensors ({size:,} bytes)")
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            shapes = {name: [int(side) for side in entry["shape"]] for name, entry in tensors.items()}
            expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, RecursionError):
            raise ValueError("is damaged: its header is unreadable") from None
    if size != expected:
        state = "is cut off" if size < expected else "is damaged"
        raise ValueError(f"{state}: it has {size:,} of {expected:,} bytes")
    return shapes


@dataclass(frozen=True)
class Fit:
    """How the weights of files fit a model."""

    weights: int
    """Of the model, without its head and pooler."""
    missing: list[str]
    """Those of them that the files lack, or have in another shape."""
    share: float
    """The missing part of their numbers."""
    pooler: list[str]
    """Missing weights of a pooler, which training learns, like a head."""
    head: list[str]
    """Missing weights of the head."""
    unused: list[str]
    """Weights in the files of further layers than the model has."""
    unexpected: list[str]
    """All weights in the files that the model does not have."""

    def problems(self, network: PreTrainedModel, field: str) -> Iterator[Problem]:
        """The error for weights that are not the model's, else warnings."""
        named = f"{self.weights:,} weights of {type(network).__name__}"
        if self.share == 1 and self.weights:
            message = (
                f"none of the {named} is in its files: the model needs {_listed(self.missing)}; "
                f"they have {_listed(self.unexpected) or 'no others'}. {_next_step(self)}"
            )
            yield _problem(field, message)
        elif self.missing:
            message = (
                f"its files lack {len(self.missing):,} of the {named}, or have them in another shape "
                f"({_percent(self.share)} of its numbers, without the head): {_listed(self.missing)}. "
            )
            if self.share > MAX_MISSING:
                yield _problem(field, message + _next_step(self))
            else:
                yield _problem(field, f"{message}They are drawn at random before training.", "warning")
        if self.unused:
            message = f"its files have {len(self.unused):,} weights of layers beyond those of config.json: "
            yield _problem(field, f"{message}{_listed(self.unused)}. They are not used.", "warning")


def compare(network: PreTrainedModel, info: Mapping[str, Any]) -> Fit:
    """How the weights of files fit the network, by what from_pretrained returns with output_loading_info."""
    absent = {*missing_weights(info)}
    sizes = {name: weight.numel() for name, weight in network.named_parameters()}
    body = _body(network, sizes)
    own = {name: sizes[name] for name in body if not _POOLER.search(name)}
    missing = sorted(own.keys() & absent)
    names = {*sizes, *(name.removeprefix(f"{network.base_model_prefix}.") for name in sizes)}
    patterns = {_pattern(name) for name in names}
    unexpected = sorted(info["unexpected_keys"])
    return Fit(
        weights=len(own),
        missing=missing,
        share=sum(own[name] for name in missing) / max(1, sum(own.values())),
        pooler=sorted(absent & body - own.keys()),
        head=sorted(absent & sizes.keys() - body),
        unused=[name for name in unexpected if (pattern := _pattern(name)) in patterns and pattern != name],
        unexpected=unexpected,
    )


def missing_weights(info: Mapping[str, Any]) -> list[str]:
    """The names of the weights that files lack or have in another shape, by transformers' `output_loading_info`."""
    return sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])])


def require_whole(network: PreTrainedModel, folder: Path, missing: Sequence[str]) -> None:
    """Raises UserError if a trained model lacks weights, which transformers has drawn at random."""
    if missing:
        message = f"{folder} lacks {len(missing):,} weights of {type(network).__name__}, or has them in another shape: "
        message += f"{_listed(missing)}. Restore its files, or train it again."
        raise UserError.of("model", "model", message)


def head_problem(
    network: PreTrainedModel, found: Fit, auto_class: str, field: str, *, is_reference: bool
) -> Iterator[Problem]:
    """A warning if the head of a language model is missing, which training would have to learn from nothing; an error
    if the loss compares with the model as it was before training."""
    if found.head and auto_class in LANGUAGE_MODELS:
        message = f"its files lack the head of {type(network).__name__}, {_listed(found.head)}, which is drawn at "
        if is_reference:
            yield _problem(field, f"{message}random, and the loss {_NEEDS_HEAD}")
        else:
            message += "random before training: name a model that was saved with its head, if there is one."
            yield _problem(field, message, "warning")


def new_head_problem(network: PreTrainedModel, field: str) -> Iterator[Problem]:
    """An error if a model from scratch, which is stored without its head, has one of its own, where the loss compares
    with the model as it was before training."""
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        message = f"a new {type(network).__name__} has a head of its own, which is drawn at random when training "
        message += f"begins, and the loss {_NEEDS_HEAD} Or set tie_word_embeddings: true."
        yield _problem(field, message)


_NEEDS_HEAD = "compares with the model before training: name a model that was saved with its head."


def _body(network: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Those of the weights that are not the head's."""
    prefix = network.base_model_prefix
    if prefix and hasattr(network, prefix):
        return {name for name in names if name.startswith(f"{prefix}.")}
    head = network.get_output_embeddings()
    of_head = [layer for layer, module in network.named_modules() if module is head]
    return {name for name in names if name.rpartition(".")[0] not in of_head}


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", f".{name}").removeprefix(".")


def _next_step(found: Fit) -> str:
    """The advice for files whose names differ from the model's by a prefix, or else for those of another model."""
    for part, advice in _SAVED_BY.items():
        if any(f".{part}" in f".{name}" for name in found.unexpected):
            return f"{part!r} is in the names of the files; {advice}."
    first = found.missing[0]
    ends = (first, first.partition(".")[2])
    for name in found.unexpected:
        if prefix := next((name.removesuffix(end) for end in ends if end and name.endswith(end)), ""):
            return f"The names in the files begin with {prefix!r}: save the model with save_pretrained()."
    return "Name the folder of a model that save_pretrained() of transformers wrote, with its own config.json."


def _listed(names: Iterable[str]) -> str:
    """The first three names, and the number of others."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"


def _problem(where: str, message: str, level: Any = "error") -> Problem:
    return Problem(kind="model", where=where, message=message, level=level)
