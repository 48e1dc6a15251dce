"""A training with kernels for GPUs, with stand-ins that a CPU can run, has the losses of one without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.task_types import build_world, recipe_of, write_fit_job, write_rows
from tests.training.forks import curve, finish
from tests.training.kernels import run_fit_with_kernels

LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 120, "max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A causal language model on packed rows; its world is in the folder of the rows."""
    home = tmp_path_factory.mktemp("packed")
    training = {"max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 4, "eval_strategy": "epoch"}
    values = {
        **recipe_of("causal-lm", write_rows("causal-lm", home / "rows"), **training),
        "model": {"source": "scratch", "config": LLAMA},
        "compute": {"num_processes": 1, "mixed_precision": "no"},
    }
    build_world(values, home)
    return values


def losses(recipe: dict[str, Any], job: Path, settings: dict[str, Any], **training: Any) -> dict[str, list[float]]:
    """The training and validation losses of a training with these settings."""
    values = {**recipe, "training": recipe["training"] | training}
    write_fit_job(values, Path(recipe["data"]["path"]).parent, job, **settings)
    outcome = finish(job, program=run_fit_with_kernels)
    assert outcome.failure is None, outcome.failure
    points = curve(job).values()
    return {name: [point[name] for point in points if name in point] for name in ("train_loss", "eval_loss")}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trainer", "accelerate"])
def test_the_losses_are_those_of_a_training_without_the_kernels(
    recipe: dict[str, Any], tmp_path: Path, engine: str
) -> None:
    expected = losses(recipe, tmp_path / "plain", {}, engine=engine)
    flash = losses(recipe, tmp_path / "flash", {"attn_implementation": "flash_attention_2"}, engine=engine)
    liger = losses(recipe, tmp_path / "liger", {}, engine=engine, use_liger_kernel=True)
    assert len(expected["train_loss"]) == 6 and expected["eval_loss"]
    for name, values in expected.items():
        assert flash[name] == pytest.approx(values, rel=1e-4)
        assert liger[name] == pytest.approx(values, rel=1e-4)
