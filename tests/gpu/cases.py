"""The cases of `make gpu`: one table. It needs the standard library alone, so that the cases can be listed anywhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
BASE = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "datasets": "datasets",
    "evaluate": "evaluate",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "pynvml": "nvidia-ml-py",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "tokenizers": "tokenizers",
    "yaml": "pyyaml",
}
"""The packages to install, by module, that every case needs."""


@dataclass(frozen=True)
class Case:
    """One thing to try on a GPU."""

    name: str
    function: str
    """`module:function` in tests.gpu, called with a Ground and the settings. It returns a Result."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    """The packages to install, by module, that it needs besides BASE."""
    gpus: int = 1
    capability: tuple[int, int] = (0, 0)
    """The lowest compute capability of the GPU."""
    alone: bool = True
    """Whether nothing else may run at the same time, because it measures."""
    on_cpu: bool = False
    """Whether a CPU can run it too, which checks this tool."""


@dataclass(frozen=True)
class Result:
    """The outcome of a case that was tried."""

    checks: dict[str, str]
    """By promise `yes`, perhaps with details, or `no: …`."""
    figures: dict[str, float | int | str] = field(default_factory=dict)
    refused: str = ""
    """The reason why the project refuses it; then there are no checks."""

    @property
    def holds(self) -> bool:
        return bool(self.refused) or all(found.startswith("yes") for found in self.checks.values())


def table(name: str) -> ModuleType:
    """A table of training.recipe.tables, loaded by its file: importing the package needs pydantic."""
    file = ROOT / "training" / "recipe" / "tables" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_table_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


STRATEGIES = table("strategies").STRATEGIES
TASK_TYPES = table("task_types").TASK_TYPES
ENGINES = table("engines").ENGINES
BF16 = (8, 0)
CAPABILITY = {"bf16": BF16, "fp16": (7, 0)}
"""The lowest compute capability that computes in a number format."""
FLASH_ATTENTION = table("kernels").ATTENTION
LIGER = table("kernels").LIGER
TINY_LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 120, "max_position_embeddings": 64},
}
"""A model that Liger has kernels for."""
QLORA = {"peft": "peft", "bitsandbytes": "bitsandbytes"}


def _packages(strategy: str) -> dict[str, str]:
    package = STRATEGIES[strategy].package
    return {package: package} if package else {}


def _kernels() -> Iterator[Case]:
    """The options that are for GPUs alone: the same loss as without them, the gain, and resume to the byte."""
    options = {
        "liger": (LIGER, {"use_liger_kernel": True}, ("causal-lm",)),
        **{
            name.replace("_", "-"): (
                kernels,
                {"attn_implementation": name},
                # BERT has dropout in its attention.
                ("causal-lm", "sequence-classification") if kernels.drops else ("causal-lm",),
            )
            for name, kernels in FLASH_ATTENTION.items()
        },
    }
    for name, (kernels, option, tasks) in options.items():
        needs: dict[str, Any] = {"packages": {kernels.module: kernels.package}}
        needs["capability"] = max(kernels.capability, BF16)
        for task in tasks:
            yield Case(f"option-{name}-{task}", "options:compare", {"task": task, "option": option}, **needs)
        settings = {"task": "causal-lm", "strategy": "ddp", "precision": "bf16", "processes": 1, "config": TINY_LLAMA}
        resumes = f"option-{name}-resumes"
        yield Case(resumes, "trainings:train_and_resume", {**settings, **option}, **needs, alone=False)


def _trainings() -> Iterator[Case]:
    """Every task type with every strategy; bf16 and fp16 with one process, bf16 with two."""
    for processes, precisions in ((1, ("bf16", "fp16")), (2, ("bf16",))):
        for task in TASK_TYPES:
            for strategy in STRATEGIES:
                for precision in precisions:
                    yield _training(task, strategy, precision, processes)
    for strategy, facts in STRATEGIES.items():
        for offload in facts.offloads:
            yield _training("sequence-classification", strategy, "bf16", 1, offload=offload)
    for engine in ENGINES:
        if engine != "trainer":
            for precision in ("bf16", "fp16"):
                yield _training("sequence-classification", "ddp", precision, 1, engine=engine)


def _training(task: str, strategy: str, precision: str, processes: int, **more: Any) -> Case:
    parts = [more.get("engine", task), strategy, precision, *(["2-gpus"] if processes > 1 else [])]
    parts += ["offload", more["offload"]] if "offload" in more else []
    return Case(
        "-".join(parts),
        "trainings:train_and_resume",
        {"task": task, "strategy": strategy, "precision": precision, "processes": processes, **more},
        _packages(strategy),
        gpus=processes,
        capability=CAPABILITY[precision],
        alone=False,
        on_cpu=precision == "bf16" and "offload" not in more,
    )


CASES: tuple[Case, ...] = (
    Case("memory-message", "memory:cuda_message"),
    Case("memory-halves", "memory:halves_micro_batch", capability=BF16),
    *(
        Case(
            f"memory-estimate-{strategy}",
            "memory:estimate_and_peak",
            {"strategy": strategy},
            _packages(strategy),
            capability=BF16,
            on_cpu=strategy == "ddp",
        )
        for strategy in STRATEGIES
    ),
    *(
        Case(f"speed-training-{task}", "speed:training", {"task": task}, capability=BF16, on_cpu=True)
        for task in ("sequence-classification", "causal-lm")
    ),
    *_kernels(),
    Case("speed-prediction", "speed:prediction", capability=BF16, on_cpu=True),
    *(
        Case(
            f"qlora-{precision}",
            "trainings:train_and_resume",
            {
                "task": "sft",
                "strategy": "ddp",
                "precision": precision,
                "processes": 1,
                "config": TINY_LLAMA,
                "lora": {"r": 16, "lora_alpha": 32, "quantization": "nf4", "target_modules": "all-linear"},
            },
            QLORA,
            capability=CAPABILITY[precision],
            alone=False,
        )
        for precision in ("bf16", "fp16")
    ),
    *(
        Case(f"answers-{task}", "answers:same_on_both", {"task": task}, capability=BF16, alone=False, on_cpu=True)
        for task in ("sequence-classification", "sft")
    ),
    Case("fork", "trainings:train_as_fork", {"task": "sequence-classification"}, capability=BF16, on_cpu=True),
    *_trainings(),
)
"""Without --only, in the order in which they are tried: measurements first."""


def chosen(names: list[str]) -> list[Case]:
    """The cases whose names begin with one of these, in the order of the names; all without names."""
    found = {case.name: case for name in names for case in CASES if f"{case.name}-".startswith(f"{name}-")}
    return [*found.values()] if names else [*CASES]
