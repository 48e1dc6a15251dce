from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from tests.raised import Says, raised_problems
from training.data.file_systems import display_name
from training.problems import UserError
from training.recipe import Recipe, Training, load, parse, parse_set
from training.recipe.extra_arguments import arguments
from training.recipe.field_types import describe_field
from training.recipe.rules.slice_rules import named_groups
from training.recipe.tables.optimizers import OPTIMIZERS
from training.task_types import TASK_TYPES
from training.task_types import load as load_task

ROOT = Path(__file__).parents[3]

PLAIN: dict[str, Any] = {
    "name": "reviews",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "reviews", "text": ["text"], "label": "label"},
    "model": {"source": "folder", "path": "models/small"},
}


def changed(**overrides: Any) -> Recipe:
    """The plain recipe with overrides, `__` for the dot."""
    return parse(PLAIN, {name.replace("__", "."): value for name, value in overrides.items()})


def problems(values: Any = PLAIN, overrides: dict[str, Any] | None = None) -> dict[str, str]:
    """The message of each mistake by its field; every mistake is reported once."""
    with pytest.raises(UserError) as raised:
        parse(values, overrides or {})
    found = {problem.where: problem.message for problem in raised.value.problems}
    assert len(found) == len(raised.value.problems)
    assert {problem.kind for problem in raised.value.problems} == {"recipe"}
    return found


