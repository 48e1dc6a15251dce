"""Embeddings of texts from those of their tokens, and the files by which sentence-transformers does the same.

A folder of sentence-transformers names its steps in modules.json: a transformer, a pooling of its outputs, and perhaps
their normalization. config_sentence_transformers.json has the prompts, which are put before texts. A model that this
project has trained has its pooling in config.json too, in the field CONFIG.

M texts, T tokens, D dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from training.models.repository_files import DEFAULT_PROMPT, MODULES, name_of, read_json, read_json_list
from training.problems import UserError

if TYPE_CHECKING:
    import torch

Mode = Literal["mean", "cls", "lasttoken"]
CONFIG = "sentence_embedding"
"""The field of a model's config with a Pooling."""
_OLDER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The fields of Pooling's configuration before sentence-transformers 6."""


@dataclass(frozen=True)
class Pooling:
    """How the embedding of a text is made of those of its tokens."""

    pooling: Mode = "mean"
    normalize: bool = False

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(M, D) float32, of the last hidden states of the tokens, (M, T, D), and the attention mask, (M, T)."""
        import torch

        hidden, lines = hidden.float(), torch.arange(len(hidden), device=hidden.device)
        if self.pooling == "mean":
            weights = mask[:, :, None].float()
            pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        elif self.pooling == "cls":
            pooled = hidden[lines, mask.int().argmax(dim=1)]
        else:
            pooled = hidden[lines, mask.shape[1] - 1 - mask.int().flip(1).argmax(dim=1)]
        return torch.nn.functional.normalize(pooled, dim=1) if self.normalize else pooled


def pooling_of(config: Any, folder: Path, pooling: Mode | None = None, normalize: bool | None = None) -> Pooling:
    """The pooling of a model: as given, else by its config, else by the files of its folder, else the mean.

    Raises UserError if the folder names a step that is not known.
    """
    stored = getattr(config, CONFIG, None)
    if isinstance(stored, Mapping):
        found = _of_config(stored)
    else:
        steps = {str(step.get("type", "")).rpartition(".")[2]: step for step in read_json_list(folder / MODULES)}
        if unknown := steps.keys() - {"Transformer", "Pooling", "Normalize"}:
            message = f"{MODULES} has the step {min(unknown)}, and Transformer, Pooling and Normalize are known: "
            raise UserError.of("model", "model.path", f"{message}choose a base model without it.")
        name = name_of(f"{steps.get('Pooling', {}).get('path')}/config.json")
        settings = {} if "/" in name else read_json(folder / name)  # other folders are no part of the model
        mode = _mode(settings, name) if "Pooling" in steps and pooling is None else "mean"
        found = Pooling(mode, "Normalize" in steps)
    return Pooling(pooling or found.pooling, found.normalize if normalize is None else normalize)


def _of_config(stored: Mapping[str, Any]) -> Pooling:
    mode, normalize = (stored.get(name, getattr(Pooling, name)) for name in ("pooling", "normalize"))
    if mode not in get_args(Mode) or not isinstance(normalize, bool) or len(stored) > 2:
        message = f"config.json has {CONFIG}: {dict(stored)!r:.200}. It has pooling, one of "
        message += f"{', '.join(get_args(Mode))}, and normalize: correct it, or name another model."
        raise UserError.of("model", "model.path", message)
    return Pooling(mode, normalize)


def _mode(settings: Mapping[str, Any], where: str) -> Mode:
    named = settings.get("pooling_mode") or [mode for field, mode in _OLDER_MODES.items() if settings.get(field)]
    modes = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if len(modes) != 1 or modes[0] not in get_args(Mode):
        message = f"{where} has the pooling {' and '.join(map(str, modes)) or None}: set one of "
        raise UserError.of("model", "options.pooling", f"{message}{', '.join(get_args(Mode))}.")
    if not settings.get("include_prompt", True):
        message = f"{where} leaves prompts out of the pooling (include_prompt: false): choose another base model."
        raise UserError.of("model", "model.path", message)
    return cast(Mode, modes[0])


def sentence_transformers_files(pooling: Pooling, dimensions: int, max_length: int) -> dict[str, str]:
    """The files, by name, with which SentenceTransformer loads a folder of transformers with this pooling, without the
    prompts.

    They have the form of version 2, which all later versions read.
    """
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * pooling.normalize)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(steps)
    ]
    modes = {field: mode == pooling.pooling for field, mode in _OLDER_MODES.items()}
    files: dict[str, Any] = {
        MODULES: modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": dimensions, **modes, "include_prompt": True},
    }
    return {name: _as_json(content) for name, content in files.items()}


def prompts_file(prompts: Mapping[str, str]) -> str:
    """The content of PROMPTS with these prompts by name."""
    usual = DEFAULT_PROMPT if prompts.get(DEFAULT_PROMPT) else None
    return _as_json({"prompts": dict(prompts), "default_prompt_name": usual, "similarity_fn_name": "cosine"})


def _as_json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"
