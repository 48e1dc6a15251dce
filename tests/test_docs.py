"""The README and the pages of docs/ are true: examples run, paths exist, generated parts can be made."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from pydantic import BaseModel

from deployments.docstrings import LIBRARIES
from docs import reference_tables
from flows.cli.main import main, parser
from flows.reports.tables import verdict_lines
from tasks.cache.results import Artifact
from tasks.cache.stage import Work
from tasks.prefect.deployments import read_deployments
from tasks.reports.model_reports import find_worst_groups
from tasks.stages.gate import gate
from tasks.stages.score import require_fitting
from tests.raised import raised_problems
from training.evaluation.judgements import PairedAnswers, judge_answers
from training.evaluation.predictions import OneLabel
from training.problems import Problem
from training.programs.compare import CompareSettings
from training.programs.compare import compare_models as compare
from training.recipe import SWEEP_ENTRYPOINT, Recipe, load, parse, parse_set, parse_sweep

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
ALL = "\n".join(PAGES.values())


def example(name: str) -> str:
    """The code block behind `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", ALL, re.DOTALL)
    assert found, name
    return found[1]


def block(name: str) -> str:
    """The text between `<!-- name -->` and `<!-- /name -->`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", ALL, re.DOTALL)
    assert found, name
    return found[1]


def module(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module that can be imported by name."""
    made = ModuleType(name)
    exec(source, made.__dict__)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_the_recipe_for_your_own_csv_is_valid() -> None:
    document = yaml.safe_load(example("recipe"))
    assert parse(document["deployments"][0]["parameters"]["recipe"]).data.source == "csv"


def test_the_example_of_publishing_is_part_of_a_valid_recipe() -> None:
    recipe = yaml.safe_load(example("recipe"))["deployments"][0]["parameters"]["recipe"]
    assert parse({**recipe, **yaml.safe_load(example("hub"))}).release.hub is not None


def test_the_judge_prefers_the_shorter_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    module("my_judge", example("judge"), monkeypatch)
    ones, texts = np.ones(3), ["a", "a" * 50, "a" * 15]
    answers = PairedAnswers(np.arange(3), texts, ["b" * 30, "b", "b" * 10], ones, ones)
    outcomes = judge_answers("my_judge:shorter", ['"prompt"'] * 3, answers, lambda done, total: None)
    assert outcomes.tolist() == [1.0, 0.0, 0.5]


def test_the_example_of_a_nightly_prediction_can_be_deployed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(example("batch-prediction"))
    (deployment,) = read_deployments([tmp_path / "mine.yaml"])
    assert (deployment.flow, deployment.name) == ("batch-predict", "mine")


def test_the_example_of_a_chain_can_be_deployed(tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(example("chain"))
    (deployment,) = read_deployments([tmp_path / "chain.yaml"])
    assert (deployment.flow, deployment.name) == ("retrain", "support-preference")
    recipe = yaml.safe_load(example("chain"))["deployments"][0]["parameters"]["recipe"]
    assert parse(recipe).model.source == "registry"


def test_the_example_of_a_model_that_runs_every_night_can_be_deployed(tmp_path: Path) -> None:
    (tmp_path / "tickets.yaml").write_text(example("nightly"))
    found = [(deployment.flow, deployment.name) for deployment in read_deployments([tmp_path / "tickets.yaml"])]
    assert found == [(flow, "tickets") for flow in ("finetune", "batch-predict", "retrain")]


def test_the_function_gives_rows_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.data.load_rows import load
    from training.data.sources import fingerprint, load_object
    from training.recipe import Data
    from training.task_types.sequence_classification import SequenceClassification

    module("my_rows", example("rows"), monkeypatch)
    found = load(
        Data(source="python", path="my_rows:rows", text=["text"], label="label"), SequenceClassification(), {}, tmp_path
    )
    assert (found.rows, found.labels, found.warnings) == ({"train": 100, "validation": 20}, 2, 0)
    assert fingerprint(load_object("my_rows:rows")) == "one to a hundred, second edition"


def test_the_metric_is_computed_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from training.evaluation import metrics
    from training.evaluation.predictions import OneLabel

    module("my_metrics", example("metric"), monkeypatch)
    predictions, references = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    predicted = OneLabel(references, predictions, np.eye(2)[predictions], ["no", "yes"])
    found = metrics.compute(["accuracy", "my_metrics:Errors"], predicted)
    assert found == {"accuracy": 0.75, "errors": 0.25}


def test_the_page_on_drift_shows_the_default_thresholds() -> None:
    (part,) = re.findall(r"^  drift: (\{.*\})$", PAGES["docs/how-to/drift.md"], re.MULTILINE)
    assert yaml.safe_load(part).items() <= Recipe.model_validate(_own_rows()).release.drift.model_dump().items()


def _own_rows() -> dict[str, Any]:
    return dict(yaml.safe_load(example("recipe"))["deployments"][0]["parameters"]["recipe"])


def test_the_verdict_that_is_shown_follows_from_its_rows() -> None:
    """1,630 rows, of which both models get 1,270 right, the new one alone 85, the champion alone 75."""
    recipe = load(ROOT / "deployments" / "demo.yaml", {"training.seed": 2})
    labels = np.zeros(1630, dtype=np.int64)
    new, old = (np.repeat([0, a, b, 1], [1270, 85, 75, 200]) for a, b in ((0, 1), (1, 0)))
    both = [OneLabel(labels, predictions, np.eye(2)[predictions], ["a", "b"]) for predictions in (new, old)]
    settings = CompareSettings(
        task=recipe.task,
        options={},
        split=recipe.judged_split,
        metrics=["accuracy"],
        figure=recipe.compared_by,
        less_is_better=[],
        margin=0.0,
        confidence=0.95,
        champion="demo/1",
    )
    compared = Artifact(stage="compare", key="k", digest="d", result=compare(*both, settings))
    scored = Artifact(stage="score", key="k", digest="d", result={"validation": {"accuracy": {"value": 1355 / 1630}}})
    lines = verdict_lines(gate.make(Work("k", Path(), "run"), recipe, scored, compared))
    assert "\n".join(f"    {line}" for line in lines) in block("gate")


def test_every_part_of_a_recipe_that_a_page_shows_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text((ROOT / "deployments/examples/chat.jinja").read_text())
    whole = yaml.safe_load(example("recipe"))["deployments"][0]["parameters"]["recipe"]
    needed = {name: whole[name] for name in ("name", "task", "data", "model")}
    parts, files = [], []
    for page in PAGES.values():
        for fence in re.findall(r"(?<! -->\n)```yaml\n(.*?)```", page, re.DOTALL):
            part = yaml.safe_load(fence)
            if isinstance(part, dict) and part.keys() <= Recipe.model_fields.keys():
                parse({**needed, **part})
                parts.append(part)
            elif isinstance(part, dict):
                recipes = [entry["parameters"].get("recipe", {}) for entry in part.get("deployments", ())]
                files += [parse(one).name for one in recipes if "data" in one]
    assert len(parts) >= 4 and {"questions", "questions-sorted"} <= {*files}


def test_every_command_that_is_shown_is_one_that_there_is() -> None:
    commands = re.findall(r"^ {4}(?:\$ )?finetune (.+)$", ALL, re.MULTILINE)
    assert {command.split()[0] for command in commands} >= {
        *("run", "plan", "models", "promote", "rollback", "predict", "show", "reproduce")
    }
    for command in commands:
        parser().parse_args(shlex.split(command, comments=True))


def test_the_mistakes_that_are_shown_are_those_that_the_command_reports(capsys: pytest.CaptureFixture[str]) -> None:
    command, *messages = [line.removeprefix("    ") for line in block("mistakes").strip("\n").splitlines()]
    assert main(shlex.split(command.removeprefix("$ finetune "))) == 2
    assert capsys.readouterr().err.splitlines() == messages


def test_the_tree_names_what_is_there_and_misses_no_room() -> None:
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", README, re.DOTALL)
    assert tree
    folder, named = "", set()
    for line in tree[1].splitlines():
        path = line.split()[0]
        folder = folder if line.startswith(" ") else path
        path = folder + path if line.startswith(" ") else path
        assert (ROOT / path).exists(), path
        named.add(path.rstrip("/"))
    packages = [file.parent for top in ("flows", "tasks", "training") for file in (ROOT / top).glob("*/__init__.py")]
    assert [room for room in packages if room.relative_to(ROOT).as_posix() not in named] == []
    flows = [path for path in (ROOT / "flows").glob("*.py") if path.name != "__init__.py"]
    assert [path.name for path in flows if f"flows/{path.name}" not in named] == []


def test_every_file_that_a_page_links_to_is_there() -> None:
    for name, page in PAGES.items():
        for link in re.findall(r"\]\(([^)\s#]+)(?:#[\w-]+)?\)", page):
            assert "://" in link or (ROOT / name).parent.joinpath(link).exists(), (name, link)


def test_a_page_that_hides_its_part_of_the_navigation_links_all_of_it() -> None:
    groups = 0
    for name, page in PAGES.items():
        for pages in re.findall(r"```{toctree}\n:hidden:\n\n(.*?)\n```", page, re.DOTALL):
            for entry in pages.splitlines():
                path = re.sub(r".*<(.*)>", r"\1", entry)
                assert f"]({path}.md)" in page, (name, path)
            groups += 1
    assert groups >= 7


def test_every_path_of_the_project_that_contributing_names_is_there() -> None:
    paths = re.findall(r"`((?:flows|tasks|training|tests|docs|deployments|infra)/[\w/.-]*)`", PAGES["CONTRIBUTING.md"])
    assert len(paths) >= 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_generated_part_of_a_page_can_be_made_and_is_shown_on_one() -> None:
    marks = [mark for page in PAGES.values() for mark in reference_tables.MARK.findall(page)]
    assert sorted(marks) == sorted(reference_tables.GENERATED)
    for name, markdown in reference_tables.GENERATED.items():
        assert len(markdown().splitlines()) > 5, name


def test_every_field_of_the_recipe_is_on_its_page_with_type_default_and_description() -> None:
    page = reference_tables.recipe()
    entries = re.findall(r"^`([\w.]+)`\n: (.+); (?:required|optional|default .+)\.\n\n  (\S.+)$", page, re.MULTILINE)
    fields = set(_fields(Recipe, ""))
    assert {path for path, _, _ in entries} == fields and len(fields) > 100
    assert not [path for path, kind, _ in entries if "any value" in kind and path not in ANY_VALUE]


ANY_VALUE = {"model.config", "options", "training.extra", "training.lora.settings", "compute.deepspeed"}
"""Fields whose values the libraries define."""


def _fields(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        inside = (field.annotation, *get_args(field.annotation))
        for inner in (*inside, *(entry for one in inside for entry in get_args(one))):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _fields(inner, f"{path}{name}.")


def test_the_page_on_evaluation_names_every_metric_and_what_a_run_prints_of_them() -> None:
    from tasks.cache.results import Artifact
    from tasks.reports.stage_summaries import summarize_result
    from training.recipe.tables.metrics import METRICS

    page = reference_tables.replaced(PAGES["docs/how-to/evaluate.md"])
    assert [name for name in METRICS if f"`{name}`" not in page] == []
    printed = block("evaluate")
    shown = re.findall(r"(\w+) (\d\.\d{4}) \((\d\.\d{3}) to (\d\.\d{3}); baseline (\d\.\d{3})\)", printed)
    figures = {
        name: dict(zip(("value", "low", "high", "baseline"), map(float, ends), strict=True)) for name, *ends in shown
    }
    named = re.findall(r"evaluation.metrics=\[(.*)\]", printed)[0].split(", ")
    assert list(figures) == named
    assert (
        summarize_result("score", Artifact(stage="score", key="k", digest="d", result={"validation": figures}))
        in printed
    )


def test_the_groups_that_are_shown_are_the_worst_and_their_verdict_follows_from_them(home: Path) -> None:
    rows = dict(zip(LIBRARIES, (304, 274, 276, 252, 279, 245), strict=True))
    right = dict(zip(LIBRARIES, (263, 236, 221, 194, 239, 192), strict=True))
    ends = {"low": 0.718254, "high": 0.817460}  # of sklearn
    groups = [
        {"group": name, "rows": rows[name], "metrics": {"accuracy": {"value": right[name] / rows[name], **ends}}}
        for name in sorted(LIBRARIES)
    ]
    overrides = parse_set(shlex.split(block("floors").split("finetune run")[1].splitlines()[0])[2::2])
    recipe = load(ROOT / "deployments" / "demo.yaml", overrides)
    scored = Artifact(
        stage="score", key="k", digest="d", result={"validation": {"accuracy": {"value": sum(right.values()) / 1630}}}
    )
    scored.path.mkdir(parents=True)
    (scored.path / "slices.json").write_text(json.dumps({"validation": {"label": groups, "length_bucket": groups}}))
    lines = verdict_lines(gate.make(Work("k", Path(), "run"), recipe, scored, None))
    *figures, warning = [f"    {line}" for line in lines]  # between them, the run shows its comparison
    assert "\n".join(figures) in block("floors") and f"{warning}\n" in block("floors")
    assert f"slices: worst {find_worst_groups(recipe, scored.path)['label']}\n" in block("slices")
    (problem,) = _unfitting(home / "rows", block("floors").split("finetune plan")[1])
    assert f"    {problem.where}: {problem.message}\n" in block("floors")


def _unfitting(rows: Path, typed: str) -> tuple[Problem, ...]:
    """The error of a plan with these options on the demo's rows."""
    rows.mkdir()
    (rows / "labels.json").write_text(json.dumps(sorted(LIBRARIES)))
    (rows / "validation.arrow").touch()
    (rows / "log").mkdir()
    counts = {"validation": dict.fromkeys(sorted(LIBRARIES), 1)}
    (rows / "log/report.json").write_text(json.dumps({"labels": counts}))
    overrides = parse_set(shlex.split(typed.splitlines()[0])[2::2])
    return raised_problems(require_fitting, load(ROOT / "deployments" / "demo.yaml", overrides), rows)


def test_the_sweep_that_is_shown_is_valid() -> None:
    recipe = yaml.safe_load(example("recipe"))["deployments"][0]["parameters"]["recipe"]
    shown = yaml.safe_load(example("sweep").replace("*recipe", "recipe"))
    entry = shown["deployments"][0]
    _, sweep = parse_sweep(recipe, entry["parameters"]["sweep"])
    assert entry["entrypoint"] == SWEEP_ENTRYPOINT and (sweep.metric, sweep.trials) == ("f1", 20)
