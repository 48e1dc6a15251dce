"""Exact search in embeddings that predictions wrote, and the forms of their numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.prediction import vector_search
from tasks.prediction.vector_search import find_files, search
from tasks.registry.model_spec import ModelSpec
from tests.raised import raised_problems
from training.data.prediction_files import STAMPS
from training.data.vectors import VectorType, as_vectors

MODEL = ModelSpec("models:/finder/1", 64, {"task": "sentence-similarity", "options": {}}, {}, "finder", "1", "digest")


def write(file: Path, vectors: npt.NDArray[np.float32], kind: VectorType = "float32", digest: str = "digest") -> None:
    """Rows with these embeddings, and a last one with an error in place of its own."""
    embeddings = pa.array([*vectors.tolist(), None], pa.list_(pa.float32()))
    numbers = range(1, len(embeddings) + 1)
    columns = {
        "text": [f"text {number}" for number in numbers],
        "embedding": as_vectors(embeddings, kind, vectors.shape[1]),
        **dict.fromkeys(STAMPS, [None] * len(embeddings)),
        "error": [None] * len(vectors) + ["has no text"],
        "model_digest": [digest] * len(embeddings),
        "input_file": [file.name] * len(embeddings),
        "input_row": numbers,
    }
    pq.write_table(pa.table(columns), file)


@pytest.mark.parametrize("kind", ["float32", "float16", "binary"])
def test_the_most_similar_rows_are_those_of_all_similarities_in_blocks_and_files(
    kind: VectorType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_search, "BLOCK_ROWS", 64)
    draw = np.random.default_rng(0)
    query, vectors = draw.normal(size=100).astype(np.float32), draw.normal(size=(500, 100)).astype(np.float32)
    write(tmp_path / "a.parquet", vectors[:200], kind)
    write(tmp_path / "b.parquet", vectors[200:], kind)
    if kind == "binary":
        similarities = 1 - 2 * ((vectors > 0) != (query > 0)).mean(axis=1)
    else:
        similarities = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    best = np.argsort(-similarities, kind="stable")[:10].tolist()
    hits = search(MODEL, query.tolist(), find_files([str(tmp_path)]), 10)
    assert [(hit.row["input_file"], hit.row["input_row"]) for hit in hits] == [
        ("a.parquet", row + 1) if row < 200 else ("b.parquet", row - 199) for row in best
    ]
    assert [hit.similarity for hit in hits] == pytest.approx(similarities[best], abs=1e-3)
    assert hits[0].row.keys() == {"text", "input_file", "input_row"}


def test_equal_rows_come_in_their_order_and_fewer_rows_than_asked_for_are_all(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", np.ones((3, 8), np.float32))
    assert [hit.row["input_row"] for hit in search(MODEL, [1.0] * 8, [tmp_path / "a.parquet"], 2)] == [1, 2]
    assert len(search(MODEL, [1.0] * 8, [tmp_path / "a.parquet"], 9)) == 3


def test_files_without_embeddings_of_the_version_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "old.parquet", np.ones((2, 8), np.float32), digest="older")
    write(tmp_path / "small.parquet", np.ones((2, 4), np.float32))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    messages = {
        "old": "has embeddings of another version than finder/1",
        "small": "has embeddings of 4 numbers, and the model's have 8",
        "rows": "has no column 'embedding'",
        "broken": "is not readable",
        "absent": "has no Parquet files",
    }
    for name, message in messages.items():
        file = tmp_path / f"{name}.parquet"
        (problem,) = raised_problems(lambda file=file: search(MODEL, [1.0] * 8, find_files([str(file)]), 3))
        assert problem.where == "--corpus" and message in problem.message


def test_a_file_without_any_embedding_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", np.empty((0, 8), np.float32))
    write(tmp_path / "b.parquet", np.ones((1, 8), np.float32))
    assert [hit.row["input_file"] for hit in search(MODEL, [1.0] * 8, find_files([str(tmp_path)]), 3)] == ["b.parquet"]


def test_a_bit_of_a_binary_embedding_says_whether_a_number_is_positive() -> None:
    found = as_vectors(pa.array([[1.0, -1.0, 0.5, 0, 0, 0, 0, 2.0, 1.0], None], pa.list_(pa.float32())), "binary", 9)
    assert found.to_pylist() == [[0b10100001, 0b10000000], [0, 0]]
