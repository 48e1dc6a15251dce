"""What a champion of other labels makes of today's rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from training.champion import by_labels, need_kind
from training.kinds import load
from training.problems import UserError

KIND = load("sequence-classification")
LOGITS = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.3]], dtype=np.float32))


def test_labels_are_taken_over_by_name_whatever_their_order() -> None:
    predictions, logits = by_labels(KIND, LOGITS, ["a", "b", "c"], ["c", "a", "b"], np.array([0, 0, 0]))
    assert predictions.tolist() == [1, 0, 2]
    assert np.array_equal(logits, LOGITS[:, [2, 0, 1]])


def test_a_label_that_the_champion_does_not_know_gets_no_probability() -> None:
    predictions, logits = by_labels(KIND, LOGITS, ["a", "b", "c"], ["a", "b", "new", "c"], np.array([2, 3, 2]))
    assert predictions.tolist() == [0, 3, 1]
    assert KIND.probabilities(logits)[:, 2].tolist() == [0, 0, 0]


def test_a_label_that_the_champion_alone_knows_is_a_wrong_answer_as_wrong_as_it_was_sure() -> None:
    true = np.array([0, 1, 0])
    predictions, logits = by_labels(KIND, LOGITS, ["gone", "a", "b"], ["a", "b"], true)
    probabilities = KIND.probabilities(logits)
    # The first row says what is gone; the others say b and a, of which both are right.
    assert (predictions == true).tolist() == [False, True, True]
    assert probabilities[[0, 1, 2], true] == pytest.approx([0.2, 0.6, 0.5], abs=1e-6)
    assert probabilities.sum(axis=-1) == pytest.approx([1, 1, 1])


def test_a_champion_of_another_kind_is_a_mistake_that_says_what_it_is(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["BertForSequenceClassification"]}))
    need_kind(KIND, "sequence-classification", tmp_path, "small/1")
    config.write_text(json.dumps({"architectures": ["BertForTokenClassification"]}))
    with pytest.raises(UserError, match=r"release.registry: small/1 is BertForTokenClassification"):
        need_kind(KIND, "sequence-classification", tmp_path, "small/1")
