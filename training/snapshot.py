"""Which files of a model repository are taken, and into which part of the snapshot."""

from __future__ import annotations

import fnmatch
from typing import Literal

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


def missing_parts(names: set[str]) -> list[str]:
    """What a repository with these files lacks to be fine-tuned, each worded to follow "it has"."""
    lacks = []
    if "config.json" not in names:
        lacks.append("no config.json, so it is not a model that transformers can load")
    if not any(name.endswith(".safetensors") for name in names):
        lacks.append(
            "no *.safetensors, and other weight formats may run code when they are read: "
            "save the model again with save_pretrained()"
        )
    if "tokenizer.json" not in names:
        lacks.append("no tokenizer.json: save its tokenizer again with AutoTokenizer and save_pretrained()")
    return lacks
