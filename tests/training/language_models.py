"""Tiny language models with byte-level tokenizers, as their families have them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES: dict[str, tuple[str, bool]] = {
    "llama": (r"\p{N}{1,3}", True),
    "dbrx": (r"\p{N}{1,3}", False),
    "qwen2": (r"\p{N}", False),
    "smollm": ("digits", False),
    "gpt2": ("", False),
}
"""The numbers that are words of a family's tokenizer, and whether it ignores merges."""
SIZE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZE |= {"intermediate_size": 128, "max_position_embeddings": 128, "head_dim": 32}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
NAMES, VERBS = ("Anna", "Boris", "the old cat", "Zoë", "nobody"), ("sees", "counts", "paints", "doesn't want")
THINGS = ("1 red apple", "23 boats", "4,567 stars", "a naïve map", "两只 猫", "x = [0, 1];", "the sea…")


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of few words, numbers, accents, Chinese, code and line breaks."""
    draw = random.Random(seed)
    return [
        f"{draw.choice(NAMES)} {draw.choice(VERBS)} {draw.choice(THINGS)}{draw.choice(('.', '!', chr(10), '  —'))}"
        f" {draw.choice(NAMES)} {draw.choice(VERBS)} {draw.choice(THINGS)}."
        for _ in range(count)
    ]


def make_tokenizer(folder: Path, family: str = "llama", vocab_size: int = 400) -> Any:
    """A byte-level BPE tokenizer that splits texts as the family's does, saved in the folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    numbers, ignores_merges = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    if numbers in ("digits", ""):
        split, is_gpt = pre_tokenizers.Digits(individual_digits=True), True
    else:
        split, is_gpt = pre_tokenizers.Split(Regex(f"{WORDS}{numbers}{MARKS}"), "isolated"), False
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters]) if numbers else letters
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(300), trainer)
    named: dict[str, Any] = {"eos_token": special[1], "pad_token": special[1]}
    if family == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", pair=f"{special[0]} $A {special[0]} $B", special_tokens=[(special[0], 0)]
        )
        named["bos_token"] = special[0]
    elif family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        named["unk_token"] = special[1]  # otherwise its class adds <|endoftext|>, which theirs have
    loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    loaded.chat_template = TEMPLATE
    loaded.save_pretrained(folder)
    return loaded


def make_model(folder: Path, model_type: str, steps: int = 60, family: str = "", **config: Any) -> Any:
    """A model that was trained on sentences for some steps, saved in the folder with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer(folder, family or ("llama" if model_type == "llama" else "qwen2"))
    named = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        network = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{**SIZE, "vocab_size": len(tokenizer), **named, **config})
        )
    rows = tokenizer(sentences(256, seed=1), padding=True, return_tensors="pt")
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for step in range(steps):
        part = slice(step % 8 * 32, step % 8 * 32 + 32)
        loss = network(input_ids=rows.input_ids[part], labels=labels[part]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval().save_pretrained(folder)
    return network
