"""A served encoder: its rows a second beside batch prediction, the time of one request, and memory.

A process of its own predicts the same rows with the same predictor, in turn with the server. Run as a program it is
that process: `... MODEL ROWS` reads a line a measurement, and prints its seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks.environment_variables import environment
from tasks.jobs.hardware import mixed_precision
from tasks.registry.versions import PRECISION_TAG
from tasks.tracking.connection import connect
from tests.benchmarks.subject import KIND, Subject
from tests.benchmarks.table import Row
from tests.flows.served import Server, register
from tests.flows.small import command
from training.jobs.processes import descendants

ROWS, CLIENTS, ROUNDS = 640, 32, 7
BATCH_ROWS = 32
MAX_LENGTH = 64
ALONE = 100
"""Requests one at a time."""
MANY = 10_000
PART = 1_000
CLOSE = 0.02
"""Probabilities of bf16 depend on the rows of the batch so much."""


def measure(subject: Subject) -> list[Row]:
    """The ratios, and the memory after many requests."""
    folder, file = subject.folder / "served", subject.folder / "served-rows.json"
    _write_classifier(subject, folder)
    texts = pq.read_table(subject.data / "train.parquet", columns=["text"])["text"].to_pylist()[:ROWS]
    file.write_text(json.dumps(texts))
    home = Path(os.environ["FINETUNE_HOME"])
    home.mkdir(mode=0o700, exist_ok=True)
    register(folder, KIND)
    connect().set_model_version_tag("counter", "1", PRECISION_TAG, mixed_precision())
    argv = [sys.executable, "-m", "tests.benchmarks.serve", str(folder), str(file)]
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment({})) as child,
        Server(home, "counter", "--batch-size", str(BATCH_ROWS), command=command()) as server,
    ):
        beside = _Beside(child)
        rows = [*_rate(server, beside, texts), _alone(server, beside, texts), _memory(server, beside, texts)]
        assert child.stdin
        child.stdin.close()
    return rows


def _write_classifier(subject: Subject, folder: Path) -> None:
    """The subject's model with a head that nobody has trained."""
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(subject.base["tokenizer"], folder)
    AutoModelForSequenceClassification.from_pretrained(subject.base["model"]).save_pretrained(folder)