def deployment(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "deployment.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def file_problem(file: Path, entry: str | None = None) -> tuple[str, str]:
    (problem,) = raised_problems(load, file, entry=entry)
    return problem.where.replace(str(file), "FILE"), problem.message


# What a recipe is


def test_a_field_that_is_left_out_has_the_documented_default() -> None:
    recipe = parse(PLAIN)
    assert recipe.tokens.max_length == 128
    assert recipe.training.optim == "adamw_torch_fused"
    assert recipe.compute.model_dump() == {
        "strategy": "ddp",
        "offload": "no",
        "fsdp_reshard_after_forward": True,
        "fsdp_wrap": None,
        "deepspeed": {},
        "accelerate": None,
        "num_processes": "auto",
        "num_machines": 1,
        "cluster": None,
        "cluster_address": None,
        "mixed_precision": "auto",
        "stall_timeout_s": 1800.0,
    }
    assert recipe.evaluation.splits == ["validation"]
    assert recipe.release.registry is None


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse(PLAIN).training.seed = 1


def test_a_recipe_survives_being_written_and_read() -> None:
    recipe = changed(training__learning_rate=3e-5, release__gate={"minimum": {"accuracy": 0.7}})
    assert parse(recipe.model_dump(mode="json")) == recipe


def test_every_field_has_a_description() -> None:
    def undescribed(model: type[BaseModel]) -> list[str]:
        inner = [field.annotation for field in model.model_fields.values()]
        below = [task for task in inner if isinstance(task, type) and issubclass(task, BaseModel)]
        return [name for name in model.model_fields if not describe_field(model, name)] + [
            name for task in below for name in undescribed(task)
        ]

    assert undescribed(Recipe) == []


def test_training_fields_are_those_of_the_installed_transformers() -> None:
    fields = list(Training.model_fields)
    assert set(fields[: fields.index("loss")]) <= set(arguments())
    assert not set(fields[fields.index("loss") :]) & set(arguments())


def test_choices_of_scheduler_and_optimizer_are_those_of_the_installed_transformers() -> None:
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    fields = Training.model_fields
    assert set(get_args(fields["lr_scheduler_type"].annotation)) == {scheduler.value for scheduler in SchedulerType}
    assert set(OPTIMIZERS) <= {optimizer.value for optimizer in OptimizerNames}


@pytest.mark.parametrize("file", [str(file.relative_to(ROOT)) for file in (ROOT / "deployments").rglob("*.yaml")])
def test_the_recipes_that_come_along_are_right(file: str) -> None:
    assert load(ROOT / file).name == Path(file).stem


def test_a_hub_recipe_is_pointed_at_files_and_a_folder_by_overrides_alone() -> None:
    data = ["data.source=parquet", "data.path=d", "data.config=null", "data.text=[text]"]
    model = ["model.source=folder", "model.path=m"]
    recipe = load(ROOT / "deployments/sst2.yaml", parse_set(data + model))
    assert (recipe.data.source, recipe.data.text, recipe.model.source) == ("parquet", ["text"], "folder")


# Mistakes


def test_six_different_mistakes_give_six_messages() -> None:
    values = copy.deepcopy(PLAIN)
    values["trainig"] = {"seed": 1}
    values["data"]["text"] = "text"
    values["training"] = {"lr_scheduler_type": "cosin", "learning_rate": -1, "eval_strategy": "steps"}
    values["release"] = {"gate": {"minimum": {"acuracy": 0.5}}}
    assert problems(values) == {
        "trainig": "no such field. Did you mean 'training'?",
        "data.text": "'text' is of the wrong type: it takes a list. Write [text].",
        "training.lr_scheduler_type": (
            "'cosin' is unknown: choose from linear, cosine, cosine_with_restarts, polynomial, constant, "
            "constant_with_warmup, inverse_sqrt, reduce_lr_on_plateau, cosine_with_min_lr, "
            "cosine_warmup_with_min_lr, warmup_stable_decay, greedy. Did you mean 'cosine'?"
        ),
        "training.learning_rate": "-1 is out of range: it must be above 0.",
        "training.eval_steps": ("is missing: `eval_strategy: steps` needs the number of steps between evaluations."),
        "release.gate.minimum.acuracy": (
            "is not evaluated: choose from accuracy, or add it to evaluation.metrics. Did you mean 'accuracy'?"
        ),
    }


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("name", "My Reviews", "'My Reviews'…use lower-case letters, digits and '-', beginning with a letter or digit"),
        ("task", "ranking", f"'ranking' is unknown…{', '.join(TASK_TYPES)}…module:Class"),
        ("task", ["regression"], "['regression'] is of the wrong type: it takes text"),
        ("data.path", "", "is empty…text"),
        ("data.label", 3, "3 is of the wrong type…text. Put it in quotes"),
        ("data.text", ["a", "b", "c"], "['a', 'b', 'c'] has 3 entries…at most 2"),
        ("data.revision", "v2", "'v2' is for `source: hub` only; with csv, set it to null"),
        ("data.config", "sst2", "'sst2' is for `source: hub` only; with csv, set it to null"),
        ("data.label_names", ["a", "b", "a"], "'a' is listed twice…once"),
        ("model.path", None, "is missing: `source: folder` needs the folder of the model"),
        ("model.config", {"a": 1}, "is for `source: scratch`…folder…set it to null"),
        ("tokens.max_length", True, "true is of the wrong type…a whole number"),
        ("tokens.max_length", 64.0, "64.0 is of the wrong type…a whole number. Write 64."),
        ("training", 5, "5 is of the wrong type…a mapping of fields"),
        ("training.weight_decay", float("nan"), "nan is of the wrong type…a finite number"),
        ("training.num_train_epochs", 1e30, "1e+30 is out of range…at most 1,000,000"),
        ("training.max_steps", 10**30, f"{10**30} is out of range…at most 1,000,000,000"),
        ("training.max_steps", 0, "0 is out of range…at least 1, or -1 for as many as the epochs take"),
        ("training.warmup_steps", 10.5, "10.5 is out of range: whole steps, or below 1 the share of all steps"),
        ("training.max_length", 64, "no such field. Did you mean 'tokens.max_length'?"),
        ("training.optim", ["sgd"], "['sgd'] is unknown: choose from adamw_torch_fused"),
        ("training.adam_beta1", 0.8, "belongs to `extra`…training.extra.adam_beta1"),
        ("training.bf16", True, "cannot be set in a recipe…compute.mixed_precision"),
        ("training.metric_for_best_model", "eval_accuracy",
         "'eval_accuracy' is not evaluated: choose from accuracy, loss…evaluation.metrics. Did you mean 'accuracy'?"),
        ("training.greater_is_better", True, "true would keep the worst checkpoint by loss: leave it out"),
        ("training.lr_scheduler_type", "warmup_stable_decay",
         "warmup_stable_decay needs num_decay_steps: set training.extra.lr_scheduler_kwargs.num_decay_steps"),
        ("training.extra.adam_beta3", 1.0, "no such field of TrainingArguments. Did you mean 'adam_beta2'?"),
        ("training.extra.adam_beta2", "high", "'high' is of the wrong type…float"),
        ("training.extra.seed", 1, "has its own field: set training.seed"),
        ("training.extra.output_dir", "x", "cannot be set in a recipe…folder and the name of a run"),
        ("compute.num_processes", 0, "0 is out of range…at least 1"),
        ("compute.num_processes", 1.5, "1.5 is of the wrong type…a whole number"),
        ("compute.num_processes", "all", "'all' is unknown: choose from auto, a whole number"),
        ("evaluation.splits", [], "[] has 0 entries…at least 1"),
        ("release.gate.minimum.accuracy", 75, "75 is out of range…at most 1"),
        ("release.gate.split", "test", "'test' is not evaluated: choose from validation, or add it there"),
        ("release.minimum", {}, "no such field. Did you mean 'release.gate.minimum'?"),
        ("release.champion", "latest", "'latest' is reserved by MLflow…choose another, such as champion"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_value_and_what_is_allowed(where: str, value: Any, message: str) -> None:
    assert problems(overrides={where: value}) == {where: Says(message)}


def test_a_metric_that_is_not_computed_while_training_cannot_choose_the_best_model() -> None:
    seq2seq = {
        **{name: PLAIN[name] for name in ("name", "model")},
        "task": "seq2seq",
        "data": {"source": "csv", "path": "rows"},
        "evaluation": {"metrics": ["rougeL"]},
        "training": {"metric_for_best_model": "rougeL"},
    }
    parse(seq2seq)
    (unavailable,) = problems({**seq2seq, "options": {"generate_while_training": False}}).items()
    assert unavailable == (
        "training.metric_for_best_model",
        "'rougeL' is not computed while training (options.generate_while_training is false): set that to true, or set "
        "this to null, for the loss.",
    )
    (shared,) = problems({**seq2seq, "compute": {"strategy": "fsdp"}}).items()
    assert shared[0] == unavailable[0] and "(with fsdp, nothing is generated while training" in shared[1]
    parse({**seq2seq, "options": {"generate_while_training": False}, "training": {}})


def test_a_warm_up_that_the_schedule_does_not_have_is_refused() -> None:
    warmup = {"training.warmup_steps": 0.1}
    assert problems(overrides={**warmup, "training.lr_scheduler_type": "constant"}) == {
        "training.warmup_steps": (
            "does nothing with `lr_scheduler_type: constant`: choose constant_with_warmup, or leave it out."
        )
    }
    assert problems(overrides={**warmup, "training.lr_scheduler_type": "reduce_lr_on_plateau"}).keys() == warmup.keys()
    parse(PLAIN, {**warmup, "training.lr_scheduler_type": "constant_with_warmup"})


def test_metrics_of_numbers_are_refused_where_the_named_labels_are_no_numbers() -> None:
    metrics = {"evaluation.metrics": ["accuracy", "mse", "spearman"]}
    assert problems(overrides={**metrics, "data.label_names": ["1", "good"]}) == {
        f"evaluation.metrics[{index}]": (
            f"{name!r} needs numbers, and the label 'good' is not one: choose another metric, or use labels "
            "such as 1 to 5."
        )
        for index, name in ((1, "mse"), (2, "spearman"))
    }
    named = {**metrics, "data.label_names": ["1", "2.5", "-3"]}
    assert parse(PLAIN, named).evaluation.metrics[1] == "mse"


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        (["genre", "label", "genre"], {"evaluation.slices[2]": "'genre' is listed twice."}),
        ([""], {"evaluation.slices[0]": "is empty: it takes text."}),
        (["stars"], {"evaluation.slices[0]": "'stars' is the column of labels: write label."}),
        (["text"], {"evaluation.slices[0]": "'text' is a column of texts: choose another, or length_bucket for groups "
                                            "by their length."}),
    ],
)  # fmt: skip
def test_slices_that_no_rows_could_have_are_reported(slices: list[str], expected: dict[str, str]) -> None:
    assert problems(overrides={"data.label": "stars", "evaluation.slices": slices}) == expected


def test_columns_are_slices_of_the_splits_that_keep_them() -> None:
    chosen = {"evaluation.splits": ["train", "validation"], "evaluation.slices": ["length_bucket", "genre"]}
    assert problems(overrides=chosen) == {
        "evaluation.slices[1]": (
            "'genre' is not stored for train: leave train out of evaluation.splits, or slice by label."
        )
    }


