"""Stage: reading and checking of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tasks.cache.code import figures_code
from tasks.cache.input_files import Progress, unchanged, unchanged_images
from tasks.cache.results import Artifact, Lock, PinnedFile, PinnedRows
from tasks.cache.stage import Work
from tasks.hub.client import explain_read_errors
from tasks.jobs.job import Files, StageJob, folder_of, stage
from tasks.reports.row_reports import (
    emit_warnings,
    read_report,
    summarize_corpus,
    summarize_corrections,
    summarize_splits,
)
from training.data.corpus import load_corpus
from training.data.load_rows import LoadDataResult, load
from training.data.prediction_rows import format_of
from training.data.sources import reading_by_name, split_names
from training.jobs.protocol import NotInKey, Settings, values_in_key
from training.local_files import open_local
from training.models.repository_files import CHAT_TEMPLATE, HOME_ROOMS
from training.recipe import Data, Recipe
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.rules.column_rules import code_for_rows, source_columns, takes_template
from training.recipe.tables.formats import SOURCES
from training.recipe.tables.row_checks import OF_LATER_STAGES, REFUSED_BY_TEMPLATE
from training.recipe.task_specification import specification
from training.tokenization.chat_templates import load_template
from training.tokenization.encoder import token_counter
from training.tokenization.special_tokens import SPECIAL


class LoadDataSettings(Settings):
    """The settings of reading and checking rows."""

    data: Data
    """Without the checks of later stages."""
    task: Annotated[str, NotInKey("its columns, checks and code are in the key")]
    options: Annotated[dict[str, Any], NotInKey("the options that its code for rows reads are in the key")]
    evaluated: Annotated[list[str], NotInKey("the splits that it chooses on the Hub or in an object are in the key")]
    pinned: Annotated[list[PinnedRows], NotInKey("the digests of the files are in the key")]
    """The files or the commit of each set."""
    corrections: Annotated[PinnedFile | None, NotInKey("its digest is in the key")] = None
    corpus: Annotated[list[PinnedFile], NotInKey("their digests are in the key")] = []  # noqa: RUF012
    """The files of further documents."""


def load_data_settings(recipe: Recipe, lock: Lock) -> LoadDataSettings:
    """The settings of load_data for this recipe."""
    checks = {name: level for name, level in recipe.data.checks.items() if name not in OF_LATER_STAGES}
    return LoadDataSettings(
        **recipe.task_and_options,
        data=recipe.data.model_copy(update={"checks": checks}),
        evaluated=list(recipe.evaluation.splits),
        pinned=list(lock.sets),
        corrections=lock.corrections,
        corpus=lock.corpus,
    )


LoadDataArtifact = Artifact[LoadDataResult]


@stage(LoadDataResult, may_repeat=True)
def load_data(recipe: Recipe, lock: Lock, model: Artifact | None = None) -> StageJob:
    """Reads every split into Arrow, checks it, and fixes the labels' names and order. Also keeps the columns of
    validation and test from which slices can be made. The keys of later stages have the digests of only the files that
    they read.

    The settings of reading and checking, the content of the files and of data.corrections, the commit or the object's
    code and fingerprint; of a mixture those of each set, with names, weights and epochs. The model's tokenizer, if it
    counts the tokens by which a mixture is weighted or if rows that its chat template refuses are left out: only then
    is `model` given. Of a model from scratch, whose tokenizer is trained on the rows, the chat template alone.
    """
    data, wanted = recipe.data, source_columns(recipe)
    code, named, options = code_for_rows(recipe)
    sources = [SOURCES[one.source] for one in data.sets]
    contents = [_content(one, pinned, wanted.evaluated) for one, pinned in zip(data.sets, lock.sets, strict=True)]
    shown = [_shown_names(one, pinned) for one, pinned in zip(data.sets, lock.sets, strict=True)]
    content, names = contents[0], shown[0]
    if data.mix is not None:
        content, names = {"files": {}, "mix": {}, "sets": data.set_names}, {}
        for name, entry, of_set, shown_names in zip(data.set_names, data.mix, contents, shown, strict=True):
            content["files"] |= {f"{name}/{split}": digests for split, digests in of_set.pop("files").items()}
            content["mix"][name] = values_in_key(entry) | of_set
            for key, value in shown_names.items():
                part, _, split = key.partition(".")
                names[f"files.{name}/{split}" if part == "files" else f"mix.{name}.{key}"] = f"{name}: {value}"
    if lock.corrections is not None:
        content["corrections"] = lock.corrections.sha256
        names["corrections"] = lock.corrections.path
    if lock.corpus:
        rules, paths = ReadingRules.of(data), [pin.path for pin in lock.corpus]
        formats = sorted({format_of(path, rules) for path in paths})
        sources += [SOURCES[name] for name in formats if name != TEXT_LINES]
        content["corpus"] = {"files": [pin.sha256 for pin in lock.corpus], "formats": formats}
        content["corpus"] |= {"rules": rules.model_dump(mode="json"), **reading_by_name(data.sets[0], paths)}
        names["corpus.files"] = ", ".join(paths)
    columns = {column.name: column.form + " or nothing" * column.may_be_empty for column in wanted.columns}
    libraries = [library for one in sources for library in one.libraries] + ["pillow"] * wanted.has_images
    reads: dict[str, Files] = {}
    if model is not None:
        reads["tokenizer"] = folder_of(model, "tokenizer")
        libraries.append("tokenizers")
    elif leaves_out_refused(recipe) and (pin := lock.model_files.get(CHAT_TEMPLATE)):
        reads["tokenizer"] = Files(partial(_make_template_folder, pin), {"chat_template": pin.sha256})
    if leaves_out_refused(recipe):
        libraries += ["transformers", "jinja2"]
    # Without a tokenizer, only code of conversations, or the user's, reads modules of tokenization.
    rooms = "training.tokenization.encoder" if takes_template(recipe) or ":" in recipe.task else "training.tokenization"
    unread = [] if reads else [rooms, "training.models"]
    of_corpus = ["training.data.corpus"] if lock.corpus else []
    return StageJob(
        _read,
        load_data_settings(recipe, lock),
        reads=reads,
        content=content,
        tables={"task": {"options": options, "columns": columns, "checks": dict(wanted.task_type.checks)}},
        code=[
            "training.data.load_rows",
            *of_corpus,
            *dict.fromkeys(one.reader.partition(":")[0] for one in sources),
            *wanted.modules,
            *code,
        ],
        outside=[*figures_code(recipe.task), *unread],
        users_code=named | {where: one.path for where, one in _objects(data)},
        libraries=tuple(dict.fromkeys(libraries)),
        field_names=names,
    )


def counts_tokens(recipe: Recipe) -> bool:
    """Whether reading the rows needs the model's tokenizer: for a mixture that is weighted by tokens."""
    return recipe.data.mix is not None and recipe.data.weight_by == "tokens"


