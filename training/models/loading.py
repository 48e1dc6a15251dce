"""Models and tokenizers: loaded from folders, prepared for a task, and exported."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.integrations import unset_hf_deepspeed_config

from training.models import adapters, generation_settings, weights
from training.models.configurations import require_class, without_code
from training.models.repository_files import blame_tokenizer, require_bounded, require_no_other_files
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.recipe import Lora

transformers.utils.logging.disable_progress_bar()

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The recipe's precisions."""

# Names of position tables. x_position_embeddings and the like are positions on a page.
_POSITION_TABLE = re.compile(r"position_embeddings?|embed_positions|wpe|positions_embed")

# Executes no code of a model folder, and downloads nothing.
_SAFE = {"local_files_only": True, "trust_remote_code": False}


class TaskModel(Protocol):
    """The part of a task type that models depend on: see training.task_types.task_type."""

    auto_class: ClassVar[str]

    def preprocessor(self, folder: Path) -> Any | None: ...

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]: ...

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None: ...


def make_deterministic() -> None:
    """Selects deterministic kernels. Called before any computation."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It costs a pass over every new tensor, and only code that reads uninitialized memory needs it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Adam's averages of rarely used weights decay to denormal numbers, which are slow.
    torch.set_flush_denormal(True)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a device computes in one of the recipe's precisions."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "no")


def padding_multiple() -> int:
    """The number of tokens that the width of a batch is a multiple of on this machine."""
    return 8 if torch.cuda.is_available() else 1


def load_tokenizer(folder: Path, model: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; its class may depend on the config of its model, in the folder `model` if that is
    another one. Raises OSError or ValueError if it cannot be read, and UserError if it names files of elsewhere, or
    makes texts so long that they would fill the memory."""
    require_no_other_files(folder, *([] if model is None else [model]))
    config = {} if model is None else {"config": AutoConfig.from_pretrained(model, **_SAFE)}
    with blame_tokenizer(str(folder), "its tokenizer is not readable"):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **_SAFE, **config)
    if loaded.is_fast:
        require_bounded(loaded.backend_tokenizer, folder / "tokenizer.json")
    return loaded


def load_preprocessor(task_type: TaskModel, folder: Path, model: Path | None = None) -> PreTrainedTokenizerBase:
    """What a task type prepares rows with: its own preprocessor of the folder, or else as `load_tokenizer`."""
    own: PreTrainedTokenizerBase | None = task_type.preprocessor(folder)
    return load_tokenizer(folder, model) if own is None else own


def load_for_training(
    task_type: TaskModel,
    folder: Path,
    labels: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    lora: Lora | None = None,
    precision: str = "no",
    preparing: Callable[[PreTrainedModel], AbstractContextManager[Any]] = nullcontext,
    compared: Callable[[weights.Fit], None] = lambda fit: None,
    require_usable: Callable[[PreTrainedModel], None] = lambda model: None,
) -> PreTrainedModel:
    """The folder's model with a head for these labels, in float32 on the CPU.

    Weights that the folder lacks, or has for another number of labels, are initialized with `seed`. A head for the same
    labels in another order is put into the order of `labels`. With `lora` the model has adapters; with 4 bits it is on
    a GPU and computes in `precision`. The task type prepares the model within `preparing`, where `require_usable` tries
    it. `compared` gets how the folder's weights fit; raises UserError if they are not the model's.
    """
    set_seed(seed)
    load = partial(_load, task_type, folder, task_type.config_fields(labels))
    model, new_weights, found = load()
    if wrong := [problem for problem in found.problems(model, "model.path") if problem.level == "error"]:
        raise UserError(wrong)
    compared(found)
    if lora and lora.quantization:
        model = adapters.quantize(model, new_weights, load, lora, DTYPES[precision])
    _reorder_head(model, task_type, folder, labels)
    if getattr(model.config, "pad_token_id", 0) is None:
        # Sequence classifiers on decoders find a row's last token by it.
        model.config.pad_token_id = tokenizer.pad_token_id
    with preparing(model):
        task_type.prepare(model, tokenizer)
        require_usable(model)
    if lora:
        adapters.add(model, lora, new_weights, task_type.auto_class, seed)
    return model


