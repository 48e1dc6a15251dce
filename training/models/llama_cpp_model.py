"""GGUF files in llama.cpp, by llama-cpp-python, on the CPU."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from transformers.utils import ModelOutput

CONTEXT = 512
"""The first length of a context in tokens; a longer text gets twice as long a one, until it fits."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _ignore(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """llama.cpp reports each tensor that it loads."""


class LlamaCppModel:
    """A GGUF file that is called like a causal model of transformers: tokens to logits.

    Args:
        file: the GGUF file.
        config: the configuration of the model that it was made from.
        threads: of a forward pass; those of torch by default.
    """

    device = torch.device("cpu")
    runtime = f"llama.cpp ({llama_cpp.__version__} of llama-cpp-python)"

    def __init__(self, file: Path, config: Any, threads: int | None = None) -> None:
        self.config, self._file, self._threads = config, file, threads or torch.get_num_threads()
        self._context = 0
        self._require(CONTEXT)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **others: Any) -> ModelOutput:
        """`logits`, (B, T, V). A position 0 begins a text of its own. Padding on the right needs no mask."""
        starts = torch.zeros_like(input_ids) if position_ids is None else position_ids
        rows = []
        for ids, places in zip(input_ids.tolist(), starts.tolist(), strict=True):
            cuts = [0, *(number for number in range(1, len(ids)) if position_ids is not None and not places[number])]
            texts = (ids[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(ids)], strict=True))
            rows.append(np.concatenate([self._logits(text) for text in texts]))
        return ModelOutput(logits=torch.from_numpy(np.stack(rows)))

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, in which special tokens are read as such."""
        return [int(token) for token in self._model.tokenize(text.encode(), add_bos=False, special=True)]

    def _logits(self, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(T, V) the logits after each token."""
        self._require(len(ids))
        self._model.reset()
        self._model.eval(ids)
        found: np.ndarray[Any, np.dtype[np.float32]] = self._model.scores[: len(ids)].copy()
        return found

    def _require(self, tokens: int) -> None:
        """Loads the model with a context of at least so many tokens."""
        if tokens <= self._context:
            return
        self._context = max(CONTEXT, 1 << (tokens - 1).bit_length())
        llama_cpp.llama_log_set(_ignore, ctypes.c_void_p(0))
        self._model = llama_cpp.Llama(
            str(self._file),
            n_ctx=self._context,
            n_batch=self._context,
            n_ubatch=min(self._context, 512),
            n_gpu_layers=0,
            n_threads=self._threads,
            n_threads_batch=self._threads,
            logits_all=True,
            verbose=False,
        )
        # Its own end fails once the interpreter has begun to end.
        weakref.finalize(self._model, self._model._stack.close)


def quantize(file: Path, out: Path, kind: str) -> None:
    """Writes a GGUF file with weights of fewer bits, `kind` in llama.cpp. Raises RuntimeError if it cannot."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, kind)
    llama_cpp.llama_log_set(_ignore, ctypes.c_void_p(0))
    if llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp cannot make {kind} of {file.name}")
