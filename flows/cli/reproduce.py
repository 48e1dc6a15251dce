"""`finetune reproduce NAME/VERSION`: makes a registered model again from its record, and compares the bytes."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.codes import COMPLETED, FAILED, sigterm_interrupts
from flows.cli.run import call_flow, leave, say_failed
from flows.reports.tables import aligned
from tasks.cache import settings
from tasks.registry import consent
from tasks.tracking.reports import format_count, format_score
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from tasks.registry.reproduction import Difference, FigurePair
    from training.recipe import Recipe

MARK = "reproduces"
"""The file of a home that says which model is being made again there."""
RULE = "each figure lies within the other's 95% interval"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("reproduce", help="make a registered model again", description=__doc__)
    parser.add_argument("name", metavar="NAME/VERSION|NAME@ALIAS", help="a registered version")
    parser.add_argument(
        "--into",
        metavar="DIR",
        type=Path,
        help="the fresh home to make it in, kept whatever comes of it (default: one beside the home, gone where the "
        "bytes are the same); one that an earlier try was stopped in is gone on with",
    )
    parser.add_argument(consent.OPTION, action="store_true", help=consent.OPTION_HELP)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """0 for the same bytes, or for figures that agree where something is known to differ; else 1.

    Raises UserError for a version that is not there, for code that the record names unless --run-code is given, and
    for files that are gone or have changed.
    """
    from tasks.registry import lineage
    from tasks.registry.reproduction import RecordedBatches, recorded_recipe, start_model
    from tasks.stages.fit import batch_division

    if not {"/", "@"} & set(arguments.name):
        message = f"{arguments.name!r} names no version: say which, {arguments.name}/1 or {arguments.name}@champion."
        raise UserError([Problem(kind="option", where="NAME/VERSION", message=message)])
    record = lineage.of_version(arguments.name)
    if record["model"] is None:
        message = f"of {arguments.name} it is not kept which bytes it had."
        raise UserError([Problem(kind="registry", where="VERSION", message=message)])
    if not arguments.run_code:
        consent.require(f"the record of {arguments.name}", record["said"], record["recipe"])
    with (
        sigterm_interrupts(),
        start_model(record) as start,
        _fresh_home(arguments.into, record["model"]["digest"]) as home,
    ):
        recipe = recorded_recipe(record, start)
        print("\n".join(_foreword(record, differing := _prepared(recipe, record))), flush=True)
        done = call_flow(recipe, frozenset(), RecordedBatches(recipe, record, batch_division))
        if done["state"] == "completed":
            lines, code, same = _compared(record, done, differing)
            print("\n".join(lines))
            kept = f"Kept: {home}"
        else:
            code, same = say_failed(done), False
            kept = f"What finished is kept: go on there by --into {home}"
        if same and arguments.into is None:
            shutil.rmtree(home)
        else:
            print(kept, file=sys.stderr)
    leave(done, code)
    return code


def _prepared(recipe: Recipe, record: Mapping[str, Any]) -> list[Difference]:
    """What is another than then, once all that can be made as it was then is."""
    from tasks.registry import reproduction
    from tasks.stages.resolve import pin

    lock = pin(recipe)
    reproduction.require_recorded_files(record, lock)
    reproduction.set_recorded_threads(record)
    return reproduction.differences(record, lock, reproduction.describe_machine())


def _compared(
    record: Mapping[str, Any], done: Mapping[str, Any], differing: Sequence[Difference]
) -> tuple[list[str], int, bool]:
    """What is said of the model that came out, the exit code, and whether its bytes are the recorded ones."""
    from tasks.registry.lineage import model_files
    from tasks.registry.reproduction import differing_files, pair_figures

    key = next(stage["key"] for stage in done["stages"] if stage["name"] == "fit")
    recorded, here = record["model"]["files"], model_files(key) or {}
    if not (others := differing_files(recorded, here)):
        return [_the_same(recorded)], COMPLETED, True
    figures = pair_figures(record["metrics"] or {}, done["metrics"])
    lines, code = _afterword(others, recorded, here, differing, figures)
    return lines, code, False


def _foreword(record: Mapping[str, Any], differing: Sequence[Difference]) -> Iterator[str]:
    registered = record["registered"]
    yield f"{registered['name']} version {registered['version']}, of flow run {record['run']['flow_run_id']}"
    if not differing:
        libraries, files = (
            format_count(len(record["libraries"]), "version"),
            format_count(len(record["code"]["files"]), "file"),
        )
        yield f"All is as it was then: the rows, {files} of code, {libraries}, the hardware and the threads."
        return
    yield "Not all is as it was then, so the bytes may differ:"
    yield from (f"  {line}" for line in aligned([["input", "recorded", "here"], *map(list, differing)]))


def _the_same(files: Mapping[str, Any]) -> str:
    weights = [name for name in files if name.endswith(".safetensors")]
    digests = "; ".join(f"sha256 {files[name]['sha256']} {name}" for name in weights)
    return f"The same bytes: {digests}; and {format_count(len(files) - len(weights), 'other file')}."


def _afterword(
    others: Sequence[str],
    recorded: Mapping[str, Any],
    here: Mapping[str, Any],
    differing: Sequence[Difference],
    figures: Sequence[FigurePair],
) -> tuple[list[str], int]:
    """What is said of a model that has other bytes, and the exit code."""
    digests = [
        [name, *((files.get(name, {}).get("sha256") or "none")[:12] for files in (recorded, here))] for name in others
    ]
    lines = ["Other bytes:", *(f"  {line}" for line in aligned([["file", "recorded", "here"], *digests]))]
    table = [["figure", "recorded", "here", "agree"]]
    for compared in figures:
        scores = [format_score(one) for one in (compared.recorded, compared.here)]
        table.append([compared.figure, *scores, "yes" if compared.agrees else "no"])
    lines += [f"  {line}" for line in aligned(table)]
    if figures and all(compared.agrees for compared in figures):
        lines.append(f"The figures agree within noise: {RULE}.")
        if differing:
            return lines, COMPLETED
        lines.append("Nothing is known that could have changed the bytes: they should have been the same.")
    else:
        lines.append(f"The figures do not agree within noise, which would be: {RULE}.")
    return lines, FAILED


@contextlib.contextmanager
def _fresh_home(asked: Path | None, model: str) -> Iterator[Path]:
    """A home of its own for all that is done in the block, MLflow's database included; one that was not asked for goes
    where the block raises before anything was made."""
    own = settings.home()
    home = (
        Path(tempfile.mkdtemp(prefix=f"{own.name}-reproduced-", dir=own.parent)) if asked is None else asked.absolute()
    )
    if home.is_dir() and _marked(home) != model and any(file.name != MARK for file in home.iterdir()):
        message = f"{home} is not empty: name a folder that is, or that is not there."
        raise UserError([Problem(kind="option", where="--into", message=message)])
    before = {name: os.environ.get(name) for name in ("FINETUNE_HOME", "MLFLOW_TRACKING_URI", "OMP_NUM_THREADS")}
    os.environ["FINETUNE_HOME"] = str(home)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    try:
        if _marked(settings.home()) != model:  # else a kill in the midst of writing it again would lose it
            (home / MARK).write_text(model)
        yield home
    except BaseException:
        if asked is None and not (home / "runs").exists():
            shutil.rmtree(home)
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _marked(home: Path) -> str | None:
    file = home / MARK
    return file.read_text() if file.is_file() else None
