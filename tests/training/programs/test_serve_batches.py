"""Which requests of a served model are one batch."""

from __future__ import annotations

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
