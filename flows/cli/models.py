"""The commands for registered models: `models`, `promote`, `rollback`, `export`, `dossier`."""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.cli.runs import format_time
from flows.cli.shared import (
    COMPLETED,
    add_json_argument,
    add_limit_argument,
    add_version_arguments,
    output_file,
    write_json,
)
from flows.reports.tables import align, export_lines, fit_to_terminal, terminal_width, wrap
from tasks.provenance.dossier import build_dossier, find_documents
from tasks.provenance.dossier_signature import SUFFIX, sign_dossier
from tasks.registry import promotions
from tasks.registry.model_spec import find_model
from tasks.registry.version_exports import export_version
from tasks.registry.versions import list_models
from tasks.reports.formatting import format_size, format_value
from training.jobs.protocol import write_atomically
from training.problems import UserError
from training.recipe import EXPORTS, split_version_name

EXPORTABLE = (*EXPORTS, "safetensors")


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this registered model")
    add_limit_argument(parser, "how many versions of a model")
    add_json_argument(parser, "the list, with intervals and digests,")


def models(arguments: argparse.Namespace) -> int:
    """List registered models, newest version first.

    With NAME, also lists each change of its champion: when, by whom and why.
    """
    models = list_models(arguments.name, arguments.limit)
    write_json(arguments.json, models)
    blocks = []
    for model in models:
        more = [f"  … and older versions: --limit {2 * arguments.limit}"] if model["has_more"] else []
        blocks.append([model["name"], *fit_to_terminal(_version_lines(model["versions"])), *more])
        if arguments.name and model["moves"]:
            blocks.append([line for move in reversed(model["moves"]) for line in _move_lines(move)])
    print("\n\n".join("\n".join(block) for block in blocks) or "Nothing is registered yet.")
    return COMPLETED


def _version_lines(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [["version", "aliases", "date", "verdict", "metrics", "data"]]
    for version in versions:
        aliases = ", ".join(version["aliases"])
        date = datetime.fromtimestamp(version["registered_ms"] / 1000, UTC).date().isoformat()
        data = " ".join(filter(None, [version["data"] or "", (version["data_commit"] or "")[:7]]))
        scores = version["figures"].get(version["split"], {})
        values = ", ".join(f"{name} {format_value(score['value'])}" for name, score in scores.items())
        metrics = f"{version['split']} {values}" if values else ""
        lines.append([version["version"], aliases, date, version["verdict"] or "", metrics, data])
    return [f"  {line}" for line in align(lines)]


def _move_lines(move: Mapping[str, Any]) -> list[str]:
    """Formats a change of the champion: time, versions, author and reason."""
    change = f"version {move['before']} → {move['to']}" if move["before"] else f"version {move['to']}"
    by = f"flow run {move['flow_run'][:8]}" if move["by"] == "run" else f"finetune {move['by']}"
    why = f": {move['why']}" if move["why"] else ""
    start = f"  {format_time(move['time'])}  "
    text = f"{change} by {by} of {move['user']} on {move['host']}{why}"
    return wrap(text, terminal_width(), start, " " * len(start))


def add_promote_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a registered model")
    parser.add_argument("version", metavar="VERSION", help="the number of the version")
    add_why(parser)
    parser.add_argument("--alias", metavar="ALIAS", help="set this alias instead of the champion's")


def add_why(parser: argparse.ArgumentParser) -> None:
    """Adds --why."""
    parser.add_argument("--why", metavar="TEXT", default="", help="the reason, shown by `finetune models NAME`")


def promote(arguments: argparse.Namespace) -> int:
    """Make a registered version the champion, regardless of the gate."""
    print(promotions.promote(arguments.name, arguments.version, arguments.why, arguments.alias))
    return COMPLETED


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a registered model")
    add_why(parser)


def rollback(arguments: argparse.Namespace) -> int:
    """Make the previous champion the champion again.

    A second rollback goes back one more.
    """
    print(promotions.roll_back(arguments.name, arguments.why))
    return COMPLETED


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument(
        "format",
        metavar="FORMAT",
        choices=EXPORTABLE,
        help="; ".join(f"{name}: {form.description}" for name, form in EXPORTS.items())
        + "; safetensors: one file of weights, for servers and converters",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write, new or empty")


def export(arguments: argparse.Namespace) -> int:
    """Write a registered version as a folder for other tools.

    ONNX is for encoders, GGUF and weights of fewer bits are for language models, safetensors for every model. An
    export that was released with the version is downloaded; another one is made, and was not compared with the model.
    """
    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError.of("option", "--out", f"{out} is not an empty folder: name another one.")
    model = find_model(*split_version_name(arguments.model), arguments.task)
    released = export_version(model, arguments.format, out)
    print(f"{model.name} version {model.version}:")
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        print(f"  {file}  {format_size(file.stat().st_size)}")
    if released is not None:
        print(*export_lines({arguments.format: released}), sep="\n")
    elif arguments.format != "safetensors":
        print("Not compared with the model: name the format in release.exports for that.")
    return COMPLETED


def add_dossier_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME/VERSION", help="a registered version; NAME@ALIAS names it too")
    parser.add_argument("--out", metavar="FILE", type=output_file, required=True, help="the zip file to write")


def dossier(arguments: argparse.Namespace) -> int:
    """Write all that is known of a registered version into one zip file, and its signature into a file beside it.

    The file has the lineage, card, metrics and verdict, a CycloneDX bill of materials, a Croissant data set and
    OpenLineage events.
    """
    if not re.search(r"[/@]", arguments.model):
        message = f"{arguments.model!r} is no version: write NAME/VERSION, such as {arguments.model}/1, or NAME@ALIAS."
        raise UserError.of("option", "NAME/VERSION", message)
    documents = find_documents(arguments.model)
    content = build_dossier(documents)
    beside = arguments.out.with_name(arguments.out.name + SUFFIX)
    try:
        signature, words = sign_dossier(documents, content), f"{beside}  its signature by the key of this home"
    except UserError as error:  # this home has no trusted key, and may read the version all the same
        signature, words = None, f"Not signed: {error}"
    write_atomically(arguments.out, content)
    if signature is None:
        beside.unlink(missing_ok=True)  # that of an earlier file
    else:
        write_atomically(beside, signature)
    print(f"{arguments.out}  {format_size(len(content))}  sha256 {hashlib.sha256(content).hexdigest()}")
    print(words)
    return COMPLETED
