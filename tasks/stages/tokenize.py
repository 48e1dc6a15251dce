"""Stage: tokenization of the rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.results import Artifact
from tasks.cache.stage import Work
from tasks.jobs.commands import Launch, python_argv
from tasks.jobs.job import Files, StageJob, files_of, folder_of, job_of, joined, stage
from tasks.reports.row_reports import emit_warnings, read_token_report
from training import task_types
from training.data.ipc_files import CORPUS, SPLITS
from training.models.repository_files import read_json, uses_tokenizer_json
from training.programs.create_model import ModelResult
from training.programs.tokenize_with_transformers import TokenizeSettings
from training.recipe import Recipe
from training.tokenization.token_files import TokenizeResult
from training.tokenization.token_files import tokenize as to_tokens

CHILD = "training.programs.tokenize_with_transformers"

# The fields of config.json from which transformers chooses the tokenizer's class.
CLASS_FIELDS = ("model_type", "model_name", "tokenizer_class")

# Optional libraries by which tokenizers of transformers read vocabularies.
OPTIONAL_LIBRARIES = ("sentencepiece", "sacremoses", "tiktoken")


@stage(TokenizeResult, may_repeat=True)
def tokenize(
    recipe: Recipe,
    data: Artifact,
    model: Artifact[ModelResult],
    mined: Artifact | None = None,
    written: Artifact | None = None,
) -> StageJob:
    """Streams the rows through the tokenizer into Arrow, and reports cut rows. With `mined`, the training rows are
    those with negatives, and those of validation and test perhaps ones with candidates. With `written`, the training
    rows are those whose targets a teacher has written.

    The rows, the tokenizer's files (not the model's weights), the number of the model's tokens, the length, and the
    level of the check for cut rows.

    If the tokenizer's class can change the tokens, also the model's type and the version of transformers.
    """
    task_type, has_json = task_types.load(**recipe.task_and_options), _in_process(model)
    libraries = ["tokenizers", "pyarrow", *task_type.libraries]
    tables: dict[str, Any] = {}
    names = [f"{name}.arrow" for name in (*SPLITS, CORPUS)]
    rows = files_of(data, names)
    changed, splits = written, ["train"]
    if mined is not None and (negatives := recipe.data.negatives) is not None:
        changed, splits = mined, [*negatives.splits]
    if changed is not None:
        own = [f"{split}.arrow" for split in splits]
        rows = joined("rows", files_of(changed, own), files_of(data, [name for name in names if name not in own]))
    if not has_json:
        config = read_json(model.path / "model" / "config.json")
        tables = {"model": {"config": {name: config.get(name) for name in CLASS_FIELDS}}}
        libraries += ["transformers", *(name for name in OPTIONAL_LIBRARIES if importlib.util.find_spec(name))]
    return StageJob(
        _tokenize if has_json else CHILD,
        TokenizeSettings(
            task=recipe.task,
            options=task_type.options_of("tokenize"),
            max_length=recipe.tokens.max_length,
            level=recipe.data.checks.get("truncated", "warning"),
            vocab_size=model.result.vocab_size,
        ),
        reads={
            "data": rows,
            "tokenizer": folder_of(model, "tokenizer"),
            # Of config.json, only the fields in the key choose the class.
            **({} if has_json else {"model": Files(model.path / "model", {}, ("config.json",))}),
        },
        tables=tables,
        code=["training.tokenization.token_files", *task_types.code_modules(recipe.task)],
        outside=[*figures_code(recipe.task), *(["training.programs"] if has_json else [])],
        users_code=task_types.user_code(recipe.task),
        libraries=libraries,
        field_names={"max_length": "tokens.max_length", "level": "data.checks.truncated"},
        # Other programs run without threads of tokenizers.
        launch=lambda: Launch(python_argv(CHILD), {"TOKENIZERS_PARALLELISM": "true"}, {}),
        show=partial(
            _show_report,
            max_length=recipe.tokens.max_length,
            most_generated=getattr(task_type.options, "max_new_tokens", None),
        ),
    )


@stage(TokenizeResult, where="there are rows without labels", may_repeat=True)
def tokenize_unlabelled(recipe: Recipe, unlabelled: Artifact, model: Artifact[ModelResult]) -> StageJob:
    """Streams the rows without labels through the tokenizer, as `tokenize` does.

    What the key of `tokenize` contains, with these rows.
    """
    return job_of(tokenize, recipe, unlabelled, model)


def _tokenize(work: Work, settings: TokenizeSettings, inputs: Mapping[str, Path]) -> TokenizeResult:
    return to_tokens(
        task_types.load(settings.task, settings.options),
        inputs["data"],
        inputs["tokenizer"],
        work.out,
        settings.max_length,
        settings.level,
        progress=work.progress,
        vocab_size=settings.vocab_size,
    )


def _in_process(model: Artifact) -> bool:
    return uses_tokenizer_json(model.path / "tokenizer", model.path / "model")


def _show_report(work: Work, result: object, max_length: int, most_generated: int | None) -> None:
    from training.evaluation.plots import draw_tokens

    report = read_token_report(work.out, most_generated)
    emit_warnings(work, report)
    draw_tokens(report, max_length, work.out / "log")
