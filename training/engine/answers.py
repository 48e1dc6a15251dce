"""Generated answers in some rows of a split: to prompts, for the length of answers and for judges; and in place of the
assistant's messages, for metrics of tool calls.

N rows of a split, P answered prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.distributed import ranks
from training.evaluation.constant_predictions import sample_evenly
from training.evaluation.preferences import ANSWER, BASE, TOKENS
from training.models.loading import autocast
from training.task_types.generation import BATCH_PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import TokenRows
    from training.task_types.task_type import AnswersPrompts, AnswersTurns, GeneratesAnswers
    from training.tokenization.encoder import Encoder


@dataclass(frozen=True)
class Answers:
    """The answers of a model to some prompts."""

    rows: npt.NDArray[np.int64]  # (P,) their rows, ascending
    texts: list[str]
    tokens: list[int]
    """The tokens of each answer, with its end token."""

    def reaching(self, most: int) -> int:
        """The number of answers with at least so many tokens."""
        return sum(tokens >= most for tokens in self.tokens)

    def add_to(self, predictions: pa.Table, of_base: bool = False) -> pa.Table:
        """The predictions (N rows) with the answers and their tokens, null in other rows."""
        prefix = BASE if of_base else ""
        texts, tokens = np.full((2, predictions.num_rows), None, object)
        texts[self.rows], tokens[self.rows] = self.texts, self.tokens
        predictions = predictions.append_column(f"{prefix}{ANSWER}", pa.array(texts.tolist(), pa.string()))
        return predictions.append_column(f"{prefix}{TOKENS}", pa.array(tokens.tolist(), pa.int64()))


def answer_prompts(
    task_type: AnswersPrompts,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenRows,
    prompts: int,
    mixed_precision: str,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """The model's answers to `prompts` evenly spaced rows. Every rank calls it and gets the same.

    The prompts of a batch do not depend on the number of processes. `report` is called on rank 0 with the numbers of
    prompts that are done and of all.
    """
    chosen = sample_evenly(len(rows), prompts)
    texts = [task_type.prompt_of(rows[int(row)]) for row in chosen]
    found = _generate(task_type, network, tokenizer, texts, mixed_precision, report)
    return Answers(chosen, [text for text, _ in found], [count for _, count in found])


def answer_turns(
    task_type: AnswersTurns,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    rows: pa.Table,
    most: int,
    mixed_precision: str,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[pa.Array, list[int]]:
    """The column of the model's answers in at most `most` evenly spaced rows with turns, null for other rows, and the
    number of tokens of each answer. Every rank calls it and gets the same. `report`: as for `answer_prompts`."""
    having = task_type.rows_with_turns(rows)
    chosen = having[sample_evenly(len(having), most)] if len(having) else having
    given = rows.take(pa.array(chosen)).to_pylist()
    prompts = [task_type.turn_prompts(encoder, row) for row in given]
    flat = [prompt for of_row in prompts for prompt in of_row]
    found = iter(_generate(task_type, network, tokenizer, flat, mixed_precision, report))
    texts, tokens = np.full(rows.num_rows, None, object), []
    for place, row, of_row in zip(chosen.tolist(), given, prompts, strict=True):
        answers = [next(found) for _ in of_row]
        texts[place] = task_type.write_turns(row, [text for text, _ in answers])
        tokens += [count for _, count in answers]
    return pa.array(texts.tolist(), pa.string()), tokens


def _generate(
    task_type: GeneratesAnswers,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[npt.NDArray[np.int32]],
    mixed_precision: str,
    report: Callable[[int, int], None],
) -> list[tuple[str, int]]:
    """The answer to each prompt, and the number of its tokens, of all ranks."""
    order = np.argsort([-len(text) for text in texts], kind="stable")
    batches = [order[start : start + BATCH_PROMPTS] for start in range(0, len(order), BATCH_PROMPTS)]
    found: dict[int, tuple[str, int]] = {}
    with autocast(network.device, mixed_precision):
        for number in range(ranks.rank(), len(batches), ranks.world_size()):
            batch = batches[number].tolist()
            answers = task_type.answer(network, tokenizer, [texts[place] for place in batch])
            found |= dict(zip(batch, answers, strict=True))
            if ranks.rank() == 0:
                report(sum(map(len, batches[: number + 1])), len(texts))
    for of_rank in ranks.all_gather(found):
        found |= of_rank
    return [found[place] for place in range(len(texts))]
