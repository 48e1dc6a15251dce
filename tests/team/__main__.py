"""A team on one machine: python -m tests.team

Real servers with passwords over PostgreSQL and a bucket, and two workers with a home each and no shared disk. One
worker's machine is lost in the middle of a training, and the other one finishes it. Takes some five minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path

import yaml

from flows.reports.tables import align
from tasks.registry.lineage import LINEAGE
from tests.flows.small import write_project
from tests.team.servers import BUCKET, Servers, find_missing
from tests.team.workers import Machine
from tests.waiting import wait_until

HEAD = ["what", "where", "seconds", "found", ""]
LONG = {"training.callbacks": ["tests.flows.slowly:Slowly"], "training.learning_rate": 4e-3}
"""A training of two minutes, but of seconds where Machine.train_quickly was called."""
OTHER = {"training.learning_rate": 3e-3}
STEPS = (3, 30)
MODELS = 3
"""The number of different models in all scenes: the first one, and those of LONG and OTHER."""
CONTENT = {"load_data", "load_model", "tokenize", "fit", "predict", "score"}
"""The stages whose artifacts machines share."""
LONG_S = 300.0


class Table:
    """The rows of what was tried; each is printed when it is known."""

    def __init__(self) -> None:
        self._rows = [HEAD]
        self.failed = 0

    def add(self, what: str, where: str, seconds: float | None, found: str, ok: bool) -> None:
        """Adds a row, and prints it."""
        self.failed += not ok
        row = [what, where, "" if seconds is None else f"{seconds:.1f}", found, "ok" if ok else "NOT OK"]
        self._rows.append(row)
        print(" · ".join(filter(None, row)), flush=True)

    def lines(self) -> list[str]:
        """The aligned table."""
        return align(self._rows)


class CommandLines:
    """Searches the command lines of all processes for secrets, until `stop`."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.found: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the looks."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            secrets = self._servers.secrets()
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes()
                except OSError:
                    continue
                if any(secret in words for secret in secrets):
                    self.found.add(words.split(b"\0")[0].decode(errors="replace"))


