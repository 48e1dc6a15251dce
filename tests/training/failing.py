"""Code that fails on one rank, as hardware and rare rows do."""

from __future__ import annotations

import os
from typing import Any

from tests.training.forks import run_main
from training.batching.batches import PadToLongest
from training.programs import predict


def on_second_rank(tokenizer: Any, multiple: int) -> Any:
    """A collator that can make no batch of training on rank 1."""
    pad = PadToLongest(tokenizer, multiple)

    def collate(rows: list[dict[str, Any]]) -> Any:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("only here")
        return pad(rows)

    return collate


def predict_but_on_second_rank(job_dir: str, rank: dict[str, str]) -> None:
    """training.programs.predict, whose rank 1 can make no batch."""
    from training.batching import batches

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("only here")

    if rank["RANK"] == "1":
        batches.PadToLongest.__call__ = fail  # type: ignore[method-assign]
    run_main(predict)(job_dir, rank)
