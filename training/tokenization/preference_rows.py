"""Preference rows: a prompt with a chosen and a rejected answer, or with one completion, as texts or as messages.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}                        texts, joined as they are
    {"prompt": "2 + 2 =", "completion": " 4"}                                      the same with one answer
    {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}             messages, by the chat template
    {"prompt": "2 + 2?", "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}   the prompt is a user's message
    {"messages": [USER, ASSISTANT], "label": true}                                 the last message is the completion

Messages may call tools, which a column `tools` declares, or a prompt of the form {"messages": [USER], "tools": [TOOL]}.
Answers may repeat the messages of the prompt. A text of several words that both answers of a pair repeat as their
beginning is taken off them, as in Anthropic's HH. An answer is one message of the assistant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from training.data.arrow_columns import as_json
from training.data.conversation_forms import as_tools
from training.problems import UserError
from training.tokenization.answer_tokens import AnswerTokens, encode_answers
from training.tokenization.chat_templates import (
    CALLS,
    FIELD,
    ChatTemplate,
    find_problem,
    find_refused,
    find_tool_problem,
    render_rows,
)
from training.tokenization.features import Features, list_column
from training.tokenization.packing import OF_ANSWER

if TYPE_CHECKING:
    from training.recipe.column_types import Mask
    from training.tokenization.chat_templates import Spans
    from training.tokenization.encoder import Encoder

PROMPT, MESSAGES, TOOLS = "prompt", "messages", "tools"
ANSWERS = ("chosen", "rejected", "completion")
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


class PreferenceRow(NamedTuple):
    """A prompt with its answers, as JSON values."""

    prompt: Any
    answers: Sequence[Any]
    """In the order of `answer_names`."""
    tools: Any = None
    """The declarations of the tools that it may call."""

    @property
    def is_text(self) -> bool:
        """Whether prompt and answers are joined as they are, without the chat template."""
        return not self.tools and all(isinstance(value, str) for value in (self.prompt, *self.answers))


def parse_rows(rows: pa.RecordBatch) -> list[PreferenceRow]:
    """The rows, without a prompt that both answers repeat."""
    return [
        row._replace(answers=[answer[len(row.prompt) :] for answer in row.answers])
        if _remark(row) == "repeated"
        else row
        for row in _parse(rows)
    ]


def _parse(rows: pa.RecordBatch) -> list[PreferenceRow]:
    return [_parse_row(values, answer_names(rows)) for values in rows.to_pylist()]


def _parse_row(values: Mapping[str, Any], names: Sequence[str]) -> PreferenceRow:
    tools = json.loads(values.get(TOOLS) or "null")
    if MESSAGES in values:
        prompt, answer = json.loads(values[MESSAGES]), list[Any]()
        if names and isinstance(prompt, list):
            prompt, answer = prompt[:-1], prompt[-1:]
        return PreferenceRow(prompt, [answer] * len(names), as_tools(tools))
    prompt = json.loads(values[PROMPT])
    if isinstance(prompt, Mapping) and prompt.keys() == {MESSAGES, TOOLS}:
        prompt, tools = prompt[MESSAGES], prompt[TOOLS]
    return PreferenceRow(prompt, [json.loads(values[name]) for name in names], as_tools(tools))


def repeats(prompt: Content, answer: Content) -> bool:
    """Whether a text begins with the text of its prompt. A prompt of one word, such as `Hello`, may well be the first
    word of an answer."""
    return isinstance(prompt, str) and isinstance(answer, str) and len(prompt.split()) > 1 and answer.startswith(prompt)


def _remark(row: PreferenceRow) -> str:
    """The remark of token_files.REMARKS on a row of `_parse` whose answers repeat the prompt; empty if none does."""
    count = sum(repeats(row.prompt, answer) for answer in row.answers)
    if not count:
        return ""
    if len(row.answers) == 1:
        return "repeated_in_completion"
    return "repeated" if count == len(row.answers) else "repeated_once"


def count_repeated(rows: pa.RecordBatch) -> dict[str, int]:
    """The numbers of rows whose answers repeat the prompt, by remark."""
    counts = Counter(map(_remark, _parse(rows)))
    del counts[""]
    return dict(counts)


def answer_names(rows: pa.RecordBatch) -> list[str]:
    """The answers that rows have: chosen and rejected, or completion, or none."""
    names = rows.schema.names
    return ["completion"] if {MESSAGES, "label"} <= {*names} else [name for name in ANSWERS if name in names]


def prompt_as_json(values: Mapping[str, Any]) -> str:
    """The prompt of a stored row without its tools: a text or a list of messages."""
    return as_json(_parse_row(values, ["completion"] if MESSAGES in values else []).prompt)


def find_row_problem(row: PreferenceRow, names: Sequence[str] = ()) -> str | None:
    """The first problem of a row of `parse_rows`, in words that follow a colon; None if there is none. `names` are
    those of its answers."""
    prompt = row.prompt
    if problem := find_tool_problem(row.tools):
        return f"the tools: {problem}"
    if isinstance(prompt, str):
        if not prompt.strip():
            return "the prompt is empty"
    elif problem := find_problem(prompt, answered=False):
        return f"the prompt: {problem}"
    elif prompt[-1]["role"] == "assistant":
        return "the prompt: its last message is by 'assistant', and must be one that is answered"
    messages = as_messages(prompt)
    for name, answer in zip(names, row.answers, strict=True):
        if isinstance(answer, str):
            if not answer.strip():
                return f"{name} is empty"
            continue
        if problem := find_problem(answer, answered=True):
            return f"{name}: {problem}"
        if len(_without(messages, answer)) != 1:
            return f"{name} has {len(answer)} messages, and {_NEITHER}"
    return None


def same_answers(row: PreferenceRow) -> bool:
    """Whether both answers of a row without problems have the same content and the same calls."""
    messages, said = as_messages(row.prompt), []
    for answer in row.answers:
        (message,) = _without(messages, as_answer(answer))
        said.append((message["content"], [call["function"] for call in message.get(CALLS) or ()]))
    return len(said) == 2 and said[0] == said[1]


def as_messages(prompt: Content) -> list[dict[str, Any]]:
    """The prompt as a conversation: a text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def as_answer(answer: Content) -> list[dict[str, Any]]:
    """The answer as messages: a text is a message of the assistant."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def encode_rows(
    encoder: Encoder, rows: pa.RecordBatch, *, append_eos: bool, answered: bool = False
) -> list[list[AnswerTokens]]:
    """The tokens of each row's texts, without truncation, with the mask of their answers: the prompt with each of its
    answers, or the prompt alone if rows have no answers. With `answered`, a prompt alone ends with its answer.

    Raises UserError if a chat template is needed and missing, and RefusedRows if it cannot write some rows.
    """
    parsed, per_row = parse_rows(rows), len(answer_names(rows)) or 1
    texts = [*chain(*_write_rows(ChatTemplate.of(encoder), parsed, answered=answered))]
    is_text = [row.is_text for row in parsed for _ in range(per_row)]
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


def find_refused_rows(template: ChatTemplate, rows: pa.RecordBatch) -> Iterator[tuple[str, Mask]]:
    """The reasons of the rows that the template cannot write, each with a mask of its rows."""
    return find_refused(lambda: _write_rows(template, parse_rows(rows), answered=False), rows.num_rows)


def _write_rows(
    template: ChatTemplate | None, rows: Sequence[PreferenceRow], *, answered: bool
) -> list[list[tuple[str, Spans]]]:
    """The texts of each row with the spans of their answers."""
    return render_rows(
        partial(_join, row.prompt, row.answers, answered=answered) if row.is_text else partial(_render, template, row)
        for row in rows
    )


def _render(template: ChatTemplate | None, row: PreferenceRow) -> list[tuple[str, Spans]]:
    if template is None:
        message = "is missing: the tokenizer has no chat template, and messages need one. Name a file, such as "
        message += "deployments/examples/chat.jinja, or give texts as prompts and answers."
        raise UserError.of("model", FIELD, message)
    prompt, tools = as_messages(row.prompt), row.tools or ()
    if not row.answers and prompt[-1]["role"] != "assistant":
        return [(template.render_prompt(prompt, tools), [])]
    answers = [_without(prompt, as_answer(answer)) for answer in row.answers] or [[]]
    rendered = [template.render_last_answer([*prompt, *answer], tools) for answer in answers]
    return [(text, [span]) for text, span in rendered]


def _without(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer's messages without those of the prompt before them."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
