"""Two models' answers to the same prompts: their lengths, and the judgements of a user's function.

P prompts, D draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.evaluation.bootstrap import DRAWS, SEED, draws, interval
from training.evaluation.predictions import Floats
from training.evaluation.preferences import ANSWER, BASE, TOKENS
from training.jobs.user_code import CodeField, is_function_of


@dataclass(frozen=True)
class PairedAnswers:
    """The answers of a model and of its opponent to P prompts."""

    rows: npt.NDArray[np.int64]  # (P,) the rows of the prompts, ascending
    own: Sequence[str]
    others: Sequence[str]
    own_tokens: Floats  # (P,)
    other_tokens: Floats  # (P,)


def paired_answers(predictions: pa.Table, opponent: pa.Table | None) -> PairedAnswers:
    """The answers in a model's predictions and in those of its opponent, None for its base model."""
    prefix, others = (BASE, predictions) if opponent is None else ("", opponent)
    rows = np.flatnonzero(predictions[ANSWER].is_valid().to_numpy())
    columns = [predictions[ANSWER], others[f"{prefix}{ANSWER}"]]
    tokens = [predictions[TOKENS], others[f"{prefix}{TOKENS}"]]
    texts = [column.take(rows).to_pylist() for column in columns]
    counts = [column.take(rows).cast("float64").to_numpy() for column in tokens]
    return PairedAnswers(rows, texts[0], texts[1], counts[0], counts[1])


def judge_answers(
    name: str, prompts: Sequence[str], answers: PairedAnswers, report: Callable[[int, int], None]
) -> Floats:
    """(P,) 1 where the user's function `module:function` prefers the model's answer, 0 where it prefers the opponent's,
    and 0.5 where it prefers neither, as of equal answers, which it is not called for.

    `prompts` are JSON, a text or a list of messages. The order of two answers is drawn at random, the same each time.
    `report` is called with the numbers of judged and of all prompts. Raises UserError if the function is not found,
    fails, or returns anything else than 0, 1 or None.
    """
    judge, outcomes = FIELD.load(name), np.full(len(prompts), 0.5)
    swapped = np.random.default_rng(SEED).integers(0, 2, size=len(prompts))
    for place, (prompt, own, other) in enumerate(zip(prompts, answers.own, answers.others, strict=True)):
        if own != other:
            given = (other, own) if swapped[place] else (own, other)
            better = _call(judge, name, int(answers.rows[place]), json.loads(prompt), *given)
            outcomes[place] = 0.5 if better is None else float(better == swapped[place])
        report(place + 1, len(prompts))
    return outcomes


def _call(judge: Callable[..., Any], name: str, row: int, *given: Any) -> int | None:
    try:
        better = judge(*given)
    except Exception as error:  # a user's function may raise anything
        raise FIELD.error(f"{name!r} failed for row {row}: {type(error).__name__}: {error}") from error
    if better is None or (isinstance(better, int) and better in (0, 1)):
        return None if better is None else int(better)
    message = f"{name!r} returned {better!r} for row {row}: it must return 0 or 1, the place of the better answer, or "
    raise FIELD.error(f"{message}None for neither.")


def difference_interval(differences: Floats, groups: npt.NDArray[np.int64] | None = None) -> tuple[float, float]:
    """The ends of the 95 % bootstrap interval of the mean of (P,) differences; `groups` are those of the prompts."""
    drawn = [(counts @ differences, counts.sum(axis=1)) for counts in draws(len(differences), DRAWS, SEED, groups)]
    sums, rows = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    return interval(sums / rows)


FIELD = CodeField(
    kind="metrics",
    where="evaluation.judge",
    example="my_judge:shorter",
    accepted="a function of a prompt and two answers",
    accepts=is_function_of(3),
)
