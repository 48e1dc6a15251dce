"""The comparison of a sweep's variants with its recipe over several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tasks.stages.compare_seeds import describe_gain
from tests.arrow import write_arrow
from tests.training import programs_here, tiny
from training.evaluation.scores import VariantGain
from training.programs import compare_seeds as program

ROWS, SEEDS = 400, 4
TRUE = np.arange(ROWS) % 2


def run(
    home: Path, rights: dict[str, list[np.ndarray]], groups: np.ndarray | None = None, **more: Any
) -> list[VariantGain]:
    """The gains from whether each row is right, of each setting by seed."""
    (home / "data").mkdir(parents=True)
    (home / "data/labels.json").write_text(json.dumps(["neg", "pos"]))
    if groups is not None:
        write_arrow(home / "data/validation.groups.arrow", pa.table({"group": groups}))
    inputs, trials = {"data": home / "data"}, dict[str, list[str]]()
    for name, of_setting in rights.items():
        for right in of_setting:
            trial = f"trial_{len(inputs)}"
            trials.setdefault(name, []).append(trial)
            inputs[trial] = home / trial
            inputs[trial].mkdir()
            logits = np.eye(2, dtype=np.float32)[np.where(right, TRUE, 1 - TRUE)] * 2
            tiny.write_predictions(inputs[trial] / "validation.parquet", TRUE, logits, np.full(ROWS, 4, np.int32))
    settings = {"split": "validation", "metrics": ["accuracy"], "figure": "accuracy", "less_is_better": False} | more
    found = programs_here.run(program, home / "job", inputs, task="sequence-classification", trials=trials, **settings)
    assert json.loads((home / "job/output/seeds.json").read_text()) == found
    return [VariantGain.model_validate(one) for one in found]


def drawn(random: np.random.Generator, shares: list[float]) -> list[np.ndarray]:
    return [random.random(ROWS) < share for share in shares]


def test_settings_that_gain_with_every_seed_are_told_from_those_that_change_what_a_seed_does(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    recipe = drawn(random, [0.68, 0.74, 0.70, 0.66])
    better = [right | (random.random(ROWS) < 0.5) for right in recipe]
    worse = [right & (random.random(ROWS) < 0.7) for right in recipe]
    alike = [np.where(random.random(ROWS) < 0.01, ~right, right) for right in recipe]
    lucky = [recipe[place] for place in (1, 0, 3, 2)]
    given = {"recipe": recipe, "better": better, "worse": worse, "alike": alike, "lucky": lucky}
    found = {one.variant: one for one in run(tmp_path / "rows", given)}
    assert {name: one.answer for name, one in found.items()} == {
        "better": "variant",
        "worse": "variant",
        "alike": "seed",
        "lucky": "unknown",
    }
    one = found["better"]
    assert one.recipe_values == [right.mean() for right in recipe] and one.values == [right.mean() for right in better]
    assert one.gain == pytest.approx(np.mean(one.values) - np.mean(one.recipe_values)) and one.low < one.gain < one.high
    sentence = describe_gain(one)
    assert sentence.startswith("better is better than the recipe: it is the settings, not the seed. accuracy 0.")
    assert "over 4 seeds and 400 rows." in sentence
    assert describe_gain(found["alike"]).startswith("alike changes no more than another seed does, 0.0")
    assert describe_gain(found["lucky"]).startswith("lucky: 4 seeds are too few to say")
    losses = run(tmp_path / "losses", {"recipe": recipe, "better": better}, less_is_better=True)
    assert losses[0].gain == pytest.approx(-one.gain) and losses[0].answer == "variant"


def test_rows_in_groups_tell_less(tmp_path: Path) -> None:
    random, groups = np.random.default_rng(3), np.arange(ROWS) // 20
    right = (random.random(20) < 0.6)[groups]
    recipe, better = [right] * SEEDS, [right | (random.random(20) < 0.3)[groups]] * SEEDS
    alone, grouped = (
        run(tmp_path / str(number), {"recipe": recipe, "better": better}, of_rows)[0]
        for number, of_rows in enumerate((None, groups))
    )
    assert grouped.high - grouped.low > 3 * (alone.high - alone.low) and grouped.groups == 20
    assert "400 rows in 20 groups." in describe_gain(grouped)
