"""Stage: reading and checking of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.input_files import Progress, require_unchanged
from tasks.cache.refs import Lock, PinnedRows, Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.hub.client import explain_read_errors
from tasks.reports.row_reports import emit_warnings, read_report
from training.data.sources import delimiter_of, is_conllu, split_names
from training.recipe import Data, Recipe
from training.recipe.mixture import OF_MIXTURE, SHARED
from training.recipe.rules.column_rules import code_for_rows, source_columns
from training.recipe.tables.formats import SOURCES

# Places, names and limits: the content of the files is an input instead.
NOT_INPUTS = {"path", "config", "revision", "splits", "max_file_gb"}


def inputs(recipe: Recipe, lock: Lock, model: Ref | None = None) -> Inputs:
    """The settings of reading and checking, the files' content, the commit or the object's code and fingerprint; of a
    mixture those of each set, with names, weights and epochs.

    `model` is only given if its tokenizer counts the tokens by which a mixture is weighted.
    """
    data, wanted = recipe.data, source_columns(recipe)
    columns = {column.name: column.form + " or nothing" * column.may_be_empty for column in wanted.columns}
    code, named, options = code_for_rows(recipe)
    task = {"options": options, "columns": columns, "checks": dict(wanted.task_type.checks)}
    sources = [SOURCES[one.source] for one in data.sets]
    if data.mix is None:
        values, names = _inputs_of_set(data, lock.sets[0], wanted.evaluated)
    else:
        sets, files, names = dict[str, Any](), dict[str, list[str]](), dict[str, str]()
        for index, (name, entry) in enumerate(zip(data.set_names, data.mix, strict=True)):
            found, shown = _inputs_of_set(data.sets[index], lock.sets[index], wanted.evaluated)
            found["data"] = {key: value for key, value in found["data"].items() if key not in SHARED}
            files |= {f"{name}/{split}": digests for split, digests in found.pop("files").items()}
            sets[name] = {"weight": entry.weight, "epochs": entry.epochs, **found}
            for key, value in shown.items():
                part, _, split = key.partition(".")
                names[f"files.{name}/{split}" if part == "files" else f"mix.{name}.{key}"] = f"{name}: {value}"
        shared = _settings(data, {*SHARED, *OF_MIXTURE[1:]}, exclude=set())
        values = {"data": shared, "mix": sets, "sets": list(sets), "files": files}
    outside, libraries = figures_code(recipe.task), [library for one in sources for library in one.libraries]
    if model is None:
        outside = [*outside, "training.tokenization.token_counts"]
    else:
        values["upstream"] = {"tokenizer": model.parts["tokenizer"]}
        libraries.append("tokenizers")
    return Inputs(
        {**values, "task": task},
        code=["training.data.load_rows", *dict.fromkeys(one.reader.partition(":")[0] for one in sources), *code],
        outside=outside,
        named=named | {where: one.path for where, one in _objects(data)},
        libraries=tuple(dict.fromkeys(libraries)),
        names=names,
    )


def counts_tokens(recipe: Recipe) -> bool:
    """Whether reading the rows needs the model's tokenizer: for a mixture that is weighted by tokens."""
    return recipe.data.mix is not None and recipe.data.weight_by == "tokens"


def _inputs_of_set(data: Data, pinned: PinnedRows, evaluated: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The inputs of one set of rows, and what names of them stand for."""
    settings = _settings(data, None, exclude=NOT_INPUTS | {*OF_MIXTURE})
    paths = [pin.path for files in pinned.files.values() for pin in files]
    if data.source == "csv":  # a file's name decides its delimiter
        settings["delimiter"] = [delimiter_of(path, data) for path in paths]
    if data.source == "conll":  # and its columns
        settings["conllu"] = [is_conllu(path) for path in paths]
    if data.source in ("hub", "python"):
        settings |= data.model_dump(include={"path", "config"}) | {"splits": split_names(data, evaluated)}
    values = {
        "data": settings,
        "files": {split: [pin.sha256 for pin in files] for split, files in pinned.files.items()},
        "commit": pinned.hub.commit if pinned.hub else None,
        "fingerprint": pinned.fingerprint,
    }
    names = {
        "commit": f"{data.path} at {data.revision or 'main'}",
        "fingerprint": f"what {data.path} is made from",
        **{f"files.{split}": ", ".join(pin.path for pin in files) for split, files in pinned.files.items()},
    }
    return values, names


def _settings(data: Data, include: set[str] | None, exclude: set[str]) -> dict[str, Any]:
    settings = data.model_dump(include=include, exclude=exclude)
    settings["checks"].pop("truncated", None)  # an input of tokenize
    return settings


def _objects(data: Data) -> Iterator[tuple[str, Data]]:
    """The sets of rows that Python objects provide, by the recipe field that names the object."""
    for index, one in enumerate(data.sets):
        if one.source == "python":
            yield "data.path" if data.mix is None else f"data.mix[{index}].path", one


@stage(inputs, may_repeat=True)
def load_data(work: Work, recipe: Recipe, lock: Lock, model: Ref | None = None) -> Mapping[str, Any]:
    """Reads every split into Arrow, checks it, and fixes the labels' names and order. Also keeps the columns of
    validation and test from which slices can be made. The keys of later stages have the digests of only the files that
    they read.
    """
    from training.evaluation.plots import draw_rows

    tokenizer = None if model is None else model.path / "tokenizer"
    figures = load_rows(recipe, lock, work.out, work.progress, tokenizer)
    report = read_report(work.out)
    emit_warnings(work, report)
    draw_rows(report, work.out / "log")
    return figures


def load_rows(
    recipe: Recipe, lock: Lock, out: Path, progress: Progress, tokenizer: Path | None = None
) -> Mapping[str, Any]:
    """Writes the rows and their report to the folder `out`, without the store. Raises UserError with every problem.

    `progress` is called with the amount read and the total. `tokenizer` is the folder of the model's tokenizer, if
    `counts_tokens`.
    """
    from training.data.load_rows import load

    task_type, evaluated, data = source_columns(recipe).task_type, recipe.evaluation.splits, recipe.data
    pinned = [
        {"commit": one.hub.commit}
        if one.hub
        else {split: [pin.path for pin in files] for split, files in one.files.items()}
        for one in lock.sets
    ]

    def explain(index: int) -> AbstractContextManager[None]:
        hub = lock.sets[index].hub
        return explain_read_errors("dataset", data.sets[index].path, hub.commit) if hub else nullcontext()

    if data.mix is not None:
        counter = _token_counter(tokenizer) if tokenizer is not None else None
        figures = load(data, task_type, pinned, out, progress, evaluated, explain, counter)
    else:
        with explain(0):
            figures = load(data, task_type, pinned[0], out, progress, evaluated)
    require_unchanged(lock.all_data_files)
    return figures


def _token_counter(folder: Path) -> Callable[[list[str]], int]:
    from training.tokenization.token_counts import token_counter

    return token_counter(folder)
