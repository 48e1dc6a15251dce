"""Each task type whole: from rows to a registered model that answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.flows.forked import finetune
from tests.task_types import ROWS, TINY, recipe_of, write_project
from training import task_types
from training.recipe import parse
from training.recipe.rules.column_rules import source_columns
from training.recipe.tables.exports import EXPORTS

IN_CI = {"image-classification", "reward-modeling"}
"""A processor in place of a tokenizer, and a model that no pipeline serves; the others are left to the drill."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.drill]) for name in TINY]
)
def test_a_run_registers_a_model_that_answers_a_file_of_rows_as_it_was_evaluated(
    name: str, server: dict[str, str], tmp_path: Path
) -> None:
    file, home, result_file = write_project(name, tmp_path), tmp_path / "home", tmp_path / "told.json"
    # In the precision of the later prediction: one token that is as likely as another changes the rest of a text.
    settings = ["--set", "training.num_train_epochs=2", "--set", "compute.mixed_precision=no"]
    settings += ["--set", "release.gate.baseline=false"]  # two epochs teach little
    recipe = parse(recipe_of(name, tmp_path / "rows"))
    has_onnx = task_types.from_settings(recipe.task_and_options).auto_class in EXPORTS["onnx"].classes
    exports = ["onnx", "onnx-int8"] if has_onnx else []
    settings += ["--set", f"release.exports=[{', '.join(exports)}]", "--set", "release.export_margin=1.0"]
    run = finetune(home, "run", str(file), *settings, "--json", str(result_file), timeout_s=500, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(result_file.read_text())
    assert result["model"]["registered"] == f"{name}/1" and result["verdict"]["decision"] == "promote"
    assert {form: one["released"] for form, one in result["exports"].items()} == dict.fromkeys(exports, True)

    shown = [column.source_name for column in source_columns(recipe).inputs]
    rows, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    whole = map(json.loads, (tmp_path / "rows/validation.jsonl").read_text().splitlines())
    rows.write_text("\n".join(json.dumps({name: row[name] for name in shown}) for row in whole))

    def predict() -> list[dict[str, Any]]:
        predicted = finetune(home, "predict", name, "--input", str(rows), "--output", str(out), **server)
        assert predicted.returncode == 0, predicted.stderr
        lines = map(json.loads, out.read_text().splitlines())
        return [{name: value for name, value in line.items() if name != "predicted_at"} for line in lines]

    given = predict()
    (stored,) = (home / stage["artifact"] for stage in result["stages"] if stage["name"] == "predict")
    (data,) = (home / stage["artifact"] for stage in result["stages"] if stage["name"] == "load_data")
    made, labels = task_types.from_settings(recipe.task_and_options), json.loads((data / "labels.json").read_text())
    answers = made.to_records(pq.read_table(stored / "validation.parquet"), labels)
    assert len(given) == len(answers) == ROWS["validation"]
    for one, answer in zip(given, answers, strict=True):
        if not one.get("targets", 1):  # without a target, it generates one
            assert isinstance(one["generated_text"], str)
            continue
        if one.get("rejected_reward", 0) is None:  # the reward of a prompt alone
            assert isinstance(one["reward"], float)
            continue
        assert made.same_prediction({name: one[name] for name in answer}, answer, 1e-2), (one, answer)

    for stage in ("fit", "predict_shard"):  # so that the version is fetched from MLflow, and predicts again
        shutil.rmtree(home / "artifacts" / stage)
    out.unlink()
    assert predict() == given
