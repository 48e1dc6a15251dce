"""The command `reproduce`: a training is repeated from its record."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.cli.local_flow import exit_without_server, fine_tune_here, print_failure
from flows.cli.shared import COMPLETED, FAILED
from flows.reports.tables import align
from tasks.cache.garbage_collection import REPRODUCES, UNFINISHED_FILE, find_reproductions, remove_reproduction
from tasks.home import home
from tasks.locks import exclusive_lock
from tasks.registry import lineage, reproduction, untrusted_code
from tasks.registry.lineage import list_model_files
from tasks.registry.reproduction import Difference, MetricPair, differing_files, pair_metrics
from tasks.reports.formatting import format_count, format_score
from tasks.stages.fit import batch_division
from tasks.stages.resolve import pin, pin_folder_of_model
from training.problems import UserError

RULE = "each value lies within the other's 95% interval"


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME/VERSION|NAME@ALIAS", help="a registered version")
    parser.add_argument(
        "--into",
        metavar="DIR",
        type=lambda text: Path(text).absolute(),
        help="the home to train in: an empty folder, or the one of an earlier try, which then continues; it is kept "
        "(default: a new folder next to the home, removed if the bytes are the same)",
    )
    parser.add_argument(untrusted_code.OPTION, action="store_true", help=untrusted_code.OPTION_HELP)


def reproduce(arguments: argparse.Namespace) -> int:
    """Train a registered model again from its record and compare the bytes.

    Exit code 0 if the bytes are the same, or if the metrics agree and a known input differs; else 1.
    """
    name, into = arguments.name, arguments.into
    if not {"/", "@"} & set(name):
        raise UserError.of("option", "NAME/VERSION", f"{name!r} has no version: give one, {name}/1 or {name}@champion.")
    record = lineage.find_version(name)
    reproduction.require_signed(record)
    if not arguments.run_code:
        untrusted_code.require_consent(
            f"the record of {name}", record[lineage.RECIPE_WITHOUT_DEFAULTS], record["recipe"]
        )
    reproduction.require_whole(record, name)
    inputs = reproduction.find_stored_inputs(record)
    stored = {**inputs, **reproduction.find_made_by_versions(record)}
    folders = {stage: ref.path for stage, ref in stored.items()}
    with (
        reproduction.find_versions(record, stored) as versions,
        _fresh_home(into, record["model"]["digest"]) as fresh,
    ):
        for warning in versions.warnings:
            print(warning, file=sys.stderr)
        recipe = reproduction.recorded_recipe(record, versions.start)
        reproduction.link_stored(stored, folders)
        if inputs:
            print(f"Files are missing here: {' and '.join(inputs)} as stored.")
            is_folder = versions.start is not None and "load_model" not in inputs
            files = pin_folder_of_model(recipe) if is_folder else None
            lock = reproduction.recorded_lock(record, versions, files)
        else:
            lock = pin(recipe, versions=versions.others)
            reproduction.require_recorded_files(record, lock)
        reproduction.set_recorded_threads(record)
        differences = reproduction.differences(record, lock, reproduction.describe_machine())
        print("\n".join(_describe_inputs(record, differences)), flush=True)
        batches = reproduction.RecordedBatches(recipe, record, batch_division)
        result = fine_tune_here(recipe, batches, recorded=lock)
        if result["state"] == "completed":
            lines, code, same = _compare(record, result, differences)
            print("\n".join(lines))
            hint = f"Kept: {fresh}"
        else:
            code, same = print_failure(result), False
            hint = f"Completed stages are stored: continue with --into {fresh}"
        if not same or into is not None:
            print(hint, file=sys.stderr)
            (fresh / UNFINISHED_FILE).unlink(missing_ok=True)
    if same and into is None:
        remove_reproduction(fresh)
    exit_without_server(result, code)
    return code


def _describe_inputs(record: Mapping[str, Any], differences: Sequence[Difference]) -> Iterator[str]:
    registered = record["registered"]
    yield f"{registered['name']} version {registered['version']}, of flow run {record['run']['flow_run_id']}"
    if differences:
        yield "Some inputs differ, so the bytes may differ:"
        yield from (f"  {line}" for line in align([["input", "recorded", "here"], *map(list, differences)]))
    else:
        files = format_count(len(record["code"]["files"]), "file")
        libraries = format_count(len(record["libraries"]), "version")
        yield f"All inputs are as recorded: the rows, {files} of code, {libraries}, the hardware and the threads."


def _compare(
    record: Mapping[str, Any], result: Mapping[str, Any], differences: Sequence[Difference]
) -> tuple[list[str], int, bool]:
    """Compares the models; returns lines to print, the exit code, and whether the bytes are the same."""
    key = next(stage["key"] for stage in result["stages"] if stage["name"] == "fit")
    recorded, here = record["model"]["files"], list_model_files(key) or {}
    if different := differing_files(recorded, here):
        figures = pair_metrics(record["metrics"] or {}, result["metrics"])
        return *_describe_difference(different, recorded, here, differences, figures), False
    weights = [name for name in recorded if name.endswith(".safetensors")]
    digests = "; ".join(f"sha256 {recorded[name]['sha256']} {name}" for name in weights)
    line = f"The same bytes: {digests}; and {format_count(len(recorded) - len(weights), 'other file')}."
    return [line], COMPLETED, True


def _describe_difference(
    files: Sequence[str],
    recorded: Mapping[str, Any],
    here: Mapping[str, Any],
    differences: Sequence[Difference],
    figures: Sequence[MetricPair],
) -> tuple[list[str], int]:
    """Describes a model with other bytes by its files and metrics; returns lines to print and the exit code."""
    digests = [
        [name, *((model.get(name, {}).get("sha256") or "none")[:12] for model in (recorded, here))] for name in files
    ]
    metrics = [["metric", "recorded", "here", "agree"]]
    for pair in figures:
        scores = [format_score(score) for score in (pair.recorded, pair.here)]
        metrics.append([pair.figure, *scores, "yes" if pair.agrees else "no"])
    tables = [*align([["file", "recorded", "here"], *digests]), *align(metrics)]
    lines = ["The bytes differ:", *(f"  {line}" for line in tables)]
    if not figures or not all(pair.agrees for pair in figures):
        return [*lines, f"The metrics do not agree within noise ({RULE})."], FAILED
    lines.append(f"The metrics agree within noise ({RULE}).")
    if differences:
        return lines, COMPLETED
    return [*lines, "No input is known to differ: the bytes should have been the same."], FAILED


@contextlib.contextmanager
def _fresh_home(into: Path | None, model: str) -> Iterator[Path]:
    """Makes a folder the home of the block, with an MLflow database of its own. The shared store has the model, so
    it is left out. A new folder is removed if the block raises before a run begins. Folders of killed processes are
    removed too."""
    own = home()
    for piece in find_reproductions():
        if not piece.needed_by:
            remove_reproduction(piece.path)
    fresh = into or Path(tempfile.mkdtemp(prefix=f"{own.name}-reproduced-", dir=own.parent))
    mark = fresh / REPRODUCES
    marked = mark.is_file() and mark.read_text(encoding="utf-8") == model
    if fresh.exists() and not fresh.is_dir():
        raise UserError.of("option", "--into", f"{fresh} is not a folder: name an empty or a new folder.")
    if fresh.is_dir() and not marked and any(file != mark for file in fresh.iterdir()):
        raise UserError.of("option", "--into", f"{fresh} is not empty: name an empty or a new folder.")
    names = ("FINETUNE_HOME", "FINETUNE_STORE", "MLFLOW_TRACKING_URI", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ["FINETUNE_HOME"] = str(fresh)
    for name in ("FINETUNE_STORE", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    try:
        home()  # creates it
        with exclusive_lock(mark) as alone:
            if not alone:
                message = f"another `finetune reproduce` runs in {fresh}: wait until it ends, or name another folder."
                raise UserError.of("option", "--into", message)
            if not marked:
                mark.write_text(model, encoding="utf-8")
            if into is None:
                (fresh / UNFINISHED_FILE).touch()
            else:
                (fresh / UNFINISHED_FILE).unlink(missing_ok=True)
            yield fresh
    except BaseException:
        if into is None and not (fresh / "runs").exists():
            shutil.rmtree(fresh)
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
