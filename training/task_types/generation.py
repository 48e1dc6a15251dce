"""How a model writes: options of the task types whose models do, over the settings that a model brings along."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from training.models.repository_files import read_json
from training.recipe.section import ClosedModel

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

FILE = "generation_config.json"
# What transformers refuses to save beside settings by which it does nothing.
_OF_SAMPLING = ("temperature", "top_p", "min_p", "top_h", "typical_p", "top_k", "epsilon_cutoff", "eta_cutoff")
_OF_BEAMS = ("early_stopping", "length_penalty")


class Generation(ClosedModel):
    """The options. Nothing is drawn at random: the same text gets the same answer."""

    num_beams: int = Field(default=1, ge=1)
    """Beginnings of an answer that are pursued side by side; of 1, the likeliest token is always taken."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens that an answer has at most."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """Tokens that it has at least. This and the following are left to the model's own settings by null."""
    length_penalty: float | None = None
    """With beams: above 0 favours long answers, below 0 short ones."""
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    """So many tokens in a row occur once in an answer; 0 for no such limit."""

    @field_validator("min_new_tokens")
    @classmethod
    def _fits(cls, least: int | None, others: ValidationInfo) -> int | None:
        most = others.data.get("max_new_tokens")
        if least is not None and most is not None and least > most:
            raise PydanticCustomError("limits", "more than options.max_new_tokens, {most}", vars())
        return least

    @field_validator("length_penalty")
    @classmethod
    def _has_beams(cls, penalty: float | None, others: ValidationInfo) -> float | None:
        if penalty is not None and others.data.get("num_beams") == 1:
            raise PydanticCustomError("beams", "does nothing without beams: set options.num_beams to more than 1")
        return penalty

    def settings(self) -> dict[str, Any]:
        """Those that are set, as GenerationConfig calls them."""
        asked = self.model_dump(include=set(Generation.model_fields), exclude_none=True)
        return {"do_sample": False, "max_length": None, "num_return_sequences": 1, **asked}

    def of(self, model: PreTrainedModel) -> GenerationConfig:
        """How the model generates: its own settings, and these over them."""
        settings: GenerationConfig = deepcopy(model.generation_config)
        settings.update(**self.settings())
        leave_out_effectless(settings)
        return settings

    def published_files(self, folder: Path) -> dict[str, str]:
        """The file by which whoever loads the exported model in `folder` generates in the same way."""
        settings = {**read_json(folder / FILE), **self.settings()}
        effectless = _effectless(settings)
        told = {name: value for name, value in settings.items() if value is not None and name not in effectless}
        return {FILE: json.dumps(told, indent=2, sort_keys=True) + "\n"}


def leave_out_effectless(settings: GenerationConfig) -> None:
    """Unsets what does nothing beside the others, as many models bring it: changed in anything else, they could not be
    saved."""
    settings.update(**dict.fromkeys(_effectless(settings.to_dict())))


def _effectless(settings: Mapping[str, Any]) -> tuple[str, ...]:
    sampling = () if settings.get("do_sample") is True else _OF_SAMPLING
    return sampling + (() if (settings.get("num_beams") or 1) > 1 else _OF_BEAMS)
