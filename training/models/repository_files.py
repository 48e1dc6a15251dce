"""The files of a model repository: which are downloaded, what the small ones say, and which are refused."""

from __future__ import annotations

import base64
import errno
import fnmatch
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training.local_files import MOST_BYTES, find_foreign, open_regular, read_whole
from training.problems import Problem, UserError, on_one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MODULES, POOLING = "modules.json", "*_Pooling/config.json"
"""The steps of a model of sentence-transformers, and the settings of one of them: in a snapshot, a file beside the
model, such as 1_Pooling.json."""
PROMPTS, DEFAULT_PROMPT = "config_sentence_transformers.json", "default"
"""The file with prompts, which are put before texts, and the name of the one that is used if none is named."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    MODULES,
    "*_Pooling.json",
)
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
IMAGE_PROCESSOR = "preprocessor_config.json"
"""The settings of an image processor, which stands in the place of a tokenizer."""
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    IMAGE_PROCESSOR,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    PROMPTS,
)
HOME_ROOMS = ("artifacts", "jobs")
"""The rooms of the home with models: a run prints the folder of its own."""
REGISTRY_ROOMS = (*HOME_ROOMS, "mlartifacts")
"""The rooms of the home with registered models."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter of peft, which needs its base model."""
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes of transformers without a vocabulary file."""

TOKENIZER_JSON_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that use tokenizer.json unchanged. The others build a tokenizer from its vocabulary."""
MOST_GROWTH = 1000
"""A tokenizer whose replacements may make a text longer than this many times is refused."""
MOST_SPECIAL_TOKENS = 1000
"""A tokenizer that adds more tokens to a text is refused: a list of a template may name other lists."""
LONGEST_WORD = 1000
"""A word-piece tokenizer that splits longer words is refused: the time grows with the third power of the length."""
OVERRIDDEN = ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2")
"""Model types for which transformers ignores the class in tokenizer_config.json."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Settings of tokenizer_config.json that FastEncoder reads or that do not change the ids.
_KNOWN_SETTINGS = {
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


# Settings by which transformers reads other files than those of the folder by their usual names.
_OTHER_FILES = {
    "config.json": ("configuration_files", "transformers_weights"),
    "tokenizer_config.json": (
        "fast_tokenizer_files",
        "gguf_file",
        "init_inputs",
        "merges",
        "tokenizer_object",
        "vocab",
    ),
}
_PATHS = re.compile(r"(?<!^special_tokens_map)(?<!^tokenizer)_file$")
"""Further settings of tokenizer_config.json: paths, which some classes of tokenizers read. Those that older versions of
transformers wrote there are never read."""


def part_of(name: str) -> Literal["model", "tokenizer"] | None:
    """The snapshot's folder for a file; None for files that are not downloaded (code, pickled weights, READMEs)."""
    if any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES):
        return "model"
    return "tokenizer" if any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER_FILES) else None


def name_of(path: str) -> str:
    """The name in a snapshot of a file of a repository, 1_Pooling.json for 1_Pooling/config.json."""
    return path.replace("/config.json", ".json") if fnmatch.fnmatch(path, POOLING) else path


def has_weights(names: Iterable[str]) -> bool:
    """Whether files with these names hold the weights of a model, and not only those of an adapter."""
    return any(name.endswith(".safetensors") and name != ADAPTER_WEIGHTS for name in names)


def require_files(names: Iterable[str], where: str, *, images: bool = False) -> None:
    """Raises UserError with everything that a repository with these files lacks for fine-tuning, of a model of texts or
    of images. `where` names the repository in messages."""
    names, missing = {name for name in names if "/" not in name}, []
    if ADAPTER_CONFIG in names:
        message = f"{where} has {ADAPTER_CONFIG}: it is an adapter of peft, and training would start without it. "
        message += "Merge it into its base model with merge_and_unload(), and name the folder of save_pretrained()."
        raise UserError.of("model", "model.path", message)
    if "config.json" not in names:
        missing.append("no config.json, so it is not a model that transformers can load")
    if not has_weights(names):
        missing.append(
            "no *.safetensors, and other weight formats may run code when they are read: "
            "save the model again with save_pretrained()"
        )
    # If there is a tokenizer_config.json, its class decides, which `require_vocabulary` checks.
    if images:
        missing += [] if IMAGE_PROCESSOR in names else [NO_IMAGE_PROCESSOR]
    elif "tokenizer_config.json" not in names and not any(map(_is_vocabulary, names)):
        missing.append(f"no tokenizer.json, {_OR_ELSE}")
    if missing:
        raise UserError(Problem(kind="model", where="model.path", message=f"{where} has {part}.") for part in missing)


