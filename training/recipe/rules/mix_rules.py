"""Rules of a recipe about a mixture of sets: names, weights, passes, and columns that fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from training.recipe.mixture import MIX, OF_MIXTURE, set_names
from training.recipe.rules.column_rules import columns_of
from training.recipe.rules.rule import Rule, WrittenRecipe


def _needs_mixture(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields of a mixture have no effect without one."""
    if written["data.mix"] is None:
        for name in OF_MIXTURE[1:]:
            if (value := written[f"data.{name}"]) != written.fields("data")[name].get_default():
                yield f"data.{name}", f"{value!r} has no effect without data.mix: leave it out."


def _sources(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """A mixture has no source of its own."""
    if written["data.mix"] is None:
        return
    if (source := written["data.source"]) != MIX:
        yield "data.source", f"{source!r} is for one set of rows: leave it out, each set in data.mix has its own."
    if path := written["data.path"]:
        yield "data.path", f"{path!r} is for one set of rows: leave it out, each set in data.mix has its own."


def _names(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    names = set_names(written["data.mix"] or ())
    for index, name in enumerate(names):
        if name in names[:index]:
            first = f"data.mix[{names.index(name)}]"
            yield f"data.mix[{index}].name", f"{name!r} is also the name of {first}: give each set its own name."


def _weights(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Either all sets have a weight, or none; the size of a mixture is set once."""
    entries = written["data.mix"] or ()
    weighted = [entry.get("weight") is not None for entry in entries]
    fixed = [index for index, entry in enumerate(entries) if entry.get("epochs") is not None]
    if any(weighted) and not all(weighted):
        first = weighted.index(True)
        for index in [index for index, has in enumerate(weighted) if not has]:
            message = f"is missing: data.mix[{first}] has one. Give all sets a weight, or none."
            yield f"data.mix[{index}].weight", message
        return
    if not entries:
        return
    if any(weighted):
        for index in fixed[1:]:
            message = f"{entries[index]['epochs']:g} contradicts data.mix[{fixed[0]}].epochs: with weights, the passes "
            yield f"data.mix[{index}].epochs", f"{message}of one set fix those of all others. Leave one of them out."
    if (strategy := written["data.stopping_strategy"]) != "first_exhausted" and (fixed or not any(weighted)):
        reason = f"data.mix[{fixed[0]}].epochs fixes the size" if fixed else "without weights all sets are passed"
        yield "data.stopping_strategy", f"{strategy!r} has no effect: {reason}. Leave it out."
    if (unit := written["data.weight_by"]) != "rows" and not any(weighted):
        yield "data.weight_by", f"{unit!r} has no effect without weights: give each set in data.mix a weight."


def _tokens(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Tokens are counted before there is a mixture on which a tokenizer could be trained."""
    if written["data.mix"] and written["data.weight_by"] == "tokens" and written["model.source"] == "scratch":
        message = (
            "'tokens' need a tokenizer, and a model from scratch trains its own on the mixture: choose characters, "
        )
        yield "data.weight_by", f"{message}which are close, or rows; or start from a model that has a tokenizer."


MIX_RULES: tuple[Rule, ...] = (_needs_mixture, _sources, _names, _weights, _tokens)


def unfitting_columns(sets: Sequence[WrittenRecipe], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields a problem for each set whose columns are not those of the first set, by their role for the task type.

    Raises InvalidFieldError if a field that names columns is invalid.
    """
    roles = [[column.name for column in columns_of(written)] for written in sets]
    for index, found in enumerate(roles):
        if found != roles[0]:
            message = f"{names[index]!r} has the columns {', '.join(found)}, and {names[0]!r} (data.mix[0]) has "
            yield f"data.mix[{index}]", f"{message}{', '.join(roles[0])}: all sets need the same ones."
