"""Tiny models of today's architectures, made from configurations. `make matrix` trains, kills, resumes, exports and
reloads each of them.

Another architecture is an entry of ARCHITECTURES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 120,
}
POSITIONS = {"max_position_embeddings": 64}
GROUPED = {**SIZE, **POSITIONS, "num_key_value_heads": 1}
"""Of decoders whose queries share keys and values."""
DIMENSIONS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 120,
    "max_position_embeddings": 160,
}


@dataclass(frozen=True)
class Architecture:
    """A tiny model, and the task type that it is trained for."""

    task: str
    config: dict[str, Any]
    known: str
    """Models of this architecture."""


GENERATES, CLASSIFIES, TRANSLATES = "causal-lm", "sequence-classification", "seq2seq"

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3": Architecture(GENERATES, {**GROUPED, "head_dim": 16}, "Qwen3"),
    "llama": Architecture(GENERATES, GROUPED, "Llama 3, SmolLM2, TinyLlama"),
    "mistral": Architecture(GENERATES, {**GROUPED, "sliding_window": 16}, "Mistral"),
    "gemma3_text": Architecture(
        GENERATES, {**GROUPED, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}, "Gemma 3"
    ),
    "phi3": Architecture(GENERATES, GROUPED, "Phi-3, Phi-4"),
    "olmo2": Architecture(GENERATES, GROUPED, "OLMo 2"),
    "smollm3": Architecture(GENERATES, GROUPED, "SmolLM3"),
    "modernbert": Architecture(CLASSIFIES, {**SIZE, **POSITIONS, "local_attention": 16}, "ModernBERT"),
    "deberta-v2": Architecture(
        CLASSIFIES,
        {**SIZE, **POSITIONS, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
        "DeBERTa-v2, DeBERTa-v3",
    ),
    "xlm-roberta": Architecture(CLASSIFIES, {**SIZE, "max_position_embeddings": 80}, "XLM-R, multilingual E5"),
    "electra": Architecture(CLASSIFIES, {**SIZE, **POSITIONS, "embedding_size": 16}, "ELECTRA"),
    "distilbert": Architecture(
        CLASSIFIES,
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 120, **POSITIONS},
        "DistilBERT",
    ),
    "t5": Architecture(
        TRANSLATES,
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 120},
        "T5, FLAN-T5",
    ),
    "bart": Architecture(TRANSLATES, DIMENSIONS, "BART"),
    "mbart": Architecture(TRANSLATES, DIMENSIONS, "mBART, mBART-50"),
}
