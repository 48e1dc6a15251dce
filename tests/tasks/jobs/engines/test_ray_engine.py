"""Training on the machines of a Ray cluster: two nodes on this machine, each with a home of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.small import command, environment, write_project
from tests.ray_nodes import ray_nodes

pytest.importorskip("ray", reason="without the extra ray")
pytestmark = pytest.mark.drill

SETTINGS = ("compute.num_processes=2", "training.num_train_epochs=40", "release.registry=null")
ON_CLUSTER = (*SETTINGS, "compute.cluster=ray", "compute.num_machines=2")
ENDED_WITHIN_S = 20.0


@dataclass(frozen=True)
class Cluster:
    """Two nodes, and the undisturbed run of one machine with as many processes."""

    address: str
    raylets: tuple[int, ...]
    homes: tuple[Path, ...]
    store: str
    """The machines' shared store; a run need not have it."""
    file: Path
    weights: str

    def start(self, home: Path, **more: str) -> subprocess.Popen[str]:
        """A run on the cluster, whose result is in out.json beside the home."""
        return start(home, self.file, ON_CLUSTER, RAY_ADDRESS=self.address, **more)

    def left(self) -> list[str]:
        """The commands of processes of jobs on the nodes."""
        return [words for words in all_commands() if any(f"{home}/" in words for home in self.homes)]


