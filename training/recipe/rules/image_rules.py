"""Rules of a recipe whose rows have images: fields that are for texts."""

from __future__ import annotations

from collections.abc import Iterator

from training.recipe.rules.column_rules import task_type_of
from training.recipe.rules.rule import Rule, WrittenRecipe

_TOKENS = "is for texts, which are cut into tokens"
OF_TEXTS = {
    "tokens.max_length": _TOKENS,
    "model.chat_template": "is for conversations",
    "data.label_separator": "is for several labels in a row",
    "data.corrections": "recognises rows by their texts",
    "release.gate.must_hold": "is for rows of texts",
    "training.lora": "adds adapters to the layers of language models",
    "training.use_liger_kernel": "has kernels for language models",
}
"""Fields that images do not have, each with the reason."""
CHECKS_OF_TEXTS = ("near_duplicates", "truncated", "refused_by_template", "garbled_text", "long_text")


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


IMAGE_RULES: tuple[Rule, ...] = (_of_texts,)
