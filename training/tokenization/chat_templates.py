"""Chat templates: conversations as texts, and the spans of a text that the assistant wrote.

Templates are third-party programs. They run in the sandbox of transformers, as in apply_chat_template, with one
difference: a text with today's date would give the same rows other tokens tomorrow, so `strftime_now` is undefined for
templates that ask whether it is defined, and gives the others FIXED_DATE. The length of a text, and the time to write
it, are limited.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.data.row_problems import masks_by_reason, shorten
from training.jobs.resources import cores
from training.local_files import open_local, read_whole
from training.models.repository_files import chat_template
from training.problems import UserError
from training.tokenization.encoder import load_fast_encoder
from training.tokenization.features import RefusedRows
from training.tokenization.special_tokens import mark_spelt

if TYPE_CHECKING:
    from jinja2 import Template

    from training.recipe.column_types import Mask
    from training.tokenization.encoder import Encoder

ROLES = ("system", "user", "assistant", "tool")
CALLS = "tool_calls"
"""The name under which a message of the assistant has calls of tools, beside its content or instead of it."""
FIELD = "model.chat_template"
LONGEST_TEXT = 20_000_000
"""Characters of a conversation."""
FIXED_DATE = date(2024, 7, 26)
"""The date that Llama's template writes without today's."""
LARGEST_POWER = 64
LONGEST_NUMBER = 65_536
"""Bits. Python computes with longer numbers for minutes, and cannot be interrupted."""
LONGEST_S = 30.0
"""The time to write a conversation."""
MOST_BYTES = 2 * 1024**3
"""The memory to write a conversation, for what the limit of the text does not see, such as `'x'.ljust(10 ** 10)`."""

_ASKS_FOR_DATE = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_TYPE_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "a boolean"}
_TYPE_NAMES[type(None)] = "null"

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Declarations of tools: `{"type": "function", "function": {"name": …, "parameters": …}}` each."""
Spans = list[tuple[int, int]]
"""Stretches of a text: the first character and the character after the last."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with its tokenizer's special tokens. All methods raise RefusedRows if the template cannot write
    the conversation, and UserError if it exceeds the limits."""

    text: str
    tokens: Mapping[str, str]
    """The special tokens by name, such as eos_token."""
    spellings: Sequence[str] = ()
    """All special tokens. Those in contents are written behind a MARK of `special_tokens`: they are text."""

    @classmethod
    def of(cls, encoder: Encoder) -> ChatTemplate | None:
        """The template of a tokenizer, None if it has none."""
        return None if encoder.chat is None else cls(*encoder.chat, encoder.special_texts)

    def render_prompt(self, messages: Messages, tools: Tools = ()) -> str:
        """The messages, followed by the start of an answer."""
        messages, tools = mark_spelt((messages, tools), self.spellings)
        text, _ = self._render(messages, tools, add_generation_prompt=True)
        self._require_all(messages, tools, text, add_generation_prompt=True)
        return text

    def render_answers(self, messages: Messages, tools: Tools = ()) -> tuple[str, Spans]:
        """The messages, and the spans of the assistant's answers: those that `{% generation %}` marks, or else the text
        that each answer adds to its prompt. Answers with the weight 0 are left out.

        An earlier answer that the template writes otherwise once more messages follow has the text that it then has.
        Raises RefusedRows if the text contains no answer, or if the text before an answer is not the one that a model
        answers, because then the spans cannot be found.
        """
        messages, tools = mark_spelt((messages, tools), self.spellings)
        is_marked = _GENERATION.search(self.text) is not None
        text, spans = self._render(messages, tools, return_assistant_tokens_mask=is_marked)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not is_marked:
            spans = [self._find_answer(messages, tools, place, text) for place in answers]
        elif tools:  # a trained model answers these prompts, for metrics of tool calls
            for place in answers:
                if place and messages[place - 1]["role"] != "assistant":
                    self._render(messages[:place], tools, add_generation_prompt=True)
        if ignored := [number for number, place in enumerate(answers) if messages[place].get("weight") == 0]:
            if len(spans) != len(answers):
                raise _refusal(
                    messages,
                    f"marks {len(spans)} answers of {len(answers)} in {_first_words(messages)}, so it is unknown which "
                    "has the weight 0",
                    ": mark each message of the assistant once.",
                )
            spans = [span for number, span in enumerate(spans) if number not in ignored]
            if not spans:
                return text, []
        if not "".join(text[start:stop] for start, stop in spans).strip():
            marks = " between {% generation %} and {% endgeneration %}" if is_marked else ""
            raise _refusal(messages, f"writes no answer{marks} in {_first_words(messages)}", ": change it.")
        self._require_all(messages, tools, text)
        return text, spans

    def render_last_answer(self, messages: Messages, tools: Tools = ()) -> tuple[str, tuple[int, int]]:
        """The messages, and the span of the last one, which is the assistant's, as `render_answers` finds it."""
        messages, tools = mark_spelt((messages, tools), self.spellings)
        if _GENERATION.search(self.text) is None:
            text, _ = self._render(messages, tools)
            span = self._find_answer(messages, tools, len(messages) - 1, text)
        else:
            text, spans = self._render(messages, tools, return_assistant_tokens_mask=True)
            span = spans[-1] if spans else (0, 0)
        if not text[slice(*span)].strip():
            raise _refusal(messages, f"writes no answer in {_first_words(messages)}", ": change it.")
        self._require_all(messages, tools, text)
        return text, span

    def _require_all(self, messages: Messages, tools: Tools, text: str, **options: bool) -> None:
        """Raises RefusedRows if the text of the messages is the same without one of their contents, or with other
        arguments of a call or other tools: a template may ignore a role, or write no calls. A content that the template
        rewrites, such as by trimming, is accepted."""
        where = _first_words(messages)
        for place, message in enumerate(messages):
            others = {}
            content = message["content"].strip()
            if content and content not in text:
                others["content"] = {**message, "content": f"{message['content']} ."}
            for number, call in enumerate(message.get(CALLS) or ()):
                function = call["function"]
                changed = {**function, "arguments": {**(function.get("arguments") or {}), "_": 0}}
                calls = [*message[CALLS]]
                calls[number] = {**call, "function": changed}
                others[f"{CALLS}[{number}]" if number else CALLS] = {**message, CALLS: calls}
            for name, other in others.items():
                if self._render([*messages[:place], other, *messages[place + 1 :]], tools, **options)[0] == text:
                    raise _refusal(
                        messages,
                        f"does not write the {name} of message {place + 1}, by {message['role']!r}, of {where}: it "
                        "would have no effect",
                    )
        renamed = [
            {**tool, "function": {**tool["function"], "name": f"{tool['function']['name']}_", "parameters": {"_": {}}}}
            for tool in tools
        ]
        if tools and self._render(messages, renamed, **options)[0] == text:
            raise _refusal(messages, f"does not write the tools of {where}: they would have no effect")

    def _find_answer(self, messages: Messages, tools: Tools, place: int, text: str) -> tuple[int, int]:
        before = self._render(messages[:place], tools, add_generation_prompt=True)[0]
        after = self._render(messages[: place + 1], tools)[0]
        if after.startswith(before) and text.startswith(after):
            return len(before), len(after)
        if text.startswith(before) and (stop := self._find_earlier_end(messages, tools, place, text, len(before))):
            return len(before), stop
        raise _refusal(
            messages,
            f"changes message {place + 1} of {_first_words(messages)} if it is answered or more messages follow, "
            "so the assistant's part of the text is unknown",
            ": mark it in the template with {% generation %} and {% endgeneration %}.",
        )

    def _find_earlier_end(self, messages: Messages, tools: Tools, place: int, text: str, start: int) -> int | None:
        """The end of an answer that a template writes otherwise if it is the last, as Qwen3's does: the first end of an
        answer behind `start`. None if it is not known, or the next message comes before it."""
        if place + 1 == len(messages):
            return None
        end = self.find_end()
        if end is None or not any(token in end for token in self.spellings) or (found := text.find(end, start)) < 0:
            return None
        following = {**messages[place + 1], "content": f"{messages[place + 1]['content']} ."}
        changed, _ = self._render([*messages[: place + 1], following, *messages[place + 2 :]], tools)
        stop = found + len(end)
        return stop if changed != text and changed[:stop] == text[:stop] else None

    def find_end(self) -> str | None:
        """The text after an answer that belongs to its span; None if there is none or the template writes no answer."""
        asked, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        try:
            text, spans = self.render_answers([asked, answer])
        except UserError:
            return None
        answers = "".join(text[start:stop] for start, stop in spans)
        return answers.partition(answer["content"])[2] or None

    def _render(self, messages: Messages, tools: Tools, **options: bool) -> tuple[str, Spans]:
        from transformers.utils import chat_template_utils

        try:
            with _WATCH.limit():
                _compile_limited(self.text)  # for the next line, which finds it in the cache
                texts, spans = chat_template_utils.render_jinja_template(
                    [[{name: value for name, value in message.items() if value is not None} for message in messages]],
                    tools=[*tools] or None,
                    chat_template=self.text,
                    **options,
                    **self.tokens,
                )
        except Exception as error:  # a template can fail like any program
            is_limit = isinstance(error, MemoryError | _LimitError)
            reason = str(_LimitError() if is_limit else error).rstrip(".")
            refusal = _refusal(messages, f"cannot write {_first_words(messages)}: {reason}")
            # Without rows, beyond a limit: others would take as long.
            raise (UserError(refusal.problems) if is_limit else refusal) from error
        return texts[0], spans[0] if options.get("return_assistant_tokens_mask") else []


