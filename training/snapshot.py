"""Which files of a model repository are taken, and into which part of the snapshot."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Literal

from training.problems import Problem, UserError

MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
)


def part_of(name: str) -> Literal["model", "tokenizer"] | None:
    """The snapshot's folder that a file goes into; None for what is not taken (code, pickled weights, read-mes)."""
    if any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES):
        return "model"
    return "tokenizer" if any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER_FILES) else None


def need_parts(names: Iterable[str], where: str) -> None:
    """Raises UserError with all that a repository of these files, those in folders apart, lacks to be fine-tuned.

    `where` names the repository at the start of a message.
    """
    names, lacks = {name for name in names if "/" not in name}, []
    if "config.json" not in names:
        lacks.append("no config.json, so it is not a model that transformers can load")
    if not any(name.endswith(".safetensors") for name in names):
        lacks.append(
            "no *.safetensors, and other weight formats may run code when they are read: "
            "save the model again with save_pretrained()"
        )
    if "tokenizer.json" not in names:
        lacks.append("no tokenizer.json: save its tokenizer again with AutoTokenizer and save_pretrained()")
    if lacks:
        raise UserError(Problem(kind="model", where="model.path", message=f"{where} has {lack}.") for lack in lacks)
