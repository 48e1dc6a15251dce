"""Batch predictions under fire: whatever happens, the output is that of an undisturbed run, each row once.

The first home trains the small recipe and predicts a folder of rows undisturbed. Every fault takes place in a copy of
the trained home. The flow, the supervisor or the program gets SIGKILL at a random instant, stored shards and written
files are damaged, or the bucket of the output fails; then the same command runs again, until it succeeds.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.prediction.output import MANIFEST
from tests.drill.ground import Ground, Run, victims
from tests.drill.promises import judge, require
from tests.drill.watch import Watch
from tests.flows.small import write_rows
from tests.s3 import BUCKET, KEYS, S3

TRAINED = ("training.num_train_epochs=2", "compute.num_processes=1")
FILES, ROWS, SHARD_ROWS = 3, 1200, 40
END_WITHIN_S = 400.0
MOST_KILLS = 3
"""Of one run and those that continue it."""
REQUESTS = 60
"""A fault comes at one of so many first requests to the bucket."""


class PredictFaults:
    """Plays faults by number, as a seed draws them.

    Args:
        ground: where runs take place.
        watch: looks at what they leave.
        seed: draws the faults.
    """

    def __init__(self, ground: Ground, watch: Watch, seed: int) -> None:
        self.results: dict[str, str] = {}
        self.kills = 0
        self.s3 = S3()
        self._ground, self._watch, self._seed = ground, watch, seed
        self._homes, self._inbox = itertools.count(1), ground.folder / "inbox"
        self._trained = ground.folder / "trained"
        run = ground.start(self._trained, *TRAINED)
        require(not self.status(run), f"the training failed: {run.ending()}")
        self._inbox.mkdir()
        for number in range(FILES):
            write_rows(self._inbox / f"day-{number}.csv", ROWS, seed=number)
        lines = [{"text": "a good film"}, {"text": None}, {"text": "a dull plot"}]
        (self._inbox / "odd.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        began, (home, out) = time.monotonic(), self.places()
        run = self.start(home, out)
        require(not self.status(run), f"the undisturbed prediction failed: {run.ending()}")
        self.seconds = time.monotonic() - began
        self._whole = _rows_of(_files_in(out))
        require(len(self._whole) == FILES * ROWS + 3, f"{len(self._whole)} rows")
        print(f"undisturbed prediction: {self.seconds:.1f} s, {len(self._whole):,} rows", flush=True)

    def play(self, number: int) -> None:
        """Plays one fault to its end, and compares."""
        draw = random.Random(f"{self._seed}-predict-{number}")
        name = f"{number:02} {[*FAULTS][(number - 1) % len(FAULTS)]}"
        self.results[f"predict {name}"] = judge(f"predict  {name}", lambda: FAULTS[name[3:]](self, draw))
        self.s3.fault = self.s3.lost = lambda request: None

    def places(self) -> tuple[Path, Path]:
        """A home with the trained model, and an output that is not there yet."""
        number = next(self._homes)
        home = self._ground.folder / f"home-{number}"
        shutil.copytree(self._trained, home, symlinks=True)
        return home, self._ground.folder / f"out-{number}"

    def start(self, home: Path, out: Path | str, **more: str) -> Run:
        """Starts a prediction of all rows."""
        words = ["predict", "small/1", "--input", str(self._inbox), "--output", str(out)]
        return self._ground.command(home, *words, "--shard-rows", str(SHARD_ROWS), **more)

    def status(self, run: Run) -> int:
        """Watches the run to its end; nothing of it may be left soon after. Returns its exit status."""
        return self._watch.exit_status(run, END_WITHIN_S)

    def kill(self, run: Run, home: Path, draw: random.Random) -> str | None:
        """Kills a part of the run at a random instant of a whole run or, as often, after a random number of shards;
        the flow, if there is no such part. Returns what died and when; None if the run had ended."""
        part = draw.choice(["flow", "flow", "supervisor", "program"])
        if draw.random() < 0.5:
            after_s = draw.random() * self.seconds
            when, alive = f"{after_s:.1f} s", self._watch.look_until(time.monotonic() + after_s, run)
        else:
            before, count = len(_stored(home)), draw.randint(1, ROWS // SHARD_ROWS)
            when, alive = f"{count} shards", True
            while alive and len(_stored(home)) < before + count:
                time.sleep(0.01)
                alive = run.process.poll() is None
        found = victims(run.process.pid) if alive else {}
        if not found:
            return None
        part = part if part in found else "flow"
        try:
            os.kill(found[part][0], signal.SIGKILL)
        except ProcessLookupError:
            return None
        self.kills += 1
        return f"{part} after {when}"

    def succeed(self, home: Path, run: Run, files: Callable[[], dict[str, bytes]]) -> int:
        """The run ends with the output of the undisturbed one. Returns the rows that it predicted itself."""
        require(self.status(run) == 0, f"exit status {run.process.returncode}: {run.ending()}")
        found = files()
        require(MANIFEST in found, "there is no manifest")
        parts = {part["name"] for part in json.loads(found[MANIFEST])["parts"]}
        require(parts == found.keys() - {MANIFEST}, "the manifest names other files")
        rows = _rows_of(found)
        require(len(rows) == len(self._whole), f"{len(rows)} rows instead of {len(self._whole)}")
        require(rows == self._whole, "rows differ from those of the undisturbed run")
        left = [path.name for path in (home / "jobs").glob("predict-*")]
        require(len(left) <= MOST_KILLS, f"jobs are left: {left}")
        return int(run.result()["counts"]["new"])


def killed(faults: PredictFaults, draw: random.Random) -> str:
    """Parts of runs die at random instants; what was predicted is not predicted again."""
    home, out = faults.places()
    deaths = []
    for _ in range(draw.randint(1, MOST_KILLS)):
        run = faults.start(home, out)
        death = faults.kill(run, home, draw)
        if death is None:
            break
        deaths.append(death)
        if death.startswith("flow"):
            faults.status(run)
            continue
        faults.succeed(home, run, lambda: _files_in(out))  # it starts its program again
    stored = _stored(home)
    new = faults.succeed(home, faults.start(home, out), lambda: _files_in(out))
    kept = (FILES * ROWS) // SHARD_ROWS + 1 - len(stored)
    require(new <= kept * SHARD_ROWS, f"{new} rows were predicted, with {len(stored)} shards in the store")
    return f"{', '.join(deaths) or 'no kill fell'}; the last run predicted {new:,} rows"


def damaged(faults: PredictFaults, draw: random.Random) -> str:
    """Shards of the store and files of the output are cut, changed or lost."""
    home, out = faults.places()
    faults.succeed(home, faults.start(home, out), lambda: _files_in(out))
    shards = sorted((home / "artifacts" / "predict_shard").glob("*/predictions.parquet"))
    chosen = [*draw.sample(shards, draw.randint(1, 5)), *draw.sample(sorted(out.iterdir()), draw.randint(1, 5))]
    for path in chosen:
        harm, content = draw.choice(["cut", "changed", "lost"]), path.read_bytes()
        path.unlink()  # a file of the store may have another name in a job
        at = draw.randrange(len(content))
        if harm == "cut":
            path.write_bytes(content[:at])
        elif harm == "changed":
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    new = faults.succeed(home, faults.start(home, out), lambda: _files_in(out))
    require(new <= 5 * SHARD_ROWS, f"{new} rows were predicted again for at most 5 damaged shards")
    return f"{len(chosen)} files; {new} rows were predicted again"


def bucket_fails(faults: PredictFaults, draw: random.Random) -> str:
    """The bucket of the output refuses requests for a time, or for good until the next run."""
    home, _ = faults.places()
    name = f"out-{home.name}"
    status, first = draw.choice([500, 503, 403]), draw.randint(1, REQUESTS)
    count, number = draw.choice([1, 3, 40, 10**6]), itertools.count(1)
    faults.s3.fault = lambda request: status if first <= next(number) < first + count else None
    env = {**faults.s3.environment(), **KEYS}
    run = faults.start(home, f"s3://{BUCKET}/{name}", **env)
    ended = faults.status(run)
    require(ended in (0, 1, 2), f"exit status {ended}: {run.ending()}")
    require("Traceback" not in run.printed(), f"a traceback: {run.ending()}")
    faults.s3.fault = lambda request: None

    def files() -> dict[str, bytes]:
        return {key.removeprefix(f"{name}/"): content for key, content in faults.s3.objects(f"{name}/").items()}

    new = faults.succeed(home, faults.start(home, f"s3://{BUCKET}/{name}", **env), files)
    requests = "all requests" if count == 10**6 else f"{count} requests"
    return f"{status} to {requests} from {first} on: exit status {ended}; then {new:,} rows were new"


FAULTS: dict[str, Callable[[PredictFaults, random.Random], str]] = {
    "killed": killed,
    "damaged": damaged,
    "bucket fails": bucket_fails,
}


def _stored(home: Path) -> set[str]:
    """The names of the shards that are stored."""
    return {path.name for path in (home / "artifacts" / "predict_shard").glob("[!.]*")}


def _files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _rows_of(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """All rows, in the order of the input, without the time of their prediction."""
    parts = [pq.read_table(pa.BufferReader(content)) for name, content in files.items() if name.endswith(".parquet")]
    rows = pa.concat_tables(parts).drop_columns(["predicted_at"]).to_pylist()
    return sorted(rows, key=lambda row: (row["input_file"], row["input_row"]))
