"""Rules of a recipe whose rows have images: fields that are for texts."""

from __future__ import annotations

from collections.abc import Iterator

from training.recipe.rules.column_rules import task_type_of
from training.recipe.rules.rule import Rule, WrittenRecipe

_TOKENS = "is for texts, which are cut into tokens"
OF_TEXTS = {
    "tokens.max_length": _TOKENS,
    "model.chat_template": "is for conversations",
    "data.corrections": "recognises rows by their texts",
    "release.gate.must_hold": "is for rows of texts",
    "training.lora": "adds adapters to the layers of language models",
    "training.use_liger_kernel": "has kernels for language models",
}
"""Fields that images do not have, each with the reason."""
JITTERED = ("brightness", "contrast", "saturation", "hue")
CHECKS_OF_TEXTS = ("truncated", "refused_by_template", "garbled_text", "long_text")


def _of_texts(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields for texts have no effect on images, or none that is known."""
    if not task_type_of(written).reads_images():
        return
    for name, reason in OF_TEXTS.items():
        section, _, field = name.rpartition(".")
        if written.is_written(name) and written[name] != written.fields(section)[field].get_default():
            yield name, f"{reason}, and task {written['task']} has images: leave it out."
    for name in CHECKS_OF_TEXTS:
        if name in written["data.checks"]:
            yield f"data.checks.{name}", f"is a check of texts, and task {written['task']} has images: leave it out."
    if (unit := written["data.weight_by"]) != "rows":
        yield "data.weight_by", f"{unit!r} is for texts, and task {written['task']} has images: set it to rows."


def _augment(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Augmentation changes images, each field something, within limits."""
    name = "training.augment"
    if written[name] is None:
        return
    if not task_type_of(written).reads_images():
        yield name, f"changes images, and task {written['task']} has none: leave it out."
        return
    given = [step for step in written.fields(name) if written[f"{name}.{step}"] is not None]
    if not given:
        yield name, "changes nothing: name a change, such as `RandomHorizontalFlip: {}`, or leave it out."
    if {"RandomCrop", "RandomResizedCrop"} <= {*given}:
        yield f"{name}.RandomCrop", "does what RandomResizedCrop does too: leave one of them out."
    if "ColorJitter" in given and not any(written[f"{name}.ColorJitter.{one}"] for one in JITTERED):
        yield f"{name}.ColorJitter", f"changes nothing: set one of {', '.join(JITTERED)}, or leave it out."
    for step in given:
        for field in {"scale", "ratio"} & written.fields(f"{name}.{step}").keys():
            least, most = written[f"{name}.{step}.{field}"]
            if least > most:
                yield f"{name}.{step}.{field}", f"[{least:g}, {most:g}] is out of order: the smaller one is first."
            elif field == "scale" and most > 1:
                yield f"{name}.{step}.scale", f"{most:g} is out of range: a share of the area is at most 1."


IMAGE_RULES: tuple[Rule, ...] = (_of_texts, _augment)
