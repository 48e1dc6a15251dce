"""What fails on one rank, as hardware and rare rows do."""

from __future__ import annotations

import os
from typing import Any

from tests.training.forks import run_main
from training import predict
from training.metrics import LabelMetric


class OnSecondRank(LabelMetric):
    """Computes nothing, and not even that on rank 1."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("only here")
        return {"nothing": 0.0}


def predict_but_on_second_rank(job_dir: str, rank: dict[str, str]) -> None:
    """training.predict, whose rank 1 can make no batch."""
    from training import batching

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("only here")

    if rank["RANK"] == "1":
        batching.PadToLongest.__call__ = fail  # type: ignore[method-assign]
    run_main(predict)(job_dir, rank)
