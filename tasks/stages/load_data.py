"""Stage: reading and checking of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.input_files import Progress, require_unchanged
from tasks.cache.refs import Lock
from tasks.cache.stage import Inputs, Work, stage
from tasks.hub.client import explain_read_errors
from tasks.tracking.reports import emit_warnings, read_report
from training.data.sources import delimiter_of, split_names
from training.recipe import Recipe
from training.recipe.rules.column_rules import code_for_rows, source_columns
from training.recipe.tables.formats import SOURCES

# Places, names and limits: the content of the files is an input instead.
NOT_INPUTS = {"path", "config", "revision", "splits", "max_file_gb"}


def inputs(recipe: Recipe, lock: Lock) -> Inputs:
    """The settings of reading and checking, the files' content, the commit or the object's code and fingerprint."""
    data, wanted = recipe.data, source_columns(recipe)
    columns = {column.name: column.form + " or nothing" * column.may_be_empty for column in wanted.columns}
    source = SOURCES[data.source]
    code, named, options = code_for_rows(recipe)
    settings = data.model_dump(exclude=NOT_INPUTS)
    settings["checks"].pop("truncated", None)  # an input of tokenize
    if data.source == "csv":  # a file's name decides its delimiter
        pinned = (pin.path for split in lock.data_files.values() for pin in split)
        settings["delimiter"] = [delimiter_of(path, data) for path in pinned]
    if data.source in ("hub", "python"):
        settings |= data.model_dump(include={"path", "config"}) | {"splits": split_names(data, wanted.evaluated)}
    files = {split: [pin.sha256 for pin in pinned] for split, pinned in lock.data_files.items()}
    return Inputs(
        {
            "data": settings,
            "task": {"options": options, "columns": columns, "checks": dict(wanted.task_type.checks)},
            "files": files,
            "commit": lock.data_hub.commit if lock.data_hub else None,
            "fingerprint": lock.data_fingerprint,
        },
        code=["training.data.load_rows", source.reader.partition(":")[0], *code],
        outside=figures_code(recipe.task),
        named=named | ({"data.path": data.path} if data.source == "python" else {}),
        libraries=source.libraries,
        names={
            "commit": f"{data.path} at {data.revision or 'main'}",
            "fingerprint": f"what {data.path} is made from",
            **{f"files.{split}": ", ".join(p.path for p in pinned) for split, pinned in lock.data_files.items()},
        },
    )


@stage(inputs, may_repeat=True)
def load_data(work: Work, recipe: Recipe, lock: Lock) -> Mapping[str, Any]:
    """Reads every split into Arrow, checks it, and fixes the labels' names and order. Also keeps the columns of
    validation and test from which slices can be made. The keys of later stages have the digests of only the files that
    they read.
    """
    from training.evaluation.plots import draw_rows

    figures = load_rows(recipe, lock, work.out, work.progress)
    report = read_report(work.out)
    emit_warnings(work, report)
    draw_rows(report, work.out / "log")
    return figures


def load_rows(recipe: Recipe, lock: Lock, out: Path, progress: Progress) -> Mapping[str, Any]:
    """Writes the rows and their report to the folder `out`, without the store. Raises UserError with every problem.

    `progress` is called with the amount read and the total.
    """
    from training.data.load_rows import load

    task_type, evaluated = source_columns(recipe).task_type, recipe.evaluation.splits
    if lock.data_hub is None:
        files = {split: [pin.path for pin in pinned] for split, pinned in lock.data_files.items()}
        figures = load(recipe.data, task_type, files, out, progress, evaluated)
        require_unchanged(pin for pinned in lock.data_files.values() for pin in pinned)
        return figures
    with explain_read_errors("dataset", recipe.data.path, lock.data_hub.commit):
        return load(recipe.data, task_type, {"commit": lock.data_hub.commit}, out, progress, evaluated)
