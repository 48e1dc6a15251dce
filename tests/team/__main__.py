"""A team on one machine: python -m tests.team

Real servers with passwords over PostgreSQL and a bucket, and two workers with a home each and no shared disk. One
worker's machine burns down in the middle of a training, and the other one finishes it. Takes some four minutes.
"""

from __future__ import annotations

import argparse
import json
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
from tests.machine import wait_until
from tests.team.servers import BUCKET, Servers, find_missing
from tests.team.workers import Machine

HEAD = ["what", "where", "seconds", "found", ""]
OVERRIDES = {"training.callbacks": ["tests.flows.slowly:Slowly"], "training.learning_rate": 4e-3}
"""A training of two minutes, but of seconds where Machine.train_quickly was called."""
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
    """Looks at the command lines of all processes for secrets, until `stop`."""

    def __init__(self, secrets: list[str]) -> None:
        self._secrets = [secret.encode() for secret in secrets]
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
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes()
                except OSError:
                    continue
                if any(secret in words for secret in self._secrets):
                    self.found.add(words.split(b"\0")[0].decode(errors="replace"))


class Team:
    """The scenes, in their order.

    Args:
        folder: an empty one.
        table: gets a row for each promise.
    """

    def __init__(self, folder: Path, table: Table) -> None:
        self._folder, self._table = folder, table
        self._servers = Servers(folder)
        self._machines: list[Machine] = []

    def play(self) -> None:
        """Starts the team, works, and ends it, whatever happens."""
        try:
            self._start_servers()
            watch = CommandLines(self._servers.secrets)
            self._work()
            watch.stop()
            self._search_secrets(watch)
        finally:
            for machine in self._machines:
                machine.stop_worker()
            left = sum(machine.processes_left() for machine in self._machines)
            self._servers.stop()
            self._table.add("the end", "all", None, f"{left} processes of workers are left", left == 0)

    def _start_servers(self) -> None:
        for name, seconds in self._servers.start().items():
            self._table.add(f"{name} starts", "servers", seconds, "", True)
        for name, status in self._servers.status_without_password().items():
            found = f"without its password: {status}"
            self._table.add(f"{name} asks who it is", "servers", None, found, status in (401, 403, "refused"))

    def _work(self) -> None:
        first, second = self._machine("worker-1"), self._machine("worker-2")
        file = self._write_deployment()
        first.prefect("work-pool", "create", "finetune", "--type", "process")
        first.finetune("notify")  # makes the automation that finds the runs of dead workers
        printed = first.finetune("deploy", str(file))
        self._table.add("deploy", first.name, None, "finetune/small", "finetune/small" in printed)
        digest = self._run_first(first)
        self._run_again(second, digest)
        self._read_only(file, digest)
        self._burn_down(file, first, second)

    def _run_first(self, machine: Machine) -> str:
        machine.start_worker()
        began = time.monotonic()
        run = machine.start_run("finetune/small")
        self._wait_for(run, "Completed")
        seconds, digest = time.monotonic() - began, weights_of(machine)
        uploaded = sum(self._servers.objects("finetune/").values()) / 1e6
        found = f"model {digest[:12]}, {len(self._states(machine, run))} stages, {uploaded:.1f} MB in the bucket"
        self._table.add("first run", machine.name, seconds, found, True)
        machine.stop_worker()
        return digest

    def _run_again(self, machine: Machine, digest: str) -> None:
        machine.start_worker()
        began = time.monotonic()
        run = machine.start_run("finetune/small")
        self._wait_for(run, "Completed")
        made = sorted(name for name, state in self._states(machine, run).items() if state != "cached")
        same = weights_of(machine) == digest
        found = f"model {weights_of(machine)[:12]}; executed: {', '.join(made)}"
        ok = same and not {"load_data", "load_model", "tokenize", "fit", "predict", "score"} & {*made}
        self._table.add("the same, empty home", machine.name, time.monotonic() - began, found, ok)

    def _read_only(self, file: Path, digest: str) -> None:
        person = self._machine("laptop", "reader")
        before, began = self._servers.objects("finetune/"), time.monotonic()
        printed = person.finetune("run", str(file))
        same = weights_of(person) == digest and self._servers.objects("finetune/") == before
        self._table.add(
            "a key that may only read", person.name, time.monotonic() - began, f"model {digest[:12]}, nothing uploaded",
            same and "fetched" in printed,
        )  # fmt: skip

    def _burn_down(self, file: Path, first: Machine, second: Machine) -> None:
        run = second.start_run("finetune/small", "-p", f"overrides={json.dumps(OVERRIDES)}")
        step = self._wait_for_checkpoint(5)
        began = time.monotonic()
        killed = second.burn_down()
        self._table.add("burns down in fit", second.name, None, f"{killed} processes killed after step {step}", True)
        self._wait_for(run, "Crashed")
        self._table.add("is found dead", "Prefect", time.monotonic() - began, "the flow run is Crashed", True)
        first.train_quickly()
        first.start_worker()
        began = time.monotonic()
        first.finetune("resume", run)
        self._wait_for(run, "Completed")
        resumed = [line for line in self._logs(run) if "of another machine" in line]
        state = self._states(first, run)["fit"]
        found = f"fit {state}, {resumed[-1].partition(': ')[2] if resumed else 'from the beginning'}"
        self._table.add("finishes it", first.name, time.monotonic() - began, found, bool(resumed))
        undisturbed = self._machine("undisturbed", store=False)
        undisturbed.train_quickly()
        sets = [word for name, value in OVERRIDES.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        undisturbed.finetune("run", str(file), *sets)
        expected, ended_with = weights_of(undisturbed), weights_of(first, newest=True)
        found = f"{ended_with[:12]}, undisturbed {expected[:12]}"
        self._table.add("the same bytes", first.name, None, found, expected == ended_with)
        left = [name for name in self._servers.objects("finetune/") if "/checkpoints/" in name or "/leases/" in name]
        self._table.add("nothing is left over", "bucket", None, f"{len(left)} checkpoints and leases", not left)

    def _search_secrets(self, watch: CommandLines) -> None:
        secrets = [secret.encode() for secret in self._servers.secrets]

        def has_secret(content: bytes) -> bool:
            return any(secret in content for secret in secrets)

        places = [] if not has_secret(self._servers.dump()) else ["a database"]
        places += [name for name in self._servers.objects() if has_secret(self._servers.content(name))]
        own = {self._folder / "etc", self._folder / "postgres"}
        files = [path for path in self._folder.rglob("*") if not own & {*path.parents} and path.is_file()]
        places += [str(path) for path in files if has_secret(path.read_bytes())]
        places += [f"the command line of {program}" for program in watch.found]
        looked = f"{len(files)} files, {len(self._servers.objects())} objects, 3 databases, all command lines"
        self._table.add("secrets", "everywhere", None, f"{'; '.join(places) or 'none'} in {looked}", not places)

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

    def _states(self, machine: Machine, run: str) -> dict[str, str]:
        """The state of each stage of a run, from its record."""
        record = json.loads((machine.home / "runs" / run / LINEAGE).read_text())
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


def main() -> int:
    """Plays the scenes, and prints the table."""
    argparse.ArgumentParser(prog="python -m tests.team", description=__doc__).parse_args()
    if missing := find_missing():
        print("This needs:", *missing, sep="\n  ", file=sys.stderr)
        return 2
    began, table = time.monotonic(), Table()
    with tempfile.TemporaryDirectory(prefix="finetune-team-") as folder:
        Path(folder).chmod(0o711)  # PostgreSQL's user goes through it
        try:
            Team(Path(folder), table).play()
        except Exception as error:
            print(error, file=sys.stderr)
            table.add("stopped", "", None, f"{type(error).__name__}: {str(error).splitlines()[0]}", False)
    print("", *table.lines(), sep="\n")
    print(f"\n{time.monotonic() - began:.0f} s, bucket {BUCKET}, {table.failed} not ok")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
