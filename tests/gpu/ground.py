"""The place in which the cases of `make gpu` run: a folder, the device, small and large sets of rows, and jobs."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.jobs.commands import accelerate_argv, accelerate_environment, python_argv
from tasks.jobs.launch import run_job
from tests import task_types as tiny
from tests.matrix.cells import Victim
from tests.task_types import build_world, write_fit_job
from training.engine.state_check import SWITCH
from training.jobs.protocol import Job, Outcome
from training.recipe import ResolvedCompute

STALL_TIMEOUT_S = 300.0
POLL_S = 0.02
# Models of the size that a single GPU trains quickly and that fill it: about 110 million weights.
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30_000,
    "max_position_embeddings": 512,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "vocab_size": 30_000,
    "max_position_embeddings": 1024,
}
LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "sequence-classification": (BERT, 128),
    "causal-lm": (LLAMA, 1024),
}
"""The model and the tokens of a row, for cases that measure."""
SMALLER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
"""The sizes with which a CPU tries this tool."""
ROWS = {"train": 8_000, "validation": 4_000}
WORDS_A_ROW = {"sequence-classification": 40, "causal-lm": 200}
"""The mean number of words of a large world's row."""


@dataclass
class Ground:
    """Where the cases run."""

    folder: Path
    on_cpu: bool = False
    loading: threading.Lock = field(default_factory=threading.Lock)
    """Held while a model is made or loaded in this process. Transformers changes its classes meanwhile: a model that
    another thread loads then would lack its tied weights."""
    _worlds: dict[str, Path] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def world(self, task: str, config: Mapping[str, Any] | None = None) -> Path:
        """A small world of the task type, created once; `config` is that of another model."""
        name = f"{task}-{config['model_type']}" if config else task
        with self.loading:
            if name not in self._worlds:
                home = self.folder / "worlds" / name
                recipe = tiny.recipe_of(task, tiny.write_rows(task, home / "rows"))
                model = {"model": {"source": "scratch", "config": dict(config)}} if config else {}
                self._worlds[name] = build_world({**recipe, **model}, home)
            return self._worlds[name]

    def large_world(self, task: str) -> Path:
        """The world of `large_recipe`, created once."""
        name = f"{task}-large"
        with self.loading:
            if name not in self._worlds:
                home = self.folder / "worlds" / name
                _write_texts(home / "rows", task, divisor=100 if self.on_cpu else 1)
                self._worlds[name] = build_world(self.large_recipe(task), home)
            return self._worlds[name]

    def large_recipe(self, task: str, compute: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
        """A recipe of a task type of LARGE; `training` are further settings of training."""
        config, max_length = LARGE[task]
        if self.on_cpu:
            config, max_length = config | SMALLER, 128
            config |= {"num_key_value_heads": 2} if "num_key_value_heads" in config else {}
        recipe = tiny.recipe_of(task, self.folder / "worlds" / f"{task}-large" / "rows")
        steps = {"eval_strategy": "no", "load_best_model_at_end": False, "checkpoint_interval_s": 1e9}
        return {
            **recipe,
            "model": {"source": "scratch", "config": config},
            "tokens": {"max_length": max_length},
            "training": {"learning_rate": 1e-4, "per_device_train_batch_size": 32, **steps, **training},
            "compute": {"num_processes": 1, "mixed_precision": "bf16", **(compute or {})},
        }

    def large_job(
        self,
        task: str,
        job: Path,
        compute: dict[str, Any] | None = None,
        attn_implementation: str | None = None,
        **training: Any,
    ) -> Path:
        """A job of training.programs.fit on the large world."""
        world = self.large_world(task)
        recipe = self.large_recipe(task, **training)
        return _write_job(recipe, world, job, {"mixed_precision": "bf16", **(compute or {})}, attn_implementation)

    def small_job(
        self,
        world: Path,
        task: str,
        job: Path,
        compute: dict[str, Any],
        attn_implementation: str | None = None,
        **training: Any,
    ) -> Path:
        """A job of training.programs.fit on a small world. `compute` has num_processes and mixed_precision."""
        return _write_job(tiny.recipe_of(task, world / "rows", **training), world, job, compute, attn_implementation)

    def run(
        self,
        job: Path,
        *,
        victim: Victim | None = None,
        on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None,
        program: str = "training.programs.fit",
        checks_state: bool = False,
        threads: int | None = 2,
    ) -> Outcome:
        """Runs a job by the command of the stage fit, to its end or until `victim` has killed one of its processes.
        With `checks_state`, which takes time, restored states are compared with saved ones. `threads` of each process;
        as many as in a run if it is None."""
        compute = Job.read(job).settings["compute"]
        processes, strategy = compute["num_processes"], compute["strategy"]
        argv = accelerate_argv(
            program, num_processes=processes, mixed_precision=compute["mixed_precision"], use_cpu=self.on_cpu
        )
        if self.on_cpu and processes == 1 and strategy != "ddp":
            argv = python_argv(program)  # with --cpu, the launcher excludes all strategies but ddp
        env = accelerate_environment(num_processes=processes, use_cpu=self.on_cpu, strategy=strategy)
        return run_job(
            job,
            argv,
            env={**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **env, SWITCH: str(int(checks_state))},
            on_events=victim or on_events,
            stall_timeout_s=STALL_TIMEOUT_S,
            poll_s=POLL_S,
        )


def _write_job(
    recipe: dict[str, Any], world: Path, job: Path, compute: dict[str, Any], attn_implementation: str | None
) -> Path:
    """Writes a job with this compute section, which the recipe's rules do not check: one process may share a model
    with itself here."""
    single = recipe | {"compute": {"num_processes": 1, "mixed_precision": "no"}}
    resolved = ResolvedCompute(**{"num_processes": 1, **compute})
    fields = {"num_processes": resolved.num_processes, "mixed_precision": resolved.mixed_precision}
    settings = {"attn_implementation": attn_implementation} if attn_implementation else {}
    return write_fit_job(single, world, job, compute={**resolved.weight_settings(), **fields}, **settings)


def _write_texts(folder: Path, task: str, divisor: int) -> None:
    """Texts of frequent and rare words, as in a language; one of the words determines the label."""
    folder.mkdir(parents=True)
    draw = random.Random(7)
    words = [f"{draw.choice('bdfgklmnprst')}{draw.choice('aeiou')}{number:x}" for number in range(20_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    mean = WORDS_A_ROW[task]
    for split, count in ROWS.items():
        lines = []
        for _ in range(count // divisor):
            label = draw.choice(tiny.LABELS)
            length = max(4, min(4 * mean, int(draw.expovariate(1 / mean))))
            text = " ".join([draw.choice(tiny.WORDS[label]), *draw.choices(words, weights, k=length)])
            lines.append(json.dumps({"text": text, "label": label}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
