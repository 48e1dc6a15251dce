"""`finetune power`, and the plan's reasons why the gate can promote nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flows.cli.main import main
from tasks.cache.history import History
from tasks.stages.preflight.gate_power import JudgedEntries, find_obstacles, last_comparison, measure_power
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_project
from tests.training.tiny import CONFIG
from training.data.load_rows import load
from training.evaluation.group_tests import Clusters
from training.evaluation.row_groups import Groups
from training.recipe import parse
from training.recipe.task_specification import specification

ASSUMED = "Only one of the two models is right on 10% of the rows (an assumption: "


def test_the_gain_that_the_stored_rows_find_is_shown_for_a_file_and_for_a_registered_model(
    finished: FinishedRun, tmp_path: Path
) -> None:
    shown = [
        finetune(finished.home, "power", name, "--json", str(tmp_path / "out.json")).stdout
        for name in (str(finished.file), "small")
    ]
    assert shown[0] == shown[1]
    head, assumed, found, *_ = shown[0].splitlines()
    assert head == "validation: 60 rows, 95% confidence" and assumed.startswith(ASSUMED)
    (gain,) = re.findall(r"^The gate finds a gain of (0\.\d{4}) in accuracy with a chance of 80 %\.$", found)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert f"{figures['detectable_gain']:.4f}" == gain and figures["obstacles"] == []
    assert [one["gain"] for one in figures["gains"]] == [0.005, 0.01, 0.02, 0.03, 0.05]
    assert figures["gains"][0]["rows"] > figures["gains"][-1]["rows"] > 60


def test_a_comparison_of_another_version_of_the_project_counts_as_none(home: Path) -> None:
    of_another_version = {"verdict": {"comparison": {"test": "mcnemar", "p_value": 0.01}}}
    History("small").remember_completed(of_another_version)
    recipe = parse(yaml.safe_load(write_project(home / "p").read_text())["deployments"][0]["parameters"]["recipe"])
    assert last_comparison(recipe) is None


@pytest.mark.slow
def test_counted_comparisons_flips_and_few_rows_show_in_power_and_plan(finished: FinishedRun) -> None:
    gate = ["--set", "release.gate.control=all", "--set", "release.gate.flips.max_share=0.02"]
    shown = finetune(finished.home, "power", str(finished.file), *gate).stdout
    assert shown.startswith("validation: 60 rows, 97.8125% confidence, comparison 1 on these rows\n")
    assert "\nThe gate finds no gain with a chance of 80 %.\n" in shown
    obstacle = (
        "60 rows of validation replace no champion: release.gate.flips.max_share, 0.02, takes 190 rows without any "
        "flip at 97.8125% confidence (comparison 1 on these rows)."
    )
    assert f"\nwarning: {obstacle}\n" in shown
    plan = finetune(finished.home, "plan", str(finished.file), *gate, "--set", "release.gate.min_rows=61").stdout
    assert f"  gate: {obstacle}\n" in plan
    assert "  gate: 60 rows of validation promote no model: release.gate.min_rows is 61.\n" in plan
    later = finetune(finished.home, "power", str(finished.file), *gate[:2], "--comparison", "10000000", "--rows", "30")
    assert (
        "promote no model at 100% confidence (comparison 10,000,000 on these rows): it takes 43 at least."
        in later.stdout
    )
    assert "  gate: " not in finetune(finished.home, "plan", str(finished.file)).stdout


@pytest.mark.slow
def test_a_run_by_groups_trains_nothing_again_and_judges_by_groups(finished: FinishedRun, tmp_path: Path) -> None:
    """The three genres are the groups: too few to promote, as plan, verdict and power say."""
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    given = [str(finished.file), "--set", "data.split={by: group, column: genre}"]
    given += ["--set", "release.registry=groups", "--set", "release.gate.flips.max_share=0.02"]
    done = finetune(home, "run", *given, "--json", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    states = {stage["name"]: stage["state"] for stage in result["stages"]}
    assert (states["load_data"], states["fit"], states["score"]) == ("ran", "cached", "ran")
    compared = result["verdict"]["comparison"]
    assert (compared["groups"], compared["method"], result["verdict"]["decision"]) == (3, "gaffke", "keep")
    assert "on the same 60 rows of validation in 3 groups: " in result["verdict"]["reason"]
    shown = finetune(home, "power", *given).stdout
    assert shown.startswith("validation: 60 rows in 3 groups, 95% confidence\n")
    assert (
        "They tell as much as 3 rows without groups (an assumption: all rows of a group gain or lose together).\n"
        in shown
    )
    obstacle = "60 rows of validation in 3 groups promote no model at 95% confidence: it takes 5 groups at least."
    assert f"\nwarning: {obstacle}\n" in shown
    plan = finetune(home, "plan", *given, "--set", "release.gate.confidence=0.96").stdout
    assert "  gate: 60 rows of validation in 3 groups promote no model at 96% confidence" in plan


RANKED: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "embedding": (
        {"task": "embedding"},
        [{"anchor": f"q{number % 8}", "positive": f"p{number}"} for number in range(40)],
    ),
    "reranking": (
        {"task": "reranking", "options": {"loss": "mse"}, "data.label": "label"},
        [{"query": f"q{number % 9}", "document": f"p{number}", "label": number % 9 > 0} for number in range(40)],
    ),
    "labels": (
        {"task": "embedding", "options": {"loss": "batch_hard_triplet"}, "data.text": ["text"], "data.label": "label"},
        [{"text": f"t{number % 9}", "label": "ab"[number % 9 // 8]} for number in range(40)],
    ),
}
"""Rows of eight queries with a relevant document, and in the latter two of one without."""


@pytest.mark.parametrize("kind", RANKED)
def test_of_rankings_queries_count_not_rows(kind: str, tmp_path: Path) -> None:
    fields, rows = RANKED[kind]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checks = dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows"), "ignore")
    base = {
        "name": "few",
        "data": {"source": "json", "path": str(tmp_path), "checks": checks},
        "model": {"source": "scratch", "config": CONFIG},
        "tokens": {"max_length": 8},
        "evaluation": {"splits": ["validation"]},
        "release": {"registry": "few"},
    }
    recipe = parse(base, fields)
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")}
    load(recipe.data, specification(**recipe.task_and_options), files, tmp_path / "data")
    judged = JudgedEntries.of(recipe, tmp_path / "data")
    assert judged.number == 8
    assert list(find_obstacles(recipe, judged.number, None)) == [
        "8 queries of validation promote no model: release.gate.min_rows is 20."
    ]


def test_groups_that_can_decide_nothing_are_counted_before_training(home: Path) -> None:
    recipe = parse(yaml.safe_load(write_project(home / "p").read_text())["deployments"][0]["parameters"]["recipe"])
    few = Groups(np.repeat(np.arange(4), 25))
    assert list(find_obstacles(recipe, 100, None, few)) == [
        "100 rows of validation in 4 groups promote no model: release.gate.min_rows is 20, and counts groups.",
        "100 rows of validation in 4 groups promote no model at 95% confidence: it takes 5 groups at least.",
    ]
    assert list(find_obstacles(recipe, 500, None, few)) == []  # as many rows are in 20 such groups
    recipe = parse({**recipe.model_dump(exclude_unset=True)}, {"release.gate.min_rows": 5})
    assert list(find_obstacles(recipe, 125, None, few)) == []
    flips = parse({**recipe.model_dump(exclude_unset=True)}, {"release.gate.flips.max_share": 0.02})
    (obstacle,) = find_obstacles(flips, 200, None, few)
    assert obstacle.startswith(
        "200 rows of validation in 8 groups replace no champion: release.gate.flips.max_share, 0.02, "
    )
    assert obstacle.endswith("takes 149 groups without any flip at 95% confidence.")
    alone = measure_power(recipe, 1000, 0.1, 0.95, [0.05])
    clustered = measure_power(recipe, 1000, 0.1, 0.95, [0.05], Clusters(10, 5), 100)
    assert clustered["detectable_gain"] > 2 * alone["detectable_gain"]
    assert clustered["gains"][0]["rows"] > 4 * alone["gains"][0]["rows"]
    # min_rows counts the groups there are, also where a few large ones have most of the rows
    strict = parse({**recipe.model_dump(exclude_unset=True)}, {"release.gate.min_rows": 100})
    found = [measure_power(strict, 2000, 0.1, 0.95, [0.05], Clusters(30, 1), groups) for groups in (100, 99)]
    assert found[0]["gains"][0]["chance"] > 0.5 and found[1]["gains"][0]["chance"] == 0


def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, home: Path, model_unchecked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_project(tmp_path / "project"))
    assert main(["power", file]) == 2
    assert capsys.readouterr().err == (
        "--rows: the rows are not stored yet: run the recipe first, or give their number, such as --rows 1000.\n"
    )
    assert main(["power", file, "--rows", "1000", "--differing", "0.05", "--gain", "0.02"]) == 0
    assert "on 5% of the rows (as --differing says)" in capsys.readouterr().out
    assert main(["power", file, "--rows", "1000", "--set", "data.split={by: group, column: genre}"]) == 2
    assert capsys.readouterr().err == (
        "data.split: rows are held out by group, and the groups are not stored yet: run the recipe first.\n"
    )
    assert main(["power", file, "--set", "release.gate.compare=f1", "--set", "release.gate.margin=0.1"]) == 2
    compare, margin = capsys.readouterr().err.splitlines()
    assert compare.startswith("release.gate.compare: the power of the comparison by f1 ")
    assert margin.startswith("release.gate.margin: the power with a margin, 0.1, is not computed")
