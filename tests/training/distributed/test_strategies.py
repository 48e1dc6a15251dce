"""FSDP2 and ZeRO with two processes on the CPU: they train, stop, go on to the same bytes, and export a whole model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AlbertConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ResNetConfig,
    ViTConfig,
)

from tests.fork_server import call
from tests.raised import raised_problems
from tests.task_types import fit_job, make_world
from tests.training import tiny
from tests.training.forks import (
    assert_resumes,
    assert_same,
    checkpoints_written,
    curve,
    events,
    finish,
    kill_when,
    run_fit,
)
from training import distributed
from training.distributed import zero
from training.distributed.fsdp import find_wrapped_layers, require_one_group
from training.engine.checkpoints import find_damage, step_of
from training.jobs.protocol import Failure, Job, Outcome, read_outcome
from training.recipe import ResolvedCompute

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")


def each(*names: str) -> pytest.MarkDecorator:
    chosen = [pytest.param(name, marks=needs_deepspeed if "deepspeed" in name else ()) for name in names]
    return pytest.mark.parametrize("strategy", chosen)


# 150 rows: 4 full steps an epoch, and 22 rows left over that make unequal micro-batches.
# 60 rows of validation, in passes of 14 over two ranks: the last has 4.
EPOCHS = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "per_device_eval_batch_size": 7,
}
# The loss falls, so by this rule the first epoch is the best, and the second the last.
BEST_FIRST = EPOCHS | {
    "num_train_epochs": 3,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "early_stopping_patience": 1,
    "learning_rate": 1e-3,
}


def failure(outcome: Outcome | None) -> Failure:
    assert outcome is not None and outcome.failure is not None
    return outcome.failure


@pytest.fixture(scope="module")
def one_process(world: Path) -> Path:
    """One process on the steps of two, without dropout, which each rank draws for itself."""
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base)
    config = json.loads((base / "model/config.json").read_text())
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "model/config.json").write_text(json.dumps(config | quiet))
    one = {**BEST_FIRST, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
    job_dir = tiny.fit_job(world, world / "one", base=base.name, **one)
    figures = finish(job_dir).result
    assert (figures["best_step"], figures["steps"]) == (5, 10)
    return job_dir


@pytest.fixture(scope="module")
def undisturbed(world: Path, one_process: Path) -> Callable[[str], Path]:
    """An undisturbed job of a strategy with the steps of the one process; run once."""

    @cache
    def run(strategy: str) -> Path:
        job_dir = job(world, world / strategy, strategy)
        assert finish(job_dir).state == "finished"
        return job_dir

    return run


def job(world: Path, job_dir: Path, strategy: str) -> Path:
    base, compute = "base-without-dropout", {"strategy": strategy}
    return tiny.fit_job(world, job_dir, base=base, processes=2, compute=compute, **BEST_FIRST)


@pytest.mark.slow
@each("fsdp", "deepspeed-zero3")
def test_one_process_that_is_killed_ends_with_the_same_bytes(world: Path, tmp_path: Path, strategy: str) -> None:
    """One GPU trains with a strategy for several to keep state in the CPU's memory."""
    whole, killed = (
        tiny.fit_job(world, tmp_path / name, compute={"strategy": strategy}, **EPOCHS) for name in ("whole", "killed")
    )
    assert finish(whole).state == "finished"
    assert kill_when(killed, lambda: checkpoints_written(killed) == 1)
    assert finish(killed).state == "finished"
    assert_same(killed, whole)


@pytest.mark.slow
@needs_deepspeed
def test_two_processes_that_share_only_the_optimizers_state_end_with_the_same_bytes_after_a_kill(
    world: Path, tmp_path: Path
) -> None:
    settings = {**EPOCHS, "num_train_epochs": 1, "checkpoint_interval_s": 0.01}
    whole, killed = (
        tiny.fit_job(world, tmp_path / name, processes=2, compute={"strategy": "deepspeed-zero1"}, **settings)
        for name in ("whole", "killed")
    )
    assert finish(whole).state == "finished"
    assert_resumes(killed, whole, after=2, victim=1)
    newest = max((whole / "checkpoints").glob("checkpoint-*"), key=step_of)
    assert len([*newest.glob("global_step*/*_optim_states.pt")]) == 2  # a share of each process


