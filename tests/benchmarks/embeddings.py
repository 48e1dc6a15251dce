"""Embeddings of many documents by `finetune predict`, against the raw forward pass on the same batches.

The rate is that of the further documents: a command with a tenth of them runs first, and its time is subtracted from
that with all, so that starts and imports do not count. Commands and forward pass take turns, because the speed of a
machine changes. Run as a program it is one process: `... register MODEL` registers the model in the home, and
`... raw MODEL FILE FIRST` prints the seconds, and those of processor time, of the forward pass alone on the file's
documents from FIRST on.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import mixed_precision
from tests.benchmarks.cold import read_pss_kb
from tests.benchmarks.subject import Subject, run, write_job
from tests.benchmarks.table import Row
from tests.flows.small import command, environment
from training.jobs.processes import descendants
from training.jobs.protocol import OUTPUT
from training.recipe.batch_prediction import SHARD_ROWS

TURNS = 3
WORDS, SHORT_WORDS = 40, 10
"""Of a document, such as a paragraph, and of a short one, such as a question. What a row costs beside the forward pass
is the same for both, and so a larger share of a short one."""
BATCH_ROWS = 64
MAX_TOKENS = 64
LOOK_EVERY_S = 2.0
"""Seconds from one look at the memory to the next: it takes 12 ms of a core for a process of 1.2 GB."""
SMALL = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "vocab_size": 8000,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Ran:
    """One command, or the forward pass."""

    wall_s: float
    processor_s: float
    peak_mib: float = 0.0
    result: Any = None


@dataclass(frozen=True)
class Turn:
    """The command for a tenth of the documents, for all, and the forward pass for the others."""

    few: Ran
    many: Ran
    raw: Ran

    @property
    def seconds(self) -> float:
        """Wall time of the command for the further documents."""
        return self.many.wall_s - self.few.wall_s

    @property
    def processor_s(self) -> float:
        """Processor time of the command for the further documents."""
        return self.many.processor_s - self.few.processor_s


def measure(subject: Subject) -> list[Row]:
    """The ratio of the rates for documents and for short ones, the memory for ten times the documents, and what one
    appended document costs."""
    many, folder = subject.documents, subject.folder / "embeddings"
    few = many // 10
    folder.mkdir()
    model = _make_model(subject, folder)
    compared = {words: _take_turns(subject, model, folder / f"{words}-words", words) for words in (WORDS, SHORT_WORDS)}
    home, turns = folder / f"{WORDS}-words" / "home-0", compared[WORDS]
    longer = _write(folder / f"{WORDS}-words" / "many.parquet", _make_documents(subject, many + 1, WORDS))
    again = _predict(home, longer, home / "many")
    small, large = max(turn.few.peak_mib for turn in turns), max(turn.many.peak_mib for turn in turns)
    memory = f"highest peak of all processes: {small:.0f} MiB for {few:,} documents, {large:.0f} MiB for {many:,}"
    return [
        *_compare_rates("embeddings of documents", many - few, WORDS, turns),
        *_compare_rates("embeddings of short documents", many - few, SHORT_WORDS, compared[SHORT_WORDS]),
        Row("embeddings: memory for 10 times the documents", large / small, memory, most=1.10),
        Row(
            "embeddings: documents that one appended document embeds",
            again.result["counts"]["new"],
            f"{many:,} before, in blocks of {SHARD_ROWS:,}; {again.wall_s:.1f} s from the command's start to its end",
            most=SHARD_ROWS,
        ),
    ]


def _take_turns(subject: Subject, model: Path, folder: Path, words: int) -> list[Turn]:
    """Commands and forward passes for documents of so many words, in homes in the folder."""
    many, homes = subject.documents, [folder / f"home-{number}" for number in range(TURNS)]
    few = many // 10
    for home in homes:  # one for each turn: a home embeds no document twice
        home.mkdir(mode=0o700, parents=True)
        _child(home, "register", str(model))
    texts = _make_documents(subject, many + 1 + few, words)
    beginning, file = _write(folder / "few.parquet", texts[many + 1 :]), _write(folder / "many.parquet", texts[:many])
    return [
        Turn(
            _predict(home, beginning, home / "few"),
            _predict(home, file, home / "many"),
            Ran(*json.loads(_child(home, "raw", str(model), str(file), str(few)))),
        )
        for home in homes
    ]


def _compare_rates(what: str, rows: int, words: int, turns: Sequence[Turn]) -> list[Row]:
    ratios = [turn.raw.wall_s / turn.seconds for turn in turns]
    rate, raw = rows / median(turn.seconds for turn in turns), rows / median(turn.raw.wall_s for turn in turns)
    how = f"{rows:,} documents of {words} words, {SMALL['hidden_size']} dimensions, {TURNS} times in turn; medians; "
    how += f"{rate:,.0f} documents/s, and {raw:,.0f} by the forward pass in the same batches of {BATCH_ROWS}; "
    how += f"{min(ratios):.2f} to {max(ratios):.2f}"
    processor = median(turn.raw.processor_s / turn.processor_s for turn in turns)
    return [
        Row(f"{what} / raw forward pass", median(ratios), how, least=0.9),
        Row(f"{what} / raw, in processor time", processor, "the command's other work counts against it"),
    ]


def _make_model(subject: Subject, folder: Path) -> Path:
    """A small encoder that nobody has trained, as training exports it."""
    from training import task_types
    from training.models import loading

    job = folder / "jobs/model"
    settings = {"config": SMALL, "seed": 0, "texts": ["text"], "writes": False}
    write_job(job, "training.programs.create_model", settings, {"data": subject.loaded})
    run(job, python_argv("training.programs.create_model"))
    base, task_type = job / OUTPUT, task_types.load("embedding")
    network = loading.load_base(task_type, base / "model", seed=0)
    task_type.prepare(network, loading.load_tokenizer(base / "tokenizer"))
    loading.export(network, base / "tokenizer", folder / "model")
    return folder / "model"


def _make_documents(subject: Subject, count: int, length: int) -> list[str]:
    """Distinct documents of so many of the subject's words."""
    rows = pq.read_table(subject.data / "train.parquet", columns=["text"])["text"].to_pylist()
    words = [word for text in rows for word in text.split()]
    starts = (place * (length - 1) % (len(words) - length) for place in range(count))
    return [" ".join([*words[start : start + length - 1], str(number)]) for number, start in enumerate(starts)]


