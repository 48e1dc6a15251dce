"""Files of accelerate and DeepSpeed in a recipe: they may repeat its fields, and a difference is an error."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.raised import raised_problems
from training.problems import UserError
from training.recipe import Recipe, parse
from training.recipe.accelerate_file import Refusal, translate
from training.recipe.overrides import read_yaml
from training.recipe.rules import compute_rules

PLAIN: dict[str, Any] = {
    "name": "reviews",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "reviews", "text": ["text"], "label": "label"},
    "model": {"source": "folder", "path": "models/small"},
}
# As `accelerate config` writes them.
COMMON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
FSDP = COMMON | {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer,BertPooler",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": False,
    },
}
ZERO = COMMON | {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    },
}
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def with_names(names: Any) -> dict[str, Any]:
    return {**PLAIN, "data": {**PLAIN["data"], "label_names": names}}


@pytest.mark.parametrize(
    ("name", "text"), [("n.txt", "bad\nso so \r\ngood\n\n"), ("n.json", '["bad", "so so", "good"]')]
)
def test_label_names_come_from_a_file_and_are_part_of_the_recipe(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert parse(with_names(name)) == parse(with_names(["bad", "so so", "good"]))


@pytest.mark.parametrize(
    ("name", "text", "where", "message"),
    [
        ("n.txt", None, "data.label_names", "'n.txt' cannot be read: No such file or directory; name a file, or write"),
        ("~nobody-here/n.txt", None, "data.label_names", "'~nobody-here/n.txt' cannot be read: No such file"),
        ("n\0.txt", None, "data.label_names", "'n\\x00.txt' cannot be read: No such file"),
        ("n.txt", "a\n\nb\n", "data.label_names", "'n.txt' has no name in line 2: each line is the name of a label."),
        ("n.txt", "a\n", "data.label_names", "'n.txt' lists 1: it takes at least 2 names."),
        ("n.txt", "a\nb\na\n", "n.txt (data.label_names)", "'a' is listed twice; each label is listed once."),
        ("n.json", '{"a": 1}', "data.label_names", "'n.json' is no list of names: write a name a line, or in JSON"),
        ("n.json", '["a"', "data.label_names", "'n.json' is not JSON: line 1:"),
    ],
)
def test_a_file_that_lists_no_label_names_is_one_mistake(
    folder: Path, name: str, text: str | None, where: str, message: str
) -> None:
    if text is not None:
        (folder / name).write_text(text)
    (problem,) = raised_problems(parse, with_names(name))
    assert problem.where == where and problem.message.startswith(message)


def write(name: str, values: dict[str, Any]) -> str:
    Path(name).write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return name


def recipe(overrides: dict[str, Any] | None = None, **compute: Any) -> Recipe:
    return parse({**PLAIN, "compute": compute}, overrides)


def find_messages(overrides: dict[str, Any] | None = None, **compute: Any) -> dict[str, str]:
    return {problem.where: problem.message for problem in raised_problems(recipe, overrides, **compute)}


def fields(compute: dict[str, Any], **training: Any) -> Recipe:
    return parse({**PLAIN, "compute": compute, "training": training})


def test_an_accelerate_file_is_equivalent_to_the_recipe_with_the_same_settings() -> None:
    shared = {"num_machines": 1, "num_processes": 2, "mixed_precision": "bf16"}
    wrapped = {"fsdp_reshard_after_forward": False, "fsdp_wrap": ["BertLayer", "BertPooler"]}
    assert recipe(accelerate=write("a.yaml", FSDP)) == fields(
        {**shared, **wrapped, "strategy": "fsdp", "offload": "all"}
    )
    assert recipe(accelerate=write("a.yaml", ZERO)) == fields(
        {**shared, "strategy": "deepspeed-zero3", "offload": "all"}, gradient_accumulation_steps=4, max_grad_norm=0.5
    )
    for task in ("MULTI_GPU", "MULTI_CPU"):
        assert recipe(accelerate=write("a.yaml", COMMON | {"distributed_type": task})) == fields(shared)
    alone = {"distributed_type": "NO", "mixed_precision": "no"}
    assert recipe(accelerate=write("a.yaml", alone)) == fields({"num_processes": 1, "mixed_precision": "no"})
    many = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    assert recipe(accelerate=write("a.yaml", COMMON | many | {"distributed_type": "MULTI_GPU"})) == fields(
        shared | {"num_machines": 2, "cluster": "ray"}
    )


def test_a_recipe_that_has_been_read_needs_its_files_no_more() -> None:
    ds = write("ds.json", {"zero_optimization": {"stage": 2, "overlap_comm": False}})
    pointing = ZERO | {"deepspeed_config": {"deepspeed_config_file": ds}}
    read = recipe(accelerate=write("a.yaml", pointing))
    assert (read.compute.strategy, read.compute.deepspeed) == (
        "deepspeed-zero2",
        {"zero_optimization": {"stage": 2, "overlap_comm": False}},
    )
    shared = {"num_processes": 2, "num_machines": 1, "mixed_precision": "bf16"}
    assert read == recipe(strategy="deepspeed-zero2", deepspeed=ds, **shared)
    given = Recipe.model_validate({**PLAIN, "compute": {"accelerate": "a.yaml"}})  # as a flow is given it
    assert parse(given.model_dump(exclude_unset=True)) == read
    for file in ("a.yaml", "ds.json"):
        Path(file).unlink()
    assert parse(read.model_dump()) == parse(json.loads(read.model_dump_json())) == read


def test_stage_1_of_zero_in_either_file_is_the_strategy_of_that_name() -> None:
    ds = write("ds.json", {"zero_optimization": {"stage": 1}})
    for group in ({"zero_stage": 1}, {"deepspeed_config_file": ds}):
        assert (
            recipe(accelerate=write("a.yaml", ZERO | {"deepspeed_config": group})).compute.strategy == "deepspeed-zero1"
        )


def test_a_setting_written_twice_must_agree_and_is_reported_with_both_places_and_values() -> None:
    file = write("a.yaml", FSDP)
    assert recipe(accelerate=file, strategy="fsdp", num_processes=2).compute.strategy == "fsdp"
    assert find_messages({"compute.num_processes": 4}, accelerate=file, strategy="ddp") == {
        "a.yaml: distributed_type": "'FSDP' makes compute.strategy 'fsdp', and the recipe has it as 'ddp': leave one "
        "of them out.",
        "a.yaml: num_processes": "2 makes compute.num_processes 2, and the recipe has it as 4: leave one of them out.",
    }
    ds = write("ds.json", {"zero_optimization": {"stage": 2}})
    pointing = ZERO | {"deepspeed_config": {"deepspeed_config_file": ds, "zero_stage": 3}}
    assert find_messages(accelerate=write("a.yaml", pointing)) == {
        "ds.json: zero_optimization.stage": "2 makes compute.strategy 'deepspeed-zero2', and a.yaml: "
        "deepspeed_config.zero_stage makes it 'deepspeed-zero3': leave one of them out."
    }


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"num_proceses": 2}, "num_proceses", "2 is not supported: the recipe has no field for it. Leave this out. Did "
         "you mean 'num_processes'?"),
        ({"distributed_type": "XLA"}, "distributed_type", "'XLA' is out of scope: TPUs are not supported"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type", "'MEGATRON_LM' is not supported: choose from NO"),
        ({"distributed_type": "MULTI_XPU"}, "distributed_type", "'MULTI_XPU' is not supported: choose from NO"),
        ({"distributed_type": "FSPD"}, "distributed_type", "'FSPD' is not supported: choose from NO, MULTI_CPU, "
         "MULTI_GPU, FSDP, DEEPSPEED. Did you mean 'FSDP'?"),
        ({"distributed_type": None}, "distributed_type", "'None' is not supported: choose from NO"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment", "'AMAZON_SAGEMAKER' is not supported"),
        ({"mixed_precision": "fp8"}, "mixed_precision (compute.mixed_precision)", "'fp8' is unknown: choose from"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config",
         "{'dynamo_backend': 'INDUCTOR'} is not supported: set training.extra.torch_compile in the recipe"),
        ({"gpu_ids": "0,1"}, "gpu_ids", "'0,1' is not supported: set CUDA_VISIBLE_DEVICES in the environment"),
        ({"parallelism_config": {"tp_size": 2}}, "parallelism_config", "{'tp_size': 2} is not supported"),
        ({"deepspeed_config": {"zero_stage": 2}}, "deepspeed_config", "is for `distributed_type: DEEPSPEED` only"),
        ({"fsdp_config": {}}, "fsdp_config.fsdp_version",
         "1 is not supported: set it to 2"),
        ({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_foward": True}},
         "fsdp_config.fsdp_reshard_after_foward", "True is not supported: the recipe has no field for it."),
        ({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}},
         "fsdp_config.fsdp_reshard_after_forward (compute.fsdp_reshard_after_forward)",
         "'FULL_SHARD' is of the wrong type: it takes true or false."),
        ({"fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
         "fsdp_config.fsdp_auto_wrap_policy", "'SIZE_BASED_WRAP' is not supported: the recipe has no field"),
    ],
)  # fmt: skip
def test_an_unsupported_setting_of_an_accelerate_file_is_refused_by_name(
    changed: dict[str, Any], field: str, message: str
) -> None:
    found = find_messages(accelerate=write("a.yaml", FSDP | changed))
    assert found.keys() == {f"a.yaml: {field}"} and found[f"a.yaml: {field}"].startswith(message)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"zero_stage": 0}, "zero_stage (compute.strategy)"),
        ({"offload_param_device": "nvme"}, "offload_param_device"),
        ({"offload_optimizer_device": "none"}, "offload_param_device"),
        ({"deepspeed_multinode_launcher": "pdsh"}, "deepspeed_multinode_launcher"),
    ],
)
def test_an_unsupported_setting_of_its_deepspeed_part_is_refused(changed: dict[str, Any], field: str) -> None:
    file = write("a.yaml", ZERO | {"deepspeed_config": ZERO["deepspeed_config"] | changed})
    assert find_messages(accelerate=file).keys() == {f"a.yaml: deepspeed_config.{field}"}


def test_a_file_for_cpus_is_refused_where_training_would_take_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.recipe.accelerate_file._sees_gpus", lambda: True)
    found = translate({"distributed_type": "MULTI_CPU", "use_cpu": True})
    assert [one.field for one in found if isinstance(one, Refusal)] == ["use_cpu"]


def test_all_problems_of_both_files_are_reported_at_once_and_rules_name_the_file() -> None:
    ds = write("ds.json", {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Lamb"}, "gradient_clipping": 5.0})
    assert find_messages(strategy="deepspeed-zero2", deepspeed=ds) == {
        "ds.json: zero_optimization.stage": "3 contradicts compute.strategy, which is 'deepspeed-zero2': set that, and "
        "leave this out.",
        "ds.json: optimizer.type": "'Lamb' contradicts training.optim, which is 'adamw_torch_fused': set that, and "
        "leave this out.",
        "ds.json: gradient_clipping": "5.0 contradicts training.max_grad_norm, which is 1.0: set that, and leave this "
        "out.",
    }
    file = write("a.yaml", FSDP | {"num_processes": 1, "gpu_ids": "0", "mixed_precision": "fp9"})
    assert find_messages(accelerate=file).keys() == {
        "a.yaml: gpu_ids",
        "a.yaml: mixed_precision (compute.mixed_precision)",
    }
    whole = FSDP["fsdp_config"] | {"fsdp_offload_params": False}
    file = write("a.yaml", FSDP | {"num_processes": 1, "fsdp_config": whole})
    assert find_messages(accelerate=file).keys() == {"a.yaml: distributed_type (compute.strategy)"}


def test_a_file_that_cannot_be_read_is_reported_with_the_field_that_names_it() -> None:
    Path("a.yaml").write_text("a: [")
    Path("ds.json").write_text('{"a":\n1,}')
    assert find_messages(accelerate="a.yaml") == {
        "compute.accelerate: a.yaml:1": "is not YAML: expected the node content, but found '<stream end>'."
    }
    assert find_messages(accelerate="b.yaml") == {"compute.accelerate: b.yaml": "no such file. Did you mean 'a.yaml'?"}
    (message,) = find_messages(strategy="deepspeed-zero2", deepspeed="ds.json").values()
    assert message.startswith("'ds.json' is not JSON: line 2: ")
    Path("ds.json").write_bytes('{"ü": 1}'.encode("latin-1"))
    (message,) = find_messages(strategy="deepspeed-zero2", deepspeed="ds.json").values()
    assert message == "'ds.json' is not UTF-8 text: save it as UTF-8."


def aliases_of_aliases(form: str) -> str:
    """Nine lines, the last of which is a billion times the first."""
    lines = (f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 10))
    return "\n".join(["a0: &a0 {x: 1}", *lines])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 2000, "its brackets are too deep"),
        ("a: &a [*a]", "it is an alias of what it is in"),
        (aliases_of_aliases("[{}]"), "its aliases make more than 10,000,000 characters of it"),
        (aliases_of_aliases("{{<<: [{}]}}"), "its aliases make more than 10,000,000 characters of it"),
        (f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 2000)}]", "its aliases make more than 10,000,000 characters"),
        ('a: !!timestamp "x"', "is not YAML"),
    ],
)
def test_a_small_yaml_file_takes_little_memory_whatever_its_aliases_and_brackets_are(
    folder: Path, content: str, message: str
) -> None:
    Path("a.yaml").write_text(content)
    (found,) = find_messages(accelerate="a.yaml").values()
    assert message in found
    with pytest.raises(UserError, match=message):
        read_yaml(Path("a.yaml"))


def test_a_pipe_in_the_place_of_a_named_file_is_refused_and_not_waited_for() -> None:
    os.mkfifo("a.yaml")
    assert "is a pipe" in find_messages(accelerate="a.yaml").popitem()[1]


@pytest.mark.parametrize("content", ["[" * 50_000, "1" * 5000])
def test_brackets_and_digits_without_end_in_a_json_file_are_one_message(content: str) -> None:
    Path("a.json").write_text(content)
    assert find_messages({"data.label_names": "a.json"}).popitem()[1].startswith("'a.json' has brackets in brackets")
    assert find_messages(deepspeed="a.json").popitem()[1].startswith("'a.json' has brackets in brackets")


def test_sections_that_are_no_mappings_are_reported() -> None:
    file = write("a.yaml", FSDP | {"fsdp_config": "yes"})
    assert find_messages(accelerate=file)["a.yaml: fsdp_config"] == "'yes' is of the wrong type: it takes a mapping."
    file = write("a.yaml", ZERO | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": ["cpu"]}})
    assert (
        "['cpu'] for the optimizer is not supported"
        in find_messages(accelerate=file)["a.yaml: deepspeed_config.offload_param_device"]
    )
    ds = write("ds.json", {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}})
    file = write("a.yaml", ZERO | {"deepspeed_config": {"deepspeed_config_file": ds}})
    assert find_messages(accelerate=file) == {
        "ds.json: zero_optimization.offload_optimizer": "'cpu' is of the wrong type: it takes a mapping, such as "
        "{device: cpu}."
    }
    inside = {"compute.deepspeed.gradient_clipping": 1.0}
    assert find_messages(inside, strategy="deepspeed-zero2", deepspeed=write("ds.json", {})) == {
        "compute.deepspeed.gradient_clipping": "cannot be set: compute.deepspeed is 'ds.json', which has no fields."
    }


@NEEDS_DEEPSPEED
def test_a_name_that_is_unknown_to_deepspeed_is_reported_with_the_nearest() -> None:
    config = {
        "zero_optimization": {"stage": 2, "overlap_com": False, "offload_optimizer": {"pin_memry": True}},
        "wall_clok_breakdown": True,
    }
    assert find_messages(strategy="deepspeed-zero2", offload="optimizer", deepspeed=write("ds.json", config)) == {
        f"ds.json: {name}": f"no such field of DeepSpeed's configuration. Did you mean '{nearest}'?"
        for name, nearest in (
            ("zero_optimization.overlap_com", "overlap_comm"),
            ("zero_optimization.offload_optimizer.pin_memry", "pin_memory"),
            ("wall_clok_breakdown", "wall_clock_breakdown"),
        )
    }


@NEEDS_DEEPSPEED
def test_names_that_deepspeed_accepts_are_not_refused_and_it_is_not_imported() -> None:
    known = {
        "activation_checkpointing": {"partition_activations": True},
        "communication_data_type": "fp32",
        "comms_logger": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "flops_profiler": {"enabled": False},
        "fp16": {"enabled": "auto", "loss_scale_window": 10},
        "prescale_gradients": False,
        "steps_per_print": 10,
        "tensorboard": {"enabled": False},
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 1, "sub_group_size": 1},
    }
    before = "deepspeed" in sys.modules
    assert recipe(strategy="deepspeed-zero3", deepspeed=known).compute.deepspeed == known
    assert ("deepspeed" in sys.modules) == before


def test_without_deepspeed_names_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_rules, "_deepspeed_names", frozenset)
    assert recipe(strategy="deepspeed-zero2", deepspeed={"nothing_known": 1}).compute.deepspeed == {"nothing_known": 1}