# ZeRO-2 keeps what ZeRO-3 does, and the whole model besides: the matrix and the drill kill it, too.
@pytest.mark.slow
@each("fsdp", "deepspeed-zero3")
def test_stopped_and_killed_it_ends_with_the_same_bytes_and_the_export_needs_no_strategy(
    world: Path, undisturbed: Callable[[str], Path], tmp_path: Path, strategy: str
) -> None:
    """Stopped within the second epoch, killed while it evaluates at its end (FSDP alone: DeepSpeed takes long to
    begin, and an evaluation is the same by both), and again while it saves there. The state check looks at each rank's
    share of the model, the optimizer's state and the random numbers at each resume.
    """
    job_dir = job(world, tmp_path / "killed", strategy)
    folder = job_dir / "checkpoints"

    def trained(steps: int) -> bool:
        return any(event["step"] == steps for event in events(job_dir, "metrics"))

    assert kill_when(job_dir, lambda: trained(6), signal.SIGTERM, victim=1)
    assert failure(read_outcome(job_dir)).kind == "interrupted"
    checkpoint = max(folder.glob("checkpoint-*"), key=step_of)
    assert 5 < step_of(checkpoint) < 10 and find_damage(checkpoint) is None
    assert strategy != "fsdp" or kill_when(job_dir, lambda: trained(10), victim=1)
    assert kill_when(job_dir, lambda: any(folder.glob(".writing-checkpoint-10")))
    assert finish(job_dir).state == "finished"
    assert f"resuming from {checkpoint.name}" in [event["message"] for event in events(job_dir, "note")]
    assert_same(job_dir, undisturbed(strategy))
    (reported,) = events(undisturbed(strategy), "strategy")
    foreseen = distributed.load(strategy).build_configuration(ResolvedCompute(**Job.read(job_dir).settings["compute"]))
    assert distributed.FROM_THE_MODEL in str(foreseen) and distributed.FROM_THE_MODEL not in str(reported)

    exported = job_dir / "output/model"
    model, found = AutoModelForSequenceClassification.from_pretrained(exported, output_loading_info=True)
    assert not any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == ["BertForSequenceClassification"]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@each("fsdp", "deepspeed-zero3")
def test_losses_best_model_and_early_end_are_those_of_one_process_on_the_same_steps(
    one_process: Path, undisturbed: Callable[[str], Path], strategy: str
) -> None:
    """Sums of float32 in another order differ by some 1e-7 a step, which Adam blows up where a gradient is near 0."""
    job_dir = undisturbed(strategy)
    figures = (read_outcome(job_dir) or Outcome(state="failed")).result
    assert (figures["best_step"], figures["steps"]) == (5, 10)
    ours, theirs = curve(job_dir), curve(one_process)
    assert ours.keys() == theirs.keys()
    for step, point in theirs.items():
        for name in {"train_loss", "eval_loss", "grad_norm"} & point.keys():
            assert ours[step][name] == pytest.approx(point[name], rel=1e-4), (step, name)
    model, wanted = (load_file(trained / "output/model/model.safetensors") for trained in (job_dir, one_process))
    assert model.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(model[name], weight, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.slow
def test_in_bf16_a_shared_models_loss_and_the_sum_of_its_gradients_are_not_rounded(world: Path, tmp_path: Path) -> None:
    """A loss in bf16 has 8 bits: near 1.1, a multiple of 1/128."""
    quick = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False}
    job_dir = tiny.fit_job(
        world, tmp_path / "job", processes=2, precision="bf16", compute={"strategy": "fsdp"}, **quick
    )
    assert finish(job_dir, program=run_and_keep_the_precision).state == "finished"
    assert all(point["train_loss"] * 2**12 % 1 for point in curve(job_dir).values())
    assert (job_dir / "precision.txt").read_text() == "torch.bfloat16 torch.float32"


