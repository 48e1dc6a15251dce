"""Stage: hard negatives for the training rows, by BM25 or by the embeddings of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks.cache.code import figures_code
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.jobs.commands import build_predict_launch
from tasks.jobs.job import StageJob, files_of, folder_of, stage
from tasks.jobs.retries import divide_batches
from tasks.registry.pinned_versions import files_of_version
from training import task_types
from training.data.hard_negatives import (
    DECIMALS,
    MineResult,
    QueryRows,
    find_candidates,
    find_negatives,
    read_documents,
)
from training.jobs.protocol import TaskSettings
from training.programs.mine_negatives import TEXTS_AT_ONCE, MineSettings
from training.recipe import Recipe
from training.recipe.data_fields import EVALUATED, Negatives
from training.task_types.task_type import MinesNegatives

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.evaluation.bm25 import Bm25

PROGRAM = "training.programs.mine_negatives"

# Rooms and modules that the project's task types import for other stages.
NOT_EMBEDDED = ("training.task_types.losses", "training.engine.answers")
NOT_BY_WORDS = (
    *("training.programs", "training.batching", "training.models", "training.tokenization"),
    *(f"training.evaluation.{name}" for name in ("constant_predictions", "rankings", "scores")),
)


class MineByWordsSettings(TaskSettings):
    """The settings of negatives by BM25."""

    negatives: Negatives


@stage(MineResult)
def mine_negatives(recipe: Recipe, lock: Lock, data: Artifact, model: Artifact | None) -> StageJob:
    """Adds documents to the training rows that are near their queries and do not belong to them, by BM25 or by the
    embeddings of a model; with data.negatives.corpus also documents of data.corpus. With data.negatives.num_candidates,
    the queries of validation and test get the nearest documents; else these rows stay as they are. `model` is the base
    model, if it finds them.

    The training rows, data.negatives, and the further documents if they are looked at; with embeddings, also the model,
    the prompts and pooling, the length, and the number format of prediction. Neither the loss nor any setting of
    training: recipes that differ in these share the negatives, and those that differ in data.negatives or in their rows
    share the embeddings of equal blocks of texts.
    """
    negatives = recipe.data.negatives
    assert negatives is not None
    task_type = task_types.load(**recipe.task_and_options)
    of_rows: dict[str, Any] = {
        "task": recipe.task,
        "options": task_type.options_of("mine_negatives"),
        "negatives": negatives,
    }
    code, reads = task_types.code_modules(recipe.task), {"data": files_of(data, negatives.files)}
    names = {"source": "data.negatives.source"}
    if negatives.source == "bm25":
        return StageJob(
            _mine_by_words,
            MineByWordsSettings(**of_rows),
            reads=reads,
            code=["training.data.hard_negatives", "training.evaluation.bm25", *code],
            outside=[] if ":" in recipe.task else [*NOT_EMBEDDED, *NOT_BY_WORDS],
            users_code=task_types.user_code(recipe.task),
            libraries=("numpy", "scipy", "pyarrow"),
            field_names=names,
            show=_warn,
        )
    version = lock.negatives_version
    max_length = recipe.tokens.max_length if version is None else version.max_length
    if version is None:
        assert model is not None
        reads |= {part: folder_of(model, part) for part in ("model", "tokenizer")}
        of_model = TaskSettings(task=recipe.task, options=task_type.options_of("embed"))
    else:
        reads |= files_of_version(version, "data.negatives.path")
        learned = task_types.class_of(version.task).learned_options
        options = {name: value for name, value in (version.options or {}).items() if name in learned}
        of_model = TaskSettings(task=version.task, options=options)
    return StageJob(
        PROGRAM,
        MineSettings(
            **of_rows,
            model=of_model,
            is_trained=version is not None,
            max_length=max_length,
            mixed_precision=lock.mixed_precision,
        ),
        reads=reads,
        code=[*code, *task_types.code_modules(of_model.task)],
        outside=[] if ":" in recipe.task else [*NOT_EMBEDDED, *figures_code(recipe.task)],
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "numpy", "pyarrow"),
        field_names=names,
        launch=partial(build_predict_launch, PROGRAM, lock),
        batches=divide_batches(PROGRAM, TEXTS_AT_ONCE, max_length, lock),
        blocks_without=("negatives", "task", "options", *(f"upstream.{data.stage}/{file}" for file in negatives.files)),
        show=_warn,
    )


def _mine_by_words(work: Work, settings: MineByWordsSettings, inputs: Mapping[str, Path]) -> MineResult:
    from training.evaluation.bm25 import Bm25

    task_type = cast(MinesNegatives, task_types.load(settings.task, settings.options))
    rows = QueryRows.read(task_type, inputs["data"] / "train.arrow")
    rows.corpus.add_documents(read_documents(inputs["data"]))
    scores = partial(_score, Bm25([*rows.corpus.documents]), [*rows.corpus.queries])

    # A document without a word of the query has the score 0: any of them would be as good.
    least = max(settings.negatives.min_score or 0.0, 10.0**-DECIMALS)
    chosen = settings.negatives.model_copy(update={"min_score": least})
    found = find_negatives(rows.corpus, scores, chosen, work.progress)
    files = [inputs["data"] / f"{split}.arrow" for split in EVALUATED]
    for file in files:
        if (number := chosen.num_candidates) is not None and file.is_file():
            evaluated = QueryRows.read(task_type, file)
            nearby = partial(_score, Bm25([*evaluated.corpus.documents]), [*evaluated.corpus.queries])
            evaluated.write_candidates(find_candidates(evaluated.corpus, nearby, number), work.out / file.name)
    return rows.write(found, chosen.num_negatives, work.out / "train.arrow")


def _score(model: Bm25, queries: list[str], first: int, last: int) -> npt.NDArray[np.float64]:
    return model.scores(queries[first:last])


def _warn(work: Work, result: object) -> None:
    found = MineResult.model_validate(result)
    if found.without:
        message = (
            f"{found.without:,} of {found.rows:,} training rows got fewer negatives than data.negatives.num_negatives"
        )
        work.warning(f"{message}: lower margins or range_min, or raise range_max.")