class _LimitError(Exception):
    def __init__(self) -> None:
        super().__init__(
            f"it writes more than {LONGEST_TEXT:,} characters, or takes longer than {LONGEST_S:g} s or more than "
            f"{MOST_BYTES / 1e9:.1f} GB of memory"
        )


def _compile_limited(text: str) -> None:
    """Compiles a template in the cache of transformers, with limits for its text and for the products from which that
    is made. Without the list of operators, the compiler would multiply constants."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    before = ImmutableSandboxedEnvironment.intercepted_binops
    ImmutableSandboxedEnvironment.intercepted_binops = frozenset(["*", "**"])
    try:
        compiled: Template = chat_template_utils._compile_jinja_template(text)
    finally:
        ImmutableSandboxedEnvironment.intercepted_binops = before
    if hasattr(compiled, "is_limited"):
        return
    environment: Any = compiled.environment
    environment.globals.pop("strftime_now", None)
    if not _ASKS_FOR_DATE.search(text):
        environment.globals["strftime_now"] = FIXED_DATE.strftime
    environment.binop_table |= {"*": _multiply, "**": _power}
    write = compiled.root_render_func

    def write_limited(context: Any) -> Iterator[str]:
        length = 0
        for piece in write(context):
            length += len(piece)
            if length > LONGEST_TEXT:
                raise _LimitError
            yield piece

    compiled.root_render_func = write_limited
    compiled.is_limited = True  # type: ignore[attr-defined]


def _multiply(left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, Sized) and isinstance(count, int) and len(sequence) * count > LONGEST_TEXT:
            raise _LimitError
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > LONGEST_NUMBER:
        raise _LimitError
    return left * right


def _power(left: Any, right: Any) -> Any:
    if abs(right) > LARGEST_POWER or (isinstance(left, int) and left.bit_length() * abs(right) > LONGEST_NUMBER):
        raise _LimitError
    return left**right


class _Watch:
    """Ends a template that runs too long or takes too much memory. A template may loop without writing anything, so
    another thread does it; the kernel refuses the memory. A single operation of Python, such as the sum of many lists,
    cannot be ended: then the kernel ends the process, with a traceback, by SIGPROF."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._lock, self._inside = threading.Lock(), 0
        self._before: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """Inside, this thread gets a _LimitError after LONGEST_S, and a MemoryError beyond MOST_BYTES."""
        with self._lock:
            if not self._inside:  # the limit is the process's: the first sets it, and the last one takes it back
                self._before = _limit_memory()
            self._inside += 1
            self._began[threading.get_ident()] = time.monotonic()
        # The time of all threads, as the others may be at work.
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S * (1 + cores()))
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(target=self._run, name="chat-templates", daemon=True)
            self._thread.start()
            faulthandler.register(signal.SIGPROF, file=2, all_threads=False, chain=True)
        try:
            yield
        finally:
            with self._lock:
                self._began.pop(threading.get_ident(), None)
                self._inside -= 1
                if not self._inside:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    if self._before is not None:
                        resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def _run(self) -> None:
        while True:
            time.sleep(1.0)
            for thread, began in [*self._began.items()]:
                if time.monotonic() - began > LONGEST_S and self._began.pop(thread, None) is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_LimitError))


