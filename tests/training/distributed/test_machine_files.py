"""Two machines with job folders of their own train as one machine does. Each has one process; they use loopback."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import Fork
from tests.training import tiny
from tests.training.forks import (
    END_WITHIN_S,
    assert_same,
    checkpoints_written,
    events,
    finish,
    ranks,
    run_fit,
    wait_for_all,
)
from training.batching.batches import TokenRows
from training.distributed import machine_files
from training.distributed import ranks as group
from training.engine.checkpoints import find_damage, step_of
from training.jobs.protocol import Job, read_outcome

# The loss falls, so by this rule the first epoch is the best: at the end its checkpoint is loaded.
JOB: dict[str, Any] = {
    "settings": {"task": "multi-label-classification", "metrics": ["f1_micro"]},
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "checkpoint_interval_s": 0.05,
}
without_deepspeed = importlib.util.find_spec("deepspeed") is None


@pytest.fixture(scope="module")
def several_labels(world: Path) -> Path:
    """The world, with tokens of rows with several labels: after training, such a model's thresholds are computed."""
    for split in ("train", "validation"):
        plain = TokenRows(world / f"tokens/{split}.arrow")
        ids = [plain[row]["input_ids"].tolist() for row in range(len(plain))]
        labels = [[int(len(tokens) % divisor == 0) for divisor in (2, 3, 5)] for tokens in ids]
        tiny.write_tokens(world / "several", ids, labels, split)
    return world


def start(*folders: Path, program: Callable[[str, dict[str, str]], None] = run_fit) -> list[Fork]:
    """The processes of a job, started: rank 0 in the first folder, rank 1 in the second."""
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    compute = Job.read(folders[0]).settings["compute"] if program is run_fit else {"strategy": "ddp"}
    pairs = zip(folders, ranks(len(folders), compute), strict=True)
    return [Fork(program, (str(folder), rank | alone)).start() for folder, rank in pairs]


def kill_all(processes: list[Fork], reached: Callable[[], bool]) -> None:
    """Kills all processes once `reached`."""
    deadline = time.monotonic() + END_WITHIN_S
    while not reached() and time.monotonic() < deadline and processes[0].is_alive():
        time.sleep(0.001)
    assert processes[0].is_alive(), "the training ended before the kill"
    for process in processes:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()


def finish_all(*folders: Path) -> None:
    wait_for_all(start(*folders), folders[0], time.monotonic() + END_WITHIN_S)
    outcome = read_outcome(folders[0])
    assert outcome is not None and outcome.state == "finished", outcome


def newest(folder: Path) -> Path | None:
    return max((folder / "checkpoints").glob("checkpoint-*"), key=step_of, default=None)


def resumed(folder: Path) -> list[str]:
    notes = [event["message"] for event in events(folder, "note")]
    return [note.removeprefix("resuming from ") for note in notes if note.startswith("resuming")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="ddp"),
        pytest.param({"engine": "accelerate"}, id="loop", marks=pytest.mark.drill),
        pytest.param({"compute": {"strategy": "fsdp"}}, id="fsdp", marks=pytest.mark.drill),
        pytest.param(
            {"compute": {"strategy": "deepspeed-zero2"}},
            id="zero2",
            marks=[pytest.mark.drill, pytest.mark.skipif(without_deepspeed, reason="needs the extra deepspeed")],
        ),
    ],
)
def test_two_machines_resume_from_the_newest_checkpoint_of_either_and_end_with_the_bytes_of_one_machine(
    several_labels: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Killed, they exchange their roles; killed again, the machine with the newest checkpoints loses them."""
    whole, one, other = (
        tiny.fit_job(several_labels, tmp_path / name, tokens="several", processes=2, **JOB, **settings)
        for name in ("whole", "one", "other")
    )
    assert finish(whole).state == "finished"
    kill_all(start(one, other), lambda: checkpoints_written(one) >= 2)
    first = newest(one)
    assert first is not None and newest(other) is None

    kill_all(start(other, one), lambda: checkpoints_written(other) >= 2)
    copied, later = other / "checkpoints" / first.name, newest(other)
    assert resumed(other) == [first.name] and later is not None and step_of(later) > step_of(first)
    assert not copied.exists() or find_damage(copied) is None

    shutil.rmtree(other / "checkpoints")
    finish_all(other, one)
    assert resumed(other) == [first.name] * 2
    assert_same(other, whole, one)
    configs = [(folder / "output/model/config.json").read_bytes() for folder in (other, whole)]
    assert configs[0] == configs[1] and b"thresholds" in configs[0]
    assert not [*one.glob("*/.*"), *other.glob("*/.*")]


def write_and_share(folder: str, rank: dict[str, str]) -> None:
    os.environ |= rank
    machine_files.CHUNK_BYTES = 4
    group.join_group()
    checkpoint = Path(folder, "checkpoint")
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / f"rank{group.rank()}").write_bytes(bytes(range(9)))
    (checkpoint / f"empty{group.rank()}").touch()
    machine_files.collect(checkpoint)
    if group.rank() == 0:
        assert len([*checkpoint.iterdir()]) == 4
    machine_files.distribute(checkpoint)
    assert len([*checkpoint.iterdir()]) == 4
    group.leave_group()


@pytest.mark.parametrize("names", [("one", "other"), ("shared", "shared")], ids=["separate", "shared"])
def test_every_machine_gets_the_files_of_all_whether_they_share_the_folder_or_not(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    processes = start(*folders, program=write_and_share)
    wait_for_all(processes, folders[0], time.monotonic() + END_WITHIN_S)
    assert [process.exitcode for process in processes] == [0, 0]
    for folder in folders:
        found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*/*")}
        assert found == {"checkpoint/rank0": 9, "checkpoint/rank1": 9, "checkpoint/empty0": 0, "checkpoint/empty1": 0}
        assert (folder / "checkpoint/rank1").read_bytes() == bytes(range(9))