def test_rows_that_are_packed_are_not_predicted() -> None:
    texts = {"task": "causal-lm", "data.label": None, "evaluation.splits": ["validation", "train"]}
    texts |= {"evaluation.metrics": ["perplexity"]}
    assert problems(overrides=texts) == {
        "evaluation.splits[1]": (
            "'train' holds packed rows, which have no separate predictions: leave it out, or set options.packing "
            "to false."
        )
    }
    assert parse(PLAIN, {**texts, "options.packing": False}).evaluation.splits == ["validation", "train"]


def test_a_bound_of_flips_needs_predictions_that_are_right_or_wrong() -> None:
    fields = {"release.gate.flips.max_share": 0.01, "release.gate.must_hold.path": "must-hold.csv"}
    assert parse(PLAIN, fields).release.gate.flips
    found = problems(overrides={"task": "regression", "evaluation.metrics": ["mse"], **fields})
    assert found == {
        "release.gate.flips": Says("is not for task regression, …or choose from …kto"),
        "release.gate.must_hold": Says("is not for task regression, …or choose from …token-classification."),
    }


def test_the_gate_does_not_compare_what_a_constant_call_has_best() -> None:
    talks = {"task": "sft", "data.text": None, "data.label": None, "data.columns": {"messages": "m", "tools": "t"}}
    metrics = ["valid_tool_calls", "tool_call_accuracy"]
    (refused,) = problems(overrides={**talks, "evaluation.metrics": metrics}).items()
    assert refused[0] == "evaluation.metrics[0]" and "compare tool_call_accuracy" in refused[1]
    compared = {**talks, "evaluation.metrics": metrics[::-1], "release.gate.compare": metrics[0]}
    assert [*problems(overrides=compared)] == ["release.gate.compare"]
    assert parse(PLAIN, compared | {"release.gate.compare": metrics[1]}).compared_by == metrics[1]


def test_a_floor_is_of_a_slice_that_is_evaluated_and_of_a_metric_of_which_more_is_better() -> None:
    chosen = {"evaluation.slices": ["genre", "a=b"], "evaluation.metrics": ["accuracy", "log_loss"]}
    floors = {
        "gnre": {"accuracy": 0.5},
        "label=pos": {"accuracy": 0.5},
        "genre": {"f1": 0.5, "log_loss": 0.5, "accuracy": 2},
        "genre=war": {},
    }
    choices = "names no slice: choose from genre, a=b (or genre=GROUP), or add it to evaluation.slices."
    assert problems(overrides={**chosen, "release.gate.floors": floors}) == {
        "release.gate.floors.gnre": f"{choices} Did you mean 'genre'?",
        "release.gate.floors.label=pos": choices,
        "release.gate.floors.genre.f1": (
            "is not evaluated: choose from accuracy, log_loss, or add it to evaluation.metrics."
        ),
        "release.gate.floors.genre.log_loss": (
            "less of log_loss is better, and a floor is a minimum: choose another metric."
        ),
        "release.gate.floors.genre.accuracy": "2 is out of range: it must be at most 1.",
        "release.gate.floors.genre=war": "names no metric: write such as {accuracy: 0.6}.",
    }
    named = {
        "genre": {"accuracy": 0.5},
        "genre=war": {"accuracy": 0.4},
        "a=b": {"accuracy": 0.1},
        "a=b=c": {"accuracy": 0},
    }
    by_label = {"evaluation.metrics": ["f1", "roc_auc", "accuracy", "recall_micro"], "evaluation.slices": ["label"]}
    limits = dict.fromkeys(by_label["evaluation.metrics"], 0.5)
    nothing = "has no meaning if all rows have one label: choose accuracy, the share of right predictions."
    assert problems(overrides={**by_label, "release.gate.floors": {"label": limits, "label=pos": {"f1": 0.5}}}) == {
        "release.gate.floors.label.f1": f"f1 {nothing}",
        "release.gate.floors.label.roc_auc": f"roc_auc {nothing}",
        "release.gate.floors.label=pos.f1": f"f1 {nothing}",
    }
    recipe = parse(PLAIN, {**chosen, "release.gate.floors": named})
    assert named_groups(recipe.release.gate.floors, recipe.evaluation.slices) == {"genre": ["war"], "a=b": ["c"]}
    assert problems(overrides={"release.gate.floors": {"genre": {"accuracy": 0.5}}}) == {
        "release.gate.floors.genre": "names no slice: add it to evaluation.slices."
    }


def test_an_unknown_metric_is_reported_with_its_place_and_the_nearest() -> None:
    assert problems(overrides={"evaluation.metrics": ["f1", "acuracy"]}) == {
        "evaluation.metrics[1]": (
            f"'acuracy' is unknown: choose from {', '.join(load_task('sequence-classification').metrics)}, "
            "or name your class as module:Class. Did you mean 'accuracy'?"
        )
    }


def test_metrics_losses_and_slices_are_those_that_fit_the_kind() -> None:
    assert changed(task="regression").evaluation.metrics == ["mse"]
    assert changed(task="multi-label-classification").evaluation.metrics == ["accuracy"]
    found = problems(
        overrides={
            "task": "regression",
            "evaluation.metrics": ["r2", "hamming_loss"],
            "evaluation.slices": ["label"],
            "training.loss": "focal",
            "training.label_smoothing_factor": 0.1,
            "training.class_weights": "balanced",
        }
    )
    idle = "does nothing with task regression, whose targets are numbers, without classes: leave it out, or set it to "
    choices = f"{', '.join(load_task('regression').metrics)}, or name your class as module:Class."
    assert found == {
        "training.loss": (
            "'focal' is for classes, and the targets of task regression are numbers: leave it out, for the squared "
            "error, or name your function as module:function."
        ),
        "training.label_smoothing_factor": f"{idle}0.0.",
        "training.class_weights": f"{idle}null.",
        "evaluation.metrics[1]": f"'hamming_loss' does not fit task regression: choose from {choices}",
        "evaluation.slices[0]": (
            "'label' needs one label a row, unlike task regression: choose another slice, such as length_bucket."
        ),
    }


