"""What is said of a training before it starts, and of its speed: it is true, and saying it changes nothing."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import tiny
from tests.training.forks import assert_same, events, finish
from training import estimate, room, speed
from training.engines import Task
from training.protocol import Events, read_outcome

DRAWN = {"collator": "tests.training.own:Masked", "gradient_accumulation_steps": 2}
SAID = {"micro_batch": 8, "trainable": 10, "parameters": 10, "steps": 3, "tokens_an_epoch": 7, "disk_mb": 2}


@pytest.fixture(scope="module")
def told(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that said what it needs. Dropout is on, and its collator draws."""
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "told", **DRAWN)
    assert finish(job_dir).state == "finished"
    return job_dir


def test_the_trial_leaves_no_trace_in_the_weights_and_the_curve(world: Path, told: Path, tmp_path: Path) -> None:
    without = tiny.fit_job(world, tmp_path / "without", **DRAWN)
    # As if an earlier try had said it, and was killed before its first checkpoint.
    (without / "events.jsonl").write_text(json.dumps({"time": 0.0, "kind": "estimate", "micro_batch": 8}) + "\n")
    assert finish(without).state == "finished"
    assert (len(events(told, "estimate")), len(events(without, "note"))) == (1, 0)
    assert_same(told, without)


def test_what_is_said_comes_true(world: Path, told: Path) -> None:
    (said,), outcome = events(told, "estimate"), read_outcome(told)
    assert outcome is not None
    figures, files = outcome.figures, [path for path in told.rglob("*") if path.is_file()]
    assert (said["steps"], said["micro_batch"]) == (figures["steps"], figures["micro_batch"])
    assert said["tokens_an_epoch"] * 3 == sum(event["tokens"] for event in events(told, "speed"))
    model = (told / "output/model/model.safetensors").stat().st_size
    assert said["parameters"] == said["trainable"] == pytest.approx(model / 4, rel=0.05)
    assert figures["estimated_memory_mb"] == pytest.approx(figures["peak_memory_mb"], rel=0.3)
    checkpoints = sum(path.stat().st_size for path in files if "checkpoints" in path.parts)
    assert checkpoints + model <= said["disk_mb"] * 1e6
    (note,) = (event["message"] for event in events(told, "note"))
    assert note.startswith(f"{said['parameters']:,} parameters, all trained; 30 steps, ")


def test_speed_counts_each_row_and_its_tokens_once_and_is_told_as_often_as_the_loss(world: Path, told: Path) -> None:
    told_speed = events(told, "speed")
    assert sum(event["rows"] for event in told_speed) == 3 * 150
    assert [event["step"] for event in told_speed] == [4, 8, 12, 16, 20, 24, 28, 30]
    outcome = read_outcome(told)
    assert outcome is not None
    assert 0 < outcome.figures["hardware_share"] < 1
    seconds = sum(event["seconds"] for event in told_speed)
    tokens = sum(event["tokens"] for event in told_speed)
    assert outcome.figures["train_tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)


class Normed(torch.nn.Module):
    """Draws, counts batches in its buffers, and runs out of memory where a batch has more rows than fit."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fits = torch.nn.BatchNorm1d(2), 2

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        if len(inputs) > self.fits:
            raise MemoryError
        random.random(), np.random.random()
        return type("Output", (), {"loss": (self.norm(inputs) * torch.rand(2)).sum()})


class Rows(list[int]):
    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


def test_a_trial_that_does_not_fit_is_made_on_fewer_rows_and_puts_everything_back() -> None:
    from training.drawing import Numbered

    model = Normed().eval()
    task = Task(
        **dict.fromkeys(("validation", "metrics", "rows_a_step", "checkpoints", "named_checkpoint", "events")),
        model=model,  # type: ignore[arg-type]
        train=Rows(),  # type: ignore[arg-type]
        collate=lambda rows: {"inputs": torch.ones(len(rows), 2), "labels": torch.zeros(len(rows))},
        loss=None,
        training={"extra": {}},
        compute={"mixed_precision": "no"},
    )
    kept = [tensor.clone() for tensor in model.state_dict().values()]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    trial = estimate._trial(task, Numbered(range(9), [0]))
    assert trial is not None and trial.rows == 2
    assert all(torch.equal(*pair) for pair in zip(kept, model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert not model.training and all(weight.grad is None for weight in model.parameters())
    model.fits = 0
    assert estimate._trial(task, Numbered(range(9), [0])) is None


def test_too_little_memory_names_the_rows_that_would_fit() -> None:
    said = SAID | {"memory_mb": 1000, "memory_a_row_mb": 50.0}
    assert estimate.too_little(said, 1_000_000_000) is None and estimate.too_little(said, None) is None
    warning = estimate.too_little(said, 840_000_000)
    assert warning is not None and "training.per_device_train_batch_size 4 would fit" in warning
    assert "not even single rows would fit" in str(estimate.too_little(said, 500_000_000))
    assert "about 1.0 GB of memory a process (of 840 MB), 2.0 MB of disk" in estimate.sentence(said, 840_000_000)


@pytest.mark.parametrize(
    ("mount", "files"),
    [
        ("", {"memory.max": "700000000", "memory.current": "300000000", "memory.stat": "inactive_file 100000000\n"}),
        (
            "memory",
            {
                "memory.limit_in_bytes": "700000000",
                "memory.usage_in_bytes": "300000000",
                "memory.stat": "total_inactive_file 100000000\n",
            },
        ),
    ],
)
def test_a_control_group_limits_memory_and_its_processes_share_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, files: dict[str, str]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  10000000 kB\n")
    (tmp_path / "self/cgroup").write_text(f"4:{mount}:/outer/inner\n")
    inner = tmp_path / "groups" / mount / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr(room, "PROC", tmp_path)
    monkeypatch.setattr(room, "CGROUPS", tmp_path / "groups")
    assert room.memory_left(2) == 10_000_000 * 1024 // 2
    for name, content in files.items():
        (inner.parent / name).write_text(content)
    assert room.memory_left(1) == 500_000_000
    assert room.memory_left(2) == 250_000_000


def test_the_expected_end_is_told_once_as_a_time_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "FIRST_STEPS_S", 0.0)
    monkeypatch.setattr(speed, "SOON_S", 0.0)
    said = Events(tmp_path / "events.jsonl")
    end = speed.ExpectedEnd(said)
    for step in range(1, 5):
        end.stepped(step, 4)
    said.close()
    (note,) = (event["message"] for event in events(tmp_path, "note"))
    assert re.fullmatch(r"0 minutes to go at this speed: it ends about \d\d:\d\d", note)
