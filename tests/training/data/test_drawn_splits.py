"""A row stays in its split whatever arrives beside it: drawn by hypothesis."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import drawn
from training.data.duplicates import hash_texts
from training.data.holdout import split_masks

rows = st.lists(st.text(max_size=5), max_size=12)
shares = st.fixed_dictionaries({}, optional={"validation": st.floats(0.05, 0.5), "test": st.floats(0.05, 0.5)})


def splits_of(texts: list[str], sizes: dict[str, float]) -> list[str]:
    """The split of each text."""
    masks = split_masks(hash_texts(texts), sizes, "train")
    found = [[split for split, mask in masks.items() if mask is None or mask[row]] for row in range(len(texts))]
    assert all(len(splits) == 1 for splits in found)
    return [splits[0] for splits in found]


@drawn
@given(old=rows, new=rows, sizes=shares, order=st.randoms(use_true_random=False))
def test_drawn_rows_keep_their_splits_when_others_arrive_in_any_order(
    old: list[str], new: list[str], sizes: dict[str, float], order: Random
) -> None:
    before = dict(zip(old, splits_of(old, sizes), strict=True))
    mixed = [*old, *new]
    order.shuffle(mixed)
    after = zip(mixed, splits_of(mixed, sizes), strict=True)
    assert all(before.get(text, split) == split for text, split in after)