@pytest.mark.parametrize(
    ("where", "value", "advice"),
    [
        ("compute.tpu_num_cores", 8, "is out of scope: TPUs…train on an NVIDIA GPU or a CPU"),
        ("model.source", "tensorflow", "'tensorflow' is out of scope: TensorFlow…a PyTorch model with safetensors"),
        ("compute.strategy", "fairscale", "'fairscale' is out of scope: FairScale…use compute.strategy: fsdp"),
        ("training.extra.fp16_opt_level", "O1", "is out of scope: Apex…use compute.mixed_precision: bf16 or fp16"),
    ],
)  # fmt: skip
def test_settings_out_of_scope_are_refused_by_name_with_todays_equivalent(where: str, value: Any, advice: str) -> None:
    assert problems(overrides={where: value}) == {where: Says(advice)}


@pytest.mark.parametrize(
    ("where", "strategy", "values", "message"),
    [
        ("compute.strategy", "fsdp", {"compute.num_processes": 1},
         "'fsdp' shares a model…compute.num_processes is 1: raise it, set compute.offload, or use ddp"),
        ("model.attn_implementation", "ddp",
         {"model.attn_implementation": "flash_attention_2", "compute.mixed_precision": "no"},
         "'flash_attention_2' computes in 16 bits: set compute.mixed_precision to bf16 or fp16, or this to null"),
        ("compute.offload", "ddp", {"compute.offload": "all"}, "'all' is not for ddp: choose from no"),
        ("compute.offload", "fsdp", {"compute.offload": "optimizer"}, "'optimizer' is not for fsdp…no, all"),
        ("compute.offload", "deepspeed-zero2", {"compute.offload": "all"},
         "'all' is not for deepspeed-zero2: choose from no, optimizer"),
        ("compute.fsdp_wrap", "deepspeed-zero3", {"compute.fsdp_wrap": ["BertLayer"]},
         "is for `strategy: fsdp` only; with deepspeed-zero3, leave it out"),
        ("compute.fsdp_reshard_after_forward", "ddp", {"compute.fsdp_reshard_after_forward": False},
         "is for `strategy: fsdp` only; with ddp, leave it out"),
        ("compute.deepspeed", "fsdp", {"compute.deepspeed": {"zero_optimization": {"overlap_comm": False}}},
         "is for `strategy: deepspeed-zero1` or `deepspeed-zero2` or `deepspeed-zero3` only; with fsdp, leave it out"),
        ("compute.deepspeed.zero_optimization.stage", "deepspeed-zero2",
         {"compute.deepspeed": {"zero_optimization": {"stage": 3}}},
         "3 contradicts compute.strategy, which is 'deepspeed-zero2'…leave this out"),
        ("compute.deepspeed.gradient_clipping", "deepspeed-zero3", {"compute.deepspeed": {"gradient_clipping": 5.0}},
         "5.0 contradicts training.max_grad_norm, which is 1.0…leave this out"),
        ("compute.deepspeed.optimizer.type", "deepspeed-zero3", {"compute.deepspeed": {"optimizer": {"type": "Lamb"}}},
         "'Lamb' contradicts training.optim, which is 'adamw_torch_fused'…leave this out"),
        ("compute.deepspeed.zero_optimization", "deepspeed-zero3", {"compute.deepspeed": {"zero_optimization": 3}},
         "3 is of the wrong type…a mapping"),
        ("compute.deepspeed.zero_optimization.offload_param", "deepspeed-zero3",
         {"compute.deepspeed": {"zero_optimization": {"offload_param": "cpu"}}},
         "'cpu' is of the wrong type…a mapping, such as {device: cpu}"),
        ("compute.num_processes", "ddp",
         {"compute.num_processes": 3, "compute.num_machines": 2, "compute.cluster": "ray"},
         "3 cannot be shared evenly by 2 machines: give a multiple"),
        ("compute.num_machines", "ddp", {"compute.num_processes": 2, "compute.num_machines": 2},
         "2 machines need a cluster: set compute.cluster to ray, or this to 1"),
        ("compute.cluster_address", "ddp", {"compute.cluster_address": "10.0.0.1:6379"},
         "is for a cluster: set compute.cluster to ray, or leave this out"),
        ("compute.cluster_address", "ddp", {"compute.cluster": "ray", "compute.cluster_address": "10.0.0.1"},
         "'10.0.0.1'…use host:port of the head of the cluster, such as 10.0.0.1:6379"),
        ("training.resume_from_checkpoint", "ddp",
         {"compute.cluster": "ray", "training.resume_from_checkpoint": "checkpoint-4"},
         "names a folder of this machine…cluster…leave one of both out"),
        ("release.hub.checkpoints", "ddp",
         {"compute.cluster": "ray", "release.hub": {"repo": "me/it", "license": "mit", "checkpoints": "checkpoint"}},
         "checkpoints stay on the machines of the cluster: set it to no"),
        ("training.optim", "deepspeed-zero2", {"training.optim": "adafactor"},
         "'adafactor' takes means over rows and columns of whole weights…DeepSpeed…ddp or fsdp"),
    ],
)  # fmt: skip
def test_settings_that_a_strategy_cannot_take_are_reported(
    where: str, strategy: str, values: dict[str, Any], message: str
) -> None:
    overrides = {"compute.strategy": strategy, "compute.num_processes": 2, **values}
    assert problems(overrides=overrides) == {where: Says(message)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluation.folds": 1}, "1 is out of range: it must be at least 2"),
        ({"model.start_from": "champion", "release.registry": "a"}, "5 contradicts model.start_from: champion"),
        ({"training.resume_from_checkpoint": "checkpoint-4"}, "5 contradicts training.resume_from_checkpoint"),
    ],
)  # fmt: skip
def test_folds_without_rows_that_no_model_has_seen_are_reported(values: dict[str, Any], message: str) -> None:
    assert problems(overrides={"evaluation.folds": 5, **values}) == {"evaluation.folds": Says(message)}


def test_parallel_folds_need_as_many_folds() -> None:
    where = "evaluation.parallel_folds"
    assert problems(overrides={where: 2}) == {where: "2 has no effect without folds."}
    assert problems(overrides={where: 4, "evaluation.folds": 3}) == {
        where: "4 is more than evaluation.folds, 3: lower it."
    }
    parse(PLAIN, {where: 3, "evaluation.folds": 3})


