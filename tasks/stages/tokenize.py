"""Stage: tokenization of the rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.refs import Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.jobs.child import run_child
from tasks.jobs.commands import python_argv
from tasks.reports.row_reports import emit_warnings, read_report
from training import task_types
from training.models.repository_files import read_json, uses_tokenizer_json
from training.recipe import Level, Recipe
from training.recipe.program_settings import TokenizeSettings

# The fields of config.json from which transformers chooses the tokenizer's class.
CLASS_FIELDS = ("model_type", "model_name", "tokenizer_class")

SPLITS = ("train", "validation", "test")

# Optional libraries by which tokenizers of transformers read vocabularies.
OPTIONAL_LIBRARIES = ("sentencepiece", "sacremoses", "tiktoken")


def inputs(recipe: Recipe, data: Ref, model: Ref) -> Inputs:
    """The rows, the tokenizer's files (not the model's weights), the number of the model's tokens, the length, and the
    level of the check for cut rows.

    If the tokenizer's class can change the tokens, also the model's type and the version of transformers.
    """
    task_type = task_types.load(**recipe.task_and_options)
    values = {
        "task": recipe.task,
        "options": task_type.options_of("tokenize"),
        "tokens": recipe.tokens.model_dump(),
        "data": {"checks": {"truncated": _level(recipe)}},
        "upstream": {
            **{
                f"load_data/{split}": data.parts[f"{split}.arrow"] for split in SPLITS if f"{split}.arrow" in data.parts
            },
            "tokenizer": model.parts["tokenizer"],
        },
        **({"vocab_size": size} if (size := model.figures.get("vocab_size")) else {}),
    }
    libraries = ("tokenizers", "pyarrow", *task_type.libraries)
    root = "training.tokenization.token_files"
    if not _in_process(model):
        root = "training.programs.tokenize_with_transformers"
        config = read_json(model.path / "model" / "config.json")
        values["model"] = {"config": {name: config.get(name) for name in CLASS_FIELDS}}
        libraries = (
            *libraries,
            "transformers",
            *(name for name in OPTIONAL_LIBRARIES if importlib.util.find_spec(name)),
        )
    return Inputs(
        values,
        code=[root, *task_types.code_modules(recipe.task)],
        outside=figures_code(recipe.task),
        named=task_types.user_code(recipe.task),
        libraries=libraries,
    )


@stage(inputs, may_repeat=True)
def tokenize(work: Work, recipe: Recipe, data: Ref, model: Ref) -> Mapping[str, Any]:
    """Streams the rows through the tokenizer into Arrow, and reports cut rows."""
    run = _tokenize_here if _in_process(model) else _tokenize_in_child
    figures = run(work, recipe, data, model)
    _show_report(work, recipe.tokens.max_length)
    return figures


def _tokenize_here(work: Work, recipe: Recipe, data: Ref, model: Ref) -> Mapping[str, Any]:
    from training.tokenization.token_files import tokenize as to_tokens

    return to_tokens(
        task_types.load(**recipe.task_and_options),
        data.path,
        model.path / "tokenizer",
        work.out,
        recipe.tokens.max_length,
        _level(recipe),
        progress=work.progress,
        vocab_size=model.figures.get("vocab_size"),
    )


def _tokenize_in_child(work: Work, recipe: Recipe, data: Ref, model: Ref) -> Mapping[str, Any]:
    return run_child(
        work,
        "training.programs.tokenize_with_transformers",
        python_argv("training.programs.tokenize_with_transformers"),
        settings=TokenizeSettings(
            **recipe.task_and_options,
            max_length=recipe.tokens.max_length,
            level=_level(recipe),
            vocab_size=model.figures.get("vocab_size"),
        ),
        inputs={"data": data.path, "tokenizer": model.path / "tokenizer", "model": model.path / "model"},
        env={"TOKENIZERS_PARALLELISM": "true"},  # other programs run without it
    )


def _in_process(model: Ref) -> bool:
    return uses_tokenizer_json(model.path / "tokenizer", model.path / "model")


def _show_report(work: Work, max_length: int) -> None:
    from training.evaluation.plots import draw_tokens

    report = read_report(work.out)
    emit_warnings(work, report)
    draw_tokens(report, max_length, work.out / "log")


def _level(recipe: Recipe) -> Level:
    return recipe.data.checks.get("truncated", "warning")
