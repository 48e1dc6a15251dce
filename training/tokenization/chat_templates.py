"""Conversations as a chat template writes them, and where in the text the assistant speaks.

A template is a program of somebody else's. It runs in the sandbox of transformers, as apply_chat_template has it run,
and gives the same text, but for one thing: it is told no date. A text that says which day it is today would make other
tokens tomorrow of the same rows; templates that ask for the date have one of their own where there is none to be had.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.problems import Problem, UserError

ROLES = ("system", "user", "assistant")
FIELD = "model.chat_template"

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

_A = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth"}
_A[type(None)] = "nothing"

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]
"""Stretches of a text: their first characters, and those behind their last."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of Jinja, and what it knows of its tokenizer."""

    text: str
    tokens: Mapping[str, str]
    """The tokenizer's special tokens by name, such as eos_token."""

    def asked(self, messages: Messages) -> str:
        """The messages, and what an answer of the assistant's begins with. Raises UserError for messages that the
        template refuses."""
        return self._written(messages, asking=True)[0]

    def answered(self, messages: Messages) -> tuple[str, Spans]:
        """The messages, and where the assistant's are in them: what `{% generation %}` marks, else what each of them
        adds to what an answer begins with.

        Raises UserError for messages that the template refuses, where it writes nothing of the answers, and where it
        writes one otherwise once more follows it, so that it cannot be told which part is whose.
        """
        text, spans = self._answered(messages)
        if not "".join(text[start:stop] for start, stop in spans).strip():
            marks = " between {% generation %} and {% endgeneration %}" if _MARKED.search(self.text) else ""
            raise _refused(f"writes nothing of what the assistant says{marks} in {_first_words(messages)}: change it.")
        return text, spans

    def _answered(self, messages: Messages) -> tuple[str, Spans]:
        if _MARKED.search(self.text):
            return self._written(messages, marked=True)
        text, spans = self._written(messages)[0], []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.asked(messages[:place])
                after = self._written(messages[: place + 1])[0]
                if not (after.startswith(before) and text.startswith(after)):
                    raise _refused(
                        f"writes message {place + 1} of {_first_words(messages)} otherwise once it is answered or more "
                        "follows, so nobody can tell which part the assistant said: give a template in which that "
                        "stands between {% generation %} and {% endgeneration %}."
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def end(self) -> str | None:
        """What follows an answer, as far as it is learnt; None where the template does not write any answer."""
        asked, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        try:
            text, spans = self.answered([asked, answer])
        except UserError:
            return None
        said = "".join(text[start:stop] for start, stop in spans)
        return said.partition(answer["content"])[2] or None

    def _written(self, messages: Messages, *, asking: bool = False, marked: bool = False) -> tuple[str, Spans]:
        from transformers.utils import chat_template_utils

        try:
            compiled = chat_template_utils._compile_jinja_template(self.text)
            compiled.environment.globals.pop("strftime_now", None)
            texts, spans = chat_template_utils.render_jinja_template(
                [[{name: value for name, value in one.items() if value is not None} for one in messages]],
                chat_template=self.text,
                add_generation_prompt=asking,
                return_assistant_tokens_mask=marked,
                **self.tokens,
            )
        except Exception as error:  # a template may fail in all ways in which a program can
            raise _refused(
                f"cannot write {_first_words(messages)}: {str(error).rstrip('.')}. Change the template, or the rows."
            ) from error
        return texts[0], spans[0] if marked else []


def need_template(file: Path) -> None:
    """Raises UserError for a file that is not there, or that is no template. Nothing of it is run."""
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(f"{str(file)!r} cannot be read ({error.strerror}): name a file of Jinja.") from error
    except UnicodeDecodeError as error:
        raise _refused(f"{str(file)!r} is not UTF-8 text: name a file of Jinja.") from error
    except TemplateSyntaxError as error:
        raise _refused(f"{str(file)!r} is no Jinja: line {error.lineno}: {error.message}") from error


def fault_of(messages: Any, *, answered: bool) -> str | None:
    """What keeps a value from being a conversation, in words that follow a colon; None where nothing does. One that is
    `answered` ends with the assistant's message, and one that is asked may."""
    if not isinstance(messages, list):
        return f"it is {_A[type(messages)]}, and must be a list of messages"
    if not messages:
        return "it has no message"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is {_A[type(message)]}, and must have role and content"
        for name in ("role", "content"):
            if name not in message:
                return f"message {number} has no {name}: it has {', '.join(map(str, message))}"
            if not isinstance(message[name], str):
                return f"{name} of message {number} is {_A[type(message[name])]}, and must be a text"
        if message["role"] not in ROLES:
            return f"message {number} is by {message['role']!r}, and roles are {', '.join(ROLES)}"
        if message["role"] != "system" and not message["content"].strip():
            return f"message {number}, by {message['role']!r}, says nothing"
    if answered and messages[-1]["role"] != "assistant":
        return f"its last message is by {messages[-1]['role']!r}, and must be by 'assistant'"
    return None


def _first_words(messages: Messages) -> str:
    from training.data.faults import shortened

    return f"the conversation {shortened(messages[0]['content'] if messages else '')}"


def _refused(message: str) -> UserError:
    return UserError([Problem(kind="model", where=FIELD, message=message)])
