"""Predictions of a champion with other labels on today's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from training.problems import UserError
from training.programs.predict_champion import require_task
from training.task_types import load
from training.task_types.sequence_classification import probabilities

KIND = load("sequence-classification")
LOGITS = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.3]], dtype=np.float32))


def remapped(own: list[str], labels: list[str], true: list[int]) -> tuple[Any, Any]:
    """The predictions and logits by today's labels of a champion with labels of its own."""
    answers = pa.table({"label": true, "prediction": LOGITS.argmax(axis=1), "logits": LOGITS.tolist()})
    answers = answers.cast(pa.schema({"label": pa.int64(), "prediction": pa.int64(), "logits": pa.list_(pa.float32())}))
    found = KIND.remap_labels(answers, own, labels)
    assert found.schema == answers.schema and found["label"].to_pylist() == true
    return found["prediction"].to_numpy(), np.array(found["logits"].to_pylist(), np.float32)


def test_labels_are_taken_over_by_name_whatever_their_order() -> None:
    predictions, logits = remapped(["a", "b", "c"], ["c", "a", "b"], [0, 0, 0])
    assert predictions.tolist() == [1, 0, 2]
    assert np.array_equal(logits, LOGITS[:, [2, 0, 1]])


def test_a_label_that_the_champion_does_not_know_gets_no_probability() -> None:
    predictions, logits = remapped(["a", "b", "c"], ["a", "b", "new", "c"], [2, 3, 2])
    assert predictions.tolist() == [0, 3, 1]
    assert probabilities(logits)[:, 2].tolist() == [0, 0, 0]


def test_a_label_that_only_the_champion_has_counts_as_wrong_and_keeps_its_probability() -> None:
    true = np.array([0, 1, 0])
    predictions, logits = remapped(["gone", "a", "b"], ["a", "b"], true.tolist())
    given = probabilities(logits)
    # The first row's likeliest label no longer exists; the other rows predict b and a, both correct.
    assert (predictions == true).tolist() == [False, True, True]
    assert given[[0, 1, 2], true] == pytest.approx([0.2, 0.6, 0.5], abs=1e-6)
    assert given.sum(axis=-1) == pytest.approx([1, 1, 1])


def test_a_champion_of_another_task_type_is_refused_with_the_name_of_its_class(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}))
    require_task(KIND, "sequence-classification", tmp_path, "small/1")
    config.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForTokenClassification"]}))
    with pytest.raises(UserError, match=r"release.registry: small/1 is BertForTokenClassification"):
        require_task(KIND, "sequence-classification", tmp_path, "small/1")
