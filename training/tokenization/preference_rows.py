"""Preference rows: a prompt with a chosen and a rejected answer, or with one completion, as texts or as messages.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}                        texts, joined as they are
    {"prompt": "2 + 2 =", "completion": " 4"}                                      the same with one answer
    {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}             messages, by the chat template
    {"prompt": "2 + 2?", "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}   the prompt is a user's message

Answers may repeat the messages of the prompt. A text of several words that both answers of a pair repeat as their
beginning is taken off them, as in Anthropic's HH. An answer is one message of the assistant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.problems import UserError
from training.tokenization.answer_tokens import AnswerTokens, encode_answers
from training.tokenization.chat_templates import FIELD, ChatTemplate, find_problem
from training.tokenization.features import Features, RefusedRows, list_column
from training.tokenization.packing import OF_ANSWER

if TYPE_CHECKING:
    from training.tokenization.chat_templates import Spans
    from training.tokenization.encoder import Encoder

PROMPT, ANSWERS = "prompt", ("chosen", "rejected", "completion")
CHOSEN_LENGTH = "chosen_length"
"""The column with the number of tokens of the chosen text."""
ANSWER_TOKENS = ("chosen_tokens", "rejected_tokens")
"""The columns with the numbers of tokens of the answers."""
REFERENCE = ("reference_chosen_logp", "reference_rejected_logp")
"""The columns with the log-probabilities of the answers under the reference model (float32), if it is needed."""
FACTS = (*ANSWER_TOKENS, CHOSEN_LENGTH, *REFERENCE)
"""The columns of `labels`."""
_NEITHER = "must be a text, or one message by 'assistant', perhaps after the messages of the prompt"

Content = str | list[dict[str, Any]]


def parse_rows(rows: pa.RecordBatch) -> list[list[Any]]:
    """The prompt of each row, then its `answer_names`, as JSON values, without a prompt that both answers repeat."""
    return [
        [values[0], *(answer[len(values[0]) :] for answer in values[1:])] if _remark(values) == "repeated" else values
        for values in _parse(rows)
    ]


def _parse(rows: pa.RecordBatch) -> list[list[Any]]:
    names = (PROMPT, *answer_names(rows))
    columns = [list(map(json.loads, rows.column(name).to_pylist())) for name in names]
    return [list(values) for values in zip(*columns, strict=True)]


def repeats(prompt: Content, answer: Content) -> bool:
    """Whether a text begins with the text of its prompt. A prompt of one word, such as `Hello`, may well be the first
    word of an answer."""
    return isinstance(prompt, str) and isinstance(answer, str) and len(prompt.split()) > 1 and answer.startswith(prompt)


def _remark(values: Sequence[Any]) -> str:
    """The remark of token_files.REMARKS on a row of `_parse` whose answers repeat the prompt; empty if none does."""
    prompt, *answers = values
    count = sum(repeats(prompt, answer) for answer in answers)
    if not count:
        return ""
    if len(answers) == 1:
        return "repeated_in_completion"
    return "repeated" if count == len(answers) else "repeated_once"


def count_repeated(rows: pa.RecordBatch) -> dict[str, int]:
    """The numbers of rows whose answers repeat the prompt, by remark."""
    counts = Counter(map(_remark, _parse(rows)))
    del counts[""]
    return dict(counts)


def answer_names(rows: pa.RecordBatch) -> list[str]:
    """The columns with answers: chosen and rejected, or completion, or none."""
    return [name for name in ANSWERS if name in rows.schema.names]


def find_row_problem(values: Sequence[Any], names: Sequence[str] = ()) -> str | None:
    """The first problem of a row of `parse_rows`, in words that follow a colon; None if there is none. `names` are
    those of its answers."""
    prompt, *answers = values
    if isinstance(prompt, str):
        if not prompt.strip():
            return "the prompt is empty"
    elif problem := find_problem(prompt, answered=False):
        return f"the prompt: {problem}"
    elif prompt[-1]["role"] == "assistant":
        return "the prompt: its last message is by 'assistant', and must be one that is answered"
    messages = as_messages(prompt)
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, str):
            if not answer.strip():
                return f"{name} is empty"
            continue
        if problem := find_problem(answer, answered=True):
            return f"{name}: {problem}"
        if len(_without(messages, answer)) != 1:
            return f"{name} has {len(answer)} messages, and {_NEITHER}"
    return None


def same_answers(values: Sequence[Any]) -> bool:
    """Whether both answers of a row without problems are equal."""
    prompt, *answers = values
    messages = as_messages(prompt)
    contents = {answer if isinstance(answer, str) else _without(messages, answer)[0]["content"] for answer in answers}
    return len(answers) == 2 and len(contents) == 1


def as_messages(prompt: Content) -> list[dict[str, Any]]:
    """The prompt as a conversation: a text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def encode_rows(
    encoder: Encoder, rows: pa.RecordBatch, *, append_eos: bool, answered: bool = False
) -> list[list[AnswerTokens]]:
    """The tokens of each row's texts, without truncation, with the mask of their answers: the prompt with each of its
    answers, or the prompt alone if rows have no answers. With `answered`, a prompt alone ends with its answer.

    Raises UserError if a chat template is needed and missing, and RefusedRows if it cannot write some rows.
    """
    texts: list[tuple[str, Spans]] = []
    is_text: list[bool] = []
    refused: dict[int, RefusedRows] = {}
    per_row = len(answer_names(rows)) or 1
    for row, values in enumerate(parse_rows(rows)):
        prompt, *answers = values
        joined = all(isinstance(value, str) for value in values)
        if joined:
            texts += _join(prompt, answers, answered=answered)
        else:
            try:
                texts += _render(encoder, as_messages(prompt), answers)
            except RefusedRows as error:
                refused[row] = error
        is_text += [joined] * per_row
    if refused:
        raise RefusedRows.from_rows(refused)
    encoded: list[Any] = [None] * len(texts)
    for joined in {*is_text}:
        places = [place for place, one in enumerate(is_text) if one == joined]
        some, spans = zip(*(texts[place] for place in places), strict=True)
        found = encode_answers(encoder, some, spans, is_text=joined, append_eos=append_eos)
        for place, tokens in zip(places, found, strict=True):
            encoded[place] = tokens
    return [encoded[start : start + per_row] for start in range(0, len(encoded), per_row)]


