"""Adapters of other kinds than LoRA: the same answers merged and not, the same bytes after a kill, settings by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.raised import raised_problems
from tests.training import tiny
from tests.training.forks import assert_resumes, finish
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
QUICK: dict[str, Any] = {"num_train_epochs": 1, "learning_rate": 2e-2, "checkpoint_interval_s": 0.01}


def test_each_kind_is_tried() -> None:
    assert SETTINGS.keys() == ADAPTERS.keys() - {LORA}


@pytest.mark.parametrize("kind", SETTINGS)
def test_merged_it_answers_as_the_adapter_does_and_killed_it_ends_with_the_same_bytes(
    world: Path, tmp_path: Path, kind: str
) -> None:
    lora = {"peft_type": kind, "settings": SETTINGS[kind], "target_modules": ["query", "value", "output.dense"]}
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