def leaves_out_refused(recipe: Recipe) -> bool:
    """Whether the model's chat template decides which rows are kept."""
    return takes_template(recipe) and recipe.data.checks.get(REFUSED_BY_TEMPLATE, "error") != "error"


def needs_tokenizer(recipe: Recipe, lock: Lock) -> bool:
    """Whether the model, whose tokenizer reading the rows needs, is loaded before them."""
    return counts_tokens(recipe) or (leaves_out_refused(recipe) and not trains_tokenizer(recipe, lock))


def trains_tokenizer(recipe: Recipe, lock: Lock) -> bool:
    """Whether the tokenizer is trained on the rows, as that of a model from scratch is."""
    return recipe.model.source == "scratch" and lock.started_from is None


def _make_template_folder(pin: PinnedFile, work: Work) -> Path:
    """The folder of a tokenizer without a vocabulary: its chat template, and the special tokens that this may name."""
    return write_template_folder(Path(pin.path), work.job / "template")


def write_template_folder(template: Path, folder: Path) -> Path:
    """Fills a folder with a chat template and the special tokens of a model from scratch. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(open_local(str(template), HOME_ROOMS, "model"), "rb") as source:
        (folder / CHAT_TEMPLATE).write_bytes(source.read())
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return folder


def _content(data: Data, pinned: PinnedRows, evaluated: Sequence[str]) -> dict[str, Any]:
    """The values that name the content of one set of rows."""
    paths = [pin.path for files in pinned.files.values() for pin in files]
    content: dict[str, Any] = {
        "files": {split: [pin.sha256 for pin in files] for split, files in pinned.files.items()},
        "commit": pinned.hub.commit if pinned.hub else None,
        "fingerprint": pinned.fingerprint,
        **reading_by_name(data, paths),
    }
    if data.source in ("hub", "python"):
        content |= data.model_dump(include={"path", "config"}) | {"splits": split_names(data, evaluated)}
    if pinned.images is not None:
        content["images"] = pinned.images.sha256
    if data.split is not None and data.split.by != "rows":
        content["split"] = data.split.model_dump()
    return content


def _shown_names(data: Data, pinned: PinnedRows) -> dict[str, str]:
    """The display names of the values of `_content`."""
    return {
        "commit": f"{data.path} at {data.revision or 'main'}",
        "fingerprint": f"what {data.path} is made from",
        **{f"files.{split}": ", ".join(pin.path for pin in files) for split, files in pinned.files.items()},
        **({"images": f"the images in {pinned.images.path}"} if pinned.images else {}),
    }


def _objects(data: Data) -> Iterator[tuple[str, Data]]:
    """The sets of rows that Python objects provide, by the recipe field that names the object."""
    for index, one in enumerate(data.sets):
        if one.source == "python":
            yield "data.path" if data.mix is None else f"data.mix[{index}].path", one


def _read(work: Work, settings: LoadDataSettings, inputs: Mapping[str, Path]) -> LoadDataResult:
    from training.evaluation.plots import draw_rows

    result = load_rows(settings, work.out, work.progress, inputs.get("tokenizer"))
    report = read_report(work.out)
    for note in filter(None, (summarize_splits(report), summarize_corrections(report), summarize_corpus(report))):
        work.note(note)
    emit_warnings(work, report)
    draw_rows(report, work.out / "log")
    return result


def load_rows(
    settings: LoadDataSettings, out: Path, progress: Progress, tokenizer: Path | None = None
) -> LoadDataResult:
    """Writes the rows and their report to the folder `out`, without the store. Raises UserError with every problem.

    `progress` is called with the amount read and the total. `tokenizer` is the folder of the model's tokenizer, which
    counts tokens, or whose chat template refuses rows.
    """
    data, task_type = settings.data, specification(settings.task, settings.options)
    pinned = [
        {"commit": one.hub.commit}
        if one.hub
        else {split: [pin.path for pin in files] for split, files in one.files.items()}
        for one in settings.pinned
    ]

    def explain(index: int) -> AbstractContextManager[None]:
        hub = settings.pinned[index].hub
        return explain_read_errors("dataset", data.sets[index].path, hub.commit) if hub else nullcontext()

    counter, refused = None, None
    if tokenizer is not None:
        if data.mix is not None and data.weight_by == "tokens":
            counter = token_counter(tokenizer)
        if data.checks.get(REFUSED_BY_TEMPLATE, "error") != "error" and (template := load_template(tokenizer)):
            refused = partial(task_type.refused_rows, template)
    decided = settings.corrections
    corrections = decided.path if decided is not None else None
    files = [pin for one in settings.pinned for files in one.files.values() for pin in files] + settings.corpus
    images = [one.images for one in settings.pinned]
    folders = [None if pin is None else pin.path for pin in images]
    with (
        unchanged([*files, decided] if decided is not None else files),
        unchanged_images(pin for pin in images if pin is not None),
    ):
        if data.mix is not None:
            result = load(
                *(data, task_type, pinned, out, progress, settings.evaluated, explain, counter),
                corrections=corrections,
                refused_rows=refused,
                image_folders=folders,
            )
        else:
            with explain(0):
                result = load(
                    *(data, task_type, pinned[0], out, progress, settings.evaluated),
                    corrections=corrections,
                    refused_rows=refused,
                    image_folders=folders,
                )
        if settings.corpus:
            load_corpus(data, task_type, [pin.path for pin in settings.corpus], out, progress)
    return result