def pair_features(tokens: Sequence[Sequence[AnswerTokens]], max_length: int, remarks: Mapping[str, int]) -> Features:
    """The token features of N rows of `encode_rows`, each text truncated on the right: see
    training.batching.causal_batches. Prompts alone become chosen texts without answers. `remarks` are those of
    `count_repeated`."""
    nothing = AnswerTokens(np.empty(0, np.int32), np.empty(0, np.bool_))
    texts = [text for row in tokens for text in (*row, *[nothing] * (2 - len(row)))]
    untruncated = np.array([len(text.ids) for text in texts], np.int64).reshape(-1, 2)  # (N, 2)
    lengths = np.minimum(untruncated, max_length).astype(np.int32)
    cut = [(text.ids[:max_length], text.of_answer[:max_length]) for text in texts]
    answers = np.array([mask.sum() for _, mask in cut], np.int32).reshape(-1, 2)
    total = lengths.sum(axis=1, dtype=np.int32)
    columns = {
        "input_ids": list_column(np.concatenate([ids for ids, _ in cut]), total),
        OF_ANSWER: list_column(np.concatenate([mask for _, mask in cut]).astype(np.int8), total),
        CHOSEN_LENGTH: lengths[:, 0],
        **dict(zip(ANSWER_TOKENS, answers.T, strict=True)),
        "length": total,
        "targets": (answers > 0).all(axis=1).astype(np.int32),
    }
    lost = (untruncated - lengths).sum(axis=1)
    alike = [
        len(row) == 2 and bool(one.any()) and np.array_equal(ids, others) and np.array_equal(one, other)
        for row, (ids, one), (others, other) in zip(tokens, cut[::2], cut[1::2], strict=True)
    ]
    remarks = {**remarks, "joined": sum(any(text.joined for text in row) for row in tokens), "same_tokens": sum(alike)}
    return Features(pa.RecordBatch.from_pydict(columns), lost, longest=untruncated.max(axis=1), remarks=remarks)


def _join(prompt: str, answers: Sequence[str], *, answered: bool) -> list[tuple[str, Spans]]:
    if not answers:
        return [(prompt, [(0, len(prompt))] if answered else [])]
    return [(prompt + answer, [(len(prompt), len(prompt + answer))]) for answer in answers]


def _render(encoder: Encoder, prompt: list[dict[str, Any]], answers: Sequence[Content]) -> list[tuple[str, Spans]]:
    if encoder.chat is None:
        message = "is missing: the tokenizer has no chat template, and messages need one. Name a file, such as "
        message += "deployments/examples/chat.jinja, or give texts as prompts and answers."
        raise UserError.of("model", FIELD, message)
    template = ChatTemplate(*encoder.chat, encoder.special_texts)
    if not answers and prompt[-1]["role"] == "assistant":
        text, span = template.render_last_answer(prompt)
        return [(text, [span])]
    if not answers:
        return [(template.render_prompt(prompt), [])]
    rendered = []
    for answer in answers:
        messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _without(prompt, answer)
        text, span = template.render_last_answer([*prompt, *messages])
        rendered.append((text, [span]))
    return rendered


def _without(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer's messages without those of the prompt before them."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
