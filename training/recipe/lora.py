"""What a recipe says of LoRA: the section `training.lora`, under the names of peft's LoraConfig."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from training.recipe.error_messages import LIST, WORD
from training.recipe.section import Section, Text

AllOrNames = Annotated[
    Annotated[Literal["all-linear"], Tag(WORD)] | Annotated[list[Text], Field(min_length=1), Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else WORD),
]


class Lora(Section):
    """Low-rank adapters: what is trained in place of the model's own weights. Names and meanings are those of peft's
    LoraConfig, and so are the defaults."""

    r: int = Field(default=8, ge=1)
    """The rank: how many columns the one matrix beside a layer has, and rows the other."""
    lora_alpha: int = Field(default=8, ge=1)
    """What the two add to the layer is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """The share of their input that is dropped while training."""
    target_modules: AllOrNames | None = None
    """The linear layers that get them: the ends of their names, such as [q_proj, v_proj], or all-linear (null: those
    that peft has for this type of model, and for one that it does not know, all)."""
    modules_to_save: list[Text] | None = Field(default=None, min_length=1)
    """Layers that are trained whole beside them, by the ends of their names. Those whose weights are drawn anew, such
    as the head of a classifier, always are."""
    use_rslora: bool = False
    """Whether lora_alpha / √r takes the place of lora_alpha / r, which keeps large ranks from learning slowly."""
    use_dora: bool = False
    """Whether each layer's length is trained apart from its direction (DoRA): more to compute, and often better for
    small ranks."""
    quantization: Literal["nf4"] | None = None
    """nf4: the model's own linear layers are held in 4 bits while training (QLoRA), by bitsandbytes on an NVIDIA GPU.
    What is exported is the model as it came, in float32, with what was learnt."""


def packages_of(lora: Lora | None) -> list[str]:
    """The packages that it needs beyond those of this project."""
    if lora is None:
        return []
    return ["peft"] if lora.quantization is None else ["peft", "bitsandbytes"]
