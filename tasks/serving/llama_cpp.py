"""A version of a language model that llama.cpp serves, from a GGUF file that was released with it.

Source: https://llama-cpp-python.readthedocs.io/en/latest/server/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tasks.registry.model_spec import ModelSpec
from tasks.registry.version_exports import export_version, find_released
from tasks.serving.openai_server import OpenaiServer
from training.models.repository_files import read_json
from training.problems import UserError
from training.recipe.tables.exports import EXPORTS

ANY = "gguf"
SERVED_FORMATS = (ANY, *(name for name, form in EXPORTS.items() if form.tag == ANY))
"""Formats of `finetune serve`: any of GGUF, or one of them."""
MODULES = ("llama_cpp", "sse_starlette", "starlette_context")
ANSWER_TOKENS = 1024
"""Tokens of the context after a prompt of tokens.max_length, if the model has positions for them."""


class LlamaCppProcess(OpenaiServer):
    """A version that llama.cpp serves on the CPU. `wanted` is one of SERVED_FORMATS; of several, the smallest released
    one is served."""

    title, prefix, option, health_path = "llama.cpp", "llama-cpp-", "--format", "/v1/models"
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/models")

    def __init__(self, model: ModelSpec, wanted: str, on_end: Callable[[LlamaCppProcess], None]) -> None:
        super().__init__(model, on_end)
        self._wanted, self._format = wanted, ""

    def require_installed(self) -> None:
        if any(find_spec(module) is None for module in MODULES):
            message = f"{self._wanted!r} needs llama-cpp-python, not installed here: install the extra, "
            message += "`pip install 'finetune-flows[llama-cpp]'`, which compiles it in some minutes."
            raise UserError.of("option", self.option, message)

    def export(self, folder: Path) -> None:
        released = find_released(self.model)
        fitting = [name for name in SERVED_FORMATS if name in released and self._wanted in (name, ANY)]
        if not fitting:
            wanted = "GGUF file" if self._wanted == ANY else f"{self._wanted} file"
            others = [name for name in SERVED_FORMATS if name in released]
            advice = f"choose from {', '.join(others)}" if others else "name one in release.exports of its recipe"
            message = f"{self.model.name} version {self.model.version} was released without a {wanted}: {advice}."
            raise UserError.of("option", self.option, message)
        self._format = min(fitting, key=lambda name: released[name].bytes)
        export_version(self.model, self._format, folder)

    def command(self, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        positions = read_json(folder / "config.json").get("max_position_embeddings")
        context = self.model.max_length + ANSWER_TOKENS
        served = {
            "model": str(folder / EXPORTS[self._format].file),
            "model_alias": f"{self.model.name}/{self.model.version}",
            "n_ctx": min(context, positions or context),
            "n_gpu_layers": 0,
            "verbose": False,
        }
        options = {"host": "127.0.0.1", "port": port, "api_key": self.key, "interrupt_requests": False}
        file = folder.parent / "llama_cpp.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps({**options, "models": [served]}))
        return [sys.executable, "-m", "llama_cpp.server", "--config_file", str(file)], {}
