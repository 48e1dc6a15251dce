"""A version of a generator that vLLM serves, from a folder as `finetune export NAME safetensors` writes it.

During a switch both versions are loaded, so each may take less than half of the GPU: `--vllm "--gpu-memory-utilization
0.45"`.

Source: https://docs.vllm.ai/en/latest/cli/serve.html.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.registry.model_spec import ModelSpec
from tasks.registry.version_exports import export_version
from tasks.serving.openai_server import OpenaiServer
from training.problems import UserError

PROGRAM = "vllm"


class VllmProcess(OpenaiServer):
    """A version that vLLM serves. `arguments` are further ones for `vllm serve`."""

    title, prefix, option, health_path = "vLLM", "vllm-", "--engine", "/health"
    # Other paths of vLLM load adapters or change its state.
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings", "/tokenize", "/detokenize")

    def __init__(self, model: ModelSpec, arguments: Sequence[str], on_end: Callable[[VllmProcess], None]) -> None:
        super().__init__(model, on_end)
        self._arguments = arguments

    def require_installed(self) -> None:
        if shutil.which(PROGRAM) is None:
            raise UserError.of("option", self.option, f"{PROGRAM} is not installed: pip install {PROGRAM}.")

    def export(self, folder: Path) -> None:
        export_version(self.model, "safetensors", folder)

    def command(self, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        names = [f"{self.model.name}/{self.model.version}", self.model.name]
        argv = [PROGRAM, "serve", str(folder), "--served-model-name", *names]
        argv += ["--host", "127.0.0.1", "--port", str(port), *self._arguments]
        return argv, {"VLLM_API_KEY": self.key, "VLLM_NO_USAGE_STATS": "1"}
