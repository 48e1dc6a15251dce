"""The estimate before a training starts, and its expected end."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.forks import events
from training.batching.batches import LengthGroupedBatches
from training.engine import estimation, throughput
from training.engine.training_task import Task
from training.jobs import resources
from training.jobs.protocol import Events
from training.problems import UserError
from training.recipe import ResolvedCompute, Training
from training.recipe.rules.training_rules import improbable_rates

ESTIMATE = {"micro_batch_size": 8, "trainable": 10, "parameters": 10, "steps": 3, "tokens_per_epoch": 7, "disk_mb": 2}


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
    from training.batching.random_states import SeededBatch

    model = Normed().eval()
    task = Task(
        **dict.fromkeys(
            ("validation", "task_type", "metrics", "global_batch_size", "checkpoints", "named_checkpoint", "events")
        ),
        model=model,  # type: ignore[arg-type]
        train=Rows(),  # type: ignore[arg-type]
        collate=lambda rows: {"inputs": torch.ones(len(rows), 2), "labels": torch.zeros(len(rows))},
        loss=None,
        training=Training(),
        compute=ResolvedCompute(num_processes=1, mixed_precision="no"),
    )
    kept = [tensor.clone() for tensor in model.state_dict().values()]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    trial = estimation._run_trial(task, SeededBatch(range(9), [0]))
    assert trial is not None and trial.rows == 2
    assert all(torch.equal(*pair) for pair in zip(kept, model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert not model.training and all(weight.grad is None for weight in model.parameters())
    model.fits = 0
    assert estimation._run_trial(task, SeededBatch(range(9), [0])) is None


def test_too_little_memory_names_the_rows_that_would_fit() -> None:
    estimate = ESTIMATE | {"memory_mb": 1000, "memory_per_row_mb": 50.0}
    assert (
        estimation.memory_warning(estimate, 1_000_000_000) is None and estimation.memory_warning(estimate, None) is None
    )
    warning = estimation.memory_warning(estimate, 840_000_000)
    assert warning is not None and "training.per_device_train_batch_size 4 would fit" in warning
    assert "not even single rows would fit" in str(estimation.memory_warning(estimate, 500_000_000))
    untried = ESTIMATE | {"memory_mb": None, "memory_per_row_mb": 0.0}
    assert str(estimation.memory_warning(untried, 10**12)).startswith(
        "memory ran out when a single row was tried: lower to"
    )
    assert "about 1.0 GB of memory per process (of 840 MB), 2.0 MB of disk" in estimation.summary(estimate, 840_000_000)


@pytest.mark.parametrize(
    ("training", "where", "reason"),
    [
        ({"learning_rate": 2e5}, "training.learning_rate", "200000 is far above the rates at which adamw_torch_fused"),
        ({"learning_rate": 5.0, "optim": "adafactor"}, "training.learning_rate", "5 is far above"),
        ({"learning_rate": 500.0, "optim": "sgd"}, "training.learning_rate", "500 is far above the rates at which sgd"),
        ({"learning_rate": 0.1, "weight_decay": 10.0}, "training.weight_decay", "takes 100% of each weight away"),
    ],
)
def test_rates_at_which_no_model_learns_are_warned_of(training: dict[str, Any], where: str, reason: str) -> None:
    ((field, message),) = improbable_rates(Training(**training))
    assert field == where and reason in message


@pytest.mark.parametrize("training", [{}, {"learning_rate": 0.5}, {"learning_rate": 5.0, "optim": "sgd"}])
def test_unusual_rates_at_which_models_may_learn_are_not_warned_of(training: dict[str, Any]) -> None:
    assert not list(improbable_rates(Training(**training, weight_decay=0.05)))


def test_a_learning_rate_that_only_rises_is_warned_of() -> None:
    warning = estimation.warmup_warning(Training(warmup_steps=500, learning_rate=1e-3), 50)
    assert warning is not None and "the learning rate only rises, to 0.0001 of 0.001" in warning
    assert estimation.warmup_warning(Training(warmup_steps=50), 50)
    assert not any(estimation.warmup_warning(Training(warmup_steps=few), 50) for few in (0, 0.9, 49))


def test_an_engine_of_the_recipes_own_is_refused_no_disk(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoints and the model need about 1,000,000\.0 GB"):
        estimation.require_disk("trainer", tmp_path, 1e15)
    estimation.require_disk("my_engine:train", tmp_path, 1e15)


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
    monkeypatch.setattr(resources, "PROC", tmp_path)
    monkeypatch.setattr(resources, "CGROUPS", tmp_path / "groups")
    assert resources.memory_left(2) == 10_000_000 * 1024 // 2
    for name, content in files.items():
        (inner.parent / name).write_text(content)
    assert resources.memory_left(1) == 500_000_000
    assert resources.memory_left(2) == 250_000_000


def test_the_expected_end_is_reported_once_as_a_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "FIRST_STEPS_S", 0.0)
    monkeypatch.setattr(throughput, "SOON_S", 0.0)
    written = Events(tmp_path / "events.jsonl")
    batches = LengthGroupedBatches(np.ones(8, np.int32), 2, seed=0)
    reporter = throughput.Reporter(written, throughput.Speed(written, batches, (1.0, 1.0), 1.0), 4)
    for step in range(1, 5):
        reporter.report_step(step, 1.0)
    (note,) = (event["message"] for event in events(tmp_path, "note"))
    assert re.fullmatch(r"0 minutes to go at this speed: training ends about \d\d:\d\d", note)
