"""The fields of a recipe that name code: the list is complete, and every name in a recipe is found."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from training.recipe import Recipe
from training.recipe.field_types import code_fields, named_code

ROOT = Path(__file__).resolve().parents[3]
# The only files that import modules by a name that the recipe or a table has: `CodeField`, which the next test checks;
# a Hub metric, which evaluation.metrics names; and from tables of the project's own, also before the job is known.
IMPORTERS = {
    *("training/jobs/search_path.py", "training/evaluation/hub_metrics.py", "training/evaluation/metrics/__init__.py"),
    *("training/engine/training_task.py", "training/distributed/__init__.py", "training/data/readers.py"),
    *("flows/cli/main.py", "training/jobs/program.py", "tasks/tracking/tracker.py"),
    # The modules of the tables of exports and of OpenTelemetry's exporters.
    "tasks/tracking/opentelemetry.py",
    *("training/recipe/column_types.py", "training/engine/task_setup.py"),
    *("tasks/registry/version_exports.py", "training/programs/export_model.py", "training/models/small_copy.py"),
    "training/programs/compare_exports.py",
}


@cache
def every_call() -> list[tuple[str, str, ast.Call]]:
    """File, name and call of all calls of a name or an attribute."""
    found = []
    for path in sorted(file for folder in ("flows", "tasks", "training") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                found.append((path.relative_to(ROOT).as_posix(), name, node))
    return found


def calls(*names: str) -> list[tuple[str, ast.Call]]:
    return [(file, call) for file, name, call in every_call() if name in names]


@pytest.mark.slow
def test_every_field_whose_value_is_imported_is_marked_as_code() -> None:
    fields = set()
    for _, call in calls("CodeField"):
        for keyword in call.keywords:
            if keyword.arg == "where":
                fields.add(ast.unparse(keyword.value).strip("f'").partition("[")[0])
    assert len(fields) >= 8 and fields - set(code_fields(Recipe)) == set()


def test_no_other_file_imports_by_name_unpickles_or_evaluates() -> None:
    found = {file for file, _ in calls("import_module", "exec_module", "__import__", "exec", "eval", "pickle", "loads")}
    plain = {file for file, call in calls("loads", "eval") if ast.unparse(call.func) in ("json.loads", "tomllib.loads")}
    evaluates = {file for file, call in calls("eval") if ast.unparse(call.func).endswith(".eval")}  # a model's mode
    assert found - plain - evaluates == IMPORTERS


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"task": "my:Kind"}, [("task", "my:Kind")]),
        ({"data": {"source": "python", "path": "pandas:read_pickle"}}, [("data.path", "pandas:read_pickle")]),
        ({"training": {"callbacks": ["a:B", "c:D"]}}, [("training.callbacks", "a:B"), ("training.callbacks", "c:D")]),
        (
            {"training": {"callbacks": {"a:B": 1}}},
            [("training.callbacks", "a:B")],
        ),  # not valid
        (
            {"evaluation": {"metrics": ["f1", "hub:a/b@" + "0" * 40], "allow_remote_code": True}},
            [("evaluation.metrics", "hub:a/b@" + "0" * 40), ("evaluation.allow_remote_code", "true")],
        ),
        (
            {
                "task": "regression",
                "data": {"source": "csv", "path": "s3://b/rows.csv"},
                "training": {"engine": "accelerate"},
            },
            [],
        ),
        ({"training": "my:engine", "evaluation": None}, []),
        # All of these would be imported: the module ends at the first colon.
        ({"task": "my://Kind"}, [("task", "my://Kind")]),
        ({"training": {"loss": "my:loss://x"}}, [("training.loss", "my:loss://x")]),
        ({"data": {"source": "python", "path": "my://rows"}}, [("data.path", "my://rows")]),
        ({"data": {"path": "my://rows"}}, [("data.path", "my://rows")]),
        (
            {"data": {"mix": [{"source": "csv", "path": "s3://b/c"}, {"source": "python", "path": "my://rows"}]}},
            [("data.mix[1].path", "my://rows")],
        ),
    ],
)
def test_code_is_found_in_values_that_were_not_validated(
    values: dict[str, object], named: list[tuple[str, str]]
) -> None:
    assert list(named_code(Recipe, values)) == named
