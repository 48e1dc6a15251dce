"""Every field of TrainingArguments is a recipe's own, accepted and seen to act, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs import reference_tables
from tests.fork_server import call
from tests.training import tiny
from tests.training.forks import assert_same, checkpoints_written, curve, events, finish, kill_when, weights
from training.problems import UserError
from training.recipe import Training, parse
from training.recipe.extra_arguments import ACCEPTED, arguments, set_by_project
from training.recipe.tables.optimizers import OPTIMIZERS, REFUSED

ROOT = Path(__file__).parents[3]
PLAIN: dict[str, Any] = {
    "name": "reviews",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "reviews", "text": ["text"], "label": "label"},
    "model": {"source": "folder", "path": "models/small"},
}


def problems(**training: Any) -> dict[str, str]:
    with pytest.raises(UserError) as raised:
        parse({**PLAIN, "training": training})
    return {problem.where.removeprefix("training."): problem.message for problem in raised.value.problems}


def test_every_field_is_a_recipes_own_or_accepted_or_refused_with_a_reason() -> None:
    for name in arguments():
        places = [name in Training.model_fields, name in ACCEPTED, set_by_project(name) is not None]
        assert places.count(True) == 1, name
        if reason := set_by_project(name):
            assert problems(extra={name: None}) == {f"extra.{name}": f"cannot be set in a recipe: {reason}."}
    assert ACCEPTED.keys() <= arguments().keys()


def test_the_table_of_the_reference_page_has_every_field_of_the_installed_transformers() -> None:
    rows = [row.split(" | ") for row in reference_tables.training_arguments().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in arguments()]
    assert not [row for row in rows if row[2].strip(" |") == ""]


def test_every_optimizer_of_the_installed_transformers_is_offered_or_refused_with_a_reason() -> None:
    from transformers.training_args import OptimizerNames

    names = [optimizer.value for optimizer in OptimizerNames]
    offered = set(Training.model_json_schema()["properties"]["optim"]["enum"])
    assert offered == OPTIMIZERS.keys() and not offered & REFUSED.keys()
    assert offered | REFUSED.keys() == set(names)
    assert problems(optim="lomo")["optim"].startswith("'lomo' is refused: it steps inside the backward pass")


@pytest.mark.parametrize(
    ("training", "where", "message"),
    [
        ({"optim": "sgd", "extra": {"adam_beta1": 0.8}}, "extra.adam_beta1",
         "does nothing with `optim: sgd`: leave it out."),
        ({"optim": "sgd", "extra": {"optim_args": "momentun=0.9"}}, "extra.optim_args",
         "'momentun' does nothing with `optim: sgd`: it takes momentum, dampening, nesterov. Did you mean 'momentum'?"),
        ({"optim": "sgd", "extra": {"optim_args": "weight_decay=1"}}, "extra.optim_args",
         "weight_decay has its own field: set training.weight_decay."),
        ({"extra": {"optim_args": "momentum=0.9"}}, "extra.optim_args",
         "'momentum' does nothing with `optim: adamw_torch_fused`: it takes none."),
        ({"optim": "sgd", "extra": {"optim_args": "fast"}}, "extra.optim_args",
         "'fast' is not written as name=value,name=value."),
        ({"extra": {"activation_checkpointing_kwargs": {"every_n_layers": 2}}}, "extra.activation_checkpointing_kwargs",
         "does nothing without training.extra.activation_checkpointing: set that too."),
        ({"extra": {"dataloader_prefetch_factor": 2}}, "extra.dataloader_prefetch_factor",
         "does nothing without training.extra.dataloader_num_workers: set that too."),
        ({"focal_gamma": 1.0}, "focal_gamma", "1 is for `loss: focal` only; with cross_entropy, set it to null."),
        ({"loss": "focal", "label_smoothing_factor": 0.1}, "label_smoothing_factor",
         "0.1 is for `loss: cross_entropy` only; with focal, set it to 0."),
        ({"loss": "focl"}, "loss", "'focl' is unknown: choose from cross_entropy, focal, or name your function "
         "as module:function. Did you mean 'focal'?"),
        ({"class_weights": "balance"}, "class_weights",
         "'balance' is unknown: choose from balanced, weights by the labels' names. Did you mean 'balanced'?"),
        ({"class_weights": {"a": 0.0}}, "class_weights.a", "0.0 is out of range: it must be above 0."),
        ({"callbacks": ["mine"]}, "callbacks[0]", "'mine' is not the name of Python code: write it as module:name."),
        ({"report_to": ["comet"]}, "report_to[0]", "'comet' is unknown: choose from tensorboard, wandb."),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(training: dict[str, Any], where: str, message: str) -> None:
    assert problems(**training) == {where: message}


def test_weights_for_labels_that_the_recipe_does_not_name_are_reported() -> None:
    values = {**PLAIN, "data": {**PLAIN["data"], "label_names": ["bad", "good"]}}
    with pytest.raises(UserError, match=r"is no label: data.label_names has bad, good. Did you mean 'good'\?"):
        parse({**values, "training": {"class_weights": {"goo": 2.0}}})


def test_a_setting_that_needs_a_missing_package_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    needed = {name: optimizer.package for name, optimizer in OPTIMIZERS.items() if optimizer.package}
    for name, package in needed.items():
        assert (
            problems(optim=name)["optim"] == f"{name!r} needs a package that is not installed: pip install {package}."
        )
    assert problems(report_to=["wandb"])["report_to[0]"].endswith("pip install wandb.")


# What is accepted acts


NUMBERS: dict[str, Any] = {
    "neftune_noise_alpha": 5.0,
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "dataloader_num_workers": 1,
    "dataloader_prefetch_factor": 3,
    "dataloader_multiprocessing_context": "fork",
    "dataloader_pin_memory": False,
    "torch_empty_cache_steps": 2,
    "eval_on_start": True,
    "eval_delay": 2,
    "logging_strategy": "epoch",
    "logging_first_step": True,
    "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "non_padding",
    "full_determinism": True,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "use_cache": True,
    "tf32": False,
}
"""All settings that can be combined on a CPU with one process."""
TOGETHER: dict[str, Any] = {"lr_scheduler_type": "cosine_with_restarts", "extra": NUMBERS}


@pytest.fixture(scope="module")
def together(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "together", **TOGETHER)
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    return job_dir


@pytest.mark.slow
def test_all_settings_combined_show_in_the_curve_and_the_model_of_the_run(together: Path) -> None:
    points = curve(together)
    assert list(points) == [0, 1, 19, 38, 57]  # eval_on_start, logging_first_step, logging_strategy
    assert "eval_loss" in points[0] and "eval_loss" not in points[19] and "eval_loss" in points[38]  # eval_delay
    assert 0 < points[1]["num_input_tokens_seen"] < points[57]["num_input_tokens_seen"]
    assert '"use_cache": true' in (together / "output/model/config.json").read_text()


@pytest.mark.slow
def test_all_settings_combined_end_with_the_same_bytes_after_kills(world: Path, together: Path, tmp_path: Path) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "killed", **TOGETHER, checkpoint_interval_s=0.02)
    kills = sum(kill_when(job_dir, lambda count=count: checkpoints_written(job_dir) >= count) for count in (1, 8))
    assert finish(job_dir).state == "finished"
    assert kills >= 1
    assert_same(job_dir, together)


SAME_WEIGHTS = {
    *("activation_checkpointing", "activation_checkpointing_kwargs", "dataloader_num_workers"),
    "full_determinism",
}
OTHER_WEIGHTS = {"neftune_noise_alpha", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_kwargs"}


@pytest.mark.slow
def test_those_that_are_about_the_weights_change_them_and_those_about_memory_or_time_do_not(
    world: Path, tmp_path: Path
) -> None:
    def after_five_steps(name: str, without: set[str]) -> str:
        extra = {field: value for field, value in NUMBERS.items() if field not in without}
        settings = {"max_steps": 5, "load_best_model_at_end": False, "eval_strategy": "no"}
        job_dir = tiny.fit_job(world, tmp_path / name, **TOGETHER | settings | {"extra": extra})
        assert finish(job_dir).state == "finished"
        return weights(job_dir)

    delay = {"eval_delay"}  # there is no evaluation
    whole = after_five_steps("whole", delay)
    quiet = {"dataloader_prefetch_factor", "dataloader_multiprocessing_context", *delay, *SAME_WEIGHTS}
    assert after_five_steps("without-those-about-memory", quiet) == whole
    others = [after_five_steps(f"without-{name}", {name, *quiet}) for name in sorted(OTHER_WEIGHTS)]
    assert len({whole, *others}) == 1 + len(OTHER_WEIGHTS)


def arrived(job_dir: str, names: list[str]) -> dict[str, Any]:
    """The values of the fields and of the settings that follow from them."""
    from training.engine.trainer import make_trainer

    task = tiny.task_of(Path(job_dir))
    trainer = make_trainer(task)
    trainer.create_optimizer()
    group = trainer.optimizer.param_groups[0]
    from transformers.utils import logging

    dynamo = trainer.accelerator.state.dynamo_plugin
    return {
        "args": {name: getattr(trainer.args, name) for name in names},
        "ddp": vars(trainer.accelerator.ddp_handler),
        "verbosity": logging.get_verbosity(),
        "momentum": group.get("momentum"),
        "compile": (dynamo.backend.value, dynamo.mode),
    }


def test_settings_without_effect_on_this_machine_reach_the_trainer(world: Path, tmp_path: Path) -> None:
    """With several processes, on a GPU, or after minutes of compiling."""
    extra = {
        "optim_args": "momentum=0.9",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "torch_compile_backend": "aot_eager",
        "torch_compile_mode": "reduce-overhead",
        "log_level": "info",
        "log_level_replica": "error",
        "ddp_find_unused_parameters": True,
        "ddp_bucket_cap_mb": 7,
        "ddp_broadcast_buffers": False,
        "ddp_static_graph": True,
    }
    job_dir = tiny.fit_job(world, tmp_path / "arrives", optim="sgd", extra=extra)
    found = call(arrived, str(job_dir), [*extra, "torch_compile"])
    assert found["args"] == {**extra, "torch_compile": True}
    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 7, "broadcast_buffers": False, "static_graph": True}
    assert ddp.items() <= found["ddp"].items()
    assert found["verbosity"] == 20
    assert found["momentum"] == 0.9
    assert found["compile"] == ("AOT_EAGER", "reduce-overhead")
    assert ACCEPTED.keys() == {*extra, *NUMBERS, "torch_compile"}


@pytest.mark.drill
def test_a_compiled_model_trains_and_warns_of_what_is_not_exact(world: Path, tmp_path: Path) -> None:
    extra = {"torch_compile": True, "torch_compile_backend": "eager"}
    job_dir = tiny.fit_job(world, tmp_path / "compiled", max_steps=2, extra=extra)
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    (warning,) = events(job_dir, "warning")
    assert warning["message"].startswith("torch_compile: a killed run resumes")


def test_settings_that_transformers_refuses_late_are_the_users_mistake(world: Path, tmp_path: Path) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "cycles", extra={"lr_scheduler_kwargs": {"num_cycles": 2}})
    failure = finish(job_dir).failure
    assert failure is not None and failure.kind == "user_error"
    assert failure.problems[0].where == "training.extra.lr_scheduler_kwargs"
