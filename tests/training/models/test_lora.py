"""Adapters: what they leave as it was, what is exported, and the same bytes after kills."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

from tests.fork_server import call
from tests.raised import raised_problems
from tests.training import tiny
from tests.training.forks import assert_resumes, assert_same, checkpoints_written, finish, kill_when
from training import task_types
from training.batching import causal_batches
from training.batching.batches import PadToLongest, TokenRows
from training.engine.export import export
from training.jobs.protocol import read_outcome
from training.models import adapters
from training.models.loading import load_for_training, load_tokenizer
from training.recipe import Training, parse
from training.recipe.training_fields import Lora

pytestmark = pytest.mark.slow

# 150 rows: 19 steps in each of two epochs. Dropout in the layers and before the adapters; the best model is loaded at
# the end.
ASKED: dict[str, Any] = {
    "lora": {"r": 4, "lora_alpha": 16, "lora_dropout": 0.2, "target_modules": ["query", "value", "output.dense"]},
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "checkpoint_interval_s": 0.01,
}
ENGINES = ("trainer", "accelerate")
HEAD = {"classifier.weight", "classifier.bias"}


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An undisturbed job of each engine."""
    made = {}
    for engine in ENGINES:
        made[engine] = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / engine, engine=engine, **ASKED)
        outcome = finish(made[engine])
        assert outcome.state == "finished", outcome
    return made


def base_of(world: Path) -> Any:
    """The base model with some head for the labels, as anyone would load it."""
    return AutoModelForSequenceClassification.from_pretrained(world / "base/model", num_labels=len(tiny.LABELS))