def _limit_memory() -> tuple[int, int] | None:
    """Limits the memory of this process to MOST_BYTES more than it has. Returns the former limits; None if it cannot be
    limited here."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _count_bytes(os.getpid(), int(10 * time.monotonic())) + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (min([most, *(n for n in (soft, hard) if n >= 0)]), hard))
    except (OSError, ValueError, IndexError):
        return None
    return soft, hard


@lru_cache(maxsize=1)
def _count_bytes(process: int, tenth_of_a_second: int) -> int:
    """The memory of this process, which takes longer to read than many a conversation to write."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * resource.getpagesize()


_WATCH = _Watch()


def require_template(file: Path) -> None:
    """Raises UserError if the file is missing or is no Jinja template. The template is parsed, not executed."""
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        with open(open_local(str(file), kind="model"), "rb") as source:
            text = read_whole(source).decode()
        if text.startswith("\ufeff"):
            message = f"{str(file)!r} begins with a byte order mark, with which every conversation would begin: "
            raise UserError.of("model", FIELD, f"{message}save it as UTF-8 without the mark.")
        Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(text)
    except OSError as error:
        raise UserError.of(
            "model", FIELD, f"{str(file)!r} cannot be read ({error.strerror}): name a Jinja file."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError.of("model", FIELD, f"{str(file)!r} is not UTF-8 text: name a Jinja file.") from error
    except TemplateSyntaxError as error:
        raise UserError.of(
            "model", FIELD, f"{str(file)!r} is no Jinja: line {error.lineno}: {error.message}"
        ) from error
    except RecursionError:  # its traceback has a thousand lines
        message = f"{str(file)!r} has more parts in one another than can be read: name another Jinja file."
        raise UserError.of("model", FIELD, message) from None


def find_problem(messages: Any, *, answered: bool) -> str | None:
    """The first problem of a value as a conversation, in words that follow a colon; None if there is none. With
    `answered`, the last message must be the assistant's."""
    if not isinstance(messages, list):
        return f"it is {_TYPE_NAMES[type(messages)]}, and must be a list of messages"
    if not messages:
        return "it has no message"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is {_TYPE_NAMES[type(message)]}, and must have role and content"
        for name in ("role", "content"):
            if name not in message:
                return f"message {number} has no {name}: it has {', '.join(map(str, message))}"
            if not isinstance(message[name], str):
                return f"{name} of message {number} is {_TYPE_NAMES[type(message[name])]}, and must be a text"
        if message["role"] not in ROLES:
            return f"message {number} is by {message['role']!r}, and roles are {', '.join(ROLES)}"
        if problem := _find_call_problem(message, messages[: number - 1]):
            return f"message {number}, by {message['role']!r}, {problem}"
        if message["role"] not in ("system", "tool") and not (message["content"].strip() or message.get(CALLS)):
            return f"message {number}, by {message['role']!r}, is empty"
        if (weight := message.get("weight")) not in (None, 0, 1):
            return f"weight of message {number} is {weight!r:.30}, and must be 0 or 1"
        if weight == 1 and message["role"] != "assistant":
            return f"message {number}, by {message['role']!r}, has the weight 1, which only the assistant's may have"
    if answered and messages[-1]["role"] != "assistant":
        return f"its last message is by {messages[-1]['role']!r}, and must be by 'assistant'"
    if answered and all(message["role"] != "assistant" or message.get("weight") == 0 for message in messages):
        return "all messages by 'assistant' have the weight 0, so none is trained on"
    return None


def _find_call_problem(message: Mapping[str, Any], before: Messages) -> str | None:
    """The problem of a message's calls of tools, or of the result of a call."""
    if message["role"] == "tool" and not (before and (before[-1].get(CALLS) or before[-1].get("role") == "tool")):
        return "follows no call of a tool"
    calls = message.get(CALLS)
    if calls in (None, []):
        return None
    if message["role"] != "assistant":
        return f"has {CALLS}, which only the assistant's may have"
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return 'has a call without the name of a function: write {"function": {"name": …, "arguments": {…}}}'
        if not isinstance(function.get("arguments", {}), Mapping):
            return f"calls {function['name']!r} with arguments that are no JSON object"
    return None


def find_tool_problem(tools: Any) -> str | None:
    """The problem of a value as a list of tools, in words that follow a colon; None if there is none."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        return f"it is {_TYPE_NAMES[type(tools)]}, and must be a list of tools"
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return f'tool {number} has no name: write {{"type": "function", "function": {{"name": …}}}}'
    return None


def load_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a tokenizer's folder; None if it has none. Raises UserError for a tokenizer.json that cannot
    be read."""
    if (folder / "tokenizer.json").is_file():
        return ChatTemplate.of(load_fast_encoder(folder, max_length=1))
    chat = chat_template(folder)
    return None if chat is None else ChatTemplate(*chat, [*chat[1].values()])


T = TypeVar("T")


def render_rows(writers: Iterable[Callable[[], T]]) -> list[T]:
    """The results of functions that write a row each. Raises RefusedRows with all rows that the template refuses."""
    found, refused = list[T](), dict[int, RefusedRows]()
    for place, write in enumerate(writers):
        try:
            found.append(write())
        except RefusedRows as error:
            refused[place] = error
    if refused:
        raise RefusedRows.from_rows(refused)
    return found


def find_refused(render: Callable[[], object], rows: int) -> Iterator[tuple[str, Mask]]:
    """The reasons of the rows that `render`, which is called for so many rows at once, refuses, each with a mask of its
    rows."""
    try:
        render()
    except RefusedRows as refused:
        reasons = dict(zip(refused.rows, refused.reasons, strict=True))
        for mask, reason in masks_by_reason([reasons.get(row) for row in range(rows)]):
            yield reason, mask


def _refusal(messages: Messages, reason: str, advice: str = ". Change the template, or the rows.") -> RefusedRows:
    error = RefusedRows.of("model", FIELD, f"{reason}{advice}")
    error.reasons = ["it " + reason.replace(_first_words(messages), "the conversation")]
    return error


def _first_words(messages: Messages) -> str:
    return f"the conversation {shorten(messages[0]['content'] if messages else '')}"