class _Beside:
    """The process that computes the same without a server."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.tokens, self.expected = self.ask("all")

    def ask(self, *words: Any) -> Any:
        assert self._child.stdin and self._child.stdout
        print(*words, file=self._child.stdin, flush=True)
        return json.loads(self._child.stdout.readline())


def _rate(server: Server, beside: _Beside, texts: Sequence[str]) -> list[Row]:
    rounds = []
    for number in range(1 + ROUNDS):
        began, used = time.perf_counter(), _processor_s(server)
        asyncio.run(_ask_all(server, texts, beside.expected))
        took, used = time.perf_counter() - began, _processor_s(server) - used
        alone, alone_used = beside.ask("batches")
        waiting, _ = beside.ask("waiting")
        if number:  # the first warms up
            rates = (len(texts) / seconds for seconds in (took, alone, waiting))
            rounds.append((alone / took, waiting / took, used / alone_used, *rates))
    ratio, of_waiting, processor, ours, batches, unsorted = (
        statistics.median(values) for values in zip(*rounds, strict=True)
    )
    how = (
        f"{CLIENTS} clients at once, a row a request; {len(texts)} rows of {beside.tokens:.0f} tokens, {ROUNDS} times "
    )
    how += f"in turn; medians; {ours:,.0f} rows/s, and {batches:,.0f} by the predictor in batches of {BATCH_ROWS}"
    least, most = min(r[0] for r in rounds), max(r[0] for r in rounds)
    return [
        Row("served rows / batch prediction", ratio, f"{how}; {least:.2f} to {most:.2f}; {_load()}", least=0.8),
        Row(
            "served rows / the same rows, 32 at a time",
            of_waiting,
            f"the same rounds; {unsorted:,.0f} rows/s by the predictor, which gets {CLIENTS} rows at a time in the "
            "order of the requests: as many as can wait",
        ),
        Row("served rows: processor time / batch prediction", processor, "server and program, the same rounds"),
    ]


def _alone(server: Server, beside: _Beside, texts: Sequence[str]) -> Row:
    async def ask() -> list[tuple[float, float]]:
        times, connection = [], await _Connection.open(server)
        for number in range(10 + ALONE):
            raw = beside.ask("one", number)
            began = time.perf_counter()
            await connection.predict(texts[number])
            times.append((time.perf_counter() - began, raw))
        connection.close()
        return times[10:]

    times = asyncio.run(ask())
    ratio = statistics.median(ours / raw for ours, raw in times)
    ours, raw = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
    how = (
        f"{ALONE} requests one after another, each in turn with the tokenizer and the model on the same row; medians; "
    )
    return Row("one request / its forward pass", ratio, f"{how}{ours:.1f} and {raw:.1f} ms; {_load()}", most=1.5)


def _memory(server: Server, beside: _Beside, texts: Sequence[str]) -> Row:
    levels: list[list[float]] = []
    for start in range(0, MANY, PART):
        found: list[float] = []
        for part in range(start, start + PART, PART // 10):
            places = [place % len(texts) for place in range(part, part + PART // 10)]
            some = [texts[place] for place in places]
            asyncio.run(_ask_all(server, some, [beside.expected[place] for place in places]))
            found.append(_resident_mib(server))
        levels.append(found)
    first, last = (statistics.mean(levels[place]) for place in (0, -1))
    how = f"resident, of server and program: mean over the first {PART:,} requests {first:.0f} MiB, over the last of "
    how += f"{MANY:,} {last:.0f} MiB; " + ", ".join(f"{statistics.mean(part):.0f}" for part in levels)
    return Row(f"memory of a server after {MANY:,} requests", last / first, how, most=1.05)


class _Connection:
    """A client that costs next to nothing."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"
        self._head += "Content-Type: application/json\r\nContent-Length: "

    @classmethod
    async def open(cls, server: Server) -> _Connection:
        return cls(server, *await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2])))

    def close(self) -> None:
        self._writer.close()

    async def predict(self, text: str) -> dict[str, Any]:
        """The prediction of a row."""
        body = json.dumps({"rows": [{"talk": text}]})
        self._writer.write(f"{self._head}{len(body)}\r\n\r\n{body}".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer = json.loads(await self._reader.readexactly(length))
        assert head.startswith(b"http/1.1 200"), answer
        return dict(answer["predictions"][0])


async def _ask_all(server: Server, texts: Sequence[str], expected: Sequence[dict[str, Any]]) -> None:
    waiting = iter(zip(texts, expected, strict=True))

    async def client() -> None:
        connection = await _Connection.open(server)
        for text, record in waiting:
            found = await connection.predict(text)
            assert abs(_first(found) - _first(record)) < CLOSE, (text, found, record)
        connection.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def _first(record: dict[str, Any]) -> float:
    """The probability of the first of two labels."""
    probability = float(record["probability"])
    return probability if record["label"].endswith("0") else 1 - probability


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


def _processes(server: Server) -> list[int]:
    return [server.process.pid, *descendants(server.process.pid)]


def _processor_s(server: Server) -> float:
    ticks = 0
    for pid in _processes(server):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_mib(server: Server) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _processes(server))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _measure_beside(folder: Path, file: Path) -> None:
    import torch

    from training import task_types
    from training.data.casting import to_batch
    from training.engine.predictor import Predictor
    from training.models import loading

    loading.make_deterministic()
    texts, task_type, precision = json.loads(file.read_text()), task_types.load(KIND), mixed_precision()
    predictor = Predictor(
        task_type, folder, folder, MAX_LENGTH, batch_rows=BATCH_ROWS, mixed_precision=precision, device="cpu"
    )
    rows = to_batch(task_type, ["text"], [(text,) for text in texts])
    for line in sys.stdin:
        kind, *place = line.split()
        began, used = time.perf_counter(), time.process_time()
        found: Any
        if kind == "one":
            with torch.inference_mode(), torch.autocast("cpu", loading.DTYPES[precision], enabled=precision != "no"):
                inputs = predictor.tokenizer(
                    texts[int(place[0])], truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
                )
                predictor.network(**inputs).logits.float()
            found = time.perf_counter() - began
        else:
            parts = [rows] if kind != "waiting" else [rows.slice(at, CLIENTS) for at in range(0, len(rows), CLIENTS)]
            records = [record for part in parts for record in predictor.predict(part)]
            found = (time.perf_counter() - began, time.process_time() - used)
            if kind == "all":
                lengths = [len(ids) for ids in predictor.tokenizer(texts, truncation=True)["input_ids"]]
                found = (statistics.mean(lengths), records)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _measure_beside(Path(sys.argv[1]), Path(sys.argv[2]))
