"""Predictions of conversations: log-likelihoods of the answers, and in some rows the calls of tools that a model made
where the row's assistant made its own.

A turn is a message of the assistant in a row with tools. The model answers the messages before it.

N rows, F figures.
"""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from training.evaluation.constant_predictions import Baseline, Constant, Rival, shorten
from training.evaluation.predictions import Floats, Likelihoods, Rows
from training.problems import UserError
from training.recipe.tables.metrics import CONVERSATIONS, TOOL_METRICS
from training.tokenization.tool_calls import ParsedAnswer, ToolCall, Tools, parse_answer

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

    from training.tokenization.chat_templates import ChatTemplate

TURNS = "tool_turns"
"""The column of predictions with the turns of a row, as JSON; null for rows without answers."""
MOST_CALLS = 5
"""The frequent calls that the baseline tries."""
LONGEST_S = 1.0
"""For a JSON Schema and the arguments of one call."""
FIGURES = (
    *("turns", "right_decisions"),
    *("calls", "valid_calls"),
    *("calling_turns", "right_names", "right_calls"),
)
"""Numbers of a row: turns, and those in which the model calls a tool exactly if the row does; calls that the model
wrote, and those that are valid; turns in which the row calls tools, those in which the model calls tools of the same
names, and those in which it also gives the same arguments."""

SHARES = {
    "tool_call_accuracy": ("right_calls", "calling_turns"),
    "tool_name_accuracy": ("right_names", "calling_turns"),
    "tool_decision_accuracy": ("right_decisions", "turns"),
    "valid_tool_calls": ("valid_calls", "calls"),
}
"""The metrics of tool calls: one of FIGURES, as a share of another."""


@dataclass(frozen=True)
class Turn:
    """A message of the assistant, and a model's answer in its place."""

    expected: Sequence[ToolCall]
    answer: ParsedAnswer
    tools: Tools

    @cached_property
    def figures(self) -> tuple[int, ...]:
        """(F,)"""
        expected, made = self.expected, self.answer.calls
        attempts = len(made) + len(self.answer.broken_calls)
        all_read = bool(expected) and not self.answer.broken_calls
        return (
            1,
            int(bool(expected) == bool(attempts)),
            attempts,
            sum(is_valid(call, self.tools) for call in made),
            int(bool(expected)),
            int(all_read and Counter(call.name for call in expected) == Counter(call.name for call in made)),
            int(all_read and Counter(map(spell_call, expected)) == Counter(map(spell_call, made))),
        )


def write_turns(tools: Tools, turns: Sequence[tuple[Sequence[Mapping[str, Any]], str]]) -> str:
    """Returns the turns of a row, each the `tool_calls` of its message and the generated text, as they are stored in
    TURNS."""
    spelt = [{"expected": [call["function"] for call in calls], "answer": answer} for calls, answer in turns]
    return json.dumps({"tools": tools, "turns": spelt}, ensure_ascii=False)


def read_turns(text: str | None) -> tuple[Turn, ...]:
    """Returns the turns of a row from TURNS."""
    if text is None:
        return ()
    stored = json.loads(text)
    tools, turns = stored["tools"], []
    for turn in stored["turns"]:
        expected = [ToolCall(call["name"], call.get("arguments") or {}) for call in turn["expected"]]
        turns.append(Turn(expected, parse_answer(turn["answer"], tools), tools))
    return tuple(turns)