def run_and_keep_the_precision(job_dir: str, rank: dict[str, str]) -> None:
    from training.engine.trainer import ExactTrainer

    def kept(trainer: ExactTrainer) -> dict[str, torch.Tensor]:
        policy = trainer.model._get_fsdp_state()._mp_policy
        (Path(job_dir) / "precision.txt").write_text(f"{policy.param_dtype} {policy.reduce_dtype}")
        return gather_weights(trainer)

    module = distributed.load("fsdp")
    gather_weights = module.gather_weights
    module.gather_weights = kept
    run_fit(job_dir, rank)


def run_as_accelerate_would(job_dir: str, rank: dict[str, str]) -> None:
    """Without the state that a strategy makes up on the CPU. Then FSDP becomes DDP, and of DeepSpeed's processes each
    trains alone, in silence.
    """
    name = Job.read(Path(job_dir)).settings["compute"]["strategy"]
    module = distributed.load(name)
    fields = module.build_arguments
    plain = {"accelerator_config": None} | ({"use_cpu": False} if "deepspeed" in name else {})
    module._share_on_cpu = lambda: None
    module.build_arguments = lambda *given: fields(*given) | plain
    run_fit(job_dir, rank)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed-zero2", marks=needs_deepspeed)])
def test_a_strategy_that_silently_became_another_is_refused_before_it_trains(
    world: Path, tmp_path: Path, strategy: str
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "job", processes=2, compute={"strategy": strategy}, **EPOCHS)
    problem = failure(finish(job_dir, program=run_as_accelerate_would))
    assert problem.kind == "internal" and "requested {'processes': 2" in problem.message
    assert not events(job_dir, "progress")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed-zero3", marks=needs_deepspeed)])
def test_a_model_that_is_not_wrapped_at_all_is_reported(strategy: str) -> None:
    compute = ResolvedCompute.model_validate({"strategy": strategy, "num_processes": 2, "mixed_precision": "no"})
    assert distributed.load(strategy).check_wrapper(torch.nn.Linear(1, 1), compute) == "it is a Linear"