def test_folds_of_packed_and_of_mixed_rows_are_reported() -> None:
    packed = {**PLAIN, "task": "causal-lm", "data": {"source": "csv", "path": "rows", "text": ["text"]}}
    evaluation = {"metrics": ["perplexity"], "folds": 5}
    message = "5 needs a prediction of each training row, and 'train' holds packed rows…set options.packing to false"
    assert problems({**packed, "evaluation": evaluation}) == {"evaluation.folds": Says(message)}
    parse({**packed, "evaluation": evaluation, "options": {"packing": False}})
    sets = [{"source": "csv", "path": "a"}, {"source": "csv", "path": "b"}]
    mixed = {**PLAIN, "data": {"text": ["text"], "label": "label", "mix": sets}, "evaluation": {"folds": 5}}
    assert problems(mixed) == {"evaluation.folds": Says("5 needs one set of rows, and a mixture repeats rows")}


def test_a_strategy_with_all_its_options_is_a_recipe() -> None:
    for strategy, offload in (
        ("fsdp", "all"),
        ("deepspeed-zero1", "optimizer"),
        ("deepspeed-zero2", "optimizer"),
        ("deepspeed-zero3", "all"),
    ):
        parse(PLAIN, {"compute.strategy": strategy, "compute.offload": offload})
        parse(PLAIN, {"compute.strategy": strategy, "compute.offload": offload, "compute.num_processes": 1})
    waits = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"}}
    repeated = {"zero_optimization": {"stage": 3, "overlap_comm": False, **waits}, "gradient_clipping": 1.0}
    repeated |= {"bf16": {"enabled": True}}
    shared = {"compute.offload": "optimizer", "compute.mixed_precision": "bf16"}
    parse(PLAIN, {"compute.strategy": "deepspeed-zero3", "compute.deepspeed": repeated, **shared})
    del repeated["bf16"], repeated["zero_optimization"]["offload_optimizer"]
    parse(PLAIN, {"compute.strategy": "deepspeed-zero3", "compute.deepspeed": repeated})
    wrapped = {"compute.fsdp_wrap": ["BertLayer"], "compute.fsdp_reshard_after_forward": False}
    compute = parse(PLAIN, {"compute.strategy": "fsdp", "compute.offload": False, **wrapped}).compute
    assert (compute.offload, compute.fsdp_wrap) == ("no", ["BertLayer"])


@pytest.mark.parametrize(
    ("values", "where", "message"),
    [
        ({"release.hub.checkpoints": "checkpoint", "release.hub.pull_request": True}, "release.hub.pull_request",
         "is for the model alone…Set release.hub.revision to a separate branch, or release.hub.checkpoints to no"),
        ({"release.hub.checkpoints": "every_save", "training.engine": "accelerate"}, "release.hub.checkpoints",
         "'every_save' needs weights…'accelerate'…choose checkpoint or all_checkpoints, or `engine: trainer`"),
        ({"release.hub.checkpoints": "every_save", "compute.strategy": "fsdp"}, "release.hub.checkpoints",
         "'every_save' needs whole weights…fsdp…choose checkpoint or all_checkpoints, or `strategy: ddp`"),
        ({"release.hub.repo": "thing"}, "release.hub.repo", "'thing'…use owner/name, of letters, digits"),
    ],
)  # fmt: skip
def test_settings_that_a_repository_cannot_take_are_reported(values: dict[str, Any], where: str, message: str) -> None:
    assert problems(overrides={"release.hub": {"repo": "me/thing", "license": "mit"}, **values}) == {
        where: Says(message)
    }
    parse(PLAIN, {"release.hub": {"repo": "me/thing", "license": "mit", "checkpoints": False}})


@pytest.mark.parametrize(
    ("values", "where", "message"),
    [
        ({"evaluation.folds": 3}, "evaluation.folds",
         "3 contradicts data.negatives: models of folds would train on documents of the rows left out."),
        ({"task": "sentence-similarity"}, "data.negatives",
         "task sentence-similarity with these options takes no mined negatives: set it to null"),
        ({"task": "reranking", "options": {"loss": "mse"}}, "data.negatives",
         "task reranking with these options takes no mined"),
        ({"task": "reranking", "data.negatives.source": "base"}, "data.negatives.source",
         "'base' needs a base model of embeddings, and task reranking trains none: choose from bm25, registry"),
        ({"data.negatives.source": "base",
          "model": {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 99}}}, "data.negatives.source",
         "'base' would be random weights with model.source scratch: choose from bm25, registry"),
        ({"data.negatives.corpus": True}, "data.negatives.corpus",
         "takes documents of data.corpus, which names none: name their file there, or set this to false."),
        ({"data.negatives.path": "found/1"}, "data.negatives.path",
         "'found/1' is for `source: registry` only; with bm25, set it"),
        ({"data.negatives.source": "registry"}, "data.negatives.path",
         "is missing: `source: registry` needs a registered version"),
        ({"data.negatives.source": "registry", "data.negatives.path": "found"}, "data.negatives.path",
         "'found' names no version: write found@champion (an alias) or found/1 (a number)"),
        ({"data.negatives.source": "registry", "data.negatives.path": "own@champion", "release": {"registry": "own"}},
         "data.negatives.path",
         "'own@champion' is an alias that each run of this recipe may move…name a version, such as own/1."),
        ({"data.negatives.range_min": 9, "data.negatives.range_max": 11}, "data.negatives.range_max",
         "11 leaves 2 documents after range_min, fewer than num_negatives, 3: set it to 12 or more, or to null"),
        ({"data.negatives.num_candidates": 9}, "data.negatives.num_candidates",
         "is for rows with candidates, as task reranking has them, and not for embedding: set it to null"),
        ({"task": "reranking", "data.columns": {"query": "q", "document": "d"}, "data.label": "l",
          "data.negatives.num_candidates": 9}, "data.negatives.num_candidates",
         "needs rows with lists, so that a row can have candidates: name the columns documents and labels in"),
        ({"task": "reranking", "options.rank_fusion": True}, "options.rank_fusion",
         "true needs data.negatives.num_candidates: otherwise the documents of a row are in the order of the file"),
        ({"evaluation.splits": ["train", "test"]}, "evaluation.splits",
         "'train' has documents that were chosen because they are hard (data.negatives): choose from validation, test"),
    ],
)  # fmt: skip
def test_negatives_that_cannot_be_found_are_reported(values: dict[str, Any], where: str, message: str) -> None:
    columns = {"reranking": {"columns": {"query": "q", "documents": "d", "labels": "l"}}}.get(
        values.get("task", ""), {}
    )
    recipe = {
        "name": "mined",
        "task": "embedding",
        "data": {"source": "csv", "path": "rows", "negatives": {"source": "bm25"}, **columns},
        "model": {"source": "folder", "path": "me/small"},
    }
    assert problems(recipe, values) == {where: Says(message)}


