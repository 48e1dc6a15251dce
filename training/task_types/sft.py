"""Supervised fine-tuning on conversations, in which only the tokens of answers are targets.

A row of the data set        {"messages": [{"role": "user", "content": "2 + 2?"},
                                           {"role": "assistant", "content": "4"}]}
by the chat template         "user: 2 + 2?</s> assistant: 4</s>"
token features               {"input_ids": [5, 9, 3, 9, 4, 2, 6, 7, 2], "of_answer": [0, 0, 0, 0, 0, 0, 0, 1, 1],
                              "length": 9, "targets": 2}
a packed row for training    several of these one after another, and "starts": [0, 9, 21]
a padded batch               {"input_ids": (B, T), "position_ids": (B, T),
                              "labels": [-100, -100, -100, -100, -100, -100, -100, 7, 2]}
the model's output           logits (B, T, V), summed up to a loss for each row

Rows have one of three forms:
  messages                      a list of {"role": "system", "user", "assistant" or "tool", "content": a text}; the
                                assistant's may have tool_calls, and a column `tools` may declare the tools of a row
  prompt, completion            two texts that are concatenated without a template, and the eos token
  instruction, input, output    as messages: the instruction, optionally followed by the input, and the answer

If a template marks answers (`{% generation %}`), these are the targets, with the end of each answer. Otherwise an
answer is the text that it adds to its prompt: training/tokenization/chat_templates.py. A token is a target if it holds
a part of an answer or of the spaces before it: training/tokenization/answer_tokens.py. Rows longer than
tokens.max_length are truncated on the right; rows without targets left are not trained on and count in no metric.
Packed rows hold whole conversations, which do not attend to each other: training/tokenization/packing.py.

B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from training.data.arrow_columns import as_json
from training.data.conversation_forms import as_tools
from training.data.ipc_files import read_table
from training.data.row_problems import masks_by_reason
from training.evaluation.constant_predictions import sample_evenly
from training.evaluation.predictions import Likelihoods
from training.evaluation.tool_use import (
    TURNS,
    baseline_of_calls,
    find_unreadable_call,
    read_turns,
    with_turns,
    write_turns,
)
from training.models.repository_files import chat_of
from training.problems import Problem, UserError
from training.recipe.column_types import BESIDE_CONVERSATIONS
from training.recipe.tables.metrics import CONVERSATIONS, TOOL_METRICS, metrics_for
from training.task_types.causal_lm import CausalLM
from training.task_types.generation import Generation, add_end_token, generate_answers
from training.task_types.task_type import AnswersTurns, Column, WritesTargets
from training.tokenization.answer_tokens import encode_answers
from training.tokenization.chat_templates import (
    CALLS,
    FIELD,
    ChatTemplate,
    find_problem,
    find_refused,
    find_tool_problem,
    render_rows,
)
from training.tokenization.features import Features, count_lost, list_column
from training.tokenization.packing import OF_ANSWER, pack_whole_documents
from training.tokenization.preference_rows import repeats

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import Predictions
    from training.recipe.column_types import Mask
    from training.tokenization.answer_tokens import AnswerTokens
    from training.tokenization.chat_templates import Spans
    from training.tokenization.encoder import Encoder


BASELINE_ROWS = 1_000
"""Training rows whose calls are counted for the baseline."""


class SupervisedFineTuning(CausalLM, AnswersTurns, WritesTargets):
    """The answer of an assistant in a conversation."""

    class Options(CausalLM.Options):
        """The options of sft."""

        max_new_tokens: int = Field(default=128, ge=0)
        """The largest number of tokens of an answer that `finetune predict` generates; 0 generates nothing."""
        packing: bool = True
        """Whether several whole conversations are packed into one training row of up to tokens.max_length tokens. If
        not, each conversation is a row."""
        append_eos: bool = True
        """Whether the tokenizer's eos token, if any, is added to a completion. The chat template ends messages."""
        answered_prompts: int = Field(default=200, ge=1)
        """The rows with tools of each evaluated split, evenly spaced, in which the trained model and the champion
        answer in place of each message of the assistant, for metrics of tool calls."""

    options: Options
    option_stages: ClassVar = {
        **CausalLM.option_stages,
        "load_data": (),
        "answers": (*Generation.model_fields, "answered_prompts"),
    }
    prediction_type: ClassVar = CONVERSATIONS
    metrics: ClassVar[Sequence[str]] = metrics_for(CONVERSATIONS)
    answer_metrics: ClassVar[Sequence[str]] = TOOL_METRICS
    answers: ClassVar[Literal["prompts", "turns"] | None] = "turns"
    turns_column = TURNS
    teacher_writes = True
    chat_template_columns: ClassVar[Sequence[str]] = ("messages", "instruction")
    libraries: ClassVar = ("transformers", "jinja2")
    card_sentence = "Answers questions in a conversation"
    columns: ClassVar[Mapping[str, Column]] = {
        "messages": Column("value"),
        "tools": Column("value", optional=True, may_be_empty=True),
        "prompt": Column("text"),
        "completion": Column("text", target=True),
        "instruction": Column("text"),
        "input": Column("text", optional=True, may_be_empty=True),
        "output": Column("text", target=True),
    }
    checks: ClassVar = {"messages": "error"}
    unread_columns: ClassVar = BESIDE_CONVERSATIONS

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        sets = (("messages", "tools"), ("prompt", "completion"), ("instruction", "input", "output"))
        return [{name: self.columns[name] for name in names} for names in sets]

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Messages that are not a conversation that ends with an answer."""
        for mask, reason in _find_problems(rows, answered=True):
            yield "messages", f"has no conversation in column 'messages' ({reason})", mask
        for mask, reason in _find_tool_problems(rows):
            yield "messages", f"has no tools in column 'tools' ({reason})", mask

    def refused_rows(self, template: ChatTemplate, rows: pa.RecordBatch) -> Iterator[tuple[str, Mask]]:
        if "prompt" not in rows.schema.names:
            yield from find_refused(lambda: _render_conversations(template, rows), rows.num_rows)

    def row_problems_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Messages that are not a conversation."""
        for mask, reason in _find_problems(rows, answered=False):
            yield "messages", f"has no conversation ({reason})", mask, ""
        for mask, reason in _find_tool_problems(rows):
            yield "tools", f"has no tools ({reason})", mask, ""

    def without_answers(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows without target columns, and without answers at the end of conversations."""
        rows = rows.select([name for name in rows.schema.names if not self.columns[name].target])
        if "messages" not in rows.schema.names:
            return rows
        conversations = [json.loads(text) for text in rows.column("messages").to_pylist()]
        for messages in conversations:
            while len(messages) > 1 and messages[-1]["role"] == "assistant":
                messages.pop()
        others = {name: rows.column(name) for name in rows.schema.names if name != "messages"}
        return pa.RecordBatch.from_pydict({"messages": pa.array(map(as_json, conversations), pa.string()), **others})

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """input_ids; `of_answer`, 1 for each target (list<int8>); length; and `targets`, their number.

        Rows that do not end with an answer become prompts without targets. Raises UserError if a chat template is
        needed and missing.
        """
        tokens, limit = self._encode_rows(encoder, rows), encoder.max_length
        untruncated = np.array([len(one.ids) for one in tokens])
        lengths = np.minimum(untruncated, limit).astype(np.int32)
        columns = {
            "input_ids": list_column(np.concatenate([one.ids[:limit] for one in tokens]), lengths),
            OF_ANSWER: list_column(np.concatenate([one.of_answer[:limit] for one in tokens]).astype(np.int8), lengths),
            "length": lengths,
            "targets": np.array([one.of_answer[:limit].sum() for one in tokens], np.int32),
        }
        remarks = {"joined": sum(one.joined for one in tokens), "repeated_in_completion": _count_repeated(rows)}
        remarks |= count_lost(encoder.encode_whole, _answers(rows))
        return Features(pa.RecordBatch.from_pydict(columns), untruncated - lengths, remarks=remarks)

    def prompts(self, encoder: Encoder, rows: pa.RecordBatch, settings: GenerationConfig) -> list[AnswerTokens]:
        """Returns the tokens of each row before its last answer, with end tokens: templates may end questions with
        them."""
        return self._encode_rows(encoder, self.without_answers(rows))

    def _encode_rows(self, encoder: Encoder, rows: pa.RecordBatch) -> list[AnswerTokens]:
        """Returns all tokens of each row, without truncation, and the mask of the targets."""
        is_text = "prompt" in rows.schema.names
        texts, spans = _join_prompts(rows) if is_text else _render_conversations(ChatTemplate.of(encoder), rows)
        return encode_answers(encoder, texts, spans, is_text=is_text, append_eos=self.options.append_eos)

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Packs training rows, without rows that have no targets. Raises UserError if no training row has any."""
        targets = 0
        for rows in features:
            targets += pc.sum(rows.column("targets")).as_py() or 0
            if split == "train" and self.options.packing:
                rows = rows.filter(pc.greater(rows.column("targets"), 0))
                if rows.num_rows:
                    yield pack_whole_documents(rows, max_length)
            else:
                yield rows
        if split == "train" and not targets:
            message = f"{max_length} cuts off all answers of train: raise it."
            raise UserError.of("tokens", "tokens.max_length", message)

    def is_rendered(self, rows: pa.RecordBatch) -> Mask:
        return np.full(rows.num_rows, "prompt" not in rows.schema.names)

    def tokenizer_problems(self, encoder: Encoder, columns: Collection[str]) -> Iterator[Problem]:
        """A chat template that ends answers with a text at which generation does not stop."""
        if encoder.chat is None or "prompt" in columns:
            return
        end = ChatTemplate(*encoder.chat).find_end()
        ids = encoder.encode_located([end], special=False).ids.tolist() if end else []
        if encoder.eos not in ids and encoder.added_tokens.isdisjoint(ids[:1]):
            ends = f"with {end!r}, which is no special token of the tokenizer" if end else "without an end token"
            eos = "{{ eos_token }}" if encoder.eos is not None else "a special token of the tokenizer"
            message = f"ends answers {ends}: the model will write on after its answers, up to options.max_new_tokens. "
            message += f"End answers with {eos}, or take a base model whose tokenizer has the template's tokens."
            yield Problem(kind="model", where=FIELD, message=message, level="warning")
        if "tools" in columns and (written := find_unreadable_call(ChatTemplate(*encoder.chat))):
            message = f"writes a call as {written!r}, which is read as no call: metrics of tool calls find none, and a "
            message += "server returns it as text. Write calls as one of the forms in docs/how-to/conversations.md."
            yield Problem(kind="model", where=FIELD, message=message, level="warning")

    def set_end_tokens(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Also adds the chat template's end token of answers, which may differ from the tokenizer's eos."""
        super().set_end_tokens(model, tokenizer)
        chat = chat_of(tokenizer)
        end = chat and ChatTemplate(*chat).find_end()
        ids = tokenizer(end, add_special_tokens=False)["input_ids"] if end else []
        if ids and ids[0] in tokenizer.added_tokens_decoder:
            add_end_token(model, ids[0])

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """Returns the predictions unchanged: each row has one feature row."""
        return predictions

    # Answers of a teacher

    def unanswered(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Conversations without their last answer. Earlier answers are read, and no targets."""
        rows = self.without_answers(super().unanswered(rows))
        if "tools" in rows.schema.names and rows.column("tools").null_count < rows.num_rows:
            message = "sequence replaces answers by texts, and some rows have tools, whose calls are no texts: choose "
            raise UserError.of("training", "training.teacher.loss", f"{message}forward_kl, or leave these rows out.")
        if "messages" not in rows.schema.names:
            return rows
        conversations = [json.loads(text) for text in rows.column("messages").to_pylist()]
        for message in (message for messages in conversations for message in messages):
            if message["role"] == "assistant":
                message["weight"] = 0
        texts = pa.array(map(as_json, conversations), pa.string())
        return rows.set_column(rows.schema.get_field_index("messages"), "messages", texts)

    def write_targets(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, rows: pa.RecordBatch
    ) -> tuple[list[str], list[bool]]:
        """The answers that `finetune predict` gives."""
        nothing = pa.table({"row": np.arange(rows.num_rows)})
        found = self.predictions_on_request(nothing, rows, model, tokenizer, encoder)
        cut = [reason == "length" for reason in found["finish_reason"].to_pylist()]
        return found[self.generated_column].to_pylist(), cut

    def with_targets(self, rows: pa.RecordBatch, texts: Sequence[str]) -> pa.RecordBatch:
        """A completion keeps the spaces at its beginning, which divide it from its prompt: tokenizers may lose them."""
        name = next(name for name in ("messages", "completion", "output") if name in rows.schema.names)
        answers = pa.array(texts, pa.string())
        if name == "completion":
            given = zip(rows.column(name).to_pylist(), texts, strict=True)
            answers = pa.array(
                [own[: len(own) - len(own.lstrip())] + text.lstrip() for own, text in given], pa.string()
            )
        if name == "messages":
            conversations = map(json.loads, self.unanswered(rows).column("messages").to_pylist())
            last = [{"role": "assistant", "content": text} for text in texts]
            messages = ([*one, answer] for one, answer in zip(conversations, last, strict=True))
            answers = pa.array(map(as_json, messages), pa.string())
        return rows.set_column(rows.schema.get_field_index(name), name, answers)

    # Tool calls

    def rows_with_turns(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """Rows with declared tools."""
        if not {"messages", "tools"} <= {*rows.column_names}:
            return np.empty(0, np.int64)
        given = rows.select(["messages", "tools"]).to_pylist()
        return np.array([place for place, row in enumerate(given) if row["tools"] and _turns_of(row)], np.int64)

    def load_turn_encoder(self, folder: Path) -> Encoder:
        from training.tokenization.transformers_encoder import load_encoder

        return load_encoder(folder, folder, max_length=10**9)

    def turn_prompts(self, encoder: Encoder, row: Mapping[str, Any]) -> list[npt.NDArray[np.int32]]:
        """The messages before each turn, by the chat template."""
        messages, places = json.loads(row["messages"]), _turns_of(row)
        prompts = [as_json(messages[:place]) for place in places]
        rows = {"messages": prompts, "tools": [row["tools"]] * len(prompts)}
        return [one.ids for one in self._encode_rows(encoder, pa.RecordBatch.from_pydict(rows))]

    def write_turns(self, row: Mapping[str, Any], answers: Sequence[str]) -> str:
        """The tools of the row, the calls that the assistant makes in each turn, and the answers."""
        messages = json.loads(row["messages"])
        calls = [messages[place].get(CALLS) or () for place in _turns_of(row)]
        return write_turns(as_tools(json.loads(row["tools"])), list(zip(calls, answers, strict=True)))

    def answer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[npt.NDArray[np.int32]]
    ) -> list[tuple[str, int]]:
        """By generation of the likeliest tokens, or with beams."""
        longest = max(map(len, prompts), default=0)
        answers = generate_answers(model, tokenizer, prompts, self.options.settings_for(model), longest)
        return [(answer.text, answer.tokens) for answer in answers]

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Predictions:
        found = super().metric_inputs(predictions, labels)
        assert isinstance(found, Likelihoods)
        stored = predictions[TURNS].to_pylist() if TURNS in predictions.column_names else [None] * len(found)
        return with_turns(found, [read_turns(text) for text in stored])

    def empty_predictions(self, labels: Sequence[str]) -> Predictions:
        found = super().empty_predictions(labels)
        assert isinstance(found, Likelihoods)
        return with_turns(found, [])

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The unigram distribution of the training targets; and no call of a tool, or always the same, of those that
        are frequent in the training rows."""
        found = super().baseline(data, tokens, model, labels)
        train = read_table(data / "train.arrow")
        sample = train.take(pa.array(sample_evenly(len(train), BASELINE_ROWS)))
        rows = sample.take(pa.array(self.rows_with_turns(sample))).to_pylist()
        unanswered = [self.write_turns(row, [""] * len(_turns_of(row))) for row in rows]
        return baseline_of_calls(found.rivals[0], list(map(read_turns, unanswered)))

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the mean loss; for rows without an answer, the generated texts if they are stored."""
        if given["targets"]:
            return super().same_prediction(given, stored, tolerance)
        text = stored.get(self.generated_column)
        return text is None or given.get(self.generated_column) == text

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """Returns the likelihood of the row's answer; if it has none, the generated answer."""
        if record["targets"]:
            return super().lines(record)
        return [record.get("generated_text", "no answer is generated: options.max_new_tokens is 0")]


def _turns_of(row: Mapping[str, Any]) -> list[int]:
    """The places of the assistant's messages that answer another message, without those of weight 0."""
    messages = json.loads(row["messages"])
    return [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
        and message.get("weight") != 0
        and place > 0
        and messages[place - 1]["role"] != "assistant"
    ]


def _join_prompts(rows: pa.RecordBatch) -> tuple[list[str], list[Spans]]:
    """Returns prompts with their completions, if rows have any, and the spans of the completions."""
    prompts = rows.column("prompt").to_pylist()
    if "completion" not in rows.schema.names:
        return prompts, [[] for _ in prompts]
    texts = list(map(operator.add, prompts, rows.column("completion").to_pylist()))
    return texts, [[(len(prompt), len(text))] for prompt, text in zip(prompts, texts, strict=True)]


def _answers(rows: pa.RecordBatch) -> list[str]:
    """The assistant's texts of each row; of none in rows without answers."""
    for name in ("completion", "output"):
        if name in rows.schema.names:
            return list(rows.column(name).to_pylist())
    if "messages" not in rows.schema.names:
        return []
    conversations = map(json.loads, rows.column("messages").to_pylist())
    return [" ".join(one["content"] for one in messages if one["role"] == "assistant") for messages in conversations]


def _count_repeated(rows: pa.RecordBatch) -> int:
    """The completions that begin with their prompt."""
    if "completion" not in rows.schema.names:
        return 0
    return sum(map(repeats, rows.column("prompt").to_pylist(), rows.column("completion").to_pylist()))


def _render_conversations(template: ChatTemplate | None, rows: pa.RecordBatch) -> tuple[list[str], list[Spans]]:
    """Renders conversations by the chat template. Returns the texts and the spans of their answers. Raises UserError if
    the template is missing and for conversations with problems, and RefusedRows if the template cannot write some."""
    if template is None:
        message = "is missing: the tokenizer has no chat template, and messages and instructions need one. "
        message += "Name a file, such as deployments/examples/chat.jinja, or give rows with prompt and completion."
        raise UserError.of("model", FIELD, message)
    if "messages" in rows.schema.names:
        conversations = [json.loads(text) for text in rows.column("messages").to_pylist()]
    else:
        conversations = [_to_messages(**row) for row in rows.to_pylist()]
    pairs = zip(conversations, _tools_of(rows), strict=True)
    written = render_rows(partial(_render_conversation, template, messages, tools or ()) for messages, tools in pairs)
    return [text for text, _ in written], [spans for _, spans in written]


def _render_conversation(template: ChatTemplate, messages: Any, tools: Any) -> tuple[str, Spans]:
    if problem := find_problem(messages, answered=False):
        raise UserError.of("data", "messages", f"a row has no conversation: {problem}.")
    if messages[-1]["role"] != "assistant":
        return template.render_prompt(messages, tools), []
    return template.render_answers(messages, tools)


def _tools_of(rows: pa.RecordBatch) -> list[Any]:
    """The declarations of each row's tools; None where it has none."""
    if "tools" not in rows.schema.names:
        return [None] * rows.num_rows
    return [None if text is None else as_tools(json.loads(text)) for text in rows.column("tools").to_pylist()]


def _find_tool_problems(rows: pa.RecordBatch) -> Iterator[tuple[Mask, str]]:
    """Yields the mask of rows whose tools are not declarations, by reason."""
    if "tools" in rows.schema.names:
        yield from masks_by_reason([find_tool_problem(tools) for tools in _tools_of(rows)])


def _to_messages(instruction: str, input: str | None = None, output: str | None = None) -> list[dict[str, str]]:
    question = f"{instruction}\n\n{input}" if input and input.strip() else instruction
    answer = [] if output is None else [{"role": "assistant", "content": output}]
    return [{"role": "user", "content": question}, *answer]


def _find_problems(rows: pa.RecordBatch, *, answered: bool) -> Iterator[tuple[Mask, str]]:
    """Yields the mask of rows whose messages are not a conversation, by reason."""
    if "messages" not in rows.schema.names:
        return
    texts = rows.column("messages").to_pylist()
    yield from masks_by_reason([find_problem(json.loads(text), answered=answered) for text in texts])
