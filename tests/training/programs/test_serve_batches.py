"""Which requests of a served model are one batch, and what a batch costs."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.training.counting import write_classifier
from training import task_types
from training.data.casting import to_batch
from training.engine.predictor import Predictor
from training.programs.serve import Predict, split_by_length


def asked(*letters: int) -> list[Predict]:
    return [Predict(id=number, rows=[{"text": "a" * count}]) for number, count in enumerate(letters)]


def lengths(batches: list[list[Predict]]) -> list[list[int]]:
    return [[len(one.rows[0]["text"]) for one in batch] for batch in batches]


def test_requests_of_similar_lengths_are_one_batch_and_long_ones_another() -> None:
    requests = asked(20, 400, 25, 30, 420)
    assert lengths(split_by_length(requests)) == [[20, 25, 30], [400, 420]]
    assert lengths(split_by_length(asked(50, 51, 52))) == [[50, 51, 52]]
    assert sorted(one.id for batch in split_by_length(requests) for one in batch) == [0, 1, 2, 3, 4]


def test_weights_are_cast_for_the_first_batch_alone(tmp_path: Path) -> None:
    folder, task_type = write_classifier(tmp_path / "model", 1), task_types.load("sequence-classification")
    predictor = Predictor(task_type, folder, folder, 8, mixed_precision="bf16")
    rows = to_batch(task_type, ["text"], [("one two",)])
    casts, records = list[int](), list[object]()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                records.append(predictor.predict(rows))
            casts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy"))
    weights = 2 * 4 + 1  # of four layers with a bias, and one without
    assert casts[0] == casts[1] + weights and records[0] == records[1]
