"""Vocabularies of GGUF files: tokenizers as llama.cpp has them.

llama.cpp splits texts into words by a rule that it knows by name, and joins the bytes of each word by the merges of the
file. A tokenizer whose rule it does not know would read other tokens than the model was trained on, without an error,
so it is refused.

Source: llama.cpp, src/llama-vocab.cpp; the names are those of its converter, conversion/base.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.models.repository_files import read_json
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

TOKENIZER = "tokenizer.json"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES: Mapping[tuple[str, bool], str] = {
    (_WORDS + r"\p{N}{1,3}" + _MARKS, True): "llama-bpe",
    (_WORDS + r"\p{N}{1,3}" + _MARKS, False): "dbrx",
    (_WORDS + r"\p{N}" + _MARKS, False): "qwen2",
    ("digits", False): "smollm",
    ("", False): "gpt-2",
}
"""llama.cpp's name of a rule, by the expression that splits words and by `ignore_merges`. `digits`: each digit is a
word, and the rest is split as in GPT-2, whose rule is the empty one."""
KNOWN = "Llama 3, Qwen2, Qwen3, SmolLM and GPT-2"
"""Whose tokenizers have these rules."""


def find_problems(folder: Path) -> Iterator[Problem]:
    """The problems of a folder's tokenizer that llama.cpp does not have."""
    found = read_json(folder / TOKENIZER)
    yield from map(_problem, _misfits(found) if found else [f"has no {TOKENIZER}"])


def _problem(reason: str) -> Problem:
    message = f"GGUF is for tokenizers that llama.cpp has, those of {KNOWN}, and this one {reason}: leave it out."
    return Problem(kind="release", where="release.exports", message=message)


def _misfits(found: Mapping[str, Any]) -> Iterator[str]:
    model = found.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "SentencePiece's BPE" if model.get("byte_fallback") else model.get("type")
        yield f"is of the type {kind}, not byte-level BPE"
        return
    if _rule(found) is None:
        yield "splits texts by a rule that llama.cpp has no name for"
    if (found.get("normalizer") or {}).get("type", "NFC") != "NFC":
        yield f"normalizes texts ({found['normalizer']['type']})"
    if affix := model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        yield f"marks parts of words by {affix!r}"
    if absent := [letter for letter in _byte_letters() if letter not in model.get("vocab", {})]:
        yield f"lacks {len(absent)} of the 256 bytes"
    for token in found.get("added_tokens") or ():
        if any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            yield f"takes spaces away beside the token {token['content']!r}"
            break


def _byte_letters() -> list[str]:
    """The letters that stand for bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _rule(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of the rule by which a tokenizer.json splits texts; None if it has none."""
    splitting = tokenizer.get("pre_tokenizer") or {}
    steps = splitting.get("pretokenizers", [splitting])
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True) or len(before) > 1:
        return None
    ignores_merges = bool((tokenizer.get("model") or {}).get("ignore_merges"))
    if last.get("use_regex", True):
        if not before:
            return RULES.get(("", ignores_merges))
        is_digits = before[0].get("type") == "Digits" and before[0].get("individual_digits")
        return RULES.get(("digits", ignores_merges)) if is_digits else None
    if not before or before[0].get("type") != "Split":
        return None
    step = before[0]
    if (step.get("behavior"), bool(step.get("invert"))) not in (("Isolated", False), ("Removed", True)):
        return None
    return RULES.get((step["pattern"].get("Regex", ""), ignores_merges)) if step["pattern"].get("Regex") else None


def write(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: list[int]) -> None:
    """Writes the vocabulary of a tokenizer without `find_problems`. `ends` are the tokens at which the model stops
    generating; `vocab_size` that of the model. Raises UserError for a tokenizer that has more tokens than the model, or
    adds others to a text than bos and eos."""
    import gguf

    found = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in found["added_tokens"]}
    by_id = {number: text for text, number in found["model"]["vocab"].items()}
    reasons = [*_misfits(found)]  # its class may have changed what the file says
    if (last := max([*by_id, *added])) >= vocab_size:
        text = added[last]["content"] if last in added else by_id[last]
        reasons.append(f"has more tokens than the model, {text!r} as number {last} beside {vocab_size}")
    if reasons:
        raise UserError(map(_problem, reasons))
    tokens, kinds = [], []
    for number in range(vocab_size):
        kind = gguf.TokenType.NORMAL
        if number in added:
            kind = gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED
        elif number not in by_id:
            kind = gguf.TokenType.UNUSED
        tokens.append(added[number]["content"] if number in added else by_id.get(number, f"[PAD{number}]"))
        kinds.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(_rule(found)))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in found["model"]["merges"]]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    begin, end = _edges(tokenizer)
    writer.add_add_bos_token(begin)
    writer.add_add_eos_token(end)
    numbers = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    numbers["eot"] = next((token for token in ends if token != tokenizer.eos_token_id), None)
    for name, number in numbers.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def _edges(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the tokenizer adds its bos token before a text, and its eos token after it."""
    ids, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    begin, end = ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id
    if ids != [tokenizer.bos_token_id] * begin + plain + [tokenizer.eos_token_id] * end:
        raise UserError([_problem("adds other tokens to a text than bos before it and eos after it")])
    return begin, end
