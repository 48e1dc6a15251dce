"""Predictions of rows as a table and as records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from tests.training import tiny
from training import task_types
from training.engine.predictor import Predictor
from training.task_types.text_embedding import TextEmbedding

TEXTS = ["cat dog", "saw <image> drill", "bread", "cat dog soup bread"]


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by task type, whose tokenizer has a token that they do not have."""
    folders = {}
    for task in ("embedding", "sequence-classification"):
        folder = folders[task] = tiny.export_untrained(world / "base", tmp_path_factory.mktemp(task), task)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<image>"])
        tokenizer.save(str(folder / "tokenizer.json"))
    return folders


@pytest.mark.parametrize(("task", "column"), [("embedding", "anchor"), ("sequence-classification", "text")])
def test_a_table_of_predictions_has_the_records_and_nulls_for_a_row_that_the_model_cannot_read(
    task: str, column: str, trained: dict[str, Path]
) -> None:
    predictor = Predictor(task_types.load(task), trained[task], trained[task], 8, batch_rows=2)
    rows = pa.record_batch({column: TEXTS})
    records = predictor.predict(rows)
    table = predictor.predict_table(predictor.tokenize(rows))
    assert table.schema == pa.schema(list(predictor.record_types.items()))
    assert records[1] == {} and all(records[place] for place in (0, 2, 3))
    assert table.to_pylist() == [record or dict.fromkeys(table.column_names) for record in records]
    assert predictor.beyond == 2
    nothing = predictor.predict_table(predictor.tokenize(rows.slice(1, 1)))
    assert nothing.num_rows == 1 and nothing.column(0).null_count == 1


def test_embeddings_reach_a_table_without_a_python_object_for_each_number(
    trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("records were made")

    monkeypatch.setattr(TextEmbedding, "to_records", refuse)
    predictor = Predictor(task_types.load("embedding"), trained["embedding"], trained["embedding"], 8)
    table = predictor.predict_table(predictor.tokenize(pa.record_batch({"anchor": TEXTS[2:]})))
    assert np.isfinite(table["embedding"].combine_chunks().flatten().to_numpy()).all() and len(table) == 2
