"""Batch prediction against the raw forward pass on the same rows, and its memory as the rows grow.

Run as a program it is one process that predicts: `... rate MODEL TOKENIZER FILE` prints rows a second by the program of
batch predictions and by the forward pass alone, in turn; `... program MODEL TOKENIZER FILE` predicts all rows, and
`... run MODEL TOKENIZER FILE` lists them and writes predictions of them as a run does: both print the MiB that they
held at most.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.environment_variables import environment
from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import mixed_precision
from tests.benchmarks.subject import KIND, MAX_TOKENS, Subject, peak_mib, run, write_job
from tests.benchmarks.table import Row
from training.data.prediction_rows import WantedShard
from training.jobs.protocol import OUTPUT, Events, Job
from training.programs.predict_shards import PredictShardsSettings
from training.recipe.batch_prediction import SHARD_ROWS
from training.recipe.reading_rules import ReadingRules

FEW = 100_000
RATED_ROWS = SHARD_ROWS // 2
BATCH_ROWS = 64
ROUNDS = 3
# So small that ten times the rows take minutes: memory does not depend on the model.
TINY = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 2000,
    "max_position_embeddings": 512,
}


def measure(subject: Subject) -> list[Row]:
    """The ratio of the rates, and of memory for ten times the rows."""
    rounds = _child("rate", subject.base, _repeated(subject, RATED_ROWS))
    ours, raw = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    few, many = (_repeated(subject, count) for count in (FEW, 10 * FEW))
    tiny, rows = _tiny_model(subject), []
    for part, subject_of in (("program", "predicts"), ("run", "lists and writes")):
        small, large = (_child(part, tiny, file) for file in (few, many))
        how = f"peak of a process that {subject_of} {FEW:,} rows: {small:.0f} MiB; {10 * FEW:,} rows: {large:.0f} MiB"
        rows.append(Row(f"batch prediction, {part}: memory for 10 times the rows", large / small, how, most=1.10))
    how = f"{RATED_ROWS:,} rows from Parquet to Parquet, {ROUNDS} times in turn; median; {ours:,.0f} rows/s, and "
    how += f"{raw:,.0f} by the forward pass in the same batches of {BATCH_ROWS}"
    ratio = statistics.median(ours / raw for ours, raw in rounds)
    return [Row("batch prediction / raw forward pass", ratio, how, least=0.9), *rows]


def _repeated(subject: Subject, count: int) -> Path:
    """The training rows again and again, `count` in all, each with a number."""
    file = subject.folder / f"batch-{count}.parquet"
    if not file.exists():
        texts = pq.read_table(subject.data / "train.parquet")["text"].to_pylist()
        with pq.ParquetWriter(file, pa.schema({"id": pa.int64(), "text": pa.string()})) as writer:
            for start in range(0, count, SHARD_ROWS):
                numbers = range(start, min(count, start + SHARD_ROWS))
                part = {"id": [*numbers], "text": [f"{texts[number % len(texts)]} {number}" for number in numbers]}
                writer.write_table(pa.table(part))
    return file


def _tiny_model(subject: Subject) -> dict[str, Path]:
    job = subject.folder / "jobs" / "tiny"
    settings = {"config": TINY, "seed": 0, "texts": ["text"], "writes": False}
    write_job(job, "training.programs.create_model", settings, {"data": subject.loaded})
    run(job, python_argv("training.programs.create_model"))
    return {name: job / OUTPUT / name for name in ("model", "tokenizer")}


def _child(part: str, model: dict[str, Path], file: Path) -> Any:
    argv = [sys.executable, "-m", "tests.benchmarks.batches", part, str(model["model"]), str(model["tokenizer"])]
    env = environment({})  # as a job's program has it
    ended = subprocess.run([*argv, str(file)], check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(ended.stdout)


def _job(model: Path, tokenizer: Path, file: Path) -> Job:
    from training.data.prediction_rows import digest_inputs

    listed = (
        WantedShard(file=str(file), number=number, digest=digest_inputs(rows))
        for number, rows in enumerate(_shards(file))
    )
    settings = PredictShardsSettings(
        task=KIND,
        columns={"text": "text"},
        shards=[*listed],
        shard_rows=SHARD_ROWS,
        max_length=MAX_TOKENS,
        batch_size=BATCH_ROWS,
        mixed_precision=mixed_precision(),
    )
    inputs = {"model": str(model), "tokenizer": str(tokenizer)}
    return Job(program="p", key="k", settings=settings.model_dump(mode="json"), inputs=inputs)


def _shards(file: Path) -> Iterator[Any]:
    from training import task_types
    from training.data.prediction_rows import RowReader

    return RowReader(task_types.load(KIND), {"text": "text"}, ["id"]).shards(str(file), SHARD_ROWS)


def _rates(model: Path, tokenizer: Path, file: Path) -> list[list[float]]:
    import torch

    from training import task_types
    from training.batching.batches import EvaluationBatches, TokenRows
    from training.data.casting import to_batch
    from training.models import loading
    from training.programs import predict_shards
    from training.tokenization.transformers_encoder import load_encoder

    task_type, job = task_types.load(KIND), _job(model, tokenizer, file)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, precision = loading.load_trained(task_type, model).to(device), mixed_precision()
    collate = task_type.collator(loading.load_tokenizer(tokenizer, model), loading.padding_multiple())
    encoder, batches = load_encoder(tokenizer, model, MAX_TOKENS), []
    for shard in _shards(file):
        features = task_type.features(encoder, to_batch(task_type, ["text"], shard.usable())).rows
        rows = TokenRows(pa.Table.from_batches([features]))
        batches += [collate([rows[number] for number in numbers]) for numbers in EvaluationBatches(rows.lengths, 64)]
    count = sum(len(batch["input_ids"]) for batch in batches)

    def raw() -> float:
        began = time.perf_counter()
        with torch.inference_mode(), torch.autocast(device.type, loading.DTYPES[precision], enabled=precision != "no"):
            for batch in batches:
                inputs = {name: tensor.to(device) for name, tensor in batch.items()}
                task_type.forward(network, inputs)["logits"].float().cpu()
        return count / (time.perf_counter() - began)

    def ours() -> float:
        with TemporaryDirectory() as folder:
            found = predict_shards.main(Path(folder), job, Events(Path(folder) / "events.jsonl"))
        return float(found["rows_per_second"])

    return [[ours(), raw()] for _ in range(ROUNDS)]


def _program_mib(model: Path, tokenizer: Path, file: Path) -> float:
    from training.programs import predict_shards

    with TemporaryDirectory() as folder:
        predict_shards.main(Path(folder), _job(model, tokenizer, file), Events(Path(folder) / "events.jsonl"))
    return peak_mib()


def _run_mib(model: Path, tokenizer: Path, file: Path) -> float:
    """The part of a run's own process: rows are listed with their ids, read again, and written with predictions."""
    from tasks.prediction.input_rows import RowFiles, list_files, scan_rows
    from tasks.prediction.output import open_output
    from tasks.registry.model_spec import ModelSpec
    from training.recipe import parse_batch_prediction

    spec = ModelSpec("", MAX_TOKENS, {"task": KIND, "options": {}}, {"text": "text"}, "m", "1", "d")
    with TemporaryDirectory() as folder:
        values = {"model": "m", "input": [str(file)], "output": f"{folder}/out", "id": "id"}
        prediction = parse_batch_prediction(values)
        files = RowFiles(prediction, spec)
        listed = list_files(prediction.input, prediction.output, rules=ReadingRules())
        scan = scan_rows(listed, files.reader, files.shard_rows, "id", lambda done, total: None)
        keys = {shard.digest: shard.digest for shard in scan.shards}
        with open_output(prediction, spec, scan, keys) as output:
            for shard, rows in files.read(scan.shards, output.lacks):
                output.write(shard, rows(), pa.table({"label": ["x"] * shard.usable}), 0)
            output.finish({"rows": scan.rows})
    return peak_mib()


if __name__ == "__main__":
    part, *places = sys.argv[1:]
    print(json.dumps({"rate": _rates, "program": _program_mib, "run": _run_mib}[part](*map(Path, places))))