def test_a_bare_no_of_yaml_is_the_word_in_every_rule() -> None:
    hub = {"repo": "me/reviews", "license": "mit", "checkpoints": False}
    recipe = parse(PLAIN, {"release.hub": hub, "compute.cluster": "ray", "compute.mixed_precision": False})
    assert recipe.release.hub is not None and recipe.release.hub.checkpoints == recipe.compute.mixed_precision == "no"


def test_missing_fields_are_reported_with_their_purpose() -> None:
    values = {**PLAIN, "data": {"source": "csv", "path": "reviews", "text": ["text"]}}
    assert problems(values) == {
        "data.label": "is missing: The column of labels: names or whole numbers; lists of them or any numbers for some "
        "task types."
    }


def test_a_text_that_prefect_would_template_is_refused() -> None:
    message = problems(overrides={"data.label": "{{ label }}"})["data.label"]
    assert message.startswith("'{{ label }}' holds '{{': Prefect templates parameters")


def test_evaluating_a_split_that_the_data_lacks_is_refused() -> None:
    overrides = {"data.splits": {"train": "a", "validation": "b"}, "evaluation.splits": ["test"]}
    assert problems(overrides=overrides) == {
        "evaluation.splits[0]": "'test' is not in data.splits: add it there, set data.test_size, or choose another."
    }


def test_a_misspelt_split_is_reported_with_the_nearest() -> None:
    assert problems(overrides={"data.splits": {"train": "a", "validaton": "b"}}) == {
        "data.splits.validaton": ("no such split: choose from train, validation, test. Did you mean 'validation'?"),
    }


def test_a_missing_train_split_is_reported() -> None:
    assert problems(overrides={"data.splits": {"validation": "a"}}) == {
        "data.splits.train": "is missing: training needs a train split.",
    }


def test_rows_are_held_out_where_there_is_no_split_for_them() -> None:
    recipe = changed(data__splits={"train": ["a", "b"]}, data__test_size=0.2, evaluation__splits=["validation", "test"])
    assert recipe.data.splits == {"train": ["a", "b"]} and recipe.data.validation_size == 0.1


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        ({"source": "parquet", "delimiter": ";"}, "data.delimiter",
         "';' is for `source: csv` and `conll` only; with parquet, set it to null"),
        ({"delimiter": "§"}, "data.delimiter", "'§' cannot separate columns…one ASCII character, such as ; or |"),
        ({"delimiter": "||"}, "data.delimiter", "'||' has 2 characters…at most 1, such as ; or |…null: a comma"),
        ({"delimiter": ""}, "data.delimiter", "is empty…text"),
        ({"source": "parquet", "quoting": "none"}, "data.quoting",
         "'none' is for `source: csv` only; with parquet, set it to standard"),
        ({"source": "json", "header": ["text", "label"]}, "data.header",
         "['text', 'label'] is for `source: csv` and `conll` only; with json, set it to null"),
        ({"header": ["text", "label", "text"]}, "data.header", "'text' is listed twice; use each name once"),
        ({"label_separator": ","}, "data.label_separator",
         "',' is for several labels in a row, and task sequence-classification has none: set it to null"),
        ({"source": "arrow", "encoding": "latin-1"}, "data.encoding",
         "'latin-1' is for `source: csv`, `json`, `conll` and `textfolder` only; with arrow, leave it out"),
        ({"encoding": "utf-9"}, "data.encoding", "'utf-9' is not a text encoding…latin-1…Did you mean 'utf-8'?"),
        ({"encoding": "base64"}, "data.encoding", "'base64' is not a text encoding: use one such as utf-8"),
        ({"source": "hub", "splits": {"train": ["train", "extra"]}}, "data.splits.train",
         "['train', 'extra'] is for files only; with `source: hub`, name one split"),
        ({"validation_size": 0.5, "test_size": 0.5}, "data.test_size",
         "0.5 is out of range: with validation_size 0.5 it leaves no rows to train on…below 1"),
        ({"rename": {"a": "text", "b": "text"}}, "data.rename",
         "'a' and 'b' are both renamed to 'text': use each name once"),
        ({"rename": {"text": "words"}}, "data.text", "'text' is renamed to 'words' (data.rename): use that name"),
        ({"cast": {"text": "int64"}}, "data.cast.text", "'int64' is not a type for a text column: cast it to string"),
        ({"cast": {"label": "float64"}}, "data.cast.label",
         "'float64' is not a type for the label: cast it to string, int64 or bool"),
        ({"cast": {"label": "int"}}, "data.cast.label",
         "'int' is unknown: choose from string, int64, float64, bool. Did you mean 'int64'?"),
    ],
)  # fmt: skip
def test_a_mistake_about_the_rows_is_reported(data: dict[str, Any], where: str, message: str) -> None:
    assert problems({**PLAIN, "data": {**PLAIN["data"], **data}}) == {where: Says(message)}


