"""The command `search`: the rows of predicted files that are most similar to a text."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.shared import COMPLETED, add_json_argument, add_version_arguments, write_json
from flows.reports.tables import terminal_width, wrap
from tasks.prediction.single_rows import predict_records, split_into_rows
from tasks.prediction.vector_search import find_files
from tasks.prediction.vector_search import search as search_files
from tasks.registry.model_spec import find_model, with_prompt
from training.problems import UserError
from training.recipe import split_version_name
from training.task_types import class_of
from training.task_types.text_embedding import TextEmbedding


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument("texts", metavar="TEXT", nargs=1, help="the text to find similar rows for")
    parser.add_argument(
        "--corpus",
        metavar="PATH",
        action="append",
        required=True,
        help="a Parquet file with embeddings, or a folder: the --output of finetune predict NAME --input …; repeatable",
    )
    parser.add_argument("--top", metavar="N", type=int, default=5, help="the rows to show (default: 5)")
    add_json_argument(parser, "the rows with their similarities")


def search(arguments: argparse.Namespace) -> int:
    """Find the rows whose embeddings are most similar to that of a text.

    Each query compares all rows, exactly. Use FAISS, Qdrant or pgvector for large files and many queries.
    """
    if arguments.top < 1:
        raise UserError.of("option", "--top", f"{arguments.top} is too few rows: give 1 or more.")
    files = find_files(arguments.corpus)
    model = find_model(*split_version_name(arguments.model), arguments.task)
    task_type = class_of(model.task["task"])
    if not issubclass(task_type, TextEmbedding):
        message = f"{model.name} is a model for {model.task['task']}: name one that gives embeddings."
        raise UserError.of("option", "NAME", message)
    model = with_prompt(model, next(iter(task_type.own_prompts)))  # that of queries, whatever documents have
    (record,) = predict_records(model, split_into_rows(model, arguments.texts))
    found = search_files(model, record["embedding"], files, arguments.top)
    for hit in found:
        row: dict[str, Any] = {
            name: value for name, value in hit.row.items() if name not in ("input_file", "input_row")
        }
        texts = "  ".join(str(value) for value in row.values())
        place = f"{hit.row['input_file']}, row {hit.row['input_row']}"
        print(*wrap(f"{hit.similarity:.4f}  {texts}", terminal_width(), "", "        "), f"        {place}", sep="\n")
    write_json(arguments.json, [{"similarity": hit.similarity, **hit.row} for hit in found])
    return COMPLETED
