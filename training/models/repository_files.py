"""Selects the files to download from a model repository."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training.problems import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
    # Tokenizers that exist only in Python:
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "normalizer.json",
    "prophetnet.tokenizer",
    "*.spm",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "word_pronunciation.json",
    "word_shape.json",
)
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
)
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes of transformers without a vocabulary file."""

AS_THE_FILE_SAYS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that use tokenizer.json unchanged. The others build a tokenizer from its vocabulary."""
OVERRULED = ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2")
"""Model types whose tokenizer class transformers fixes, whatever tokenizer_config.json names."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What else tokenizer_config.json may say of a class that takes the file as it is: read, or without effect on the ids.
_UNDERSTOOD = {
    *SPECIAL_TOKENS,
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "max_length",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "padding_side",
    "split_special_tokens",
    "stride",
    "tokenizer_class",
    "truncation_side",
    "truncation_strategy",
}


def part_of(name: str) -> Literal["model", "tokenizer"] | None:
    """The snapshot's folder for a file; None for files that are not downloaded (code, pickled weights, READMEs)."""
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
    # What a vocabulary is called tells less than what is in tokenizer_config.json, which only `need_vocabulary` reads.
    if "tokenizer_config.json" not in names and not any(map(_is_vocabulary, names)):
        lacks.append(f"no tokenizer.json, {_OR_ELSE}")
    if lacks:
        raise UserError(Problem(kind="model", where="model.path", message=f"{where} has {lack}.") for lack in lacks)


def need_model_folder(folder: Path) -> None:
    """Raises UserError with everything that a local model lacks for fine-tuning."""
    if not folder.is_dir():
        message = f"{folder} is not a folder: name the one that holds config.json and model.safetensors."
        raise UserError([Problem(kind="model", where="model.path", message=message)])
    need_parts((path.name for path in folder.iterdir() if path.is_file()), str(folder))


def need_vocabulary(tokenizer: Path, where: str) -> None:
    """Raises UserError if a tokenizer's folder has no vocabulary and its class needs one."""
    if any(_is_vocabulary(path.name) for path in tokenizer.glob("*")):
        return
    named = read_json(tokenizer / "tokenizer_config.json").get("tokenizer_class")
    if named not in WITHOUT_VOCABULARY:
        needs = f"{named} needs a vocabulary" if named else "its tokenizer_config.json names no class that needs none"
        message = f"{where} has no tokenizer.json, {_OR_ELSE} ({needs})."
        raise UserError([Problem(kind="model", where="model.path", message=message)])


_OR_ELSE = "and no vocabulary in any other file: save its tokenizer again with AutoTokenizer and save_pretrained()"


def _is_vocabulary(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in VOCABULARY_FILES)


def uses_tokenizer_json(tokenizer: Path, model: Path) -> bool:
    """Whether tokenizer.json alone, with the few settings that `training.tokenization.encoder` reads, gives
    AutoTokenizer's ids.

    Where not, its class in transformers has a say. `tokenizer` and `model` are the folders of a snapshot. True is
    said only where nothing speaks against it.
    """
    if any((tokenizer / name).is_file() for name in ("special_tokens_map.json", "added_tokens.json")):
        return False
    settings = read_json(tokenizer / "tokenizer_config.json")
    return (
        (tokenizer / "tokenizer.json").is_file()
        and settings.get("tokenizer_class") in AS_THE_FILE_SAYS
        and settings.keys() <= _UNDERSTOOD
        and all(isinstance(settings.get(name), str | None) for name in SPECIAL_TOKENS)
        and read_json(model / "config.json").get("model_type") not in OVERRULED
    )


def chat_template(tokenizer: Path) -> tuple[str, dict[str, str]] | None:
    """The template by which a tokenizer's folder has conversations written, as AutoTokenizer finds it, in a file of its
    own or else in tokenizer_config.json; and what it is told: the special tokens by name. None where there is none."""
    settings = read_json(tokenizer / "tokenizer_config.json")
    text = default_template(settings.get("chat_template"))
    if (tokenizer / CHAT_TEMPLATE).is_file():
        text = (tokenizer / CHAT_TEMPLATE).read_text(encoding="utf-8")
    named = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}
    tokens = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in named.items()}
    return None if text is None else (text, tokens)


def default_template(value: Any) -> str | None:
    """The chat template in a tokenizer's setting; of several named templates, the default one."""
    if isinstance(value, list):  # as older files have them
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def chat_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, Mapping[str, str]] | None:
    """The chat template of a loaded tokenizer, and its special tokens by their names, by which templates write them."""
    text = default_template(tokenizer.chat_template)
    return None if text is None else (text, tokenizer.special_tokens_map)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a repository; empty if there is no such file or no object in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
