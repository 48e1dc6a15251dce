"""The page of a served model, and the command that asks it, whatever the names of its columns are."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tasks.serving.page import create_app, example_command

NAMES = ["<script>alert(1)</script>", "</pre><img src=x onerror=alert(1)>", "it's $(id) `id`", "a\x9b31m\x1b]0;b\u202e"]


def model(column: str) -> Any:
    return SimpleNamespace(name="small", task={"task": "sequence-classification"}, columns={"text": column})


@pytest.mark.parametrize("column", NAMES)
def test_the_command_is_one_for_the_shell_and_shows_no_codes_of_terminals(column: str) -> None:
    command = example_command(model(column), "http://127.0.0.1:8000", "TOKEN", holds_conversations=False)
    assert all(letter.isprintable() or letter == "\n" for letter in command)
    words = shlex.split(command.replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1]) == {"rows": [{column: f"some {column}"}]}
    assert len(words) == 6


def test_the_command_of_a_pair_has_both_texts() -> None:
    pair = model("first")
    pair.columns["text_pair"] = "second"
    command = example_command(pair, "http://127.0.0.1:8000", "TOKEN", holds_conversations=False)
    assert '{"rows": [{"first": "some first", "second": "some second"}]}' in command


@pytest.mark.parametrize("column", NAMES)
def test_the_page_has_no_element_of_a_name_and_runs_only_the_servers_script(column: str) -> None:
    client = TestClient(create_app(model(column), "Served.", holds_conversations=False))
    for path in ("/", "/docs"):
        page = client.get(path)
        found = Elements()
        found.feed(page.text)
        assert found.tags.count("script") == 1 and ("script", [("src", "page.js")]) in found.elements
        assert "img" not in found.tags and not any(
            name.startswith("on") for _, given in found.elements for name, _ in given
        )
        policy = page.headers["content-security-policy"]
        assert (
            policy.startswith("default-src 'none'; script-src 'self'; connect-src 'self';") and "unsafe" not in policy
        )
        style = page.text.partition("<style>")[2].partition("</style>")[0]
        assert f"'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'" in policy
    script = client.get("/page.js")
    assert script.headers["content-type"].startswith("text/javascript") and "innerHTML" not in script.text


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = list[tuple[str, Any]]()

    @property
    def tags(self) -> list[str]:
        """Their names."""
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, attributes))
