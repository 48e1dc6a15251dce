"""Write a registered version as a folder for other tools: ONNX for encoders, safetensors for every model.

An export that was released with the version is downloaded; another one is made, and was not compared with the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flows.cli.shared import COMPLETED, add_version_arguments
from flows.reports.tables import export_lines
from tasks.reports.formatting import format_size
from training.problems import UserError
from training.recipe import EXPORTS, split_version_name

FORMATS = (*EXPORTS, "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument(
        "format",
        metavar="FORMAT",
        choices=FORMATS,
        help="onnx: 32-bit floats; onnx-int8: weights in 8 bits; safetensors: one file of weights, for servers and "
        "converters",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write, new or empty")


def execute(arguments: argparse.Namespace) -> int:
    """Writes the folder and lists its files. Raises UserError for an unknown model, a format that the model lacks and a
    folder with content; MlflowFailed if MLflow does not answer."""
    from tasks.registry.exports import export_version
    from tasks.registry.prediction_job import find_model

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
