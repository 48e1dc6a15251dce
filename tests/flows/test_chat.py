"""`finetune chat`: a conversation on a terminal and in a pipe, with an assistant whose answers are known."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tasks.registry.versions import COLUMNS_TAG
from tasks.tracking.connection import connect
from tests.flows.forked import code_with_forked_programs, finetune
from tests.flows.served import register
from tests.flows.small import environment
from tests.fork_server import NEW_PYTHON
from tests.training.counting import CALL, write_assistant

ROOT = Path(__file__).resolve().parents[2]
CODE = """\
from flows.cli.main import main
code = main()
print([name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
sys.exit(code)"""
DEADLINE_S = 120.0
UNSIGNED = (
    "counter/1 is used without a signature: it is not signed. If you know its origin, sign it: finetune sign counter/1."
)


def command(*arguments: str) -> list[str]:
    return [NEW_PYTHON, "-c", code_with_forked_programs(CODE), "chat", *arguments]


@pytest.fixture
def home(home: Path, fresh_database: Path) -> Path:
    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(fresh_database.read_bytes())
    return home


class Person:
    """Types on the terminal of a command, and reads."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._terminal, theirs = pty.openpty()

        def log_in() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background
            os.login_tty(theirs)

        self.command = subprocess.Popen(
            command(*arguments), cwd=ROOT, env=environment(home, TERM="dumb"), preexec_fn=log_in
        )
        os.close(theirs)
        self._read = ""

    def types(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupts(self, text: str) -> None:
        """Types a text and Ctrl-C, once the command waits for the next key: readline misses a signal before that."""
        self.types(text)
        self.reads(text)
        until = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{self.command.pid}/stat").read_text().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < until
            time.sleep(0.01)
        self.types("\x03")

    def reads(self, end: str = "> ") -> str:
        """What appears up to the end, the next prompt."""
        until = time.monotonic() + DEADLINE_S
        while end not in self._read:
            assert select.select([self._terminal], [], [], until - time.monotonic())[0], self._read
            self._read += os.read(self._terminal, 4096).decode()
        found, _, self._read = self._read.partition(end)
        return " ".join(found.split())


@pytest.fixture
def person(home: Path, tmp_path: Path) -> Iterator[Person]:
    register(write_assistant(tmp_path / "model"), max_new_tokens=3)
    person = Person(home, "counter", "--max-new-tokens", "3000")
    yield person
    person.command.kill()
    person.command.wait()


@pytest.mark.slow
def test_a_person_talks_stops_an_answer_begins_anew_and_leaves(person: Person, home: Path) -> None:
    greeting = "counter version 1. /reset begins a new conversation, /quit or Ctrl-D ends it"
    assert person.reads().startswith(f"{UNSIGNED} {greeting}")
    person.types("six\n")
    assert person.reads() == "six seven eight nine"  # the question is echoed
    person.types("count\n")
    assert person.reads() == "count four five six seven eight nine"  # the third message
    person.types("on\n")
    person.reads("on on on on ")
    person.types("\x03")
    assert person.reads().count("on") < 2900
    person.interrupts("half a line")
    person.reads()
    person.types("/reset\n")
    assert person.reads() == "/reset"
    person.types("count\n")
    assert person.reads() == "count two three four five six seven eight nine"
    person.types("/rest\n")
    assert "/rest is no command: /reset begins" in person.reads()
    person.types("\x04")
    assert person.command.wait(DEADLINE_S) == 0
    assert [*(home / "jobs").iterdir()] == []


@pytest.mark.slow
def test_lines_of_a_pipe_are_answered_one_by_one_without_torch_in_the_command(home: Path, tmp_path: Path) -> None:
    register(write_assistant(tmp_path / "model"), max_new_tokens=3)
    lines = b"\xe9 six\n\ncount\n/reset\ncount\n/quit\nsix\n"  # the first is no UTF-8
    talk = subprocess.run(
        command("counter@champion", "--system", "five"), cwd=ROOT, env=environment(home), input=lines,
        capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert (talk.returncode, talk.stderr.decode()) == (0, f"{UNSIGNED}\n[]\n")
    # At most three tokens, as the recipe has it; the system's message counts, and stays after /reset.
    assert talk.stdout.splitlines() == [b"six seven eight", b"five six seven", b"three four five"]


@pytest.mark.slow
def test_conversations_and_requests_in_files_are_answered_as_in_a_chat_and_once(
    home: Path, server: dict[str, str], tmp_path: Path
) -> None:
    register(write_assistant(tmp_path / "model"), max_new_tokens=3)
    talks = [[{"role": "user", "content": text}] for text in ("six", "count", "eight", "on")]
    talks[1].insert(0, {"role": "system", "content": "Count."})
    requests: list[dict[str, Any]] = [
        {"custom_id": f"request {number}", "url": "/v1/chat/completions", "body": {"messages": talk, "max_tokens": 9}}
        for number, talk in enumerate([*talks, []])
    ]
    files = {"requests": [*requests, {"custom_id": "n", "body": {"messages": talks[0], "n": 2}}]}
    files["talks"] = [{"id": number, "talk": talk} for number, talk in enumerate(talks)]
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def predict(name: str, *more: str) -> tuple[list[dict[str, Any]], str]:
        run = finetune(
            home, "predict", "counter", "--input", str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / name),
            "--max-error-rate", "0.5", "--no-drift", *more, **server,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        (part,) = (tmp_path / name).glob("part-*.jsonl")
        return [json.loads(line) for line in part.read_text().splitlines()], run.stdout + run.stderr

    answers, printed = predict("requests", "--format", "openai")
    assert "6 rows" in printed and "4 of them now" in printed and "max_tokens of the requests: not used" in printed
    assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in files["requests"]]
    choices = [line["response"]["body"]["choices"][0] for line in answers[:4]]
    spoken = [choice["message"]["content"] for choice in choices]
    assert spoken == [
        "seven eight nine",
        "three four five",
        "nine",
        "on on on",
    ]  # as the weights have it, in a chat too
    assert [choice["finish_reason"] for choice in choices] == ["length", "length", "stop", "length"]
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}  # with the token that ends the answer
    assert answers[2]["response"]["body"]["usage"] == usage and answers[2]["error"] is None
    assert "row 5 has no conversation" in answers[4]["error"]["message"] and "`n`: 2" in answers[5]["error"]["message"]

    answers, printed = predict("talks", "--format", "jsonl", "--keep", "id")
    assert "4 rows" in printed and " 0 of them now" in printed  # the same conversations, whatever holds them
    assert [(line["id"], line["generated_text"]) for line in answers] == [*enumerate(spoken)]


def test_a_model_of_preferences_answers_requests_in_files_with_their_tools(
    home: Path, server: dict[str, str], tmp_path: Path
) -> None:
    register(write_assistant(tmp_path / "model"), "preference", max_new_tokens=3)
    tools = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
    flat = {"custom_id": "a", "messages": [{"role": "user", "content": "six"}]}
    calls = {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "tool"}], "tools": tools}}
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, (flat, calls))))
    run = finetune(
        home, "predict", "counter", "--input", str(tmp_path / "requests.jsonl"), "--output",
        str(tmp_path / "answers.jsonl"), "--format", "openai", "--no-drift", **server,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    spoken, called = (answer["response"]["body"]["choices"][0] for answer in answers)
    assert spoken["message"]["content"] == "seven eight nine"
    assert called["message"]["tool_calls"][0]["function"] == {"name": "count", "arguments": '{"to": 3}'}


def test_requests_with_tools_in_files_are_answered_by_calls(home: Path, server: dict[str, str], tmp_path: Path) -> None:
    register(write_assistant(tmp_path / "model"), max_new_tokens=3)
    connect().set_model_version_tag("counter", "1", COLUMNS_TAG, json.dumps({"messages": "talk", "tools": "tools"}))
    tools = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
    bodies = [{"messages": [{"role": "user", "content": word}], "tools": tools} for word in ("tool", "eight")]
    bodies += [{"messages": bodies[0]["messages"]}]
    lines = (json.dumps({"custom_id": str(number), "body": body}) for number, body in enumerate(bodies))
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    run = finetune(
        home, "predict", "counter", "--input", str(tmp_path / "requests.jsonl"), "--output",
        str(tmp_path / "answers.jsonl"), "--format", "openai", "--no-drift", **server,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    called, counted, plain = (answer["response"]["body"]["choices"][0] for answer in answers)
    (call,) = called["message"]["tool_calls"]
    assert (call["function"], called["message"]["content"]) == ({"name": "count", "arguments": '{"to": 3}'}, None)
    assert called["finish_reason"] == "tool_calls"
    assert (counted["message"], counted["finish_reason"]) == ({"role": "assistant", "content": "nine"}, "stop")
    assert (plain["message"], plain["finish_reason"]) == ({"role": "assistant", "content": CALL}, "stop")


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("seq2seq", [], "NAME: counter version 1 is a model for the task type seq2seq, which holds no conversation: "
         "choose one for causal-lm, sft, preference, kto, or ask it by `finetune predict`."),
        ("reward-modeling", [], "which holds no conversation"),
        ("sft", ["--max-new-tokens", "0"], "--max-new-tokens: with 0 counter version 1 generates nothing"),
        ("sft", ["--max-new-tokens", "-1"], "--max-new-tokens: "),
        ("sft", [], "NAME: the tokenizer of counter version 1 has no chat template"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_talk_is_refused_by_name(
    home: Path,
    tmp_path: Path,
    task: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    register(write_assistant(tmp_path / "model", template=None), task)
    assert main(["chat", "counter", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not any((home / "jobs").glob("*"))
