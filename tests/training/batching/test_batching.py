"""Rows from the memory map, the order of the batches, and padding."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler

from tests.training import tiny
from training.batching.batches import EvaluationBatches, LengthGroupedBatches, PadToLongest, TokenRows
from training.engine.inference import evaluate
from training.problems import UserError

LENGTHS = np.random.default_rng(0).integers(3, 60, size=1003).astype(np.int32)


def batches(
    epoch: int = 0, world: int = 1, accumulation: int = 1, rows: int = 1003, size: int = 4
) -> list[list[list[int]]]:
    """By rank, the epoch's batches."""
    found = []
    for rank in range(world):
        step = size * accumulation * world
        sampler = LengthGroupedBatches(LENGTHS[:rows], step, accumulation=accumulation, world=world, rank=rank, seed=5)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("rows", [3, 4, 23, 24, 25, 121, 122, 1003])
@pytest.mark.parametrize("size", [1, 4])
def test_each_row_comes_once_an_epoch_and_every_rank_has_as_many_batches(
    world: int, accumulation: int, rows: int, size: int
) -> None:
    by_rank = batches(world=world, accumulation=accumulation, rows=rows, size=size)
    assert sorted(chain.from_iterable(chain.from_iterable(by_rank))) == list(range(rows))
    assert len({len(rank) for rank in by_rank}) == 1
    assert all(1 <= len(batch) <= size + 1 for rank in by_rank for batch in rank)


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    assert batches(epoch=3) == batches(epoch=3)
    assert batches(epoch=3) != batches(epoch=4)


def test_a_step_has_the_same_rows_however_it_is_cut() -> None:
    def steps(world: int, accumulation: int, size: int) -> list[set[int]]:
        by_rank = batches(world=world, accumulation=accumulation, size=size)
        micro = [set(chain.from_iterable(together)) for together in zip(*by_rank, strict=True)]
        return [set().union(*micro[i : i + accumulation]) for i in range(0, len(micro), accumulation)]

    assert steps(1, 1, 12) == steps(1, 3, 4) == steps(3, 1, 4) == steps(3, 2, 2)


def test_rows_of_a_batch_have_like_lengths_and_the_longest_row_comes_first() -> None:
    (rank,) = batches(size=16)
    assert LENGTHS.max() in LENGTHS[rank[0]]
    padded = sum(LENGTHS[batch].max() * len(batch) for batch in rank)
    assert padded < 1.05 * LENGTHS.sum()


@pytest.mark.parametrize("kinds", [3, 400, 1003])
def test_rows_with_equal_partners_share_a_step_in_twos_of_like_lengths(kinds: int) -> None:
    partners = np.random.default_rng(1).integers(0, kinds, size=1003)
    sampler = LengthGroupedBatches(LENGTHS, 32, seed=5, partners=partners)
    steps = list(sampler)
    assert sorted(chain.from_iterable(steps)) == list(range(1003)) and LENGTHS.max() in LENGTHS[steps[0]]
    alone = sum(int((np.bincount(partners[step])[partners[step]] == 1).sum()) for step in steps)
    without = int((np.bincount(partners)[partners] == 1).sum())
    assert alone <= without + 2 * len(steps)  # at the ends of a step, two may be parted
    padded = sum(LENGTHS[step].max() * len(step) for step in steps)
    by_chance = [*LengthGroupedBatches(LENGTHS, 32, seed=5)]
    assert padded < 1.5 * LENGTHS.sum() and steps != by_chance
    sampler.set_epoch(1)
    assert [*sampler] != steps


def test_fewer_rows_than_processes_is_an_error_that_names_both() -> None:
    with pytest.raises(UserError, match="2 rows cannot be shared by 3 processes"):
        LengthGroupedBatches(LENGTHS[:2], 4, world=3)


def test_the_trainer_takes_the_batches_for_its_own_rank_aware_kind() -> None:
    assert isinstance(LengthGroupedBatches(LENGTHS, 4), BatchRebalanceSampler)


