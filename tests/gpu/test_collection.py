"""`make gpu` where there is no GPU: its cases are collected, and each is listed with the reason why it is not tried."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import JSON, reason_against, try_case
from tests.gpu.cases import CASES, ROOT, Case, Result, chosen
from tests.gpu.ground import Ground
from tests.gpu.table import Row, markdown
from training.recipe.tables.strategies import STRATEGIES
from training.recipe.tables.task_types import TASK_TYPES

NO_GPU = {"gpus": [], "capability": (0, 0), "missing": []}
H100 = {"gpus": [{"name": "NVIDIA H100"}], "capability": (9, 0), "missing": []}


def test_every_task_type_has_a_case_with_every_strategy_and_number_format() -> None:
    names = [case.name for case in CASES]
    assert len({*names}) == len(names)
    for task in TASK_TYPES:
        for strategy in STRATEGIES:
            assert {f"{task}-{strategy}-bf16", f"{task}-{strategy}-fp16", f"{task}-{strategy}-bf16-2-gpus"} < {*names}


def test_the_function_of_every_case_takes_its_settings() -> None:
    for case in CASES:
        module, _, name = case.function.partition(":")
        function = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
        inspect.signature(function).bind("ground", "folder", **case.settings)


@pytest.mark.slow
def test_without_a_gpu_all_cases_are_collected_none_is_tried_and_the_exit_status_is_0(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    argv = [sys.executable, "-m", "tests.gpu", "--json", str(file)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"no GPU here; Python {sys.version.split()[0]}" in done.stdout
    assert f"- there is no GPU here ({len(CASES)} cases): " in done.stdout
    rows = json.loads(file.read_text())["cases"]
    assert [row["case"] for row in rows] == [case.name for case in CASES]
    assert {row["state"] for row in rows} == {"not tried"}


@pytest.mark.drill
def test_a_cpu_can_run_the_cases_that_need_no_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    names = ["memory-estimate-ddp", "answers-sft", *(f"sequence-classification-{one}-bf16" for one in ("ddp", "fsdp"))]
    argv = [sys.executable, "-m", "tests.gpu", "--on-cpu", "--workers", "2", "--json", str(file), "--only", *names]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=590)
    rows = {row["case"]: row for row in json.loads(file.read_text())["cases"]}
    assert done.returncode == 0 and {rows[name]["state"] for name in names} == {"yes"}, done.stdout + done.stderr
    assert rows["memory-estimate-ddp"]["result"]["figures"]["causal-lm: peak MB"] > 0


def test_the_cases_are_listed_with_the_standard_library_alone() -> None:
    code = "import sys; sys.path.insert(0, '.'); from tests.gpu.cases import CASES; print(len(CASES))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(len(CASES)), done.stderr


def test_a_case_that_cannot_be_tried_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("a", "m:f", packages={"no_such_module": "no-such-package"}, gpus=1, capability=(8, 0))
    assert reason_against(case, NO_GPU, False) == "there is no GPU here"
    assert reason_against(case, H100, False) == "not installed: pip install no-such-package"
    assert reason_against(case, {**H100, "missing": ["datasets"]}, False).endswith("datasets no-such-package")
    assert reason_against(case, {**H100, "capability": (7, 5)}, False) == "it needs compute capability 8.0"
    assert reason_against(Case("b", "m:f", gpus=2), H100, False) == "it needs 2 GPUs, and there are 1"
    assert reason_against(Case("b", "m:f"), H100, False) == ""


def test_a_case_whose_program_lacks_a_module_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacks = Result({"trains": "no: ModuleNotFoundError: No module named 'dill.source'"})
    monkeypatch.setattr("tests.gpu.memory.cuda_message", lambda *_: lacks)
    row = try_case(chosen(["memory-message"])[0], Ground(tmp_path))
    assert (row.state, row.reason) == ("not tried", "not installed: the module dill.source")


def test_cases_are_chosen_by_the_beginning_of_their_names_in_the_order_of_the_arguments() -> None:
    assert [case.name for case in chosen(["memory-message"])] == ["memory-message"]
    assert {case.name.split("-")[0] for case in chosen(["speed", "sft-ddp"])} == {"speed", "sft"}
    assert [case.name for case in chosen(["qlora-fp16", "fork", "qlora"])] == ["qlora-fp16", "fork", "qlora-bf16"]
    assert chosen(["nothing"]) == [] and chosen([]) == [*CASES]


def test_the_table_has_a_line_for_each_tried_case_and_the_reasons_of_the_others() -> None:
    rows = [
        Row("fast", Result({"exact": "yes, 2 kills"}, {"tokens/s": 123456.0}), seconds=3.4),
        Row("slow", Result({"exact": "no: other weights", "runs": "yes"}), seconds=2),
        Row("odd", Result({}, refused="compute.strategy: a|b")),
        Row("new", None, "not installed: pip install x"),
        Row("newer", None, "not installed: pip install x"),
    ]
    assert [row.state for row in rows] == ["yes", "no", "refused", "not tried", "not tried"]
    assert markdown(rows).splitlines() == [
        "| case | holds | checks | figures and reasons | s |",
        "|---|---|---|---|---|",
        "| fast | yes | exact | tokens/s 123,456 | 3 |",
        "| slow | **no** | runs | exact: no: other weights | 2 |",
        "| odd | refused |  | compute.strategy: a/b | 0 |",
        "",
        "Not tried:",
        "",
        "- not installed: pip install x (2 cases): new, newer",
    ]
    assert JSON == ROOT / "build" / "gpu.json"