def require_model_folder(folder: Path, *, images: bool = False) -> None:
    """Raises UserError with everything that a local model of texts or of images lacks for fine-tuning."""
    if not folder.is_dir():
        message = f"{folder} is not a folder: name the one that holds config.json and model.safetensors."
        raise UserError.of("model", "model.path", message)
    files = [path for path in (*folder.iterdir(), *folder.glob(POOLING)) if not path.is_dir()]
    if foreign := find_foreign((str(path) for path in files if part_of(path.name)), HOME_ROOMS, "model"):
        raise UserError(foreign)
    message = "is a link to a file that is gone: copy or download the model again."
    if gone := [path for path in files if part_of(path.name) and not path.exists()]:
        raise UserError(Problem(kind="model", where=str(path), message=message) for path in gone)
    require_no_other_files(folder)
    message = f"has more than {MOST_BYTES >> 20} MiB, and is not the file that it seems: copy or download it again."
    small = (path for path in files if part_of(path.name) and not path.name.endswith(".safetensors"))
    if large := [path for path in small if path.stat().st_size > MOST_BYTES]:
        raise UserError(Problem(kind="model", where=str(path), message=message) for path in large)
    require_files((path.relative_to(folder).as_posix() for path in files), str(folder), images=images)


def require_no_other_files(*folders: Path) -> None:
    """Raises UserError if settings of a model or its tokenizer name files that transformers would read instead of those
    that are checked, copied and part of keys: they may be anywhere on this machine."""
    problems = []
    for path in (folder / name for folder in folders for name in _OTHER_FILES):
        settings = read_json(path)
        if not settings and _has_content(path):
            message = f"{path} is no JSON object: copy or download it again."
            problems.append(Problem(kind="model", where="model.path", message=message))
        found = {name: settings[name] for name in _OTHER_FILES[path.name] if settings.get(name)}
        for name in ("vocab", "merges"):
            if not isinstance(found.get(name), str):  # the vocabulary itself
                found.pop(name, None)
        if path.name == "tokenizer_config.json":
            found |= {
                name: value
                for name, value in settings.items()
                if _PATHS.search(name) and isinstance(value, str) and re.search(r"[/\\]", value)
            }
            if isinstance(sentencepiece := settings.get("sp_model_kwargs"), dict) and sentencepiece.get("model_file"):
                found["sp_model_kwargs"] = sentencepiece
        for name, value in sorted(found.items()):
            message = (
                f"{path} has {name}: {str(value)[:200]!r}, and transformers would read other files than the model's: "
                "remove the setting, or save the model and its tokenizer again with save_pretrained()."
            )
            problems.append(Problem(kind="model", where="model.path", message=message))
    if problems:
        raise UserError(problems)


def require_vocabulary(tokenizer: Path, where: str) -> None:
    """Raises UserError if a tokenizer's folder has no vocabulary and its class needs one."""
    if any(_is_vocabulary(path.name) for path in tokenizer.glob("*")):
        return
    named = read_json(tokenizer / "tokenizer_config.json").get("tokenizer_class")
    if named not in WITHOUT_VOCABULARY:
        needs = f"{named} needs a vocabulary" if named else "its tokenizer_config.json names no class that needs none"
        message = f"{where} has no tokenizer.json, {_OR_ELSE} ({needs})."
        raise UserError.of("model", "model.path", message)


def require_image_processor(folder: Path, where: str) -> None:
    """Raises UserError if the folder has no image processor."""
    if not read_json(folder / IMAGE_PROCESSOR):
        raise UserError.of("model", "model.path", f"{where} has {NO_IMAGE_PROCESSOR}.")


NO_IMAGE_PROCESSOR = (
    f"no {IMAGE_PROCESSOR}, so it does not say how images are prepared: save its processor with AutoImageProcessor and "
    "save_pretrained()"
)
_OR_ELSE = "and no vocabulary in any other file: save its tokenizer again with AutoTokenizer and save_pretrained()"


def _is_vocabulary(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in VOCABULARY_FILES)