def test_only_the_layers_with_adapters_and_the_head_are_other_than_in_the_base_model(
    world: Path, trained: dict[str, Path]
) -> None:
    before = base_of(world).state_dict()
    after = load_file(trained["trainer"] / "output/model/model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    layers = [name for name in before if name.endswith(("query.weight", "value.weight", "output.dense.weight"))]
    assert changed == HEAD | {*layers} and len(layers) == 8
    outcome = read_outcome(trained["trainer"])
    assert outcome is not None and outcome.result["trainable_parameters"] == 2 * 4 * (3 * 64 + 96) + 33 * 3


def test_the_adapter_on_the_base_model_answers_as_the_merged_model_does(world: Path, trained: dict[str, Path]) -> None:
    output = trained["trainer"] / "output"
    rows = TokenRows(world / "tokens/validation.arrow")
    batch = PadToLongest(load_tokenizer(output / "model"), 1)([rows[row] for row in range(len(rows))])
    merged = AutoModelForSequenceClassification.from_pretrained(output / "model").eval()
    adapted = PeftModel.from_pretrained(base_of(world), output / "adapter").eval()
    with torch.inference_mode():
        ours, theirs = merged(**batch).logits, adapted(**batch).logits
        base = base_of(world).eval()(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (ours - base).abs().max() > 1e-2
    config = (output / "adapter/adapter_config.json").read_text()
    assert json.loads(config)["base_model_name_or_path"] is None and str(world) not in config


def test_adapters_on_a_model_that_adapters_are_merged_into_give_a_complete_model_again(
    world: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    first = trained["trainer"] / "output/model"
    for part in ("model", "tokenizer"):  # load_model stores both from this one folder
        (world / "merged").mkdir(exist_ok=True)
        (world / "merged" / part).symlink_to(first)
    job = tiny.fit_job(world, tmp_path / "second", base="merged", **{**ASKED, "num_train_epochs": 1})
    assert finish(job).state == "finished"
    second = AutoModelForSequenceClassification.from_pretrained(job / "output/model").eval()
    start = AutoModelForSequenceClassification.from_pretrained(first)
    before, after = start.state_dict(), second.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert before.keys() == after.keys() and len(changed) == 8 and not changed & HEAD  # the start has the head
    adapted = PeftModel.from_pretrained(start, job / "output/adapter").eval()
    batch = dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.long))
    with torch.inference_mode():
        torch.testing.assert_close(second(**batch).logits, adapted(**batch).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_it_ends_with_the_same_bytes_and_checkpoints_hold_only_what_is_trained(
    world: Path, trained: dict[str, Path], tmp_path: Path, engine: str
) -> None:
    job = tiny.fit_job(world, tmp_path / "killed", engine=engine, **ASKED)
    assert kill_when(job, lambda: checkpoints_written(job) >= 7)
    (checkpoint, *_) = job.glob("checkpoints/checkpoint-*/model.safetensors")
    assert all("lora_" in name or ".modules_to_save." in name for name in load_file(checkpoint))
    assert finish(job).state == "finished"
    assert_same(job, trained[engine])
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (job / "output/adapter" / file).read_bytes() == (trained[engine] / "output/adapter" / file).read_bytes()


@pytest.mark.parametrize(
    "more",
    [
        {"lora": ASKED["lora"] | {"use_rslora": True, "use_dora": True}},
        {"lora": ASKED["lora"] | {"init_lora_weights": "pissa"}},
        {"lora": None, "extra": {"neftune_noise_alpha": 5.0}},
    ],
)
def test_each_kind_of_adapter_and_noise_on_embeddings_resume_to_the_same_bytes(
    world: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    asked = {**ASKED, "num_train_epochs": 1, **more}
    whole, killed = (tiny.fit_job(world, tmp_path / name, **asked) for name in ("whole", "killed"))
    assert finish(whole).state == "finished"
    assert_resumes(killed, whole, after=5)


def test_adapters_by_pissa_begin_with_principal_components_and_leave_the_models_outputs() -> None:
    network, ids = adapted(r=2, init_lora_weights="pissa").eval(), torch.arange(12)[None]
    assert network.peft_config["default"].init_lora_weights == "pissa"
    assert all(weight.any() for name, weight in network.named_parameters() if "lora_B" in name)
    with torch.inference_mode():
        torch.testing.assert_close(network(input_ids=ids).logits, generator()(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_both_engines_train_the_same_bytes(trained: dict[str, Path]) -> None:
    ours, theirs = ((trained[engine] / "output/adapter/adapter_model.safetensors").read_bytes() for engine in ENGINES)
    assert ours == theirs


def generator() -> GPT2LMHeadModel:
    """A small model whose output layer has the weights of its embeddings, and whose layers are stored the other way
    round."""
    set_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2)).eval()


def adapted(**lora: Any) -> GPT2LMHeadModel:
    network = generator()
    adapters.add(network, Lora(**lora), [], "AutoModelForCausalLM", seed=3)
    return network


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"target_modules": "all-linear"},
    ],
)
def test_a_language_models_adapter_names_its_base_and_merged_answers_the_same(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    network = adapted(r=2, lora_alpha=6, **more)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapters.save(network, generator(), tmp_path / "adapter", {"path": "me/base", "revision": "a" * 40}, None)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"], config["task_type"]) == (
        "me/base",
        "a" * 40,
        "CAUSAL_LM",
    )
    merged, ids = adapters.merge(generator(), tmp_path / "adapter").eval(), torch.arange(12)[None]
    with torch.inference_mode():
        ours, theirs, base = (one(input_ids=ids).logits for one in (merged, network.eval(), generator()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (ours - base).abs().max() > 1e-2
    assert type(merged) is GPT2LMHeadModel and merged.lm_head.weight is merged.transformer.wte.weight


def test_a_model_is_tried_on_the_device_where_it_lies() -> None:
    """With weights in 4 bits that is a GPU, before training begins."""
    model, seen = generator().to("meta"), set()

    def see(_: Any, __: Any, given: dict[str, torch.Tensor]) -> None:
        seen.update((name, tensor.device.type) for name, tensor in given.items())

    model.register_forward_pre_hook(see, with_kwargs=True)
    causal_batches._logits(model, causal_batches.FIRST, [0, 1, 2, 3])
    assert seen == {("input_ids", "meta"), ("position_ids", "meta")}


@pytest.mark.parametrize(
    ("lora", "where", "reason"),
    [
        (
            {"target_modules": ["c_atn"]},
            "target_modules",
            "choose from c_attn, c_fc, c_proj, lm_head, or all-linear. Did",
        ),
        ({"modules_to_save": ["head"]}, "modules_to_save", "choose from attn, "),
        ({"modules_to_save": ["wte"]}, "", "transformer.wte.weight and lm_head.weight are one weight"),
        ({"target_modules": ["c_attn", "lm_head"]}, "", "transformer.wte.weight and lm_head.weight are one weight"),
    ],
)
def test_layers_that_are_not_there_or_cannot_be_merged_are_refused_by_name(
    lora: dict[str, Any], where: str, reason: str
) -> None:
    (problem,) = raised_problems(adapted, **lora)
    assert problem.where == f"training.lora.{where}".rstrip(".") and reason in problem.message


def test_settings_that_exclude_adapters_are_refused_before_anything_runs() -> None:
    recipe = {
        "name": "test",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": "base"},
        "training": {"lora": {"quantization": "nf4", "init_lora_weights": "pissa"}},
        "compute": {"strategy": "fsdp", "num_processes": 2},
        "release": {"registry": "test", "hub": {"repo": "me/test", "license": "mit", "checkpoints": "every_save"}},
    }
    messages = {problem.where: problem.message for problem in raised_problems(parse, recipe)}
    assert "with quantization, set it to null" in messages["training.lora.init_lora_weights"]
    assert "that fsdp cannot shard" in messages["training.lora.quantization"]
    assert "checkpoints hold only the trained weights" in messages["release.hub.checkpoints"]


def test_a_layer_whose_name_ends_like_the_heads_is_unchanged_and_the_export_has_the_configuration_of_the_base(
    world: Path, tmp_path: Path
) -> None:
    """DistilBERT for another number of labels: classifier is drawn anew, pre_classifier is not."""
    set_seed(1)
    config = DistilBertConfig(vocab_size=120, dim=8, n_layers=1, n_heads=2, hidden_dim=8, num_labels=5)
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    inputs = {"model": str(tmp_path / "base"), "tokenizer": str(world / "base/tokenizer")}
    settings: Any = SimpleNamespace(labels=tiny.LABELS, base=None)
    task, tokenizer = task_types.load("sequence-classification"), load_tokenizer(world / "base/tokenizer")
    lora = Lora(target_modules="all-linear")
    network = load_for_training(task, tmp_path / "base", tiny.LABELS, tokenizer, seed=1, lora=lora).eval()
    learnt = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    assert {name.split(".")[0] for name in learnt} == {"distilbert", "classifier"}
    for weight in learnt.values():
        torch.nn.init.normal_(weight)

    task: Any = SimpleNamespace(model=network, training=Training(lora=lora, seed=1), task_type=task)
    export(task, settings, inputs, tmp_path / "out", None)
    base, merged = (
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
        for folder in (tmp_path / "base", tmp_path / "out/model")
    )
    torch.testing.assert_close(merged.pre_classifier.weight, base.pre_classifier.weight, rtol=0, atol=0)
    adapted, ids = PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval(), torch.arange(12)[None]
    with torch.inference_mode():
        ours, theirs, trained = (model(input_ids=ids).logits for model in (merged.eval(), adapted, network))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, trained, rtol=1e-5, atol=1e-5)
    assert "use_cache" not in json.loads((tmp_path / "out/model/config.json").read_text())


def put_back(job_dir: str) -> tuple[str, str] | None:
    """The adapters as a checkpoint describes them, and the Trainer's error for one that lacks an adapter weight."""
    from training.engine.trainer import make_trainer

    task = tiny.task_of(Path(job_dir))
    trainer, file = make_trainer(task), Path(job_dir) / "model.safetensors"
    adapters.save_trained(trainer.model, file)
    trainer._load_from_checkpoint(job_dir)
    found = load_file(file)
    del found[next(name for name in found if "lora_A" in name)]
    save_file(found, file)
    try:
        trainer._load_from_checkpoint(job_dir)
    except ValueError as error:
        return task.environment()["LoRA"], str(error)
    return None


def test_a_checkpoint_describes_its_adapters_and_the_trainer_resumes_from_none_that_lacks_a_weight(
    world: Path, tmp_path: Path
) -> None:
    described, refused = call(put_back, str(tiny.fit_job(world, tmp_path / "job", **ASKED)))
    assert described == "r 4, lora_alpha 16, target_modules ['query', 'value', 'output.dense']"
    assert "not of this model's adapters" in refused
