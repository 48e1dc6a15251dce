"""Reward models: TRL's loss and gradients, margins, exact training, the reward of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import GPT2ForSequenceClassification

from tests import fork_server
from tests import task_types as tiny_tasks
from tests.arrow import read_arrow
from tests.training.data.test_forms import json_lines, run
from tests.training.forks import (
    assert_resumes,
    assert_same_losses,
    curve,
    finish,
)
from tests.training.task_types import preference_model
from tests.training.task_types.test_preference import FIGURES, record
from tests.training.task_types.test_sft import BOT, USER, words
from training.batching.batches import TokenRows
from training.engine.predictor import Predictor
from training.models.loading import load_tokenizer
from training.recipe import Training
from training.task_types.reward_modeling import RewardModeling
from training.tokenization.encoder import load_fast_encoder

KIND = RewardModeling()


def mean_loss(task: RewardModeling, rows: TokenRows, folder: Path, chosen: list[int]) -> tuple[Any, Any, int]:
    """The loss of some pairs, the model, and the number of targets."""
    model = preference_model.model(0.0, GPT2ForSequenceClassification)
    batch = task.collator(load_tokenizer(folder), 1)([rows[number] for number in chosen])
    loss = task.loss(Training(), [], rows, outside=False)
    assert loss is not None
    return loss(task.forward(model, batch)["logits"], batch["labels"]), model, task.target_count(batch)


def test_the_loss_and_its_gradients_are_those_of_trl_and_every_pair_weighs_the_same(tmp_path: Path) -> None:
    task, folder = RewardModeling(preference_model.REWARD), preference_model.tokenizer(tmp_path)
    pairs = record(preference_model.PAIRS).append_column("margin", pa.array(preference_model.MARGINS))
    rows = TokenRows(pa.Table.from_batches([task.features(load_fast_encoder(folder, 32), pairs).rows]))
    found, model, _ = mean_loss(task, rows, folder, [0, 1, 2, 3])
    found.backward()
    expected, gradients = FIGURES["losses"]["reward"], preference_model.gradients(model)
    assert found.item() == pytest.approx(expected["loss"], abs=1e-5)
    for name, values in expected["gradients"].items():
        assert gradients[name] == pytest.approx(values, abs=1e-5), name
    parts = [mean_loss(task, rows, folder, part) for part in ([0], [1, 3], [2])]
    assert sum(loss.item() * pairs for loss, _, pairs in parts) / 4 == pytest.approx(found.item(), rel=1e-6)


def test_margins_are_read_if_the_recipe_names_their_column(tmp_path: Path) -> None:
    rows = [{"prompt": "b", "chosen": "c", "rejected": "d", "lead": lead} for lead in (1, 2.5)]
    for name, columns in (("without", {}), ("with", {"margin": "lead"})):
        run(KIND, json_lines(tmp_path / "rows.jsonl", rows), tmp_path / name, columns=columns)
    stored = {name: read_arrow(tmp_path / f"{name}/train.arrow") for name in ("without", "with")}
    assert "margin" not in stored["without"].column_names
    assert stored["with"]["margin"].to_pylist() == [1.0, 2.5]


def test_a_text_or_a_conversation_on_request_has_the_tokens_of_its_pair(tmp_path: Path) -> None:
    encoder = load_fast_encoder(words(tmp_path / "it"), 64)
    for pair, alone in (
        ({"prompt": "b c", "chosen": " d", "rejected": " e"}, "b c d"),
        ({"prompt": [USER], "chosen": [BOT], "rejected": "e"}, [USER, BOT]),
    ):
        (stored,) = KIND.features(encoder, record([pair])).rows.to_pylist()
        (given,) = KIND.features(encoder, record([{"prompt": alone}])).rows.to_pylist()
        assert given["input_ids"] == stored["input_ids"][: stored["chosen_length"]]
        assert given["chosen_length"] == stored["chosen_length"] and given["rejected_tokens"] == 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fork_server.call(tiny_tasks.make_world, "reward-modeling", tmp_path_factory.mktemp("pairs") / "world"))


def fit_job(world: Path, job_dir: Path, processes: int = 1) -> Path:
    training = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "checkpoint_interval_s": 0.05}
    training |= {"per_device_train_batch_size": 10 // processes, "logging_steps": 1}
    compute = {"strategy": "ddp", "num_processes": processes}
    return tiny_tasks.fit_job("reward-modeling", world, job_dir, compute, **training)


@pytest.mark.slow
def test_killed_it_ends_with_the_same_bytes_and_two_processes_learn_what_one_learns(
    pairs: Path, tmp_path: Path
) -> None:
    whole, killed, two = fit_job(pairs, tmp_path / "whole"), fit_job(pairs, tmp_path / "killed"), tmp_path / "two"
    assert finish(whole).state == finish(fit_job(pairs, two, 2)).state == "finished"
    assert_resumes(killed, whole, after=3)
    assert_same_losses(whole, two)
    one = curve(whole)
    assert one[max(one)]["eval_accuracy"] > 0.6
    _check_requests(whole / "output/model")


def _check_requests(folder: Path) -> None:
    """A text on request gets the reward that it has as the chosen one of a pair."""
    row = {"prompt": "cat dog", "chosen": " Katze Hund", "rejected": " rot"}
    predictor = Predictor(KIND, folder, folder, 32)
    ((pair,), (alone,)) = (predictor.predict(record([one])) for one in (row, {"prompt": "cat dog Katze Hund"}))
    assert alone["rejected_reward"] is None and pair["rejected_reward"] is not None
    assert alone["reward"] == pytest.approx(pair["reward"], abs=1e-5)
    assert KIND.same_prediction(pair, pair, 1e-4) and KIND.same_records([alone], [pair], 1e-4)
    assert not KIND.same_records([{**alone, "reward": float("nan")}], [pair], 1e-4)
    assert not KIND.same_prediction(pair, pair | {"reward": pair["reward"] + 1}, 1e-4)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2ForSequenceClassification"]
