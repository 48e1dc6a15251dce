"""The record of a run: what of it a reproduction reads is signed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tasks.registry.lineage import RECIPE_WITHOUT_DEFAULTS
from tasks.registry.slsa_statement import BUILD_TYPE, build_provenance, require_signed_record
from training.problems import UserError

RECORD: dict[str, Any] = {
    "recipe": {"name": "small", "model": {"path": "org/base"}},
    RECIPE_WITHOUT_DEFAULTS: {"name": "small"},
    "lock": {"model_hub": {"repo": "org/base", "commit": "c" * 40}, "model_files": {}},
    "rows": {"digest": "d" * 64, "figures": {}},
    "model": {"digest": "m" * 64, "files": {"model.safetensors": {"sha256": "w" * 64}}},
    "training": {"micro_batch_size": 8},
    "environment": {"threads": 2},
    "metrics": {"validation": {"accuracy": {"value": 0.9}}},
    "out_of_fold": None,
    "code": {"digest": "e" * 64, "files": {"training/programs/fit.py": "f" * 64}, "git": {"commit": "a" * 40}},
    "libraries": {"torch": "2.13.0"},
    "project": {"python": "3.11"},
    "verdict": {"decision": "promote"},
    "stages": [{"name": "load_data", "key": "k1", "state": "ran"}, {"name": "fit", "key": "k2", "state": "ran"}],
    "run": {"flow_run_id": "run", "began": "2026-11-27T00:00:00+00:00", "state": "running"},
}


def signed(record: dict[str, Any] | None = RECORD) -> dict[str, Any]:
    return build_provenance(
        "small/1", {"sha256": "a"}, "files", "key", {}, {"export/model.onnx": "x"}, record
    ).predicate


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("recipe", "model", "path"), "org/evil", "recipe"),
        ((RECIPE_WITHOUT_DEFAULTS, "name"), "evil", RECIPE_WITHOUT_DEFAULTS),
        (("lock", "model_hub", "commit"), "e" * 40, "lock"),
        (("model", "files", "model.safetensors", "sha256"), "e" * 64, "model"),
        (("training", "micro_batch_size"), 4, "training"),
        (("environment", "threads"), 64, "environment"),
        (("metrics", "validation", "accuracy", "value"), 0.1, "metrics"),
        (("out_of_fold",), {}, "out_of_fold"),
        (("code", "files", "training/programs/fit.py"), "e" * 64, "code"),
        (("libraries", "torch"), "2.12.0", "libraries"),
        (("stages", 0, "key"), "evil", "stages"),
    ],
)
def test_every_edit_of_what_a_reproduction_reads_is_named(path: tuple[Any, ...], value: object, part: str) -> None:
    require_signed_record(RECORD, signed(), "small/1")
    record = copy.deepcopy(RECORD)
    inside: Any = record
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    with pytest.raises(UserError, match=rf"the record of small/1 was changed since it was signed, in {part}: "):
        require_signed_record(record, signed(), "small/1")


def test_the_end_of_the_run_leaves_the_record_as_it_was_signed() -> None:
    ended = copy.deepcopy(RECORD)
    ended["run"] |= {"state": "completed"}
    ended["stages"] += [{"name": "register", "key": "k3", "state": "ran"}]
    ended |= {"version": {"name": "small", "version": "1"}, "promotion": {}}
    require_signed_record(ended, signed(), "small/1")


def test_a_version_that_was_signed_without_a_record_has_none_that_is_trusted() -> None:
    with pytest.raises(UserError, match="small/1 was signed without a record of its run"):
        require_signed_record(RECORD, signed(None), "small/1")


def test_the_provenance_names_recipe_rows_code_and_base_model_as_slsa_has_them() -> None:
    definition = signed()["buildDefinition"]
    assert definition["buildType"] == BUILD_TYPE and definition["externalParameters"] == {
        "recipe": RECORD[RECIPE_WITHOUT_DEFAULTS]
    }
    names = {one["name"]: one["digest"] for one in definition["resolvedDependencies"]}
    assert names["rows"] == {"sha256": "d" * 64} and names["base model"] == {"gitCommit": "c" * 40}
    assert names["code"] == {"sha256": "e" * 64} and names["git"] == {"gitCommit": "a" * 40}