def _write(file: Path, texts: Sequence[str]) -> Path:
    pq.write_table(pa.table({"talk": texts}), file)
    return file


def _predict(home: Path, file: Path, out: Path) -> Ran:
    """`finetune predict` of the file's documents."""
    result, peak_kb, before = out.with_suffix(".json"), 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ["--output", str(out), "--batch-size", str(BATCH_ROWS), "--no-drift", "--json", str(result)]
    argv, began = command("predict", "counter", "--input", str(file), *options), time.perf_counter()
    with subprocess.Popen(argv, env=environment(home), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak_kb = max(peak_kb, sum(map(read_pss_kb, [process.pid, *descendants(process.pid)])))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY_S)
    if process.returncode:
        raise RuntimeError(f"finetune predict ended with exit code {process.returncode}")
    used, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    processor_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return Ran(wall_s, processor_s, peak_kb / 1024, json.loads(result.read_text()))


def _child(home: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "tests.benchmarks.embeddings", *words]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=environment(home)).stdout


def _register(model: Path) -> None:
    from tasks.registry.versions import PRECISION_TAG
    from tasks.tracking.connection import connect
    from tests.flows.served import register

    register(model, "embedding")
    connect().set_model_version_tag("counter", "1", PRECISION_TAG, mixed_precision())


def _pass(model: Path, file: Path, first: int) -> tuple[float, float]:
    """The seconds of wall time and of processor time of the forward pass."""
    import torch

    from training import task_types
    from training.batching.batches import EvaluationBatches, TokenRows
    from training.models import loading
    from training.tokenization.transformers_encoder import load_encoder

    loading.make_deterministic()
    task_type, batches = task_types.load("embedding"), list[Any]()
    network, precision = loading.load_trained(task_type, model), mixed_precision()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    collate = task_type.collator(loading.load_tokenizer(model), loading.padding_multiple())
    encoder, texts = load_encoder(model, model, MAX_TOKENS), pq.read_table(file)["talk"][first:]
    for start in range(0, len(texts), SHARD_ROWS):
        part = pa.record_batch({"anchor": texts.slice(start, SHARD_ROWS).combine_chunks()})
        rows = TokenRows(pa.Table.from_batches([task_type.features(encoder, part).rows]))
        plan = EvaluationBatches(rows.lengths, BATCH_ROWS)
        batches += [collate([rows[number] for number in numbers]) for numbers in plan]
    began, used = time.perf_counter(), time.process_time()
    with torch.inference_mode(), torch.autocast(device.type, loading.DTYPES[precision], enabled=precision != "no"):
        for batch in batches:
            task_type.forward(network, {name: tensor.to(device) for name, tensor in batch.items()})["logits"].cpu()
    return time.perf_counter() - began, time.process_time() - used


if __name__ == "__main__":
    what, folder, *more = sys.argv[1:]
    if what == "register":
        _register(Path(folder))
    else:
        print(json.dumps(_pass(Path(folder), Path(more[0]), int(more[1]))))
