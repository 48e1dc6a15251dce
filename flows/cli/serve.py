"""The command `serve`: an HTTP server for a registered model."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from flows.cli.shared import COMPLETED, add_version_arguments
from tasks.servers import SERVE_PORT, announce_serving
from tasks.serving.llama_cpp import SERVED_FORMATS
from tasks.serving.server import ServeOptions
from tasks.serving.server import serve as run_server
from training.problems import Problem, UserError, nearest
from training.recipe import EXPORTS, split_version_name


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=SERVE_PORT, help=f"default: {SERVE_PORT}")
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers", help="what computes; vllm: for GPUs"
    )
    parser.add_argument(
        "--vllm", metavar="ARGUMENTS", default="", help="further arguments of `vllm serve`, in one quoted text"
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        default="",
        help="serve a GGUF file that was released with the version, by llama.cpp: "
        f"{', '.join(SERVED_FORMATS[1:])}, or gguf, the smallest of them",
    )
    rows = ServeOptions.batch_size
    parser.add_argument("--batch-size", metavar="ROWS", type=int, help=f"rows in one forward pass (default: {rows})")
    parser.add_argument("--record", metavar="FOLDER", type=Path, help="record served rows and their predictions here")
    parser.add_argument(
        "--record-share", metavar="SHARE", type=float, default=1.0, help="the share of rows to record (default: all)"
    )
    parser.add_argument(
        "--record-rows",
        metavar="ROWS",
        type=int,
        default=100_000,
        help="the most rows to keep; the oldest go (default: 100000)",
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serve a registered model over HTTP.

    The version with the alias answers, and after a promotion the new one, without a lost request. Generators have
    OpenAI's API; rows of other models go to /predict. Requests need the token of this home.
    """
    problems = _find_problems(arguments)
    try:
        vllm_arguments = shlex.split(arguments.vllm)
    except ValueError as error:
        message = f"{arguments.vllm!r} is no list of words: {error}."
        problems.append(Problem(kind="option", where="--vllm", message=message))
    if problems:
        raise UserError(problems)
    name, alias, version = split_version_name(arguments.model)
    options = ServeOptions(
        name=name,
        alias=alias,
        version=version,
        task=arguments.task,
        host=arguments.host,
        port=arguments.port,
        engine=arguments.engine,
        vllm_arguments=tuple(vllm_arguments),
        format=arguments.format,
        batch_size=arguments.batch_size or ServeOptions.batch_size,
        record=arguments.record,
        record_share=arguments.record_share,
        record_rows=arguments.record_rows,
    )

    def show_address(address: str, command: str) -> None:
        announce_serving(arguments.model, address)
        print(
            f"It is served at {address}, with a page about its API. Ctrl-C stops it. Ask it:\n\n{command}\n", flush=True
        )

    run_server(options, show_address)
    return COMPLETED


def _explain_format(model: str, name: str) -> str:
    """Why no export of this format is served, and what is possible in its place."""
    choice = f"choose from {', '.join(SERVED_FORMATS)}"
    if name not in EXPORTS:
        return f"{name!r} is no format of exports that is served: {choice}.{nearest(name, SERVED_FORMATS)}"
    if not EXPORTS[name].is_folder:
        return (
            f"{name!r} is for programs of your own, by the file of `finetune export {model} {name} --out FOLDER`: "
            f"{choice}."
        )
    return (
        f"{name!r} is for vLLM on a GPU: `finetune export {model} {name} --out FOLDER`, then `vllm serve FOLDER`. "
        "Transformers expands its weights to 16-bit floats, so it gains neither memory nor speed. On a CPU, "
        f"{choice}."
    )


def _find_problems(arguments: argparse.Namespace) -> list[Problem]:
    size = arguments.batch_size
    wrong = {
        "--port": not 0 <= arguments.port < 2**16 and f"{arguments.port} is no port: give 0 to 65535.",
        "--batch-size": size is not None and size < 1 and f"{size} is given: give 1 or more.",
        "--record-share": not 0 < arguments.record_share <= 1
        and f"{arguments.record_share:g} is given: give more than 0 and at most 1.",
        "--record-rows": arguments.record_rows < 1 and f"{arguments.record_rows} is given: give 1 or more.",
    }
    other = "--format" if arguments.format else "--engine vllm" if arguments.engine == "vllm" else ""
    if arguments.format not in ("", *SERVED_FORMATS):
        wrong["--format"] = _explain_format(arguments.model, arguments.format)
    elif arguments.format:
        wrong["--engine"] = arguments.engine == "vllm" and "does not read GGUF: leave it out, or --format."
    if other:
        message = f"is not possible with {other}: leave one of them out."
        wrong["--record"] = bool(arguments.record) and message
        wrong["--batch-size"] = wrong["--batch-size"] or (size is not None and message)
    if arguments.format and arguments.engine != "vllm":
        wrong["--vllm"] = bool(arguments.vllm) and "is for --engine vllm, not for --format: leave one of them out."
    elif not other:
        wrong["--vllm"] = bool(arguments.vllm) and "is for --engine vllm: add it, or leave this out."
    return [Problem(kind="option", where=where, message=text) for where, text in wrong.items() if text]
