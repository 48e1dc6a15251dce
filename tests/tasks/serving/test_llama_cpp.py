"""A released GGUF file that llama.cpp serves."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from tasks.serving import llama_cpp
from tests.processes import argv
from tests.raised import raised_problems
from tests.training.language_models import make_model
from training.jobs.processes import descendants
from training.problems import UserError

MODEL: Any = SimpleNamespace(name="helper", version="3", max_length=64)
HAS_SERVER = all(importlib.util.find_spec(module) for module in llama_cpp.MODULES)
needs_server = pytest.mark.skipif(not HAS_SERVER, reason="llama-cpp-python[server] is not installed")


def process(monkeypatch: pytest.MonkeyPatch, wanted: str, **released: int) -> llama_cpp.LlamaCppProcess:
    """The process of a version with released exports, by their sizes."""
    found = {name.replace("_", "-", 1): SimpleNamespace(bytes=size) for name, size in released.items()}
    monkeypatch.setattr(llama_cpp, "find_released", lambda model: found)
    return llama_cpp.LlamaCppProcess(MODEL, wanted, lambda ended: None)


def test_the_smallest_released_file_is_served_and_none_that_was_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(llama_cpp, "export_version", lambda model, name, folder: written.append(name))
    sizes = {"gguf_f16": 400, "gguf_q8_0": 200, "onnx": 1, "int8": 2}
    process(monkeypatch, "gguf", **sizes).export(tmp_path)
    process(monkeypatch, "gguf-f16", **sizes).export(tmp_path)
    assert written == ["gguf-q8_0", "gguf-f16"]
    (problem,) = raised_problems(process(monkeypatch, "gguf-q4_0", **sizes).export, tmp_path)
    assert problem.message == (
        "helper version 3 was released without a gguf-q4_0 file: choose from gguf-f16, gguf-q8_0."
    )
    (problem,) = raised_problems(process(monkeypatch, "gguf", onnx=1).export, tmp_path)
    assert problem.message == (
        "helper version 3 was released without a GGUF file: name one in release.exports of its recipe."
    )


def test_without_llama_cpp_the_message_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "MODULES", ("absent_runtime",))
    with pytest.raises(
        UserError, match=r"--format: 'gguf' needs llama-cpp-python, not installed here: .*\[llama-cpp\]"
    ):
        process(monkeypatch, "gguf").require_installed()


@needs_server
def test_llama_cpp_answers_in_openais_form_with_a_key_that_its_command_does_not_show(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.models import gguf_files

    make_model(tmp_path / "model", "llama", steps=20)

    def export_version(model: Any, name: str, folder: Path) -> None:
        gguf_files.export("AutoModelForCausalLM", tmp_path / "model", [name], folder)
        (folder / "config.json").write_bytes((tmp_path / "model/config.json").read_bytes())

    monkeypatch.setattr(llama_cpp, "export_version", export_version)
    body = b'{"messages": [{"role": "user", "content": "Anna"}], "max_tokens": 5, "temperature": 0}'
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}

    async def ask() -> tuple[int, bytes]:
        served = process(monkeypatch, "gguf", gguf_f16=1)
        await served.start()
        try:
            for pid in descendants(served._supervisor.pid):
                assert not any(served.key in word for word in argv(pid))
            (settings,) = served._folder.glob("*.json")
            assert served.key in settings.read_text() and settings.stat().st_mode & 0o077 == 0
            async with served.send(Request(scope), body) as response:
                return response.status_code, await response.aread()
        finally:
            await served.stop()

    status, answer = asyncio.run(ask())
    assert status == 200 and b'"completion_tokens":5' in answer
    assert [*(home / "jobs").iterdir()] == []
