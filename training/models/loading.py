"""Models by their task: loaded from a folder, and written to one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.integrations import unset_hf_deepspeed_config

from training.models import adapters
from training.models.configurations import need_class
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.recipe import Lora

transformers.utils.logging.disable_progress_bar()

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What a recipe calls a precision, and what torch does."""

# What models call their tables of positions; those of places on a page, such as x_position_embeddings, are no such.
_OF_PLACES = re.compile(r"position_embeddings?|embed_positions|wpe|positions_embed")

# Nothing that a model folder holds is run, and nothing is fetched.
_SAFELY = {"local_files_only": True, "trust_remote_code": False}


class HasModelClass(Protocol):
    """The part of a task type that a trained model is loaded by."""

    auto_class: ClassVar[str]


class TaskModel(HasModelClass, Protocol):
    """The part of a task type that a model is prepared for training by: see training.task_types.task_type."""

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]: ...

    def empty_predictions(self, labels: Sequence[str]) -> Any: ...

    def calibrate(self, predicted: Any) -> dict[str, Any]: ...

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None: ...


def make_deterministic() -> None:
    """Have torch choose kernels that give the same bytes every time. Call it before anything is computed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Only code that reads memory it never wrote would need this, and it costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Adam's averages of weights that rarely get a gradient decay into numbers that are slow to compute with.
    torch.set_flush_denormal(True)


def padding_multiple() -> int:
    """What the width of a batch should be a multiple of on this machine's processor."""
    return 8 if torch.cuda.is_available() else 1


def load_tokenizer(folder: Path, model: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, whose class may follow from the type of its model: that of the folder `model`, where
    it lies in another. Raises OSError or ValueError where there is none that can be read.
    """
    config = {} if model is None else {"config": AutoConfig.from_pretrained(model, **_SAFELY)}
    return AutoTokenizer.from_pretrained(folder, **_SAFELY, **config)


def load_for_training(
    task_type: TaskModel,
    folder: Path,
    labels: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    lora: Lora | None = None,
    precision: str = "no",
) -> PreTrainedModel:
    """The folder's model with a head for these labels, in float32 on the CPU.

    Weights that the folder lacks, or has for another number of labels, are drawn with `seed`. With `lora`, the recipe's
    section, it has adapters, and of its own weights only those are trained; where that asks for 4 bits, it lies on a
    GPU and computes there in `precision`.
    """
    set_seed(seed)
    load = partial(_load, task_type, folder, **task_type.config_fields(labels), ignore_mismatched_sizes=True)
    model, drawn = load()
    if lora and lora.quantization:
        model = adapters.quantized(model, drawn, load, lora, DTYPES[precision])
    # A model that was trained before may bring other labels' settings.
    model.config.update(task_type.calibrate(task_type.empty_predictions(labels)))
    if model.config.pad_token_id is None:
        # Models of text generators find a row's last token by it.
        model.config.pad_token_id = tokenizer.pad_token_id
    task_type.prepare(model, tokenizer)
    if lora:
        adapters.add(model, lora, drawn, task_type.auto_class, seed)
    return model


def load_trained(task_type: HasModelClass, folder: Path) -> PreTrainedModel:
    """A model that `export` wrote, ready to predict: float32, on the CPU, dropout off."""
    return _load(task_type, folder)[0].eval()


def require_places(model: PreTrainedModel, **tokens: int) -> None:
    """Raises UserError where a text of so many tokens, by the recipe's field that says so (tokens.max_length as
    `max_length`, other fields as the options that they are), has more than the model has places for.

    Those are the rows of its tables of positions. A model without such a table, that tells places apart by rotation or
    by distance, takes texts of any length.
    """
    tables = [
        _places(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and _OF_PLACES.fullmatch(name.rpartition(".")[2])
    ]
    problems = [
        Problem(
            kind="tokens",
            where=f"{'tokens' if name == 'max_length' else 'options'}.{name}",
            message=f"{asked} is out of range: {type(model).__name__} has places for {min(tables)} tokens.",
        )
        for name, asked in tokens.items()
        if tables and asked > min(tables)
    ]
    if problems:
        raise UserError(problems)


def _places(table: torch.nn.Embedding) -> int:
    """Some models leave the first rows of a table alone: those up to the one of padding, or a fixed number."""
    unused = 0 if table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - max(unused, int(getattr(table, "offset", 0)))


def export(model: PreTrainedModel, tokenizer: Path, out: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write config.json and safetensors to `out`, and beside them the tokenizer's files, byte for byte.

    `weights` are given where the model holds only a share of its own.
    Where the tokenizer lies in the folder of another model, that one's files do not replace this one's.
    """
    model.save_pretrained(out, state_dict=weights)
    for file in sorted(tokenizer.iterdir()):
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def add_to_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write these fields into the config.json of a model that `export` wrote, as transformers would."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | fields
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _load(task_type: HasModelClass, folder: Path, **asked: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the weights that were drawn, for the folder has none that fit."""
    # Else, where ZeRO-3 has trained in this process, it would be shared out as well.
    unset_hf_deepspeed_config()
    need_class(AutoConfig.from_pretrained(folder, **_SAFELY), task_type.auto_class, "model")
    auto_class = getattr(transformers, task_type.auto_class)
    model, found = auto_class.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **_SAFELY, **asked
    )
    assert isinstance(model, PreTrainedModel)
    return model, sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
