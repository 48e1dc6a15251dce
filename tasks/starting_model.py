"""Facts about a base model for `finetune init`, from its files on this machine: tokens of texts, positions, memory.

No weights are loaded. A model of the Hub is on this machine if its snapshot is in the Hub's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from training.jobs import resources
from training.models.repository_files import read_json, require_model_folder
from training.models.weights import read_shapes
from training.problems import UserError
from training.recipe.tables.base_models import BYTES_PER_PARAMETER
from training.tokenization.encoder import FastEncoder, load_fast_encoder

UNLIMITED = 1_000_000
"""More tokens than any text has: tokenizers without a limit have such numbers as theirs."""
_PADDED_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "esm")
"""Model types whose first two positions are no tokens."""
_NAMES: Mapping[str, Sequence[str]] = {
    "width": ("hidden_size", "d_model", "n_embd", "dim"),
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "num_heads", "n_head", "n_heads"),
}
_PROCESS_BYTES = 600_000_000
"""Of Python and its libraries."""
_LAYER_BYTES, _ATTENTION_BYTES, _LOGIT_BYTES = 68, 10, 12
"""Bytes in float32 that training keeps: a layer for each token and unit of the width; a layer for each pair of tokens
and head; an output of a language model for each token and word (after Korthikanti et al., arXiv 2205.05198)."""


@dataclass(frozen=True)
class StartingModel:
    """A base model, as far as its files are on this machine."""

    config: Mapping[str, Any]
    """Of a model here, or of random weights; empty if there is none."""
    folder: Path | None = None
    """Its files here."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StartingModel:
        """The model of a recipe's fields `model.source`, `model.path` and `model.config`. Raises UserError for a folder
        that a run would refuse."""
        if fields["source"] == "scratch":
            return cls(fields["config"])
        folder = Path(fields["path"]).expanduser() if fields["source"] == "folder" else _snapshot(fields["path"])
        if folder is not None and fields["source"] == "folder":
            require_model_folder(folder)
        return cls({} if folder is None else read_json(folder / "config.json"), folder)

    @cached_property
    def encoder(self) -> FastEncoder | None:
        """Its tokenizer, if tokenizer.json is here."""
        if self.folder is None or not (self.folder / "tokenizer.json").is_file():
            return None
        return load_fast_encoder(self.folder, UNLIMITED)

    @property
    def max_length(self) -> int | None:
        """The tokens that it reads at most, by its table of positions or its tokenizer."""
        positions = self._number("max_position_embeddings", "n_positions")
        if self.folder is None:
            return positions or {"bert": 512, "llama": 2048}.get(str(self.config.get("model_type")))
        if self.config.get("model_type") in _PADDED_POSITIONS:
            positions -= 2
        by_tokenizer = read_json(self.folder / "tokenizer_config.json").get("model_max_length")
        limits = [one for one in (positions, by_tokenizer) if isinstance(one, int) and 0 < one < UNLIMITED]
        return min(limits, default=None)

    @property
    def parameters(self) -> int | None:
        """The number of its weights: by the headers of their files, or for random weights about."""
        if self.folder is not None:
            with contextlib.suppress(UserError, OSError, ValueError, KeyError):
                files = {file.name: file for file in self.folder.iterdir()}
                return sum(map(prod, read_shapes(files).values()))
            return None
        return self._size("layers") * 12 * self._size("width") ** 2 + self._words * self._size("width") or None

    def _size(self, name: str) -> int:
        return self._number(*_NAMES[name])

    @property
    def _words(self) -> int:
        return self._number("vocab_size")

    def _number(self, *names: str) -> int:
        """The first of these numbers in the configuration; 0 if it has none."""
        values = (self.config.get(name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    def tokens(self, rows: Sequence[Sequence[str]], *, special: bool) -> list[int] | None:
        """The tokens of each row of texts, with those around them if `special`; None without a tokenizer."""
        if self.encoder is None:
            return None
        lengths = iter(self.encoder.encode_whole([text for row in rows for text in row]).lengths.tolist())
        more = self.encoder.special_tokens(pairs=len(rows[0]) > 1) if special and rows else 0
        return [sum(next(lengths) for _ in row) + more for row in rows]

    def memory_bytes(self, parameters: int, rows: int, length: int, *, writes: bool) -> int | None:
        """About the memory to train all weights by AdamW in float32 on batches of rows; `writes`: it has an output for
        each word. None if its size is unknown."""
        width, layers, heads = map(self._size, _NAMES)
        if not width * layers * heads:
            return None
        per_token = layers * (_LAYER_BYTES * width + _ATTENTION_BYTES * heads * length)
        per_token += _LOGIT_BYTES * self._words if writes else 0
        return _PROCESS_BYTES + parameters * BYTES_PER_PARAMETER + rows * length * per_token


def memory_here() -> int | None:
    """The bytes of main memory that a training may take."""
    return resources.memory_left(1)


def _snapshot(name: str) -> Path | None:
    """The folder of a model of the Hub in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        config = try_to_load_from_cache(name, "config.json")
        return Path(config).parent if isinstance(config, str) else None
    return None