def start(home: Path, file: Path, settings: tuple[str, ...], **more: str) -> subprocess.Popen[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    argv = command("run", str(file), "--json", str(home.with_suffix(".json")), *sets)
    env = environment(home, OMP_NUM_THREADS="1", **more)
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def result(home: Path) -> dict[str, Any]:
    return dict(json.loads(home.with_suffix(".json").read_text()))


def all_commands() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def until(condition: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    file, alone = write_project(tmp_path / "project"), tmp_path / "alone"
    homes = tuple(tmp_path / f"machine{number}" for number in (1, 2))
    store = tmp_path / "store"
    store.mkdir()
    with ray_nodes(homes, FINETUNE_STORE=store.as_uri()) as nodes, start(alone, file, SETTINGS) as run:
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 0, printed
        yield Cluster(nodes.address, nodes.raylets, homes, store.as_uri(), file, result(alone)["model"]["sha256"])


def at_work(cluster: Cluster) -> bool:
    """Whether a checkpoint is on a machine."""
    return any(any(home.glob("cluster/*/checkpoints/checkpoint-*")) for home in cluster.homes)


def test_two_machines_without_a_shared_disk_train_the_bytes_of_one_and_keep_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with cluster.start(home) as run:
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert result(home)["model"]["sha256"] == cluster.weights
    assert cluster.left() == [] and not at_work(cluster)


def test_a_killed_run_leaves_no_process_and_goes_on_although_its_machines_lost_their_disks(
    cluster: Cluster, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with cluster.start(home, FINETUNE_STORE=cluster.store) as run:
        until(lambda: any(Path(cluster.store.removeprefix("file://")).glob("checkpoints/*/*.json")), 200)
        run.kill()
    until(lambda: not cluster.left(), ENDED_WITHIN_S)
    for machine in cluster.homes:
        shutil.rmtree(machine / "cluster")
    with cluster.start(home, FINETUNE_STORE=cluster.store) as run:
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0 and "of another machine" in printed and "resuming from checkpoint-" in printed, printed
    assert result(home)["model"]["sha256"] == cluster.weights


def test_a_machine_that_is_lost_ends_the_try_everywhere_and_the_next_waits_for_machines(
    cluster: Cluster, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with cluster.start(home) as run:
        until(lambda: at_work(cluster), 200)
        os.kill(cluster.raylets[1], signal.SIGKILL)
        until(lambda: not cluster.left(), ENDED_WITHIN_S)
        assert run.stdout is not None
        waits = next(line for line in run.stdout if "waiting for 2 machines" in line)
        assert "the cluster has" in waits
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
    assert run.returncode == 130


def test_plan_and_doctor_say_what_is_free(tmp_path: Path) -> None:
    file, home = write_project(tmp_path / "project"), tmp_path / "home"
    sets = [word for setting in ON_CLUSTER for word in ("--set", setting)]

    def printed(address: str, *arguments: str) -> str:
        env = environment(home, RAY_ADDRESS=address)
        run = subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=200)
        assert "Traceback" not in run.stderr, run.stderr
        return " ".join(run.stdout.split())

    with ray_nodes([tmp_path / "machine1", tmp_path / "machine2"]) as nodes:
        found = "the cluster has 2 machines, with 4 cores free"
        assert f"fit: 2 machines with 1 process each, on the Ray cluster at {nodes.address}: {found}" in printed(
            nodes.address, "plan", str(file), *sets
        )
        assert f"ok Ray cluster {nodes.address}: {found}" in printed(nodes.address, "doctor")
    away = "no Ray cluster answers at '127.0.0.1:1'"
    assert f"fit: 2 machines with 1 process each; {away}" in printed("127.0.0.1:1", "plan", str(file), *sets)
    assert f"problem Ray cluster {away}" in printed("127.0.0.1:1", "doctor")


def test_a_cluster_with_a_token_is_used_with_it_alone(tmp_path: Path) -> None:
    """As the units of infra/ray start it."""
    file, token, other = write_project(tmp_path / "project"), tmp_path / "token", tmp_path / "other"
    token.write_text("a" * 64)
    other.write_text("b" * 64)
    sets = [word for setting in ON_CLUSTER for word in ("--set", setting)]
    with ray_nodes([tmp_path / "machine1"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)) as nodes:
        printed = []
        for file_of_token in (token, other):
            more = {"RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file_of_token)}
            argv, env = command("plan", str(file), *sets), environment(tmp_path / "home", **more)
            run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200)
            assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
            printed.append(run.stdout)
    assert "the cluster has 1 machine, with 2 cores free" in printed[0]
    assert "no Ray cluster answers at" in printed[1] and "free" not in printed[1]


def test_a_machine_without_the_project_is_refused_by_name(tmp_path: Path) -> None:
    """Its Python finds no module of the project, wherever that lies."""
    blocks = tmp_path / "path"
    blocks.mkdir()
    (blocks / "sitecustomize.py").write_text("import sys; sys.modules['tasks'] = None")
    file, homes = write_project(tmp_path / "project"), [tmp_path / "machine1", tmp_path / "machine2"]
    with (
        ray_nodes(homes, PYTHONPATH=str(blocks)) as nodes,
        start(tmp_path / "home", file, ON_CLUSTER, RAY_ADDRESS=nodes.address) as run,
    ):
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 2 and "Traceback" not in printed, printed
    assert "cannot run this project (ModuleNotFoundError: " in printed, printed


def test_without_a_cluster_at_its_address_the_run_says_so_before_any_stage(tmp_path: Path) -> None:
    with start(tmp_path / "home", write_project(tmp_path / "project"), ON_CLUSTER, RAY_ADDRESS="127.0.0.1:1") as run:
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 2 and "load_data" not in printed
    assert "compute.cluster_address: no Ray cluster answers at '127.0.0.1:1'" in printed


def test_trials_at_once_share_a_cluster_that_the_sweep_starts_and_have_the_figures_of_this_machine(
    tmp_path: Path,
) -> None:
    file = write_project(tmp_path / "project")
    document = yaml.safe_load(file.read_text())
    recipe = document["deployments"][0]["parameters"]["recipe"]
    search = {"space": {"training.learning_rate": {"choice": [2e-3, 5e-3, 1e-2]}}, "sampler": "grid", "parallel": 2}
    parameters = {"recipe": recipe, "sweep": search}
    entry = {"name": "small", "entrypoint": "flows.sweep:sweep", "parameters": parameters}
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    found = []
    for cluster in ("null", "ray"):
        home = tmp_path / cluster
        settings = ("--set", f"compute.cluster={cluster}", "--set", "compute.num_processes=1")
        argv = command("sweep", str(file), "--json", str(home.with_suffix(".json")), *settings)
        env = environment(home, OMP_NUM_THREADS="1")
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        trials = {trial["number"]: (trial["settings"], trial["value"]) for trial in result(home)["trials"]}
        found.append((trials, result(home)["run"]["model"]["sha256"]))
    assert found[0] == found[1]


def test_shards_on_two_machines_without_a_shared_store_are_those_of_one(tmp_path: Path) -> None:
    file, home = write_project(tmp_path / "project"), tmp_path / "home"
    with start(home, file, ("compute.num_processes=1",)) as run:
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    shutil.copytree(home, tmp_path / "other", symlinks=True)
    rows = str(tmp_path / "project" / "*.csv")
    machines = [tmp_path / "machine1", tmp_path / "machine2"]
    with ray_nodes(machines) as nodes:
        found = []
        for here, more in ((home, ()), (tmp_path / "other", ("--cluster", "ray", "--cluster-address", nodes.address))):
            out = here.with_suffix(".jsonl")
            argv = command("predict", "small", "--input", rows, "--output", str(out), "--shard-rows", "20", *more)
            env = environment(here, OMP_NUM_THREADS="1")
            done = subprocess.run([*argv, "--processes", "2"], env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            found.append([json.loads(line) | {"predicted_at": None} for line in out.read_text().splitlines()])
    assert found[0] == found[1] and len(found[0]) == 300
    assert all([*machine.glob("artifacts/fit/*")] for machine in machines)  # both have predicted
    assert not any([*machine.glob("cluster/*")] for machine in machines)
