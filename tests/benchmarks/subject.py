"""The subject of a benchmark: rows, their tokens, a base model; the user's own, or generated."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.jobs.commands import accelerate_argv, accelerate_environment, python_argv
from tasks.jobs.hardware import mixed_precision, visible_gpus
from tasks.jobs.launch import require_finished, run_job
from training.data.load_rows import load
from training.jobs.protocol import OUTPUT, Job
from training.recipe import Compute, Data, Training
from training.task_types.sequence_classification import SequenceClassification
from training.tokenization.token_files import tokenize

KIND = "sequence-classification"
ROWS = {"train": 6_920, "validation": 872}  # as many as a small real data set has
WORDS = 30_000
BATCH_ROWS = 32
MAX_TOKENS = 128
# The size of a small encoder that people do fine-tune.
CONFIG = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30_522,
    "max_position_embeddings": 512,
}


@dataclass
class Subject:
    """Rows and a model, made at their first use.

    `folder` is for everything that is written. `own_model` (a model folder), `own_data` (a folder of
    SPLIT.parquet with columns text and label), `peer` (a script to compare with), `sets` (folders of rows that recipes
    name), `documents`, `images` and `nights` (how many are embedded, processed and played) and `minutes` (of a training
    that is killed) are the user's.
    """

    folder: Path
    own_model: Path | None = None
    own_data: Path | None = None
    peer: Path | None = None
    sets: Path | None = None
    documents: int = 100_000
    images: int = 2_000
    nights: int = 20
    minutes: float = 3.0

    @cached_property
    def data(self) -> Path:
        """train.parquet and validation.parquet, with columns text and label."""
        return self.own_data or _write_rows(self.folder / "rows")

    @cached_property
    def loaded(self) -> Path:
        """The rows as the stage load_data leaves them."""
        columns = Data(source="parquet", path=str(self.data), text=["text"], label="label")
        load(
            columns,
            SequenceClassification(),
            {split: [str(self.data / f"{split}.parquet")] for split in ROWS},
            self.folder / "data",
        )
        return self.folder / "data"

    @cached_property
    def base(self) -> dict[str, Path]:
        """The folders of the model and its tokenizer."""
        if self.own_model:
            return {"model": self.own_model, "tokenizer": self.own_model}
        job = self.folder / "jobs" / "scratch"
        settings = {"config": CONFIG, "seed": 0, "texts": ["text"], "writes": False}
        write_job(job, "training.programs.create_model", settings, {"data": self.loaded})
        run(job, python_argv("training.programs.create_model"))
        return {name: job / OUTPUT / name for name in ("model", "tokenizer")}

    @cached_property
    def tokens(self) -> Path:
        """The token rows as the stage tokenize leaves them."""
        tokenize(SequenceClassification(), self.loaded, self.base["tokenizer"], self.folder / "tokens", MAX_TOKENS)
        return self.folder / "tokens"

    @cached_property
    def rows(self) -> int:
        """Of the training split."""
        return int(json.loads((self.tokens / "log" / "report.json").read_text())["rows"]["train"])

    def training_job(
        self, name: str, program: str = "training.programs.fit", num_processes: int = 1, **training: Any
    ) -> Path:
        """A job as the stage fit writes it; `training` changes the recipe's training section."""
        chosen = {"per_device_train_batch_size": BATCH_ROWS // num_processes, **training}
        settings = {
            "task": KIND,
            "labels": json.loads((self.loaded / "labels.json").read_text()),
            "max_length": MAX_TOKENS,
            "training": Training(**chosen).model_dump(mode="json"),
            "compute": {
                **Compute().weight_settings(),
                "num_processes": num_processes,
                "mixed_precision": mixed_precision(),
            },
            "metrics": ["accuracy"],
            "micro_batch_divisor": 1,
        }
        job = self.folder / "jobs" / name
        write_job(job, program, settings, {**self.base, "tokens": self.tokens})
        return job


def write_job(job: Path, program: str, settings: dict[str, Any], inputs: dict[str, Path]) -> None:
    """Writes job.json."""
    paths = {name: str(path.resolve()) for name, path in inputs.items()}
    Job(program=program, key=job.name, settings=settings, inputs=paths).write(job)


def training_argv(program: str = "training.programs.fit", num_processes: int = 1) -> list[str]:
    """The command by which the stage fit launches its program."""
    return accelerate_argv(
        program,
        num_processes=num_processes,
        mixed_precision=mixed_precision(),
        use_cpu=not visible_gpus(),
    )


def training_environment(num_processes: int) -> dict[str, str]:
    """The environment variables that the stage fit adds for that command."""
    return accelerate_environment(num_processes=num_processes, use_cpu=not visible_gpus())


def run(job: Path, argv: list[str]) -> dict[str, Any]:
    """The figures of a job of one process, run to its end in the environment of a real one.

    Raises JobFailed, UserError.
    """
    launched = "training.programs.accelerate_launch" in argv
    env = training_environment(1) if launched else None
    outcome = run_job(job, argv, env=env, on_events=lambda _: None, stall_timeout_s=600.0)
    return dict(require_finished(outcome).result)


def _write_rows(out: Path) -> Path:
    """Made-up sentences: frequent and rare words as in a language, lengths as in film reviews."""
    out.mkdir(parents=True)
    draw = random.Random(11)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    words = sorted({"".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3, 3, 4)))) for _ in range(WORDS)})
    draw.shuffle(words)
    frequencies = [1 / (place + 3) for place in range(len(words))]
    for split, count in ROWS.items():
        lengths = [max(2, min(60, round(draw.gammavariate(4.0, 4.6)))) for _ in range(count)]
        texts = [" ".join(draw.choices(words, frequencies, k=length)) for length in lengths]
        labels = [draw.randrange(2) for _ in texts]
        pq.write_table(pa.table({"text": texts, "label": labels}), out / f"{split}.parquet")
    return out


def peak_mib() -> float:
    """The most memory that this process has held, in MiB."""
    # Not ru_maxrss: a child begins with its parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024
