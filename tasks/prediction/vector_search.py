"""Exact search: the rows whose embeddings are most similar to that of a query.

The rows are Parquet files that `finetune predict NAME --input … --output …` has written with the same version of the
model. Each query reads them all, a block at a time: a library of approximate search, such as FAISS, Qdrant or pgvector,
reads the same files.

N rows of a block, D dimensions.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.prediction.single_rows import predict_records, split_into_rows
from tasks.registry.model_spec import ModelSpec, with_prompt
from tasks.reports.formatting import first_line
from training.data.prediction_files import EMBEDDING, STAMPS
from training.data.vectors import as_matrix
from training.problems import UserError
from training.task_types import class_of
from training.task_types.text_embedding import TextEmbedding, normalize

BLOCK_ROWS = 16_384
_PLACE = ("input_file", "input_row")


class Hit(NamedTuple):
    """A row that was found."""

    similarity: float
    """The cosine; of binary embeddings, 1 less twice the share of bits that differ."""
    row: dict[str, Any]
    """The columns that travelled along, and the row's place in the input."""


def embed_query(model: ModelSpec, text: str) -> list[float]:
    """The embedding of a text, with the prompt of queries: documents may have another. Raises UserError for a model
    without embeddings, and MlflowFailed."""
    task_type = class_of(model.task["task"])
    if not issubclass(task_type, TextEmbedding):
        message = f"{model.name} is a model for {model.task['task']}: name one that gives embeddings."
        raise UserError.of("option", "NAME", message)
    model = with_prompt(model, next(iter(task_type(model.task["options"]).prompt_columns())))
    (record,) = predict_records(model, split_into_rows(model, [text]))
    return list(record["embedding"])


def find_files(corpus: Sequence[str]) -> list[Path]:
    """The Parquet files of these files and folders, by name. Raises UserError if there are none."""
    found = [
        file for path in map(Path, corpus) for file in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])
    ]
    missing = [str(file) for file in found if not file.is_file()]
    if missing or not found:
        message = (
            f"{(missing or corpus)[0]} has no Parquet files: write them by finetune predict NAME --input … --output …"
        )
        raise UserError.of("option", "--corpus", f"{message}.")
    return found


def search(model: ModelSpec, query: Sequence[float], files: Sequence[Path], most: int) -> list[Hit]:
    """The most similar rows of the files to the query's embedding (D,), the best first; equal ones in their order.

    Raises UserError for files without embeddings of this version.
    """
    wanted = normalize(np.array(query, np.float32)[None])[0]
    best: list[tuple[float, int, dict[str, Any]]] = []  # the worst first; of equal ones the last
    place = 0
    for block in _blocks(model, files, len(wanted)):
        similarities = _similarities(block.column(EMBEDDING), wanted)
        for row in np.argsort(-similarities, kind="stable")[:most].tolist():
            one = (float(similarities[row]), -(place + row))
            if len(best) < most or one > best[0][:2]:
                values = {name: block.column(name)[row].as_py() for name in block.schema.names if name != EMBEDDING}
                insort(best, (*one, values), key=lambda hit: hit[:2])
                del best[: max(0, len(best) - most)]
        place += block.num_rows
    return [Hit(similarity, row) for similarity, _, row in reversed(best)]


def _blocks(model: ModelSpec, files: Sequence[Path], dimensions: int) -> Iterator[pa.RecordBatch]:
    """The rows with an embedding: it, the columns that travelled along, and the row's place."""
    for file in files:
        try:
            opened = pq.ParquetFile(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError.of("option", "--corpus", f"{file} is not readable: {first_line(error)}.") from error
        with opened:
            _require_embeddings(opened.schema_arrow, file)
            for block in opened.iter_batches(BLOCK_ROWS):
                digests = block.column("model_digest").unique().to_pylist()
                if digests != [model.digest]:
                    version = f"{model.name}/{model.version}"
                    message = f"{file} has embeddings of another version than {version}, which are not comparable: "
                    message += f"run finetune predict {version} again with the same --output."
                    raise UserError.of("option", "--corpus", message)
                names = [name for name in block.schema.names if name not in STAMPS or name in _PLACE]
                usable = block.select(names).filter(block.column("error").is_null())
                if usable.num_rows:
                    _require_size(usable.schema.field(EMBEDDING).type, file, dimensions)
                    yield usable


def _require_embeddings(schema: pa.Schema, file: Path) -> None:
    """Raises UserError if the file has no embeddings."""
    kind = schema.field(EMBEDDING).type if EMBEDDING in schema.names else None
    if kind is None or not pa.types.is_fixed_size_list(kind) or not STAMPS.keys() <= {*schema.names}:
        message = f"{file} has no column {EMBEDDING!r} of finetune predict: name the --output of one."
        raise UserError.of("option", "--corpus", message)


def _require_size(kind: pa.FixedSizeListType, file: Path, dimensions: int) -> None:
    """Raises UserError if embeddings have another size than the query's."""
    size = -(-dimensions // 8) if kind.value_type == pa.uint8() else dimensions
    if kind.list_size != size:
        message = (
            f"{file} has embeddings of {kind.list_size} numbers, and the model's have {size}: predict its rows again."
        )
        raise UserError.of("option", "--corpus", message)


def _similarities(vectors: pa.FixedSizeListArray, wanted: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(N,) of vectors to the query, which has length 1."""
    found = as_matrix(vectors, vectors.type.list_size)
    if found.dtype == np.uint8:
        differing = np.bitwise_count(found ^ np.packbits(wanted > 0))
        return np.asarray(1 - 2 * differing.sum(axis=1, dtype=np.float32) / len(wanted))
    return np.asarray(normalize(found.astype(np.float32)) @ wanted)
