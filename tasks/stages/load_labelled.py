"""Stage: rows with labels from files that are not the recipe's own, such as those whose labels arrived after a release,
or those with the labels of another source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from tasks.cache.input_files import pin_files, unchanged
from tasks.cache.results import Artifact, PinnedFile, PinnedVersion, label_names
from tasks.cache.stage import Work
from tasks.jobs.job import StageJob, stage
from tasks.prediction.input_rows import list_files
from tasks.registry.pinned_versions import files_of_version
from tasks.reports.row_reports import emit_warnings, read_report
from training.data.file_systems import display_name
from training.data.load_rows import LoadDataResult, load
from training.data.prediction_rows import format_of
from training.data.sources import reading_by_name
from training.jobs.protocol import NotInKey, Settings
from training.problems import Problem, UserError
from training.recipe import Data, Recipe
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.rules.column_rules import code_for_rows, takes_template
from training.recipe.tables.formats import SOURCES
from training.recipe.tables.row_checks import REFUSED_BY_TEMPLATE
from training.recipe.task_specification import specification
from training.tokenization.chat_templates import load_template

SPLIT = "test"
"""The name of the rows' split: load_data keeps its columns for slices."""
GROUP_COLUMN = "data.split.column"


class LabelledFiles(NamedTuple):
    """Files whose rows have labels."""

    pins: list[PinnedFile]
    rules: ReadingRules
    """How the rows are read."""
    option: Literal["inputs", "against"]
    """The option that names the files."""
    label: str | None = None
    """The column of labels, if it is not that of the rules."""
    version: PinnedVersion | None = None
    """The version that will predict the rows. Its chat template may refuse some, and groups of rows are kept."""


def find_other_labels(recipe: Recipe, path: str, label: str | None) -> LabelledFiles:
    """The files of another source of labels for the recipe's rows. Raises UserError."""
    rules = ReadingRules.of(recipe.data)
    pins = pin_files(list_files([path], field="against", rules=rules))
    return LabelledFiles(pins, rules, "against", label)


class LoadLabelledSettings(Settings):
    """The settings of reading rows with labels."""

    data: Data
    spelt: dict[str, int]
    """The indices of labels as the recipe's rows spell them, where these are not the labels' names."""
    option: Annotated[str, NotInKey("the name of an option, for messages")]
    task: str
    options: Annotated[dict[str, Any], NotInKey("the options that its code for rows reads are in the key")]
    files: Annotated[list[PinnedFile], NotInKey("their digests are in the key")]


@stage(LoadDataResult)
def load_labelled(recipe: Recipe, rows: Artifact, files: LabelledFiles) -> StageJob:
    """Reads and checks the rows as `load_data` does, as one split, with the labels of the recipe's rows in their order.

    The settings of reading, the labels' names, the content of the files, and the tokenizer if its chat template may
    refuse rows.
    """
    data, pins = _data_section(recipe, rows, files), files.pins
    code, named, options = code_for_rows(recipe)
    source = SOURCES[data.source]
    reads, libraries = {}, [*source.libraries]
    if files.version is not None and takes_template(recipe):
        reads = {"tokenizer": files_of_version(files.version, "NAME")["tokenizer"]}
        libraries += ["transformers", "jinja2", "tokenizers"]
    return StageJob(
        _load,
        LoadLabelledSettings(
            **recipe.task_and_options,
            data=data,
            spelt=dict(read_report(rows.path).get("spelt", {})),
            option=files.option,
            files=pins,
        ),
        reads=reads,
        content={"files": [pin.sha256 for pin in pins], **reading_by_name(data, [pin.path for pin in pins])},
        tables={"rows": {"options": options}},
        code=["training.data.load_rows", source.reader.partition(":")[0], *code],
        outside=["training.programs"],
        users_code=named,
        libraries=libraries,
        field_names={"files": ", ".join(pin.path for pin in pins)},
    )


def _data_section(recipe: Recipe, rows: Artifact, files: LabelledFiles) -> Data:
    """The section `data` for the rows in these files, with the labels of the recipe's `rows` in their order. Of a
    mixture they have the columns of the first set.

    Equal rows are no fault here, and rows that lack a text or a label, or that the chat template refuses, are left out
    with a warning. Raises UserError for files of several formats.
    """
    formats = {format_of(pin.path, files.rules): pin.path for pin in files.pins}
    if TEXT_LINES in formats:
        named, known = display_name(formats[TEXT_LINES]), ", ".join(files.rules.suffixes[1:])
        message = f"{named} holds a text a line, without labels: choose from {known}."
        raise UserError.of("option", files.option, message)
    if len(formats) > 1:
        message = f"the files have several formats ({', '.join(sorted(formats))}): name files of one format."
        raise UserError.of("option", files.option, message)
    data, names = files.rules.data(*formats), label_names(rows)
    levels = dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows", "absent_label"), "ignore")
    levels |= dict.fromkeys(("blank_text", "missing_label", REFUSED_BY_TEMPLATE), "warning")
    by_group = [one.split for one in recipe.data.sets if one.split is not None and one.split.by == "group"]
    if files.version is None:
        by_group, levels = [], levels | {"unknown_label": "warning"}
    values = {
        "label": files.label or data.label,
        "checks": {**data.checks, **levels},
        "label_names": names if len(names) > 1 else None,
        "split": by_group[0].model_dump(mode="json") if by_group else None,
    }
    return Data.model_validate(data.model_dump(mode="json") | values)


def _load(work: Work, settings: LoadLabelledSettings, inputs: Mapping[str, Path]) -> LoadDataResult:
    with unchanged(settings.files):
        try:
            result = _read(work, settings, inputs)
        except UserError as error:
            raise UserError(_name_option(problem, settings.option) for problem in error.problems) from error
    emit_warnings(work, read_report(work.out))
    return result


def _read(work: Work, settings: LoadLabelledSettings, inputs: Mapping[str, Path]) -> LoadDataResult:
    """Reads the rows; without groups and with a warning, if they have no column for them."""
    task_type = specification(settings.task, settings.options)
    template = load_template(inputs["tokenizer"]) if "tokenizer" in inputs else None
    read = partial(
        load,
        task_type=task_type,
        sources={SPLIT: [pin.path for pin in settings.files]},
        out=work.out,
        progress=work.progress,
        evaluated=[SPLIT],
        only=SPLIT,
        spelt=settings.spelt,
        refused_rows=partial(task_type.refused_rows, template) if template else None,
    )
    try:
        return read(settings.data)
    except UserError as error:
        lacking = [problem for problem in error.problems if problem.where == GROUP_COLUMN]
        if not lacking:
            raise
        result = read(settings.data.model_copy(update={"split": None}))
        message = f"{lacking[0].message} Rows are taken to be independent, so intervals are too narrow if rows of one "
        work.warning(f"{message}group are alike: add the column.")
        return result


def _name_option(problem: Problem, option: str) -> Problem:
    """The problem, at the option that names the files if they have no rows."""
    message = "there are no rows with labels: give files that have some."
    return problem.model_copy(update={"where": option, "message": message}) if problem.check == "no_rows" else problem
