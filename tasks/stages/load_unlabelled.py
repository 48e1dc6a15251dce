"""Stage: rows without labels, on which a model learns from its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tasks.cache.code import figures_code
from tasks.cache.input_files import unchanged
from tasks.cache.results import Artifact, Lock, PinnedFile
from tasks.cache.stage import Work
from tasks.jobs.job import StageJob, files_of, stage
from training.data.ipc_files import SPLITS
from training.data.prediction_rows import format_of
from training.data.unlabelled import FIELD as UNLABELLED
from training.data.unlabelled import UnlabelledResult
from training.data.unlabelled import load_unlabelled as read_unlabelled
from training.jobs.protocol import NotInKey, Settings
from training.recipe import Recipe
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.rules.column_rules import code_for_rows, source_columns
from training.recipe.tables.formats import SOURCES
from training.recipe.task_specification import specification


class LoadUnlabelledSettings(Settings):
    """The settings of reading rows without labels."""

    reading: dict[str, Any]
    """training.recipe.reading_rules.ReadingRules"""
    columns: dict[str, str]
    """The rows' names of the model's inputs, by role."""
    task: str
    options: Annotated[dict[str, Any], NotInKey("the options that its code for rows reads are in the key")]
    compares_nearly: bool
    files: Annotated[list[PinnedFile], NotInKey("their digests are in the key")]


@stage(UnlabelledResult, where="there are rows without labels")
def load_unlabelled(recipe: Recipe, lock: Lock, data: Artifact) -> StageJob:
    """Reads the rows of data.unlabelled. Leaves out repeated rows, rows of a split, and rows that nearly equal one of
    validation or test.

    The settings of reading, the rows of all splits, and the content of the files.
    """
    rules, (code, named, options) = ReadingRules.of(recipe.data), code_for_rows(recipe)
    formats = {format_of(pin.path, rules) for pin in lock.unlabelled} - {TEXT_LINES}
    sources = [SOURCES[name] for name in sorted(formats)]
    return StageJob(
        _load_unlabelled,
        LoadUnlabelledSettings(
            **recipe.task_and_options,
            reading=rules.model_dump(mode="json"),
            columns={column.name: column.source_name for column in source_columns(recipe).inputs},
            compares_nearly=recipe.data.checks.get("near_duplicates", "ignore") != "ignore",
            files=lock.unlabelled,
        ),
        reads={"data": files_of(data, [f"{split}.arrow" for split in SPLITS])},
        content={"files": [pin.sha256 for pin in lock.unlabelled]},
        tables={"rows": {"options": options}},
        code=["training.data.unlabelled", *(one.reader.partition(":")[0] for one in sources), *code],
        outside=[*figures_code(recipe.task), "training.programs"],
        users_code=named,
        libraries=tuple(dict.fromkeys(("pyarrow", *(name for one in sources for name in one.libraries)))),
        field_names={"files": ", ".join(pin.path for pin in lock.unlabelled)},
    )


def _load_unlabelled(work: Work, settings: LoadUnlabelledSettings, inputs: Mapping[str, Path]) -> UnlabelledResult:
    with unchanged(settings.files):
        result = read_unlabelled(
            specification(settings.task, settings.options),
            settings.columns,
            ReadingRules.model_validate(settings.reading),
            [pin.path for pin in settings.files],
            inputs["data"],
            work.out,
            compares_nearly=settings.compares_nearly,
        )
    left_out = {
        "equal to rows of validation or test": result.evaluated,
        "nearly equal to them": result.near,
        "there already": result.repeated,
        "not usable": result.unusable,
    }
    if found := [f"{count:,} {reason}" for reason, count in left_out.items() if count]:
        message = f"{UNLABELLED}: rows are left out: {', '.join(found)}; {result.rows:,} are trained on."
        work.warning(message)
    return result