def _reorder_head(model: PreTrainedModel, task_type: TaskModel, folder: Path, labels: Sequence[str]) -> None:
    """Moves the outputs of a folder's model that has the same labels in another order, as models of MNLI have."""
    named = AutoConfig.from_pretrained(folder, **_SAFE).id2label or {}
    places = {str(name).casefold(): place for place, name in sorted(named.items())}
    wanted = [label.casefold() for label in labels]
    if [*places] == wanted or len(places) != len(named) or sorted(places) != sorted(wanted):
        return
    # The weights whose size depends on the number of labels are those of the outputs.
    config = deepcopy(model.config)
    config.update(task_type.config_fields([*labels, ""]))
    with torch.device("meta"):
        larger = dict(type(model)(config).named_parameters())
    order = [places[label] for label in wanted]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.shape[0] != larger[name].shape[0]:
                weight.copy_(weight[order].clone())


def load_trained(task_type: TaskModel, folder: Path) -> PreTrainedModel:
    """A model of `export` for predictions: float32, on the CPU, dropout off. Raises UserError if it lacks weights."""
    model, missing, _ = _load(task_type, folder, {})
    weights.require_whole(model, folder, missing)
    return model.eval()


def load_for_export(auto_class: str, folder: Path, *, eager: bool = False) -> PreTrainedModel:
    """A trained model in float32 on the CPU, dropout off. Raises UserError if it lacks weights.

    `eager` is for graphs that runtimes fuse: torch's own attention has guards against NaN.
    """
    loaded, found = getattr(transformers, auto_class).from_pretrained(
        folder,
        config=without_code(AutoConfig.from_pretrained(folder, **_SAFE)),
        dtype=torch.float32,
        attn_implementation="eager" if eager else None,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **_SAFE,
    )
    weights.require_whole(loaded, folder, weights.missing_weights(found))
    whole: PreTrainedModel = loaded.eval()
    return whole


def load_base(task_type: TaskModel, folder: Path, seed: int) -> PreTrainedModel:
    """As load_trained, but of a model before its training: a head that the folder lacks is initialized with `seed`."""
    set_seed(seed)
    return _load(task_type, folder, {})[0].eval()


def vocab_size(model: PreTrainedModel) -> int | None:
    """The rows of the model's embedding; None for models that read bytes or characters."""
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (NotImplementedError, AttributeError):
        return None


def require_positions(model: PreTrainedModel, **tokens: int) -> None:
    """Raises UserError if the model has fewer positions than these numbers of tokens, which are `max_length` and
    options by name. Models without a table of positions accept texts of any length."""
    tables = [
        _count_positions(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and _POSITION_TABLE.fullmatch(name.rpartition(".")[2])
    ]
    problems = [
        Problem(
            kind="tokens",
            where=f"{'tokens' if name == 'max_length' else 'options'}.{name}",
            message=f"{number} is out of range: {type(model).__name__} has positions for {min(tables)} tokens.",
        )
        for name, number in tokens.items()
        if tables and number > min(tables)
    ]
    if problems:
        raise UserError(problems)


def _count_positions(table: torch.nn.Embedding) -> int:
    """The rows of a table without unused first ones: those up to the padding's, or a fixed number."""
    unused = 0 if table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - max(unused, int(getattr(table, "offset", 0)))


def export(model: PreTrainedModel, tokenizer: Path, out: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Writes config.json, safetensors and copies of the tokenizer's files to `out`; the model's files take precedence.
    `weights` are given if those of the model are sharded."""
    model.save_pretrained(out, state_dict=weights)
    for file in sorted(tokenizer.iterdir()):
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def add_to_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Adds fields to the config.json of an exported model, in the format of transformers."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | fields
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _load(
    task_type: TaskModel, folder: Path, config_fields: Mapping[str, Any], **options: Any
) -> tuple[PreTrainedModel, list[str], weights.Fit]:
    """The model; the names of its weights that are missing in the folder or have another shape; and how the others fit
    it."""
    require_no_other_files(folder)
    # Otherwise the model is sharded too if ZeRO-3 has trained in this process.
    unset_hf_deepspeed_config()
    config = without_code(AutoConfig.from_pretrained(folder, **_SAFE, **config_fields))
    for name in config_fields:  # of the task type's own, which from_pretrained drops
        if not hasattr(config, name):
            setattr(config, name, config_fields[name])
    require_class(config, task_type.auto_class, "model")
    generation_settings.require_loadable(folder, task_type.auto_class, "model")
    model, found = getattr(transformers, task_type.auto_class).from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **_SAFE,
        **options,
    )
    assert isinstance(model, PreTrainedModel)
    if task_type.auto_class in generation_settings.GENERATE and model.generation_config is not None:
        generation_settings.unset_unusable(model.generation_config, vocab_size(model))
    return model, weights.missing_weights(found), weights.compare(model, found)