def test_two_columns_may_change_their_names_for_each_other() -> None:
    assert changed(data__rename={"text": "label", "label": "text"}).data.text == ["text"]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://AKIA:hush/hush@bucket/rows.csv", "a user's name or password"),
        ("https://me:hush@host/rows.csv", "a user's name or password"),
        ("https://hush@host/rows.csv", "a user's name or password"),
        ("https://host/rows.csv?X-Amz-Date=1&X-Amz-Signature=hush", "the parameter X-Amz-Signature"),
        ("https://host/rows.csv?sig=hush", "the parameter sig"),
        ("https://host/rows.csv?a=1&access_token=hush", "the parameter access_token"),
        *((f"https://host/rows.csv?a=1&{name}=hush", f"the parameter {name}") for name in ("key", "code", "jwt")),
        ("https://host/rows.csv?access=hush", "the parameter access"),
        ("https://host/rows.csv?%6bey=hush", "the parameter key"),
        ("https://host/rows.csv;jsessionid=hush", "the parameter jsessionid"),
        ("https://host/rows.csv#access_token=hush", "the parameter access_token"),
        ("https://host/rows.csv#hf_hushhushhush1", "a token behind #"),
        ("https://host/rows.csv?x=ghp_hushhushhushhush1", "the parameter x"),
        ("https://host/rows.csv?x=Zk3Q9vT1xW7bR5mN2pL8hush", "the parameter x"),
        ("https://host/hf_hushhushhush1/rows.csv", "a token in its path"),
        ("s3://bucket/Zk3Q9vT1xW7bR5mN2pL8hush/rows.csv", "a token in its path"),
        ("https://host/d/eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.hush/rows.csv", "a token in its path"),
        ("s3://hf_hushhushhush1@bucket/rows.csv", "a user's name or password"),
    ],
)
@pytest.mark.parametrize("where", ["data.path", "data.splits.train"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str, what: str, where: str) -> None:
    given = {where: url} if where == "data.path" else {"data.splits": {"train": ["a.csv", url]}}
    ((field, message),) = problems(overrides=given).items()
    start = f"holds {what}, and recipes are stored and shown: set credentials in the environment instead: "
    assert field == where and message.startswith(start) and "hush" not in message
    assert ("AWS_ACCESS_KEY_ID" if url.startswith("s3") else "FSSPEC_HTTPS=") in message
    assert "hush" not in display_name(url)


@pytest.mark.parametrize("where", ["data.corrections", "data.corpus", "data.unlabelled", "release.gate.must_hold.path"])
def test_a_secret_in_the_url_of_other_rows_is_refused_too(where: str) -> None:
    found = problems(overrides={where: "https://host/rows.csv?sig=hush"})
    assert found == {where: Says("holds the parameter sig, and recipes are stored and shown")}


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a:b@c/part-?.csv",
        "https://host:8080/a@b/rows.csv?design=1",
        "abfs://container@account.dfs.core.windows.net/rows.csv",
        "sftp://me@host/rows.csv",
        "https://[no-host/rows.csv",
        "https://host/nyu-mll/glue/resolve/bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c/sst2/train.parquet",
        "s3://bucket/part-00001-5a2f9c1e-8b7d-4c3a-9f1e-2d3c4b5a6f7e-c000.snappy.parquet",
        "s3://bucket/year=2024/month=01/run_2024-01-11T12:10:03.123456Z/part-0.parquet",
        f"https://host/{'0a1b2c3d' * 8}/Amazon_Reviews_Multi_EN_DE_2019_train_50000_rows.csv?download=1",
        "https://host/rows.csv?versionId=3HL4kqtJlcpXroDTDmJrmSpXd3dIbrHYMTRCxf3vjVBH40Nr8X8gdRQBpUMLUo",
        "https://host/TrainReviewsWithLabels2024AndTestRows2025.csv?format=csv&start=2024-01-01T00:00:00Z",
    ],
)
def test_a_url_without_a_secret_is_taken(url: str) -> None:
    assert changed(data__path=url).data.path == url


def test_a_label_column_that_is_also_text_is_refused() -> None:
    assert problems(overrides={"data.label": "text"}) == {
        "data.label": "'text' is also a text column; the label needs another column."
    }


def test_a_python_source_names_a_function() -> None:
    assert problems(overrides={"data.source": "python", "data.path": "rows.py"}) == {
        "data.path": "'rows.py' is not the name of a Python object: with `source: python`, write module:name."
    }


def test_scratch_needs_a_config_that_fits_the_tokens() -> None:
    config = {"model_type": "bert", "max_position_embeddings": 64}
    assert problems({**PLAIN, "model": {"source": "scratch", "config": config}}) == {
        "model.config.vocab_size": "is missing: `source: scratch` needs it, such as vocab_size: 8000.",
        "tokens.max_length": (
            "128 is out of range: the model has 64 positions (model.config.max_position_embeddings)."
        ),
    }


def test_messages_for_a_model_from_scratch_need_a_template_and_prompts_need_none() -> None:
    model = {"source": "scratch", "config": {"model_type": "gpt2", "vocab_size": 300}}
    values = {"name": "a", "task": "sft", "data": {"source": "json", "path": "rows"}, "model": model}
    assert list(problems(values)) == ["model.chat_template"]
    assert parse(values, {"data.columns": {"prompt": "q"}}).task == "sft"
    assert parse(values, {"model.chat_template": "chat.jinja"}).task == "sft"


def test_without_evaluations_nothing_may_depend_on_them() -> None:
    overrides = {"training.eval_strategy": False, "training.early_stopping_patience": 2}
    needs = "needs evaluations, but training.eval_strategy is no: set that to epoch or steps, or this to"
    assert problems(overrides=overrides) == {
        "training.load_best_model_at_end": f"{needs} false.",
        "training.early_stopping_patience": f"{needs} null.",
    }


def test_a_bare_no_means_no() -> None:
    recipe = changed(**yaml.safe_load("{compute__mixed_precision: no}"))
    assert recipe.compute.mixed_precision == "no"


def test_other_fields_of_training_arguments_go_through_extra() -> None:
    extra = {"adam_beta2": 0.98, "lr_scheduler_kwargs": {"num_cycles": 2}, "optim_args": None}
    assert changed(training__extra=extra).training.extra == extra


# Overrides


def test_set_reads_values_as_yaml_and_short_floats_as_numbers() -> None:
    given = ["training.learning_rate=3e-5", "data.text=[a, b]", "data.config=null", "data.label=a=b", "x.y="]
    assert parse_set(given) == {
        "training.learning_rate": 3e-5,
        "data.text": ["a", "b"],
        "data.config": None,
        "data.label": "a=b",
        "x.y": None,
    }


def test_set_names_every_argument_that_cannot_be_read() -> None:
    problems = raised_problems(parse_set, ["training.seed", "=1", "data.text=[a", "tokens.max_length=64"])
    messages = [problem.message for problem in problems]
    assert [message.partition(":")[0] for message in messages] == ["'training.seed'", "'=1'", "'data.text=[a'"]


def test_an_override_changes_one_field_and_leaves_the_mapping_alone() -> None:
    values = copy.deepcopy({**PLAIN, "training": {"seed": 7}})
    recipe = parse(values, {"training.learning_rate": 1e-4})
    assert (recipe.training.seed, recipe.training.learning_rate) == (7, 1e-4)
    assert values == {**PLAIN, "training": {"seed": 7}}


