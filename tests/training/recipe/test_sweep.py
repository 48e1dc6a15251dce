"""The mistakes of a sweep, all at once and before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.raised import raised_problems
from training.problems import UserError
from training.recipe import load_sweep, parse_sweep

RECIPE: dict[str, Any] = {
    "name": "test",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
    "model": {"source": "hub", "path": "me/model"},
    "evaluation": {"metrics": ["accuracy", "log_loss"]},
}
RATE = {"training.learning_rate": {"log": [1e-5, 1e-3]}}


def problems(sweep: Any, recipe: dict[str, Any] = RECIPE) -> dict[str, str]:
    return {problem.where: problem.message for problem in raised_problems(parse_sweep, recipe, sweep)}


def test_a_sweep_takes_its_metric_direction_and_number_of_trials_from_the_recipe() -> None:
    _, sweep = parse_sweep(RECIPE, {"space": RATE})
    assert (sweep.metric, sweep.direction, sweep.trials) == ("accuracy", "maximize", 20)
    _, sweep = parse_sweep(RECIPE, {"space": RATE}, {"training.metric_for_best_model": "log_loss"}, trials=3)
    assert (sweep.metric, sweep.direction, sweep.trials) == ("log_loss", "minimize", 3)
    grid = {"training.num_train_epochs": {"range": [1, 3]}, "training.weight_decay": {"choice": [0.0, 0.1]}}
    assert parse_sweep(RECIPE, {"space": grid, "sampler": "grid"})[1].trials == 6


FAST = {"fast": {"training.learning_rate": 1e-3, "training.num_train_epochs": 1}}


def test_variants_have_the_same_seeds_as_the_recipe_and_all_settings_a_turn_with_each() -> None:
    base, sweep = parse_sweep(RECIPE, {"variants": {**FAST, "long": {"training.num_train_epochs": 9}}})
    assert sweep.seeds == [42, 43, 44, 45, 46] and sweep.trials == 15 and base.training.seed == 42
    assert sweep.settings_of_trial(1) == {"training.seed": 42}
    assert sweep.settings_of_trial(5) == {**FAST["fast"], "training.seed": 43}
    assert sweep.fields == ["training.learning_rate", "training.num_train_epochs", "training.seed"]
    again = parse_sweep(RECIPE, sweep.model_dump(exclude_unset=True))[1]  # as the flow reads it
    assert again.model_dump() == sweep.model_dump()
    assert parse_sweep(RECIPE, {"variants": FAST, "seeds": [7, 8, 9]})[1].trials == 6


def test_variants_may_have_rows_without_labels_on_which_no_trial_is_judged() -> None:
    taught = {"training.teacher": {"source": "registry", "path": "big@champion"}}
    variants = {"teacher": taught, "more": {**taught, "data.unlabelled": "more.csv"}}
    assert parse_sweep(RECIPE, {"variants": variants})[1].settings_of_trial(3)["data.unlabelled"] == "more.csv"
    message = problems({"variants": {"more": {"data.unlabelled": "more.csv"}}})["sweep.variants.more"]
    assert message.startswith("data.unlabelled: 'more.csv' are rows from which only a teacher's outputs teach")


@pytest.mark.parametrize(
    ("sweep", "where", "message"),
    [
        ({}, "sweep.space", "is missing: name the fields to search, or sweep.variants to compare with the recipe."),
        ({"variants": FAST, "space": RATE}, "sweep.space", "does not go with sweep.variants: leave one of them out."),
        ({"space": RATE, "seeds": [1, 2, 3]}, "sweep.seeds", "has no effect without sweep.variants: leave it out."),
        ({"variants": FAST, "seeds": [1, 2]}, "sweep.seeds", "[1, 2] has 2 entries: it takes at least 3."),
        ({"variants": FAST, "seeds": [1, 2, 2]}, "sweep.seeds", "[1, 2, 2] has a seed twice: each must be another."),
        (
            {"variants": FAST, "pruner": "asha"},
            "sweep.pruner",
            "has no effect with sweep.variants, which are all trained to the end: leave it out.",
        ),
        (
            {"variants": FAST, "trials": 4},
            "sweep.trials",
            "4 is not the number of trials of these settings and seeds, 10: leave it out.",
        ),
        (
            {"variants": {"recipe": FAST["fast"]}},
            "sweep.variants.recipe",
            "is the name of the recipe's own settings: choose another.",
        ),
        (
            {"variants": {"other": {"training.seed": 1}}},
            "sweep.variants.other",
            "replaces training.seed, which sweep.seeds sets: leave it out.",
        ),
        (
            {"variants": {"less": {"data.limit": 10}}},
            "sweep.variants.less",
            "replaces data.limit: trials are judged on the same rows. Replace fields of training, model, tokens or "
            "options.",
        ),
    ],
)
def test_a_mistake_of_variants_names_its_field(sweep: dict[str, Any], where: str, message: str) -> None:
    assert problems(sweep)[where] == message


def test_a_field_of_a_variant_that_does_not_exist_is_named() -> None:
    found = problems({"variants": {"typo": {"training.learning_rat": 1e-3}}})["sweep.variants.typo"]
    assert found.startswith("training.learning_rat") and found.endswith("Did you mean 'learning_rate'?")


def test_all_mistakes_of_recipe_and_sweep_are_reported_together() -> None:
    found = problems(
        {
            "space": {
                "training.learning_rat": {"log": [1e-5, 1e-3]},
                "training.num_train_epochs": {"range": [3, 1]},
                "training.weight_decay": {"log": [0.0, 0.1]},
                "training.optim": {"choice": ["adamw_torch", "adamw"]},
                "training.seed": {"choice": [1], "range": [1, 2]},
                "training.warmup_steps": {"log": [1, 10], "step": 2},
                "data.limit": {"choice": [10]},
                "training.max_grad_norm": {"choice": [1.0], "when": {"training.optim": "sgd"}},
            },
            "metric": "f2",
            "sampler": {"name": "tpe", "n_startup_trial": 3},
            "pruner": {"name": "asha", "reduction_factor": 1},
        }
    )
    assert found["sweep.space.training.learning_rat"].endswith("Did you mean 'learning_rate'?")
    assert found["sweep.space.training.num_train_epochs"] == (
        "[3, 1] is empty: the first bound must be below the second."
    )
    assert "no logarithm" in found["sweep.space.training.weight_decay"]
    assert found["sweep.space.training.optim"].startswith("with 'adamw': 'adamw' is unknown: choose from ")
    assert found["sweep.space.training.seed"] == "has range and choice of log, range and choice: give exactly one."
    assert "step without a range" in found["sweep.space.training.warmup_steps"]
    assert "trials are judged on the same rows" in found["sweep.space.data.limit"]
    assert "'sgd', which is none of its choices" in found["sweep.space.training.max_grad_norm"]
    assert found["sweep.metric"].startswith("'f2' is not computed: choose from evaluation.metrics, accuracy, log_loss.")
    assert found["sweep.sampler.n_startup_trial"].endswith("Did you mean 'n_startup_trials'?")
    assert found["sweep.pruner.reduction_factor"] == "1 is out of range: it must be at least 2."


@pytest.mark.parametrize(
    ("sweep", "where", "message"),
    [
        (None, "sweep", "is missing: write `sweep: {space: "),
        ({"space": {}}, "sweep.space", "{} has 0 entries: it takes at least 1."),
        ({"spaces": RATE}, "sweep.spaces", "no such field. Did you mean 'space'?"),
        (
            {"space": RATE, "sampler": "tpee"},
            "sweep.sampler",
            "'tpee' is unknown: choose from tpe, random, grid, cmaes.",
        ),
        ({"space": RATE, "sampler": "grid"}, "sweep.space.training.learning_rate", "has no end of values"),
        ({"space": RATE, "trials": 0}, "sweep.trials", "0 is out of range: it must be at least 1."),
        (
            {"space": {"training.learning_rate": {"logg": [1, 2]}}},
            "sweep.space.training.learning_rate.logg",
            "no such field. Did you mean 'log'?",
        ),
    ],
)
def test_a_mistake_names_its_field_and_the_next_step(sweep: Any, where: str, message: str) -> None:
    assert problems(sweep)[where].startswith(message)


def test_a_field_with_a_condition_is_checked_where_its_condition_holds() -> None:
    space = {
        "training.optim": {"choice": ["sgd", "adamw_torch"]},
        "training.extra": {"choice": [{"adam_beta2": 0.9}], "when": {"training.optim": "adamw_torch"}},
        "training.lr_scheduler_type": {"choice": ["linear", "cosine_with_min_lr"]},
        "training.extra.lr_scheduler_kwargs": {
            "choice": [{"min_lr": 1e-6}],
            "when": {"training.lr_scheduler_type": "cosine_with_min_lr"},
        },
    }
    parse_sweep({**RECIPE, "training": {"optim": "sgd"}}, {"space": space})
    wrong = {**space, "training.extra": {"choice": [{"adam_beta": 0.9}], "when": {"training.optim": "adamw_torch"}}}
    assert "sweep.space.training.extra" in problems({"space": wrong})


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ({"sampler": {"name": "tpe", "group": True}}, "sweep.sampler.group"),
        ({"sampler": {"name": "tpe", "n_ei_candidates": 0}}, "sweep.sampler.n_ei_candidates"),
        ({"sampler": {"name": "cmaes", "lr_adapt": True, "with_margin": True}}, "sweep.sampler.lr_adapt"),
        ({"pruner": {"name": "percentile", "percentile": 200.0}}, "sweep.pruner.percentile"),
        ({"pruner": {"name": "median", "n_min_trials": 0}}, "sweep.pruner.n_min_trials"),
    ],
)
def test_settings_that_optuna_refuses_are_refused_before_anything_runs(setting: dict[str, Any], where: str) -> None:
    assert where in problems({"space": RATE, **setting})


def test_the_number_of_trials_of_a_command_or_a_deployment_is_checked_like_that_of_the_file() -> None:
    for wrong in (0, -3, "6"):
        with pytest.raises(UserError, match=r"sweep\.trials"):
            parse_sweep(RECIPE, {"space": RATE}, trials=wrong)  # type: ignore[arg-type]


def test_a_metric_of_the_users_own_is_named_by_its_figure_and_needs_a_direction() -> None:
    own = {**RECIPE, "evaluation": {"metrics": ["tests.training.own:Share"]}}
    assert "figures of its own names" in problems({"space": RATE}, own)["sweep.metric"]
    assert "maximize or minimize" in problems({"space": RATE, "metric": "share"}, own)["sweep.direction"]


def test_a_direction_in_which_a_known_metric_gets_worse_is_refused() -> None:
    found = problems({"space": RATE, "direction": "minimize"})["sweep.direction"]
    assert found == "minimize would release the worst model by accuracy: leave it out, or set maximize."
    assert parse_sweep(RECIPE, {"space": RATE, "direction": "maximize"})[1].direction == "maximize"


def test_a_pruner_needs_evaluations_during_training() -> None:
    training = {"eval_strategy": "no", "load_best_model_at_end": False}
    found = problems({"space": RATE, "pruner": "asha"}, {**RECIPE, "training": training})
    assert list(found) == ["sweep.pruner"] and "set that to epoch" in found["sweep.pruner"]


def test_a_file_without_a_sweep_names_its_entries(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    entry = {"name": "mine", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": RECIPE}}
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    with pytest.raises(UserError, match=r"no entry with `entrypoint: flows\.sweep:sweep`; entries: mine"):
        load_sweep(file)