def test_rows_are_read_across_record_batches_without_a_copy(tmp_path: Path) -> None:
    written = [[row, row + 1, row + 2][: 1 + row % 3] for row in range(25)]
    tiny.write_tokens(tmp_path, written, [row % 2 for row in range(25)], block=10)
    rows = TokenRows(tmp_path / "train.arrow")
    assert len(rows) == 25
    assert [rows[row]["input_ids"].tolist() for row in range(25)] == written
    assert [int(rows[row]["label"]) for row in range(25)] == [row % 2 for row in range(25)]
    assert rows.lengths.tolist() == [len(row) for row in written]
    assert not rows[3]["input_ids"].flags.owndata and not rows[3]["input_ids"].flags.writeable


def pad(side: str, *rows: list[int], pair: bool = False, multiple: int = 8) -> dict[str, torch.Tensor]:
    tokenizer = SimpleNamespace(pad_token_id=9, pad_token_type_id=2, padding_side=side)
    features = [{"input_ids": np.array(row, np.int32), "label": np.int64(len(row))} for row in rows]
    for feature in features if pair else []:
        feature["token_type_ids"] = np.ones(len(feature["input_ids"]), np.int8)
    return PadToLongest(tokenizer, multiple)(features)  # type: ignore[arg-type]


def test_padding_is_the_tokenizers_own_and_rounded_up_to_the_multiple() -> None:
    batch = pad("right", [5, 6, 7], [5] * 8)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9, 9, 9, 9, 9], [5] * 8]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8]
    assert batch["labels"].tolist() == [3, 8]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert pad("right", [5] * 9)["input_ids"].shape == (1, 16)
    assert pad("right", [5] * 9, [5], multiple=1)["input_ids"].shape == (2, 9)
    assert pad("left", [5, 6, 7])["input_ids"].tolist() == [[9, 9, 9, 9, 9, 5, 6, 7]]


def test_pairs_keep_their_token_types() -> None:
    batch = pad("left", [5, 6], pair=True)
    assert batch["token_type_ids"].tolist() == [[2, 2, 2, 2, 2, 2, 1, 1]]
    assert "token_type_ids" not in pad("left", [5, 6])


def test_tokenizer_without_a_pad_token_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="pad_token"):
        PadToLongest(SimpleNamespace(pad_token_id=None), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "each", "world"), [(1, 2, 3), (60, 7, 2), (61, 5, 4), (8, 1, 3), (5, 8, 1)])
def test_an_evaluation_gives_each_row_once_in_the_same_batches_whatever_the_number_of_ranks(
    rows: int, each: int, world: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, rows).astype(np.int32)
    ranks = [EvaluationBatches(lengths, each, world=world, rank=rank) for rank in range(world)]
    given = [list(rank) for rank in ranks]
    assert len({len(batches) for batches in given}) == 1  # all compute together
    own = [batches[: rank.own] for rank, batches in zip(ranks, given, strict=True)]
    assert [row for share in own for batch in share for row in batch] == ranks[0].order_of_shares().tolist()
    dealt = [own[number % world][number // world] for number in range(ranks[0].batches)]
    assert dealt == list(EvaluationBatches(lengths, each))
    order = [row for batch in dealt for row in batch]
    assert sorted(order) == list(range(rows)) and (np.diff(lengths[order]) <= 0).all()
    assert ranks[0].done(1) == sum(map(len, dealt[:world])) and ranks[0].done(len(given[0])) == rows


def test_a_rank_without_a_batch_of_its_own_adds_nothing_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.distributed.ranks.gather", lambda share: [share, ([], [])])
    plan = EvaluationBatches(np.array([3, 1, 2], np.int32), 8, world=2)
    answers = pa.RecordBatch.from_pydict({"length": [3, 2, 1]})
    found = evaluate([{}], plan, lambda batch: (torch.tensor(2.0), 5, answers))
    assert found.loss == 2.0 and found.predictions["length"].to_pylist() == [3, 1, 2]