def test_an_override_reaches_into_mappings_whatever_dots_their_keys_have() -> None:
    overrides = {
        "release.gate.minimum.accuracy": 0.7,
        "training.class_weights.not.bad": 2,
        "training.extra.lr_scheduler_kwargs.num_cycles": 2,
        "data.splits.train": "a",
        "data.splits.validation": "b",
    }
    recipe = parse(PLAIN, overrides)
    assert recipe.release.gate.minimum == {"accuracy": 0.7} and recipe.training.class_weights == {"not.bad": 2}
    assert recipe.training.extra == {"lr_scheduler_kwargs": {"num_cycles": 2}}
    assert recipe.data.splits == {"train": "a", "validation": "b"}


def test_an_override_of_an_unknown_field_is_reported_with_the_nearest() -> None:
    assert problems(overrides={"training.learning_rat": 1, "learning_rate": 1, "name.x": 1}) == {
        "training.learning_rat": "no such field. Did you mean 'learning_rate'?",
        "learning_rate": "no such field. Did you mean 'training.learning_rate'?",
        "name.x": "cannot be set: 'name' has no fields.",
    }


# Files

ENTRY = """
- name: {name}
  entrypoint: flows.finetune:finetune
  parameters:
    overrides: {{training.seed: 5, tokens.max_length: 32}}
    recipe:
      name: reviews-{name}
      task: sequence-classification
      data: {{source: csv, path: d, text: [text], label: label}}
      model: {{source: folder, path: m}}
      training: {{learning_rate: 1e-4}}
"""


def test_a_file_gives_its_recipe_then_its_own_overrides_then_those_given(tmp_path: Path) -> None:
    recipe = load(deployment(tmp_path, f"deployments:{ENTRY.format(name='a')}"), {"tokens.max_length": 64})
    assert (recipe.training.learning_rate, recipe.training.seed, recipe.tokens.max_length) == (1e-4, 5, 64)


def test_of_several_entries_one_is_named(tmp_path: Path) -> None:
    file = deployment(tmp_path, f"deployments:{ENTRY.format(name='a')}{ENTRY.format(name='b')}")
    assert [load(file, entry=name).name for name in ("a", "b")] == ["reviews-a", "reviews-b"]
    assert file_problem(file) == (
        "FILE",
        "several entries deploy flows.finetune:finetune: choose one by --entry, of a, b.",
    )
    assert file_problem(file, "bb")[1].endswith("Did you mean 'b'?")


def test_a_file_without_a_finetune_entry_lists_what_it_has(tmp_path: Path) -> None:
    file = deployment(tmp_path, "deployments: [{name: other, entrypoint: 'flows.retrain:retrain'}]")
    assert file_problem(file) == (
        "FILE",
        "no entry with `entrypoint: flows.finetune:finetune`; entries: other (flows.retrain:retrain).",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("deployments:\n- name: [a\n- b: {", ("FILE:3", "is not YAML: ")),
        ("a: 1\nb: 2\na: 3\n", ("FILE:3", "is not YAML: 'a' is written twice.")),
        ("just text", ("FILE", "not a Prefect deployment file: it needs a list `deployments:`.")),
        ("deployments: [{name: a, entrypoint: 'flows.finetune:finetune'}]",
         ("FILE", "entry 'a' has no `parameters.recipe` with the fields of a recipe.")),
    ],
)  # fmt: skip
def test_a_file_that_is_no_deployment_file_is_reported_with_its_line(
    tmp_path: Path, text: str, problem: tuple[str, str]
) -> None:
    where, message = file_problem(deployment(tmp_path, text))
    assert where == problem[0]
    assert message.startswith(problem[1])


def test_a_missing_file_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    neighbour = deployment(tmp_path, "{}")
    missing = tmp_path / "deploymnt.yaml"
    assert file_problem(missing) == ("FILE", f"no such file. Did you mean {str(neighbour)!r}?")


def test_a_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_bytes(b"name: caf\xe9")
    assert file_problem(file) == ("FILE", "is not UTF-8 text (byte 9).")


def test_contradicting_limits_of_answers_are_reported_by_their_fields() -> None:
    pairs = {"task": "seq2seq", "data.text": None, "data.label": None, "evaluation.metrics": ["bleu"]}
    limits = {"options": {"max_new_tokens": 8, "min_new_tokens": 9, "length_penalty": 0.5}}
    assert problems(overrides=pairs | limits) == {
        "options.min_new_tokens": "9: more than options.max_new_tokens, 8.",
        "options.length_penalty": "0.5: does nothing without beams: set options.num_beams to more than 1.",
    }


def test_exports_have_a_format_once_that_models_of_the_task_have() -> None:
    assert problems(overrides={"release.exports": ["onnx", "onnx"]}) == {
        "release.exports[1]": "'onnx' is listed twice."
    }
    unknown = problems(overrides={"release.exports": ["onx"], "release.export_margin": 0})
    assert "onnx-int8" in unknown["release.exports[0]"] and {*unknown} == {
        "release.exports[0]",
        "release.export_margin",
    }
    texts = PLAIN | {"task": "causal-lm", "data": {"source": "csv", "path": "reviews", "text": ["text"]}}
    found = problems(texts, {"release.exports": ["onnx"]})["release.exports[0]"]
    assert found.startswith("'onnx' is for models of AutoModelForSequenceClassification, AutoModelFor")
    assert found.endswith(
        "and task causal-lm has models of AutoModelForCausalLM: choose from gguf-f16, gguf-q8_0, gguf-q4_0, "
        "gguf-q4_k_m, int8, int4."
    )
    assert parse(texts, {"release.exports": ["gguf-q8_0", "int8"]}).release.exports == ["gguf-q8_0", "int8"]
    scratch = {"source": "scratch", "path": None, "config": {"model_type": "llama", "vocab_size": 100}}
    assert problems(texts | {"model": scratch}, {"release.exports": ["gguf-q8_0", "int8"]}) == {
        "release.exports[0]": "'gguf-q8_0' is for tokenizers that llama.cpp has, and model.source: scratch makes one "
        "of its own: start from a base model, or leave it out."
    }


def test_exports_are_compared_by_a_metric_that_needs_no_generated_answers() -> None:
    chosen = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    pairs = PLAIN | {"task": "preference", "data": {"source": "csv", "path": "reviews", "columns": chosen}}
    exported = {"release.exports": ["int8"], "evaluation.metrics": ["generated_length", "accuracy"]}
    assert parse(pairs, exported).export_metrics == ["accuracy"]
    found = problems(pairs, exported | {"evaluation.metrics": ["generated_length"]})["release.exports"]
    assert found == "are compared without generated answers: add a metric that needs none to evaluation.metrics."
