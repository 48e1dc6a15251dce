"""Mistakes in a model's generation_config.json, which transformers reports late, or by a Python error.

Only settings that end generation or saving are mistakes. Tokens that the model does not have are none: those of the
tokenizer take their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.models.repository_files import read_json
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

FILE = "generation_config.json"
GENERATE = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
"""The classes of transformers whose models generate text."""
UNUSABLE = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("constraints", "force_words_ids", "penalty_alpha", "dola_layers", "stop_strings", "token_healing"),
    *("assistant_early_exit", "prompt_lookup_num_tokens", "is_assistant", "use_mtp"),
    *("num_beam_groups", "diversity_penalty", "low_memory"),
)
"""Settings that change what is returned, or need code or objects that the file does not hold."""

AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Tokens = int | list[int]


class _Settings(BaseModel):
    """Settings and the values that they may have; null is each one's default. Those of sampling are not here: nothing
    is sampled by them."""

    model_config = ConfigDict(extra="ignore", strict=True)

    num_beams: AtLeast1 | None = None
    num_return_sequences: AtLeast1 | None = None
    max_length: int | None = None
    max_new_tokens: AtLeast1 | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    max_time: float | None = None
    no_repeat_ngram_size: AtLeast0 | None = None
    encoder_no_repeat_ngram_size: AtLeast0 | None = None
    do_sample: bool | None = None
    early_stopping: bool | Literal["never"] | None = None
    repetition_penalty: Positive | None = None
    encoder_repetition_penalty: Positive | None = None
    length_penalty: float | None = None
    guidance_scale: float | None = None
    prefill_chunk_size: AtLeast1 | None = None
    exponential_decay_length_penalty: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    bos_token_id: Tokens | None = None
    eos_token_id: Tokens | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: Tokens | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: Tokens | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    bad_words_ids: Annotated[list[list[AtLeast0]], Field(min_length=1)] | None = None


def require_usable(folder: Path, auto_class: str, field: str) -> None:
    """Raises UserError with all mistakes in the file of a model's folder, if the class generates text. `field` is that
    of the recipe which names the model."""
    if auto_class in GENERATE and (problems := list(_find_problems(folder, auto_class, field))):
        raise UserError(problems)


def require_loadable(folder: Path, auto_class: str, field: str) -> None:
    """`require_usable`, and raises UserError for settings that transformers itself cannot load, or that need a GPU
    where there is none."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation import SequenceBiasLogitsProcessor

    require_usable(folder, auto_class, field)
    if auto_class not in GENERATE or not (folder / FILE).exists():
        return
    try:
        settings = GenerationConfig.from_pretrained(folder, local_files_only=True)
        if settings.sequence_bias is not None:
            SequenceBiasLogitsProcessor(settings.sequence_bias)
    except Exception as error:  # of any kind, by the setting
        cause = str(error).rstrip(".")
        message = f"{FILE} cannot be used by transformers ({cause}): correct the file, or choose another model."
        raise UserError.of("model", field, message) from error
    if "offloaded" in (settings.cache_implementation or "") and not torch.cuda.is_available():
        message = f"{FILE} has cache_implementation {settings.cache_implementation!r}, which needs a GPU, and there is "
        message += "none here: correct the file, or choose another model."
        raise UserError.of("model", field, message)


def unset_unusable(settings: GenerationConfig, tokens: int | None) -> None:
    """Unsets what generation cannot use here, and a padding token that the model, with so many tokens, does not have:
    the texts of a batch that end first would continue with it."""
    settings.update(**{name: None for name in UNUSABLE if getattr(settings, name, None)})
    if settings.pad_token_id is not None and tokens is not None and not 0 <= settings.pad_token_id < tokens:
        settings.pad_token_id = None


def _find_problems(folder: Path, auto_class: str, field: str) -> Iterator[Problem]:
    if not (folder / FILE).exists():
        return
    values = read_json(folder / FILE)
    if not values:
        if (folder / FILE).read_text(errors="replace").strip().replace(" ", "") != "{}":
            yield Problem(kind="model", where=field, message=f"{FILE} has no JSON object: correct or remove it.")
        return
    found: dict[str, tuple[Any, list[str]]] = {}
    try:
        _Settings.model_validate(values)
    except ValidationError as error:
        for one in error.errors():
            name = str(one["loc"][0])
            found.setdefault(name, (values[name], []))[1].append(one["msg"].removeprefix("Input should be "))
    beams, number = values.get("num_beams") or 1, values.get("num_return_sequences") or 1
    if not found and number > beams and not values.get("do_sample"):
        found["num_return_sequences"] = number, [f"at most num_beams, {beams}"]
    if values.get("cache_implementation") == "quantized":  # it needs further packages
        found["cache_implementation"] = "quantized", ["'dynamic', 'static' or null"]
    if auto_class == "AutoModelForSeq2SeqLM" and values.get("guidance_scale") not in (None, 1):
        found.setdefault("guidance_scale", (values["guidance_scale"], ["1 or null, because the model has an encoder"]))
    for name, (value, allowed) in found.items():
        message = f"{FILE} has {name} {value!r:.100}, which should be {' or '.join(dict.fromkeys(allowed))}: "
        yield Problem(kind="model", where=field, message=f"{message}correct the file, or choose another model.")
