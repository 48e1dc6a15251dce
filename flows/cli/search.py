"""The command `search`: the rows of predicted files that are most similar to a text."""

from __future__ import annotations

import argparse

from flows.cli.shared import COMPLETED, add_json_argument, add_version_arguments, write_json
from flows.reports.tables import terminal_width, wrap
from tasks.prediction.vector_search import embed_query, find_files
from tasks.prediction.vector_search import search as search_files
from tasks.registry.model_spec import find_model
from training.problems import UserError
from training.recipe import split_version_name


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument("text", metavar="TEXT", help="the text to find similar rows for")
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
    query = embed_query(model, arguments.text)
    found = search_files(model, query, files, arguments.top)
    for hit in found:
        texts = "  ".join(str(value) for name, value in hit.row.items() if name not in ("input_file", "input_row"))
        place = f"{hit.row['input_file']}, row {hit.row['input_row']}"
        print(*wrap(f"{hit.similarity:.4f}  {texts}", terminal_width(), "", "        "), f"        {place}", sep="\n")
    write_json(arguments.json, [{"similarity": hit.similarity, **hit.row} for hit in found])
    return COMPLETED
