"""Optimizers that are more than a formula: what is exported is what they are for, and resuming is exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training import tiny
from tests.training.forks import assert_resumes, assert_same, finish

SCHEDULE_FREE = {
    "optim": "schedule_free_adamw",
    "lr_scheduler_type": "constant",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "num_train_epochs": 1,
    "checkpoint_interval_s": 0.0001,
}


@pytest.mark.slow
def test_schedule_free_exports_its_averaged_weights_and_does_so_after_kills(world: Path, tmp_path: Path) -> None:
    whole = tiny.fit_job(world, tmp_path / "whole", **SCHEDULE_FREE)
    assert finish(whole).state == "finished"
    exported = load_file(whole / "output/model/model.safetensors")["classifier.weight"]
    last = whole / "checkpoints/checkpoint-19"
    trained = load_file(last / "model.safetensors")["classifier.weight"]
    states = torch.load(last / "optimizer.pt", weights_only=True)["state"].values()
    (z,) = (state["z"] for state in states if state["z"].shape == trained.shape)
    averaged = trained.lerp(z, 1 - 1 / 0.9)  # y = 0.9 x + 0.1 z
    assert torch.allclose(exported, averaged) and not torch.allclose(exported, trained)

    job_dir = tiny.fit_job(world, tmp_path / "killed", **SCHEDULE_FREE)
    assert_resumes(job_dir, whole, after=3)
    shutil.rmtree(job_dir / "output")  # as if killed between the last step and the export
    assert finish(job_dir).state == "finished"
    assert_same(job_dir, whole)
