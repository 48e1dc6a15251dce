"""Base models that `finetune init` offers: three sizes for each task type, English or multilingual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "medium", "large"]
SIZES: tuple[Size, ...] = ("small", "medium", "large")
BYTES_PER_PARAMETER = 16
"""Weights, gradients and two moments of AdamW in float32. Activations are added to them."""


@dataclass(frozen=True)
class OfferedModel:
    """A repository of the Hub, as its model card describes it."""

    path: str
    parameters: int
    license: str
    languages: str = ""
    """Empty for models of images."""
    max_length: int = 1
    """Tokens that it reads at most."""

    @property
    def memory_gb(self) -> float:
        """Memory to train all of its weights, without activations, in gigabytes."""
        return self.parameters * BYTES_PER_PARAMETER / 1e9


_APACHE, _MIT = "apache-2.0", "mit"
_ENGLISH, _FIFTY, _MANY = "English", "about 50 languages", "about 100 languages"


def _sizes(small: OfferedModel, medium: OfferedModel, large: OfferedModel) -> dict[Size, OfferedModel]:
    return dict(zip(SIZES, (small, medium, large), strict=True))


_ENCODERS = {
    True: _sizes(
        OfferedModel("distilbert/distilbert-base-uncased", 66_000_000, _APACHE, _ENGLISH, 512),
        OfferedModel("answerdotai/ModernBERT-base", 149_000_000, _APACHE, _ENGLISH, 8192),
        OfferedModel("answerdotai/ModernBERT-large", 395_000_000, _APACHE, _ENGLISH, 8192),
    ),
    False: _sizes(
        OfferedModel("distilbert/distilbert-base-multilingual-cased", 135_000_000, _APACHE, _MANY, 512),
        OfferedModel("FacebookAI/xlm-roberta-base", 278_000_000, _MIT, _MANY, 512),
        OfferedModel("FacebookAI/xlm-roberta-large", 560_000_000, _MIT, _MANY, 512),
    ),
}
_CASED_ENCODERS = {
    True: _sizes(
        OfferedModel("distilbert/distilbert-base-cased", 65_000_000, _APACHE, _ENGLISH, 512),
        OfferedModel("google-bert/bert-base-cased", 108_000_000, _APACHE, _ENGLISH, 512),
        OfferedModel("google-bert/bert-large-cased", 334_000_000, _APACHE, _ENGLISH, 512),
    ),
    False: _ENCODERS[False],
}
_DECODERS = {
    True: _sizes(
        OfferedModel("HuggingFaceTB/SmolLM2-135M", 135_000_000, _APACHE, _ENGLISH, 8192),
        OfferedModel("HuggingFaceTB/SmolLM2-360M", 362_000_000, _APACHE, _ENGLISH, 8192),
        OfferedModel("HuggingFaceTB/SmolLM2-1.7B", 1_711_000_000, _APACHE, _ENGLISH, 8192),
    ),
    False: _sizes(
        OfferedModel("Qwen/Qwen3-0.6B-Base", 596_000_000, _APACHE, _MANY, 32768),
        OfferedModel("Qwen/Qwen3-1.7B-Base", 1_721_000_000, _APACHE, _MANY, 32768),
        OfferedModel("Qwen/Qwen3-4B-Base", 4_022_000_000, _APACHE, _MANY, 32768),
    ),
}
_CHAT_MODELS = {
    True: _sizes(
        OfferedModel("HuggingFaceTB/SmolLM2-135M-Instruct", 135_000_000, _APACHE, _ENGLISH, 8192),
        OfferedModel("HuggingFaceTB/SmolLM2-360M-Instruct", 362_000_000, _APACHE, _ENGLISH, 8192),
        OfferedModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_000_000, _APACHE, _ENGLISH, 8192),
    ),
    # Their templates write earlier turns as they write the last one, and tools; that of Qwen3 does not.
    False: _sizes(
        OfferedModel("Qwen/Qwen2.5-0.5B-Instruct", 494_000_000, _APACHE, "29 languages", 32768),
        OfferedModel("Qwen/Qwen2.5-1.5B-Instruct", 1_544_000_000, _APACHE, "29 languages", 32768),
        OfferedModel("Qwen/Qwen3-4B-Instruct-2507", 4_022_000_000, _APACHE, _MANY, 262144),
    ),
}
_ENCODER_DECODERS = {
    True: _sizes(
        OfferedModel("google/flan-t5-small", 77_000_000, _APACHE, "English, some French, German and Romanian", 512),
        OfferedModel("google/flan-t5-base", 248_000_000, _APACHE, "English, some French, German and Romanian", 512),
        OfferedModel("google/flan-t5-large", 783_000_000, _APACHE, "English, some French, German and Romanian", 512),
    ),
    False: _sizes(
        OfferedModel("google/mt5-small", 300_000_000, _APACHE, "101 languages", 1024),
        OfferedModel("google/mt5-base", 582_000_000, _APACHE, "101 languages", 1024),
        OfferedModel("google/mt5-large", 1_230_000_000, _APACHE, "101 languages", 1024),
    ),
}
_SENTENCE_TRANSFORMERS = {
    True: _sizes(
        OfferedModel("sentence-transformers/all-MiniLM-L6-v2", 23_000_000, _APACHE, _ENGLISH, 512),
        OfferedModel("sentence-transformers/all-mpnet-base-v2", 109_000_000, _APACHE, _ENGLISH, 512),
        OfferedModel("BAAI/bge-large-en-v1.5", 335_000_000, _MIT, _ENGLISH, 512),
    ),
    False: _sizes(
        OfferedModel("sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", 118_000_000, _APACHE, _FIFTY, 512),
        OfferedModel("sentence-transformers/paraphrase-multilingual-mpnet-base-v2", 278_000_000, _APACHE, _FIFTY, 512),
        OfferedModel("BAAI/bge-m3", 568_000_000, _MIT, _MANY, 8192),
    ),
}
_VISION_MODELS = _sizes(
    OfferedModel("facebook/deit-small-patch16-224", 22_000_000, _APACHE),
    OfferedModel("google/vit-base-patch16-224-in21k", 86_000_000, _APACHE),
    OfferedModel("google/vit-large-patch16-224-in21k", 304_000_000, _APACHE),
)
IMAGE_TASKS = ("image-classification", "image-multi-label-classification", "image-regression")
_BY_TASK = {
    **dict.fromkeys(IMAGE_TASKS, dict.fromkeys((True, False), _VISION_MODELS)),
    **dict.fromkeys(("embedding", "sentence-similarity"), _SENTENCE_TRANSFORMERS),
    "token-classification": _CASED_ENCODERS,
    "causal-lm": _DECODERS,
    "seq2seq": _ENCODER_DECODERS,
    **dict.fromkeys(("sft", "preference", "kto", "reward-modeling"), _CHAT_MODELS),
}


def base_models(task: str, *, english: bool) -> dict[Size, OfferedModel]:
    """The models offered for a task type; encoders for those that are not in the table."""
    return _BY_TASK.get(task, _ENCODERS)[english]
