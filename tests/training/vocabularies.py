"""Tiny tokenizers of every sort, trained on a few sentences, and model repositories that hold them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.made import NO_WEIGHTS

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Fünf Äpfel — and naïve café tokens, 123 times over the moon!",
    "short",
    "[SEP] <s> <|im_end|> inside a text are special tokens, and 日本語 is not known at all",
    "  a much longer text about Foxes and dogs and\tmoons and apples  and cafés " * 3,
]
PAIRS = list(reversed(TEXTS))


def word_pieces(lowercase: bool = True) -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def byte_pairs(*special: str) -> Tokenizer:
    """On the level of bytes, as those of GPT-2 and of most that came after it; without a post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(tokenizer, trainer)
    return tokenizer


def roberta() -> Tokenizer:
    """Byte pairs between special tokens, two between the texts of a pair."""
    tokenizer = byte_pairs("<s>", "<pad>", "</s>")
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def unigram() -> Tokenizer:
    """As SentencePiece makes them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    _train(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def chat(bos: bool = False) -> Tokenizer:
    """As a chat model's: nothing around a text, or one token before it."""
    tokenizer = byte_pairs("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    if bos:
        start = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A <|im_start|>:1 $B:1", special_tokens=[("<|im_start|>", 1)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    tokenizer.train_from_iterator(TEXTS, trainer)


WORD_PIECES = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
CHAT = {
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "padding_side": "left",
    "chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
}
ROBERTA = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}

FROM_TOKENIZER_JSON: dict[str, tuple[str, Callable[[], Tokenizer], dict[str, Any]]] = {
    "word pieces": ("bert", word_pieces, WORD_PIECES),
    "byte pairs": ("roberta", roberta, ROBERTA),
    "unigram": ("xlm-roberta", unigram, {**ROBERTA, "unk_token": "<unk>"}),
    "chat": ("llama", chat, CHAT),
    "chat, a token first": ("mistral", lambda: chat(bos=True), {**CHAT, "bos_token": "<|im_start|>"}),
    "special tokens in texts": ("bert", word_pieces, {**WORD_PIECES, "split_special_tokens": True}),
    "tokens that the file lacks": ("bert", word_pieces, {**WORD_PIECES, "mask_token": "quick", "bos_token": "<new>"}),
}
"""Tokenizers that follow tokenizer.json: the type of their model, the tokenizer, its settings."""


def save_repository(
    folder: Path, model_type: str, tokenizer: Tokenizer | None, settings: dict[str, Any], **files: str
) -> Path:
    """A model repository without weights: its configuration, and the tokenizer's files in the format of the current
    transformers; `settings` go into tokenizer_config.json, and each of `files` is a file (`merges_txt=...`)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "model.safetensors").write_bytes(NO_WEIGHTS)
    settings = {"tokenizer_class": "TokenizersBackend", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, text in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text(text)
    return folder


def snapshot(repository: Path) -> tuple[Path, Path]:
    """The folders of tokenizer and model, apart as the store has them."""
    folders = repository.with_name("tokenizer"), repository.with_name("model")
    for folder in folders:
        shutil.copytree(repository, folder)
    (folders[0] / "config.json").unlink()
    return folders