class Team:
    """The scenes, in their order.

    Args:
        folder: an empty one.
        table: gets a row for each promise.
        step: the machine is killed when the checkpoint of this step is in the bucket.
    """

    def __init__(self, folder: Path, table: Table, step: int) -> None:
        self._folder, self._table, self._step = folder, table, step
        self._servers = Servers(folder)
        self._machines: list[Machine] = []

    def play(self) -> None:
        """Starts the servers, plays the scenes, and ends all processes, whatever happens."""
        watch = CommandLines(self._servers)
        try:
            self._start_servers()
            self._work()
            watch.stop()
            self._search_secrets(watch)
            for machine in self._machines:
                machine.stop_worker()
            left = sum(machine.processes_left() for machine in self._machines)
            self._table.add("the end", "all", None, f"{left} processes of workers are left", left == 0)
        finally:
            watch.stop()
            for machine in self._machines:
                machine.kill()
            self._servers.stop()

    def _start_servers(self) -> None:
        for name, seconds in self._servers.start().items():
            self._table.add(f"start {name}", "servers", seconds, "", True)
        for name, status in self._servers.status_without_password().items():
            self._table.add(f"{name} without password", "servers", None, str(status), status in (401, 403, "refused"))

    def _work(self) -> None:
        first, second, person = self._machine("worker-1"), self._machine("worker-2"), self._machine("laptop", "reader")
        file = self._write_deployment()
        first.prefect("work-pool", "create", "finetune", "--type", "process")
        first.finetune("notify")  # makes the automation that finds the runs of dead workers
        printed = first.finetune("deploy", str(file))
        self._table.add("deploy", first.name, None, "finetune/small", "finetune/small" in printed)
        self._check(first, "may be read and written")
        self._check(person, "may only be read")
        digest = self._run_first(first)
        self._run_again(second, digest)
        self._read_only(person, file, digest)
        self._download(digest)
        self._lose_machine(file, first, second)
        self._run_at_once(first, second)
        versions = self._servers.versions("small")
        self._table.add("registry", "MLflow", None, f"{versions} versions, {MODELS} models", versions == MODELS)
        left = [name for name in self._servers.objects("finetune/") if "/checkpoints/" in name or "/leases/" in name]
        self._table.add("bucket", "S3 server", None, f"{len(left)} checkpoints and leases are left", not left)

    def _check(self, machine: Machine, rights: str) -> None:
        printed = " ".join(machine.finetune("doctor").split())
        found = f"{'no' if 'problem' not in printed else 'a'} problem; the bucket {rights}"
        self._table.add("doctor", machine.name, None, found, "problem" not in printed and rights in printed)

    def _run_first(self, machine: Machine) -> str:
        machine.start_worker()
        began = time.monotonic()
        run = machine.start_run("finetune/small")
        self._wait_for(run, "Completed")
        seconds, digest = time.monotonic() - began, weights_of(machine)
        store, files = (sum(self._servers.objects(prefix).values()) / 1e6 for prefix in ("finetune/", "mlflow/"))
        found = f"model {digest[:12]}; in the bucket: store {store:.1f} MB, MLflow {files:.1f} MB"
        self._table.add("first run", machine.name, seconds, found, store > 0 and files > 0)
        machine.stop_worker()
        return digest

    def _run_again(self, machine: Machine, digest: str) -> None:
        machine.start_worker()
        began = time.monotonic()
        run = machine.start_run("finetune/small")
        self._wait_for(run, "Completed")
        executed = {name for name, state in self._states(run).items() if state != "cached"}
        found = f"model {weights_of(machine)[:12]}, executed: {', '.join(sorted(executed))}"
        ok = weights_of(machine) == digest and not CONTENT & executed
        self._table.add("same run, empty home", machine.name, time.monotonic() - began, found, ok)

    def _read_only(self, person: Machine, file: Path, digest: str) -> None:
        shown, before = person.finetune("show", "small/1"), self._servers.objects("finetune/")
        found = f"weights {digest[:12]}" if digest in shown else "other weights"
        self._table.add("show small/1, empty home", person.name, None, found, digest in shown)
        began = time.monotonic()
        printed = person.finetune("run", str(file))
        same = weights_of(person) == digest and self._servers.objects("finetune/") == before
        self._table.add(
            "key that may only read", person.name, time.monotonic() - began,
            f"model {weights_of(person)[:12]}, nothing uploaded", same and "fetched" in printed,
        )  # fmt: skip

    def _download(self, digest: str) -> None:
        machine = self._machine("no-bucket", store=False)
        began = time.monotonic()
        found = digest_of(machine.download("models:/small/1"))
        self._table.add(
            "models:/small/1 by MLflow", machine.name, time.monotonic() - began, f"model {found[:12]}", found == digest
        )

    def _lose_machine(self, file: Path, first: Machine, second: Machine) -> None:
        run = second.start_run("finetune/small", "-p", f"overrides={json.dumps(LONG)}")
        step = self._wait_for_checkpoint(self._step)
        time.sleep(random.random())
        began = time.monotonic()
        killed = second.burn_down()
        found = f"{killed} processes killed and the home removed, after step {step}"
        self._table.add("lost in fit", second.name, None, found, killed > 1 and not second.home.exists())
        self._wait_for(run, "Crashed")
        self._table.add("noticed", "Prefect", time.monotonic() - began, "the flow run is Crashed", True)
        first.train_quickly()
        first.start_worker()
        began = time.monotonic()
        first.finetune("resume", run)
        self._wait_for(run, "Completed")
        resumed = [line for line in self._logs(run) if "of another machine" in line]
        found = f"fit {self._states(run)['fit']}, {resumed[-1].partition(': ')[2] if resumed else 'from the beginning'}"
        self._table.add("resume", first.name, time.monotonic() - began, found, bool(resumed))
        undisturbed = self._machine("undisturbed", store=False)
        undisturbed.train_quickly()
        sets = [word for name, value in LONG.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        undisturbed.finetune("run", str(file), *sets)
        expected, ended_with = weights_of(undisturbed), weights_of(first, newest=True)
        found = f"model {ended_with[:12]}, undisturbed {expected[:12]}"
        self._table.add("the same bytes", first.name, None, found, expected == ended_with)

    def _run_at_once(self, first: Machine, second: Machine) -> None:
        second.start_worker()
        began, versions = time.monotonic(), self._servers.versions("small")
        runs = [first.start_run("finetune/small", "-p", f"overrides={json.dumps(OTHER)}") for _ in range(2)]
        for run in runs:
            self._wait_for(run, "Completed")
        seconds = time.monotonic() - began
        states = [self._states(run) for run in runs]
        executed = [name for each in states for name, state in each.items() if name in CONTENT and state != "cached"]
        homes = {self._home_of(run) for run in runs}
        digests = {weights_of(machine, newest=True) for machine in (first, second)}
        versions = self._servers.versions("small") - versions
        model = " and ".join(digest[:12] for digest in digests)
        found = f"model {model}, {versions} version, executed: {', '.join(sorted(executed))}"
        ok = len(homes) == 2 and len(digests) == versions == 1 and sorted(executed) == ["fit", "predict", "score"]
        self._table.add("two runs at once", "both workers", seconds, found, ok)

    def _search_secrets(self, watch: CommandLines) -> None:
        secrets = self._servers.secrets()

        def has_secret(content: bytes) -> bool:
            return any(secret in content for secret in secrets)

        places = ["a database"] if has_secret(self._servers.dump()) else []
        places += [name for name in self._servers.objects() if has_secret(self._servers.content(name))]
        own = {self._servers.etc, self._folder / "postgres"}
        files = [path for path in self._folder.rglob("*") if not own & {*path.parents} and path.is_file()]
        places += [str(path) for path in files if has_secret(path.read_bytes())]
        places += [f"the command line of {program}" for program in watch.found]
        looked = f"{len(files)} files, {len(self._servers.objects())} objects, 3 databases, all command lines"
        self._table.add("secrets", "everywhere", None, f"{'; '.join(places) or 'none'} in {looked}", not places)
        known = [*self._servers.etc.iterdir()]
        private = all(has_secret(path.read_bytes()) and path.stat().st_mode & 0o777 == 0o600 for path in known)
        self._table.add("secrets", "servers", None, f"found in {len(known)} files of mode 0600", private)

    def _machine(self, name: str, keys: str = "worker", store: bool = True) -> Machine:
        machine = Machine(name, self._folder, self._servers.worker_file(keys, with_store=store))
        self._machines.append(machine)
        return machine

    def _write_deployment(self) -> Path:
        file = write_project(self._folder / "project")
        document = yaml.safe_load(file.read_text())
        document["deployments"][0]["work_pool"] = {"name": "finetune"}
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return file

    def _wait_for(self, run: str, state: str) -> None:
        last = ""

        def reached() -> bool:
            nonlocal last
            last = str(self._servers.ask_prefect(f"flow_runs/{run}")["state_name"])
            assert last == state or last not in ("Completed", "Failed", "Cancelled", "Crashed") or state == "Completed"
            return last == state

        try:
            wait_until(reached, LONG_S)
        except AssertionError as error:
            raise RuntimeError(f"the run is {last}, not {state}\n" + "\n".join(self._logs(run)[-15:])) from error

    def _wait_for_checkpoint(self, least: int) -> int:
        """Waits for a checkpoint in the bucket. Returns its step."""
        newest = 0

        def stored() -> bool:
            nonlocal newest
            names = [name for name in self._servers.objects("finetune/checkpoints/") if name.endswith(".json")]
            newest = max((int(Path(name).stem) for name in names), default=0)
            return newest >= least

        wait_until(stored, LONG_S)
        return newest

    def _home_of(self, run: str) -> Path:
        """The home that has the record of a run."""
        (record,) = self._folder.glob(f"*/runs/{run}/{LINEAGE}")
        return record.parents[2]

    def _states(self, run: str) -> dict[str, str]:
        """The state of each stage of a run, from its record."""
        record = json.loads((self._home_of(run) / "runs" / run / LINEAGE).read_text())
        return {stage["name"]: stage["state"] for stage in record["stages"]}

    def _logs(self, run: str) -> list[str]:
        chosen = {"flow_run_id": {"any_": [run]}}
        return [str(log["message"]) for log in self._servers.ask_prefect("logs/filter", logs=chosen, limit=200)]


def weights_of(machine: Machine, newest: bool = False) -> str:
    """The digest of the weights that a home has; of the last training if there are several."""
    files = sorted(
        machine.home.glob("artifacts/fit/*/model/model.safetensors"), key=lambda path: path.parents[1].stat().st_mtime
    )
    assert len(files) == 1 or newest, files
    return sha256(files[-1].read_bytes()).hexdigest()


def digest_of(folder: Path) -> str:
    """The digest of the weights of a downloaded model."""
    (file,) = folder.rglob("model.safetensors")
    return sha256(file.read_bytes()).hexdigest()


def main() -> int:
    """Plays the scenes, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.team", description=__doc__)
    parser.add_argument(
        "--step", type=int, help="kill the machine after this step's checkpoint (default: a random one)"
    )
    step = parser.parse_args().step or random.randint(*STEPS)
    if missing := find_missing():
        print("This needs:", *missing, sep="\n  ", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began, table = time.monotonic(), Table()
    with tempfile.TemporaryDirectory(prefix="finetune-team-") as folder:
        Path(folder).chmod(0o711)  # PostgreSQL's user goes through it
        try:
            Team(Path(folder), table, step).play()
        except KeyboardInterrupt:
            table.add("stopped", "", None, "interrupted", False)
        except Exception as error:
            print(error, file=sys.stderr)
            table.add("stopped", "", None, f"{type(error).__name__}: {str(error).splitlines()[0]}", False)
    print("", *table.lines(), sep="\n")
    print(f"\n{time.monotonic() - began:.0f} s, bucket {BUCKET}, {table.failed} not ok")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