def test_more_of_deepspeeds_configuration_is_passed_on_with_the_settings_of_the_recipe() -> None:
    more = {"zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 7}, "gradient_clipping": 1.0}
    chosen = {"strategy": "deepspeed-zero3", "offload": "all", "deepspeed": more | {"wall_clock_breakdown": True}}
    compute = ResolvedCompute.model_validate(chosen | {"num_processes": 2, "mixed_precision": "no"})
    config = zero.build_configuration(compute, parameters=10)
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 7,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert config["gradient_clipping"] == "auto" and config["wall_clock_breakdown"] is True
    without = zero.build_configuration(compute.model_copy(update={"offload": "no", "deepspeed": {}}), parameters=10)
    assert without["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 10}


def test_the_layers_that_fsdp_puts_together_are_found_from_the_model_or_named(world: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(world / "base/model")
    assert find_wrapped_layers(model, None) == ["BertLayer"]
    assert find_wrapped_layers(model, ["BertAttention"]) == ["BertAttention"]
    silent = DistilBertForSequenceClassification(DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=8))
    assert find_wrapped_layers(silent, None) == ["TransformerBlock"]
    # The one holds the embeddings, which are put together by themselves; the other is misspelt.
    for name, hint in (("BertEmbeddings", ""), ("BertLayr", " Did you mean 'BertLayer'?")):
        (problem,) = raised_problems(find_wrapped_layers, model, [name])
        assert problem.where == "compute.fsdp_wrap" and problem.message.startswith(f"{name!r} is no layer of Bert")
        assert hint in problem.message


def test_fsdp_takes_the_layer_of_patches_for_one_module_and_names_a_model_without_embeddings() -> None:
    config = ViTConfig(image_size=16, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    patches = AutoModelForImageClassification.from_config(config)
    assert find_wrapped_layers(patches, None) == ["ViTLayer"]
    require_one_group(patches, ["ViTLayer"])
    convolutions = AutoModelForImageClassification.from_config(ResNetConfig(hidden_sizes=[4], depths=[1]))
    (problem,) = raised_problems(find_wrapped_layers, convolutions, None)
    assert problem.where == "compute.strategy" and "ResNetForImageClassification, which has no" in problem.message


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "span-corruption"])
def test_fsdp_trains_a_model_whose_embeddings_are_also_weights_of_others_as_one_process_does(
    tmp_path: Path, task: str
) -> None:
    """BERT's words and its head's bias, T5's words of encoder, decoder and head; without dropout, and killed once."""
    call(make_world, task, tmp_path / "world")
    config = tmp_path / "world/base/output/model/config.json"
    quiet = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"), 0.0)
    config.write_text(json.dumps(json.loads(config.read_text()) | quiet))
    quick = {"max_steps": 10, "eval_strategy": "no", "load_best_model_at_end": False, "checkpoint_interval_s": 0.01}
    quick |= {"extra": {"adam_epsilon": 1e-4}}
    one, two = (
        fit_job(
            task,
            tmp_path / "world",
            tmp_path / strategy,
            {"strategy": strategy, "num_processes": processes},
            per_device_train_batch_size=20 // processes,
            **quick,
        )
        for strategy, processes in {"ddp": 1, "fsdp": 2}.items()
    )
    assert finish(one).state == "finished"
    assert kill_when(two, lambda: checkpoints_written(two) >= 1, victim=1)
    assert finish(two).state == "finished"
    model, wanted = (load_file(job / "output/model/model.safetensors") for job in (two, one))
    assert model.keys() == wanted.keys()
    before = load_file(config.parent / "model.safetensors")
    words = next(name for name in wanted if name.endswith(("word_embeddings.weight", "shared.weight")))
    assert (wanted[words] - before[words.removeprefix("bert.")]).abs().max() > 1e-3
    for name, weight in wanted.items():
        torch.testing.assert_close(model[name], weight, rtol=0, atol=1e-5, msg=name)


def test_fsdp_refuses_units_that_share_a_weight_and_takes_a_layer_that_is_used_several_times() -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=8)
    network = AutoModelForSequenceClassification.from_config(config)
    require_one_group(network, ["BertLayer"])
    first, second = network.bert.encoder.layer
    second.output.dense.weight = first.output.dense.weight
    (problem,) = raised_problems(require_one_group, network, ["BertLayer"])
    assert problem.where == "compute.strategy" and problem.message.startswith(
        "'fsdp' cannot share out BertForSequenceClassification: bert.encoder.layer.0.output.dense.weight and "
        "bert.encoder.layer.1.output.dense.weight share a weight, but are in different units."
    )
    require_one_group(network, [])
    once = AutoModelForSequenceClassification.from_config(AlbertConfig(**sizes, intermediate_size=8))
    once.albert.encoder.another = once.albert.encoder.albert_layer_groups[0]
    require_one_group(once, ["AlbertLayerGroup"])


# tests/training/models/test_lora.py has the same test with one process.
@pytest.mark.drill
@each("ddp", "fsdp", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
def test_adapters_shared_by_two_processes_end_with_the_same_bytes_after_a_kill_and_merged_answer_the_same(
    world: Path, tmp_path: Path, strategy: str
) -> None:
    lora = {"r": 4, "target_modules": ["query", "value"]}
    settings = {
        "processes": 2,
        "compute": {"strategy": strategy},
        "lora": lora,
        "checkpoint_interval_s": 0.01,
        **EPOCHS,
    }
    undisturbed, killed = (tiny.fit_job(world, tmp_path / name, **settings) for name in ("undisturbed", "killed"))
    assert finish(undisturbed).state == "finished"
    assert_resumes(killed, undisturbed, after=4, victim=1)
    merged, base = (
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(tiny.LABELS)).eval()
        for folder in (killed / "output/model", world / "base/model")
    )
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        before = base.bert(input_ids=ids).last_hidden_state
        ours = merged(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, killed / "output/adapter").eval()
        torch.testing.assert_close(adapted(input_ids=ids).logits, ours, rtol=1e-5, atol=1e-5)
        assert (merged.bert(input_ids=ids).last_hidden_state - before).abs().max() > 1e-3
