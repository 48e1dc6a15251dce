"""What makes a training another training."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tasks.fit import fit
from tasks.runtime.refs import Pins, Ref
from training.recipe import parse

PLAIN = {
    "name": "test",
    "kind": "sequence-classification",
    "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
    "model": {"source": "folder", "path": "model"},
}


def flat(**compute: Any) -> dict[str, Any]:
    ref = Ref(kind="stage", key="k", digest="d", parts={"labels.json": "l"})
    recipe = parse(PLAIN | {"compute": compute})
    return fit.flat_ingredients(recipe, Pins(num_processes=2), ref, ref, ref)[0]


def test_a_strategy_and_its_options_count_and_its_code_where_it_is_used() -> None:
    ddp, fsdp = flat(), flat(strategy="fsdp", fsdp_reshard_after_forward=False)
    code = {name for name in ddp.keys() ^ fsdp.keys() if name.startswith("code.")}
    assert code == {"code.training/strategies/ddp.py", "code.training/strategies/fsdp.py"}
    changed = {name: fsdp[name] for name in ddp.keys() & fsdp.keys() if ddp[name] != fsdp[name]}
    assert changed == {"compute.strategy": "fsdp", "compute.fsdp_reshard_after_forward": False}
    assert flat(stall_timeout_s=1.0) == ddp


def test_deepspeeds_version_counts_for_its_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "deepspeed" else version(name))
    assert flat(strategy="deepspeed-zero3")["library.deepspeed"] == "0.1"
    assert "library.deepspeed" not in flat(strategy="fsdp")
