"""Supervised fine-tuning: an assistant learns to answer. Only tokens of answers are targets.

A row of the data set        {"messages": [{"role": "user", "content": "2 + 2?"},
                                           {"role": "assistant", "content": "4"}]}
as the chat template has it  "user: 2 + 2?</s> assistant: 4</s>"
becomes token features       {"input_ids": [5, 9, 3, 9, 4, 2, 6, 7, 2], "of_answer": [0, 0, 0, 0, 0, 0, 0, 1, 1],
                              "length": 9, "targets": 2}
and for training, packed     the same, several rows one after the other: "starts": [0, 9, 21]
of which a batch has         {"input_ids": (B, T), "position_ids": (B, T),
                              "labels": [-100, -100, -100, -100, -100, -100, -100, 7, 2]}
the model outputs            logits (B, T, V), summed up to a loss a row.

Rows come in three ways:
  messages                      a list of them: {"role": "system", "user" or "assistant", "content": a text}
  prompt, completion            two texts that are joined as they stand, without a template, and the eos token
  instruction, input, output    as messages: the instruction, perhaps with an input below it, and its answer

Where a template marks what the assistant says (`{% generation %}`), that is learnt: all answers of a conversation, and
what ends each. Else an answer is what it adds to the text in which it is asked for:
training/tokenization/chat_templates.py. A token is learnt if its first character is of an answer. Rows longer than
tokens.max_length are cut on the right; where nothing of an answer is left, a row is not packed, and counts for nothing
elsewhere. Packed rows hold whole conversations, which do not see one another: training/tokenization/packing.py.

B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from training.problems import Problem, UserError
from training.task_types.causal_lm import CausalLM
from training.task_types.task_type import Column

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import TokenRows
    from training.recipe.column_types import Mask
    from training.tokenization.chat_templates import Spans
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features

    Ids = npt.NDArray[np.int32]


MOST_REASONS = 8
"""The most reasons that are reported one by one for a block of rows."""


class SupervisedFineTuning(CausalLM):
    """The answer of an assistant in a conversation."""

    class Options(CausalLM.Options):
        """The options of sft."""

        max_new_tokens: int = Field(default=128, ge=0)
        """The most tokens of an answer that `finetune predict` generates; 0 generates nothing."""
        packing: bool = True
        """Whether training rows are filled with whole conversations up to tokens.max_length. If not, each
        conversation is a row."""
        append_eos: bool = True
        """Whether the tokenizer's eos token, if any, is added to a completion. The chat template ends messages."""

    options: Options
    option_stages: ClassVar = {**CausalLM.option_stages, "load_data": ()}
    chat_template_columns: ClassVar = ("messages", "instruction")
    libraries: ClassVar = ("transformers", "jinja2")
    card_sentence = "Answers questions in a conversation"
    columns: ClassVar = {
        "messages": Column("value"),
        "prompt": Column("text"),
        "completion": Column("text", target=True),
        "instruction": Column("text"),
        "input": Column("text", optional=True, may_be_empty=True),
        "output": Column("text", target=True),
    }
    checks: ClassVar = {"messages": "error"}

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        """Messages; or a prompt and its completion; or an instruction, perhaps with an input, and its output."""
        sets = (("messages",), ("prompt", "completion"), ("instruction", "input", "output"))
        return [{name: self.columns[name] for name in names} for names in sets]

    def faults(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Messages that are no conversation, or one without an answer at its end."""
        for mask, why in _no_conversations(rows, answered=True):
            yield "messages", f"has no conversation in column 'messages' ({why})", mask

    def faults_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Messages that are no conversation."""
        for mask, why in _no_conversations(rows, answered=False):
            yield "messages", f"has no conversation ({why})", mask, ""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """input_ids; `of_answer`, 1 for each token that is learnt (list<int8>); length, and `targets`, how many are.

        Rows without what is said, and conversations that end with a question, are as they are asked: up to where the
        model goes on, and without targets. Raises UserError where a chat template is wanted and there is none.
        """
        import numpy as np
        import pyarrow as pa

        from training.tokenization.features import Features, of_lengths
        from training.tokenization.packing import OF_ANSWER

        found, most = self._tokens(encoder, rows), encoder.max_length
        whole = np.array([len(ids) for ids, _ in found])
        lengths = np.minimum(whole, most).astype(np.int32)
        columns = {
            "input_ids": of_lengths(np.concatenate([ids[:most] for ids, _ in found]), lengths),
            OF_ANSWER: of_lengths(np.concatenate([of[:most] for _, of in found]).astype(np.int8), lengths),
            "length": lengths,
            "targets": np.array([of[:most].sum() for _, of in found], np.int32),
        }
        return Features(pa.RecordBatch.from_pydict(columns), whole - lengths)

    def prompts(self, encoder: Encoder, rows: pa.RecordBatch, settings: GenerationConfig) -> list[Ids]:
        """The tokens of what each row asks, up to where the answer follows that it may have: a template may end a
        question with the token that ends texts."""
        return [ids for ids, _ in self._tokens(encoder, self._unanswered(rows))]

    def _tokens(self, encoder: Encoder, rows: pa.RecordBatch) -> list[tuple[Ids, Mask]]:
        """All tokens of each row, and a mask of the targets."""
        import numpy as np

        plain = "prompt" in rows.schema.names
        texts, spans = _prompts(rows) if plain else _conversations(encoder, rows)
        encoded = encoder.encode_located(texts, special=plain)
        assert encoded.starts is not None
        ends = np.cumsum(encoded.lengths)[:-1]
        found = []
        for ids, starts, said in zip(np.split(encoded.ids, ends), np.split(encoded.starts, ends), spans, strict=True):
            of_answer = np.searchsorted(np.ravel(said), starts, side="right") % 2 == 1
            if plain:
                ids, of_answer = self._ended(encoder, ids, starts, of_answer, completed=bool(said))
            of_answer[:1] = False  # the first token has no context
            found.append((ids, of_answer))
        return found

    def _ended(self, encoder: Encoder, ids: Ids, starts: Ids, of_answer: Mask, *, completed: bool) -> tuple[Ids, Mask]:
        """The tokens of a prompt and its completion with those that end a text, which are learnt, too; and of a prompt
        alone without them, given where each token begins in the text."""
        import numpy as np

        text = int(np.flatnonzero(starts >= 0).max(initial=-1)) + 1
        if not completed:
            return ids[:text], of_answer[:text]
        of_answer[text:] = True
        if self.options.append_eos and encoder.eos is not None and encoder.eos not in ids[-1:]:
            return np.append(ids, np.int32(encoder.eos)), np.append(of_answer, True)
        return ids, of_answer

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Packed for training, without those that have no targets; else as they are. Raises UserError where none of
        train has any."""
        if split != "train":
            return features
        features = _with_targets(features, max_length)
        return _packed(features, max_length) if self.options.packing else features

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Also adds the token that ends an answer in the chat template, which may not be the tokenizer's eos."""
        from training.models.repository_files import chat_of
        from training.task_types.generation import add_end_token
        from training.tokenization.chat_templates import ChatTemplate

        super().prepare(model, tokenizer)
        chat = chat_of(tokenizer)
        end = chat and ChatTemplate(*chat).end()
        ids = tokenizer(end, add_special_tokens=False)["input_ids"] if end else []
        if ids and ids[0] in tokenizer.added_tokens_decoder:
            add_end_token(model, ids[0])

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """The predictions unchanged: each row has one feature row."""
        return predictions

    def _unanswered(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows without targets, and without the answer at the end of a conversation."""
        import pyarrow as pa

        from training.data.lists import as_json

        rows = rows.select([name for name in rows.schema.names if not self.columns[name].target])
        if "messages" not in rows.schema.names:
            return rows
        conversations = [json.loads(text) for text in rows.column("messages").to_pylist()]
        for messages in conversations:
            while len(messages) > 1 and messages[-1]["role"] == "assistant":
                messages.pop()
        return pa.RecordBatch.from_pydict({"messages": pa.array(map(as_json, conversations), pa.string())})

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the mean loss. Rows without an answer have none: their generated texts are compared, if known."""
        if given["targets"]:
            return super().same_prediction(given, stored, tolerance)
        written = stored.get(self.generated_column)
        return written is None or given.get(self.generated_column) == written

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The likelihood of a given answer; without one, the generated answer."""
        if record["targets"]:
            return super().lines(record)
        return [record.get("generated_text", "no answer is written: options.max_new_tokens is 0")]


def _prompts(rows: pa.RecordBatch) -> tuple[list[str], list[Spans]]:
    """Prompts with their completions, where rows have any, and where these are."""
    prompts = rows.column("prompt").to_pylist()
    if "completion" not in rows.schema.names:
        return prompts, [[] for _ in prompts]
    texts = list(map(operator.add, prompts, rows.column("completion").to_pylist()))
    return texts, [[(len(prompt), len(text))] for prompt, text in zip(prompts, texts, strict=True)]


def _conversations(encoder: Encoder, rows: pa.RecordBatch) -> tuple[list[str], list[Spans]]:
    """Conversations as the chat template has them, and where their answers are. Raises UserError where there is no
    template, or none that can write them, and for what is no conversation."""
    from training.tokenization.chat_templates import FIELD, ChatTemplate, fault_of

    if encoder.chat is None:
        message = "is missing: the tokenizer has no chat template, and messages and instructions are written by one. "
        message += "Name a file, such as deployments/examples/chat.jinja, or give rows with prompt and completion."
        raise UserError([Problem(kind="model", where=FIELD, message=message)])
    if "messages" in rows.schema.names:
        conversations = [json.loads(text) for text in rows.column("messages").to_pylist()]
    else:
        conversations = [_instruction(**row) for row in rows.to_pylist()]
    template, texts, spans = ChatTemplate(*encoder.chat), [], []
    for messages in conversations:
        if wrong := fault_of(messages, answered=False):
            message = f"there is no conversation to be asked about: {wrong}."
            raise UserError([Problem(kind="data", where="messages", message=message)])
        answered = messages[-1]["role"] == "assistant"
        text, of_text = template.answered(messages) if answered else (template.asked(messages), [])
        texts.append(text)
        spans.append(of_text)
    return texts, spans


def _instruction(instruction: str, input: str | None = None, output: str | None = None) -> list[dict[str, str]]:
    """A row with these columns, as messages."""
    question = f"{instruction}\n\n{input}" if input and input.strip() else instruction
    answer = [] if output is None else [{"role": "assistant", "content": output}]
    return [{"role": "user", "content": question}, *answer]


def _no_conversations(rows: pa.RecordBatch, *, answered: bool) -> Iterator[tuple[Mask, str]]:
    """Which messages are no conversation, by why they are none; the rarer reasons together."""
    import numpy as np

    from training.tokenization.chat_templates import fault_of

    if "messages" in rows.schema.names:
        found = [fault_of(json.loads(text), answered=answered) for text in rows.column("messages").to_pylist()]
        for why, _ in (told := Counter(filter(None, found)).most_common(MOST_REASONS)):
            yield np.array([one == why for one in found]), why
        if (rest := np.array([one is not None and one not in dict(told) for one in found])).any():
            yield rest, "for other reasons than the most frequent ones"


def _packed(features: Iterator[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.compute as pc

    from training.tokenization.packing import packed_whole

    for rows in features:
        there = rows.filter(pc.greater(rows.column("targets"), 0))
        if there.num_rows:
            yield packed_whole(there, max_length)


def _with_targets(features: Iterator[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    """The same. Raises UserError at their end, if none of the rows has targets."""
    found = 0
    for rows in features:
        found += int(rows.column("targets").to_numpy().sum())
        yield rows
    if not found:
        message = f"{max_length} leaves nothing of an answer in any row of train: raise it."
        raise UserError([Problem(kind="tokens", where="tokens.max_length", message=message)])
