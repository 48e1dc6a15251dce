"""Adapters of other kinds than LoRA: the same answers merged and not, the same bytes after a kill, settings by name."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.raised import raised_problems
from tests.training import tiny
from tests.training.forks import assert_resumes, checkpoints_written, finish, kill_when
from training.models import adapters
from training.recipe import parse
from training.recipe.tables.adapters import ADAPTERS, LORA
from training.recipe.training_fields import Lora

# 60 of 150 rows: 8 steps. Dropout where the kind has any.
SETTINGS: dict[str, dict[str, Any]] = {
    "IA3": {"feedforward_modules": ["output.dense"]},
    "VERA": {"r": 8, "vera_dropout": 0.1},
    "OFT": {"oft_block_size": 8, "module_dropout": 0.2},
    "LOKR": {"r": 2, "alpha": 4, "rank_dropout": 0.1},
    "LOHA": {"r": 2, "alpha": 4, "module_dropout": 0.1},
}
LAYERS = ["query", "value", "output.dense"]
QUICK: dict[str, Any] = {"num_train_epochs": 1, "learning_rate": 2e-2, "checkpoint_interval_s": 0.01}


def test_each_kind_is_tried() -> None:
    assert SETTINGS.keys() == ADAPTERS.keys() - {LORA}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_merged_it_answers_as_the_adapter_does_and_killed_it_ends_with_the_same_bytes(
    world: Path, tmp_path: Path, kind: str
) -> None:
    lora = {"peft_type": kind, "settings": SETTINGS[kind], "target_modules": LAYERS}
    whole, killed = (tiny.fit_job(world, tmp_path / name, lora=lora, **QUICK) for name in ("whole", "killed"))
    outcome = finish(whole)
    assert outcome.state == "finished", outcome
    assert_resumes(killed, whole, after=4)
    (newest, *_) = whole.glob("checkpoints/checkpoint-*/model.safetensors")
    trained = {name for name in load_file(newest) if ".modules_to_save." not in name}
    assert trained and not [name for name in trained if "base_layer" in name]

    def base() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(world / "base/model", num_labels=len(tiny.LABELS))

    output, batch = whole / "output", {"input_ids": torch.arange(5, 17)[None]}
    merged = AutoModelForSequenceClassification.from_pretrained(output / "model").eval()
    adapted = PeftModel.from_pretrained(base(), output / "adapter").eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(**batch).logits, adapted(**batch).logits, rtol=0, atol=1e-5)
        before, after = (network.bert(**batch).last_hidden_state for network in (base().eval(), merged))
    assert (after - before).abs().max() > 1e-3
    assert json.loads((output / "adapter/adapter_config.json").read_text())["peft_type"] == kind


def sharings() -> list[Any]:
    """Each kind with each strategy that shards something; a kind a strategy in every run of the tests."""
    found = []
    lacks = importlib.util.find_spec("deepspeed") is None
    usual = {"fsdp": "VERA", "deepspeed-zero2": "LOKR", "deepspeed-zero3": "OFT"}
    for strategy, often in usual.items():
        needs = [pytest.mark.skipif(lacks, reason="needs the extra deepspeed")] if "deepspeed" in strategy else []
        for kind in ADAPTERS:
            found.append(pytest.param(kind, strategy, marks=[*needs, *([pytest.mark.drill] * (kind != often))]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), sharings())
def test_two_processes_that_share_the_model_end_with_the_merged_weights_of_one_even_after_a_kill(
    world: Path, tmp_path: Path, kind: str, strategy: str
) -> None:
    """Without dropout, which each process draws for itself. With so large an epsilon, Adam does not blow up the
    rounding of gradients near 0."""
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base, dirs_exist_ok=True)
    config = json.loads((base / "model/config.json").read_text())
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "model/config.json").write_text(json.dumps(config | quiet))
    settings = {name: value for name, value in SETTINGS.get(kind, {}).items() if "dropout" not in name}
    lora: dict[str, Any] = {"peft_type": kind, "settings": settings, "target_modules": LAYERS}
    steps: dict[str, Any] = {"max_steps": 8, "eval_strategy": "no", "load_best_model_at_end": False}
    steps |= {"base": base.name, "lora": lora, "learning_rate": 0.1, "extra": {"adam_epsilon": 1e-5}}
    one = tiny.fit_job(world, tmp_path / "one", per_device_train_batch_size=16, **steps)
    compute = {"strategy": strategy}
    two = tiny.fit_job(world, tmp_path / "two", processes=2, compute=compute, checkpoint_interval_s=0.01, **steps)
    assert finish(one).state == "finished"
    assert kill_when(two, lambda: checkpoints_written(two) >= 1, victim=1)
    assert finish(two).state == "finished"
    merged, wanted = (load_file(job / "output/model/model.safetensors") for job in (two, one))
    assert merged.keys() == wanted.keys()
    before = load_file(base / "model/model.safetensors")
    moved = [float((wanted[f"bert.{name}"] - weight).abs().max()) for name, weight in before.items() if "query" in name]
    assert max(moved) > 1e-4
    for name, weight in wanted.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "bert") for kind in SETTINGS), ("IA3", "gpt2"), ("VERA", "gpt2")]
)
def test_without_target_modules_and_settings_each_kind_finds_its_layers(kind: str, family: str) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    config = AutoConfig.for_model(family, vocab_size=50, pad_token_id=0, **sizes)
    network = AutoModelForSequenceClassification.from_config(config)
    head = "score" if family == "gpt2" else "classifier"
    adapters.add(network, Lora(peft_type=kind), [f"{head}.weight"], "AutoModelForSequenceClassification", seed=3)
    trained = [name for name, weight in network.named_parameters() if weight.requires_grad and head not in name]
    assert trained and not any("base_layer" in name for name in trained)


@pytest.mark.parametrize(
    ("lora", "where", "message"),
    [
        ({"peft_type": "lora"}, "peft_type", "'lora' is unknown: choose from LORA, IA3, VERA, OFT, LOKR, LOHA"),
        ({"peft_type": "VERA", "r": 4}, "r",
         "is for `peft_type: LORA` only; with VERA, set it in training.lora.settings."),
        ({"peft_type": "IA3", "use_dora": True}, "use_dora", "is for `peft_type: LORA` only; with IA3, leave it out."),
        ({"settings": {"r": 4}}, "settings.r", "is for another peft_type than LORA"),
        ({"peft_type": "LOHA", "settings": {"alpa": 4}}, "settings.alpa",
         "LOHA has no such setting: choose from r, alpha, rank_dropout, module_dropout. Did you mean 'alpha'?"),
        ({"peft_type": "LOKR", "settings": {"r": 0}}, "settings.r", "0 is out of range: it must be at least 1."),
        ({"peft_type": "LOKR", "settings": {"module_dropout": 1}}, "settings.module_dropout",
         "1 is out of range: it must be at least 0 and below 1."),
        ({"peft_type": "OFT", "settings": {"block_share": 1}}, "settings.block_share",
         "1 is of the wrong type: it takes true or false."),
        ({"peft_type": "OFT", "settings": {"r": 2, "oft_block_size": 8}}, "settings.oft_block_size",
         "follows from settings.r and the size of a layer: leave one of both out."),
        ({"peft_type": "IA3", "settings": {"feedforward_modules": "dense"}}, "settings.feedforward_modules",
         "'dense' is of the wrong type: it takes a list of names."),
    ],
)  # fmt: skip
def test_fields_and_settings_of_another_kind_are_refused_by_name(lora: Any, where: str, message: str) -> None:
    recipe = {
        "name": "it",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": "it.csv", "text": ["text"], "label": "label"},
        "model": {"source": "hub", "path": "me/it"},
        "training": {"lora": lora},
    }
    (problem,) = raised_problems(parse, recipe)
    assert problem.where == f"training.lora.{where}" and problem.message.startswith(message)
