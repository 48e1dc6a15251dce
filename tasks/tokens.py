"""Stage: rows to token features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.runtime.refs import Ref
from tasks.runtime.stage import Ingredients, Work, stage
from training.recipe import Recipe


def ingredients(recipe: Recipe, data: Ref, model: Ref) -> Ingredients:
    """The rows, the tokenizer's files (not the model's weights) and the length."""
    return Ingredients(
        {
            "tokens": recipe.tokens.model_dump(),
            "upstream": {"load_data": data.digest, "tokenizer": model.parts["tokenizer"]},
        },
        code=["training.tokens"],
        libraries=("tokenizers", "pyarrow"),
    )


@stage(ingredients)
def tokenize(work: Work, recipe: Recipe, data: Ref, model: Ref) -> Mapping[str, Any]:
    """Streams the rows through the tokenizer into Arrow."""
    from training.tokens import tokenize as to_tokens

    return to_tokens(data.path, model.path / "tokenizer", work.out, recipe.tokens.max_length, progress=work.progress)