@dataclass(frozen=True)
class Conversations(Likelihoods):
    """Log-likelihoods of each row's answers, and the turns that were answered."""

    turns: npt.NDArray[np.object_] = field(kw_only=True)  # (N,) a tuple of Turn each, empty for rows without answers

    prediction_type: ClassVar = CONVERSATIONS

    def concatenate(self, other: Likelihoods) -> Conversations:
        return cast(Conversations, super().concatenate(other))

    def take(self, rows: Rows) -> Conversations:
        taken = super().take(rows)
        return Conversations(taken.loss, taken.targets, taken.hits, taken.tokens, turns=self.turns[rows])

    @cached_property
    def figures(self) -> Floats:
        """(N, F) the sums of FIGURES over the turns of each row."""
        sums = [
            np.sum([turn.figures for turn in turns], axis=0) if turns else [0] * len(FIGURES) for turns in self.turns
        ]
        return np.array(sums, np.float64).reshape(-1, len(FIGURES))

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """`loss`, `targets`, `hits`, or one of FIGURES."""
        if feature in FIGURES and not listed:
            return self.figures[:, FIGURES.index(feature)]
        return super().feature_values(metric, feature, dtype, listed)

    def worst_cases(self, other: Likelihoods) -> tuple[Conversations, Conversations]:
        """Also the row with the most turns twice, in all of which the other model is right. This model decides wrongly
        whether to call in one, and writes calls that cannot be read in the other."""
        assert isinstance(other, Conversations)
        own, others = super().worst_cases(other)
        most = max(range(len(self)), key=lambda row: len(self.turns[row]))
        turns, row = self.turns[most], self.take(np.array([most]))
        silent, broken = ParsedAnswer(""), ParsedAnswer("", broken_calls=[""])
        right = [replace(turn, answer=ParsedAnswer("", turn.expected)) for turn in turns]
        undecided = [replace(turn, answer=silent if turn.expected else broken) for turn in turns]
        unreadable = [replace(turn, answer=broken) for turn in turns]
        for wrong in (undecided, unreadable) if turns else ():
            own = own.concatenate(with_turns(row, [tuple(wrong)]))
            others = others.concatenate(with_turns(row, [tuple(right)]))
        return own, others

    def scores_by(self, metric: str) -> Floats:
        """(N,) the metric of each row if it is one of tool calls, 0 where it has no value; else `row_scores`."""
        if metric not in TOOL_METRICS:
            return self.row_scores
        part, whole = (self.figures[:, FIGURES.index(name)] for name in SHARES[metric])
        return np.asarray(part / np.maximum(whole, 1))

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The calls of each turn; for a row without turns, its likelihood."""
        if not (turns := self.turns[row]):
            return super().describe_row(row, inputs)
        expected = [[spell_call(call) for call in turn.expected] for turn in turns]
        made = [[spell_call(call) for call in turn.answer.calls] + [*turn.answer.broken_calls] for turn in turns]
        return {
            name: json.dumps(calls, ensure_ascii=False) for name, calls in (("label", expected), ("prediction", made))
        }


def with_turns(likely: Likelihoods, turns: Sequence[tuple[Turn, ...]]) -> Conversations:
    """Returns the predictions with the turns of each row."""
    return Conversations(likely.loss, likely.targets, likely.hits, likely.tokens, turns=as_array(turns))


def baseline_of_calls(of_tokens: Rival, turns: Sequence[tuple[Turn, ...]]) -> Baseline:
    """No call of a tool, or always the same, of those that are frequent in these turns of training rows; with the
    likelihoods of a constant prediction of tokens."""
    nothing = np.zeros(len(turns), np.int64)
    train = with_turns(Likelihoods(nothing.astype(np.float64), nothing, nothing), turns)

    def predict(calls: Sequence[ToolCall], rows: Conversations, split: str) -> Conversations:
        likely = rows if rows is train else cast(Likelihoods, of_tokens.predict(rows, split))
        answer = ParsedAnswer("", calls)
        return with_turns(likely, [tuple(replace(turn, answer=answer) for turn in row) for row in rows.turns])

    by_text = {spell_call(call): call for row in turns for turn in row for call in turn.expected}
    counts = Counter(spell_call(call) for row in turns for turn in row for call in turn.expected)
    constants = [Constant(of_tokens.name, partial(predict, []))]
    constants += [
        Constant(shorten(text), partial(predict, [by_text[text]])) for text, _ in counts.most_common(MOST_CALLS)
    ]
    return Baseline(constants, train if turns else None)


def as_array(turns: Sequence[tuple[Turn, ...]]) -> npt.NDArray[np.object_]:
    """(N,) the turns of N rows. NumPy would make two dimensions of tuples with equal lengths."""
    found = np.empty(len(turns), np.object_)
    found[:] = turns
    return found


def find_unreadable_call(template: ChatTemplate) -> str | None:
    """Returns the text in which a chat template writes a call, if the call cannot be read back from it; None if it can,
    or if the template refuses to write it."""
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
    call = ToolCall("get_time", {"city": "Rome"})
    function = {"name": call.name, "arguments": call.arguments}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }
    try:
        text, spans = template.render_answers([{"role": "user", "content": "What time is it in Rome?"}, answer], tools)
    except UserError:
        return None
    written = "".join(text[slice(*span)] for span in spans).removesuffix(template.find_end() or "")
    return (
        None
        if [(one.name, one.arguments) for one in parse_answer(written, tools).calls] == [tuple(function.values())]
        else written
    )


def is_valid(call: ToolCall, tools: Tools) -> bool:
    """Whether a call is of a declared tool, and its arguments fit the JSON Schema of the tool's parameters. Parameters
    that are no JSON Schema fit any arguments. Raises UserError for a schema that takes too long: its patterns and
    references can take years for a line of text."""
    declared = [tool["function"] for tool in tools if tool["function"]["name"] == call.name]
    if not declared:
        return False
    try:
        with _limited_time():
            validator = _validator(json.dumps(declared[0].get("parameters"), sort_keys=True))
            return validator is None or validator.is_valid(call.arguments)
    except _LimitError:
        message = f"the JSON Schema of the tool {call.name!r} takes more than {LONGEST_S:g} s for the arguments of one "
        message += "call: simplify its patterns, references or uniqueItems, or leave the rows with it out."
        raise UserError.of("data", "data.tools", message) from None
    except Exception:  # such as a reference to nowhere, or a pattern that is no regular expression
        return True


class _LimitError(Exception):
    pass


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raises _LimitError in the block after LONGEST_S of computing. Only in the main thread, where Python lets a signal
    end the search for a pattern."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def spell_call(call: ToolCall) -> str:
    """Returns the name and the arguments, the same text for arguments that are equal as JSON values: in any order of
    names, and 1 is equal to 1.0 but not to true."""
    return f"{call.name}({json.dumps(_plain(call.arguments), sort_keys=True, ensure_ascii=False)})"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Validator | None:
    """The validator of a JSON Schema; None for other values. It reads no schemas from elsewhere."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    parameters = json.loads(schema)
    try:
        Draft202012Validator.check_schema(parameters)
    except (SchemaError, RecursionError):
        return None
    return Draft202012Validator(parameters, registry=Registry())
