"""Stage: rows to token features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.runtime.refs import Ref
from tasks.runtime.reports import need_report, tell_warnings
from tasks.runtime.stage import Ingredients, Work, stage
from training.recipe import Level, Recipe


def ingredients(recipe: Recipe, data: Ref, model: Ref) -> Ingredients:
    """The rows, the tokenizer's files (not the model's weights), the length, and what rows that are cut mean."""
    return Ingredients(
        {
            "tokens": recipe.tokens.model_dump(),
            "data": {"checks": {"truncated": _level(recipe)}},
            "upstream": {"load_data": data.digest, "tokenizer": model.parts["tokenizer"]},
        },
        code=["training.tokens"],
        libraries=("tokenizers", "pyarrow"),
    )


@stage(ingredients)
def tokenize(work: Work, recipe: Recipe, data: Ref, model: Ref) -> Mapping[str, Any]:
    """Streams the rows through the tokenizer into Arrow, and tells what was cut."""
    from training.tokens import tokenize as to_tokens

    figures = to_tokens(
        data.path,
        model.path / "tokenizer",
        work.out,
        recipe.tokens.max_length,
        _level(recipe),
        progress=work.progress,
    )
    _show_report(work, recipe.tokens.max_length)
    return figures


def _show_report(work: Work, max_length: int) -> None:
    from training.pictures import draw_tokens

    report = need_report(work.out)
    tell_warnings(work, report)
    draw_tokens(report, max_length, work.out / "log")


def _level(recipe: Recipe) -> Level:
    return recipe.data.checks.get("truncated", "warning")