@contextmanager
def blame_tokenizer(where: str, failure: str) -> Iterator[None]:
    """Turns the errors of the tokenizers library into a UserError: bare Exception, and panics of Rust, which no `except
    Exception` catches."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        message = f"{failure}: {on_one_line(str(error))[:300]}. Save the tokenizer again, or name another model."
        raise UserError.of("tokens", where, message) from error


def require_bounded(tokenizer: Tokenizer, path: Path) -> None:
    """Raises UserError for a tokenizer whose replacements or special tokens make texts so long that they would fill the
    memory, or which would spend hours on one long word."""
    for part in (tokenizer.normalizer, tokenizer.decoder):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > MOST_GROWTH:
            message = f"its replacements make a text up to {growth:,} times as long, more than {MOST_GROWTH:,} times: "
            raise UserError.of("tokens", str(path), f"{message}it would fill the memory. Name another model.")
    if (added := max(map(tokenizer.num_special_tokens_to_add, (False, True)))) > MOST_SPECIAL_TOKENS:
        message = f"it adds {added:,} special tokens to every text, more than {MOST_SPECIAL_TOKENS:,}: "
        raise UserError.of("tokens", str(path), f"{message}they would fill the memory. Name another model.")
    if (longest := getattr(tokenizer.model, "max_input_chars_per_word", 0)) > LONGEST_WORD:
        message = f"max_input_chars_per_word is {longest:,}, more than {LONGEST_WORD:,}: a text without spaces would "
        raise UserError.of("tokens", str(path), f"{message}take hours. Write 100, as BERT's, or name another model.")


def _growth(part: dict[str, Any]) -> int:
    """A bound of the factor by which a normalizer or a decoder makes a text longer. A pattern may match nothing, in
    front of each character."""
    inner = [*part.get("normalizers", ()), *part.get("decoders", ())]
    if part["type"] == "Precompiled":  # the size of an index, the index, and texts that end with NUL
        content = base64.b64decode(part["precompiled_charsmap"])
        texts = content[4 + int.from_bytes(content[:4], "little") :]
        return max(1, *map(len, texts.split(b"\0")))
    added = {"Replace": "content", "Prepend": "prepend"}.get(part["type"])
    return (1 + len(part[added]) if added else 1) * math.prod(map(_growth, inner))


def uses_tokenizer_json(tokenizer: Path, model: Path) -> bool:
    """Whether tokenizer.json and the settings that training.tokenization.encoder reads surely give AutoTokenizer's ids.
    If not, the tokenizer is loaded by its class in transformers."""
    if any((tokenizer / name).is_file() for name in ("special_tokens_map.json", "added_tokens.json")):
        return False
    settings = read_json(tokenizer / "tokenizer_config.json")
    return (
        (tokenizer / "tokenizer.json").is_file()
        and settings.get("tokenizer_class") in TOKENIZER_JSON_CLASSES
        and settings.keys() <= _KNOWN_SETTINGS
        and all(isinstance(settings.get(name), str | None) for name in SPECIAL_TOKENS)
        and read_json(model / "config.json").get("model_type") not in OVERRIDDEN
    )


def chat_template(tokenizer: Path) -> tuple[str, dict[str, str]] | None:
    """The chat template of a tokenizer's folder, from its file or else from tokenizer_config.json, and the special
    tokens by name; None without a template. Raises UserError for a file that is no text."""
    settings = read_json(tokenizer / "tokenizer_config.json")
    text = default_template(settings.get("chat_template"))
    if (file := tokenizer / CHAT_TEMPLATE).is_file():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            message = "is not UTF-8 text: save it as UTF-8, or copy or download the model again."
            raise UserError.of("model", str(file), message) from None
    return None if text is None else (text, special_tokens(settings))


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json by name, such as eos_token. Older files have an object for each."""
    named = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}
    return {name: str(token.get("content")) if isinstance(token, dict) else str(token) for name, token in named.items()}


def default_template(value: Any) -> str | None:
    """The chat template in a tokenizer's setting; of several named templates, the default one."""
    if isinstance(value, list):  # in older files
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def chat_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, Mapping[str, str]] | None:
    """The chat template of a loaded tokenizer, and its special tokens by name; None without a template."""
    text = default_template(tokenizer.chat_template)
    return None if text is None else (text, tokenizer.special_tokens_map)


def text_prompts(tokenizer: Path) -> dict[str, str]:
    """The prompts of sentence-transformers in a tokenizer's folder, by name; DEFAULT_PROMPT for all texts, if any."""
    settings = read_json(tokenizer / PROMPTS)
    if not isinstance(prompts := settings.get("prompts"), dict):
        return {}
    usual = prompts.get(str(settings.get("default_prompt_name")))
    return {name: str(text) for name, text in {**prompts, DEFAULT_PROMPT: usual}.items() if text}


def _has_content(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return read_whole(file).strip() not in (b"", b"{}")
    except OSError as error:
        return error.errno == errno.EFBIG


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a repository; empty if there is no such file or no object in it."""
    value = _read(path)
    return value if isinstance(value, dict) else {}


def labels_of_config(config: Mapping[str, Any]) -> list[str]:
    """The names of the labels in a config.json, in the order of the outputs; empty if it names none."""
    named = config.get("id2label")
    if not isinstance(named, dict) or not all(str(number).isdecimal() for number in named):
        return []
    return [str(named[number]) for number in sorted(named, key=int)]


def dimensions_of_config(config: Mapping[str, Any]) -> int | None:
    """The dimensions of a model's embeddings by its config.json; None if it has another name for them."""
    of_text = config.get("text_config")
    found = (of_text if isinstance(of_text, dict) else config).get("hidden_size")
    return found if isinstance(found, int) else None


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the list of a file of a repository; empty if there is no such file or no list in it."""
    value = _read(path)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _read(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            return json.loads(read_whole(file).decode())
    except (OSError, ValueError, RecursionError):  # the last for brackets in brackets
        return None
