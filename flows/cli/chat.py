"""The command `chat`: a conversation with a registered assistant."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator

from flows.cli.shared import COMPLETED, add_version_arguments
from tasks.prediction.chat_job import Chat, open_chat, require_assistant
from tasks.registry.model_spec import find_model
from tasks.reports.formatting import format_count
from training.recipe import split_version_name

PROMPT = "> "
HELP = "/reset begins a new conversation, /quit or Ctrl-D ends it, Ctrl-C ends an answer"


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="the system's message before each conversation")
    parser.add_argument(
        "--max-new-tokens",
        metavar="TOKENS",
        type=int,
        help="the most tokens of an answer (default: options.max_new_tokens of the recipe)",
    )


def chat(arguments: argparse.Namespace) -> int:
    """Talk with a registered assistant.

    A line is a question, and the answer appears as it is generated; `/reset` begins a new conversation, `/quit` or
    Ctrl-D ends it, Ctrl-C ends the answer. Without a terminal, the lines of the standard input are one conversation.
    """
    model = find_model(*split_version_name(arguments.model), arguments.task)
    model = require_assistant(model, arguments.max_new_tokens)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    with open_chat(model, arguments.system) as chat:
        if interactive:
            print(f"{model.name} version {model.version}. {HELP[0].upper()}{HELP[1:]}.", file=sys.stderr)
        for line in _read_from_terminal() if interactive else sys.stdin:
            if line.strip() == "/quit":
                break
            _respond(chat, line.strip())
    return COMPLETED


def _respond(chat: Chat, line: str) -> None:
    if line == "/reset":
        chat.reset()
    elif line.startswith("/") and line[1:].isalpha():
        print(f"{line} is no command: {HELP}.", file=sys.stderr)
    elif line:
        for text in chat.answer(line):
            print(_printable(text), end="", flush=True)
        print(flush=True)
        if chat.dropped:
            messages = format_count(chat.dropped, "message")
            print(f"(without the {messages} at the beginning: the conversation is longer than the model reads)",
                  file=sys.stderr)  # fmt: skip


def _read_from_terminal() -> Iterator[str]:
    """The lines that a person types, until Ctrl-D. Ctrl-C discards a line."""
    import readline  # noqa: F401  # `input` then edits lines and remembers them

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _printable(text: str) -> str:
    """The text with a placeholder for each character that could control the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
