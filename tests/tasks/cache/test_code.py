"""The edits of code that change a key."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterator
from importlib.machinery import FileFinder
from pathlib import Path

import pytest

from tasks.cache import code
from tasks.cache.code import code_behind, code_digests, digest_of_syntax, users_code
from tasks.cache.digests import SETTLED_S
from tests.raised import raised_problems
from training.recipe import parse
from training.recipe.tables.engines import ENGINES

ROOT = Path(__file__).parents[3]
# The names that code which counts may import from code which does not, for they cannot change what a stage makes.
ALLOWED = {
    # It measures, and leaves all as it was: a resumed training does without it, and ends with the same bytes.
    "training.engine.estimation": {""},
    "training.engine.throughput": {"", "Reporter", "Speed", "flops", "hardware_limit"},
    # Pictures lie under log/, which the content's digest leaves out.
    "training.evaluation.plots": {"", "draw_rows", "draw_tokens"},
    # The module and class of each name: the module that is named counts.
    "training.recipe.tables.task_types": {"TASK_TYPES"},
    "training.recipe.tables.engines": {"ENGINES"},
    "training.recipe.tables.strategies": {"STRATEGIES"},
    # It is read to refuse a model.
    "training.recipe.tables.kernels": {"ATTENTION"},
    # The entries of the metrics that a stage computes are inputs of it, and the modules that they name count. A remark
    # on their labels is a warning.
    "training.recipe.tables.metrics": {
        *("METRICS", "ONE_LABEL", "MANY_LABELS", "TAGS", "NUMBERS", "TEXTS", "TOKENS", "PAIRS", "RANKINGS"),
        "CHOICES",
        *("metrics_for", "more_is_better", "non_numeric_label", "entries", "metric_modules"),
        *("UNPAIRED", "ANSWER_METRICS", "WIN_RATE", "frequent_positive", "metrics_of_second"),
        # The names of the metrics of tool calls, which the settings of a stage repeat if it computes them.
        *("TOOL_METRICS", "CONVERSATIONS"),
    },
    # How files are named; the files themselves are inputs of the stage.
    "training.recipe.tables.formats": {"FORMATS", "IMAGE_SUFFIXES", "PACKED", "SOURCES"},
    # The form of options and fields, whose values are inputs of the stage.
    "training.recipe.field_types": {"ClosedModel", "NUMBER", "Section", "Text", "WORD"},
    # Declarations alone: the values are inputs of the stage.
    "training.recipe.fields": {"ResolvedCompute", "Drift"},
    "training.recipe.training_fields": {"Training", "Lora"},
    # The entries of the formats and models that a stage exports are inputs of it.
    "training.recipe.tables.exports": {"EXPORTS", "OUTPUTS", "by_module"},
    # Names of fields, of splits and of a slice, and a section; the fields' values are inputs of the stage.
    "training.recipe.data_fields": {"DATASET", "EVALUATED", "OF_MIXTURE", "SHARED", "Negatives"},
    # The digest of the rows that it reads is an input of the stage.
    "training.data.prediction_rows": {"RowReader", "WantedShard", "read_shards"},
    "training.recipe.reading_rules": {"ReadingRules"},
    # Names of secrets.
    "training.recipe.credentials": {"variables_for", "remove_secrets"},
    # Words of the recipe, whose values are inputs of the stage.
    "training.recipe.rules.slice_rules": {"LABEL", "LENGTH", "FEWEST_ROWS", "MOST_GROUPS"},
}
# What starts programs, and stores and shows what they make; and errors: a stage that refuses makes nothing.
ALLOWED_WHOLE = ("tasks.", "training.jobs", "training.problems")
# Of the recipe, the tasks take more: values that they make inputs of a stage, and refusals.
ALLOWED_IN_TASKS = {
    "training.recipe": {"Compute", "Data", "Recipe", "ResolvedCompute", "parse"},
    "training.recipe.tables.exports": {"libraries_of", "missing_packages"},
    "training.recipe.field_types": {"named_code"},
    "training.recipe.rules.column_rules": {"source_columns", "code_for_rows", "takes_template"},
    "training.recipe.rules.training_rules": {"unfitting_weights"},
    "training.recipe.fields": {"MustHold", "answered_prompts"},
    "training.recipe.training_fields": {"Lora", "packages_of"},
    "training.recipe.reading_rules": {"TEXT_LINES"},
    "training.data.prediction_rows": {"format_of"},
    "training.recipe.tables.metrics": {"metric_libraries"},
    "training.recipe.tables.optimizers": {"OPTIMIZERS"},
    "training.recipe.tables.kernels": {"Kernels", "kernels_of"},
    "training.recipe.overrides": {"merge"},
    "training.recipe.rules.release_rules": {"CALIBRATING", "absent_splits", "undefined_metrics", "unfitting_metrics"},
    "training.recipe.rules.slice_rules": {
        *("FEWEST_ROWS", "LABEL", "LENGTH", "BUILT_IN_SLICES", "MOST_GROUPS", "named_groups", "slice_of"),
        *("unfitting_floor", "unknown_slices"),
    },
}
# The hooks of a task type that call code of evaluation. fit leaves out that code, unless figures can change the weights
# or the task type calibrates. The last line is the search in a corpus, by predict alone, which then leaves out none.
FIGURE_HOOKS = {
    *("baseline", "_rank_by_words", "metric_inputs", "empty_predictions", "write_turns"),
    *("tokenizer_problems", "_rank", "rows_of_entries"),
    "__init__",
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module that imports a helper of a package."""
    (tmp_path / "rows.py").write_text("from lib.clean import strip\n\ndef rows(split):\n    return strip(split)\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("VERSION = 1\n")
    (tmp_path / "lib" / "clean.py").write_text('def strip(x):\n    """Strips."""\n    return x.strip()\n')
    (tmp_path / "lib" / "unused.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_form_of_kept_blocks_is_code_of_the_stage_that_reads_them() -> None:
    assert "training/jobs/blocks.py" in code_behind(["training.programs.mine_negatives"]).files


def test_a_users_module_is_followed_through_its_own_imports_only(work: Path) -> None:
    assert list(code_digests(["rows"])) == ["lib/__init__.py", "lib/clean.py", "rows.py"]


@pytest.mark.parametrize(
    "edit",
    [
        'def strip(x):\n    """Another docstring."""\n    return x.strip()\n',
        'def strip(\n    x\n):  # a comment\n    """Strips."""\n\n    return (x.strip())\n',
    ],
    ids=["docstring", "reformat"],
)
def test_a_reformat_or_a_docstring_is_not_noticed(work: Path, edit: str) -> None:
    before = code_digests(["rows"])
    (work / "lib" / "clean.py").write_text(edit)
    assert code_digests(["rows"]) == before


def test_one_changed_line_of_a_helper_is_noticed_and_named(work: Path) -> None:
    before = code_digests(["rows"])
    (work / "lib" / "clean.py").write_text('def strip(x):\n    """Strips."""\n    return x.lstrip()\n')
    after = code_digests(["rows"])
    assert [name for name in after if after[name] != before[name]] == ["lib/clean.py"]


def test_a_file_that_one_process_has_parsed_is_not_parsed_by_the_next(
    work: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    time.sleep(2 * SETTLED_S)  # what changed a moment ago may change again unseen, and is not remembered
    before, parsed = code_digests(["rows"]), []
    code._read.cache_clear()
    monkeypatch.setattr(code, "_parse", lambda package, module: parsed.append(module.file.name) or "0")
    assert code_digests(["rows"]) == before and parsed == []
    (work / "lib" / "clean.py").write_text("def strip(x):\n    return x.lstrip()\n")
    assert code_digests(["rows"])["lib/clean.py"] == "0" and parsed == ["clean.py"]


def test_a_module_that_is_not_imported_does_not_count(work: Path) -> None:
    before = code_digests(["rows"])
    (work / "lib" / "unused.py").write_text("x = 2\n")
    assert code_digests(["rows"]) == before
    for_types = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from lib import unused\n"
    (work / "rows.py").write_text(for_types + (work / "rows.py").read_text())
    assert set(code_digests(["rows"])) == set(before)


def test_a_moved_folder_is_not_noticed(
    work: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_digests(["rows"])
    moved = tmp_path_factory.mktemp("moved") / "work"
    work.rename(moved)
    monkeypatch.chdir(moved)
    assert code_digests(["rows"]) == before


def test_relative_imports_are_followed(work: Path) -> None:
    (work / "lib" / "clean.py").write_text("from . import unused\nfrom .more import y\n")
    (work / "lib" / "more.py").write_text("y = 1\n")
    assert {"lib/unused.py", "lib/more.py"} <= set(code_digests(["rows"]))


def test_a_root_without_source_is_an_error_and_not_silence(work: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no source file of no_such"):
        code_digests(["no_such"])


def test_a_library_that_a_users_module_imports_counts_by_its_version(work: Path) -> None:
    (work / "lib" / "clean.py").write_text("import json, numpy.random\nfrom yaml import safe_load\n")
    assert code_behind(["rows"]).distributions == ["PyYAML", "numpy"]


def test_a_users_module_counts_wherever_python_finds_it(
    work: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "my_shared.py").write_text("import my_helper\n")
    (elsewhere / "my_helper.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    before = code_digests(["my_shared"])
    assert set(before) == {"my_shared.py", "my_helper.py"}
    (elsewhere / "my_helper.py").write_text("A = 2\n")
    assert code_digests(["my_shared"]) != before


def test_the_stages_count_what_shapes_their_bytes_and_not_how_they_are_run() -> None:
    shared = ["tasks.stages.fit", "training.programs.fit", "training.task_types.sequence_classification"]
    counted = set(code_digests([*shared, ENGINES["trainer"].module]))
    assert {
        "training/programs/fit.py",
        "training/engine/trainer.py",
        "training/batching/batches.py",
        "tasks/stages/fit.py",
    } <= counted
    assert not {"training/engine/trainer.py", "training/engine/callbacks.py"} & set(
        code_digests(shared)
    )  # another engine's
    assert not any(
        name.startswith(("tasks/cache", "tasks/jobs", "flows", "training/recipe/rules")) or name.endswith("fields.py")
        for name in counted
    )
    assert counted.isdisjoint(
        {
            "training/jobs/protocol.py",
            "training/jobs/supervise.py",
            "training/data/load_rows.py",
            "training/tokenization/encoder.py",
        }
    )


def test_of_tasks_only_the_stages_count_and_each_room_that_is_named_is_there() -> None:
    files = [*ROOT.glob("flows/**/*.py"), *ROOT.glob("tasks/**/*.py"), *ROOT.glob("training/**/*.py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    counted = {name for name in modules if name.startswith("tasks") and not code._is_outside(name, ())}
    assert counted == {name for name in modules if f"{name}.".startswith("tasks.stages.")}
    assert {*code.OUTSIDE, *code.INSIDE} <= modules


def test_code_that_counts_takes_no_logic_from_code_that_does_not() -> None:
    taken = set()
    for file in (*ROOT.glob("tasks/stages/*.py"), *ROOT.glob("training/**/*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not code._is_outside(name, ()):
            allowed = [ALLOWED, ALLOWED_IN_TASKS] if name.startswith("tasks.") else [ALLOWED]
            for module, taken_name in imports_left_out(file):
                if not module.startswith(ALLOWED_WHOLE) and not any(
                    taken_name in names.get(module, ()) for names in allowed
                ):
                    taken.add(f"{name} takes {taken_name or 'all'} from {module}")
    assert taken == set()


def test_fit_leaves_out_evaluation_code_that_only_figures_come_from() -> None:
    taken = set()
    for file in ROOT.glob("training/task_types/*.py"):
        tree = ast.parse(file.read_bytes())
        imported = imports_left_out(file, "training.evaluation")
        names = {name for module, name in imported if module.startswith("training.evaluation.")}
        bodies = [*tree.body, *(method for node in tree.body if isinstance(node, ast.ClassDef) for method in node.body)]
        for function in (node for node in bodies if isinstance(node, ast.FunctionDef)):
            used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
            taken |= {function.name} if used & names else set()
    assert taken == FIGURE_HOOKS
    packages = ("training/batching", "training/distributed", "training/engine", "training/models", "training/programs")
    users = [name for package in packages for name in code_digests(["training.programs.fit"]) if package in name]
    imported = {module for name in users for module, _ in imports_left_out(ROOT / name, "training.evaluation")}
    figures = {name for name in imported if name.startswith("training.evaluation.")}
    thresholds = "training.evaluation.stored_calibration"  # it counts where a teacher abstains
    assert figures == {"training.evaluation.plots", "training.evaluation.metrics", thresholds}


def imports_left_out(file: Path, *more: str) -> Iterator[tuple[str, str]]:
    """Each import from a module that does not count: the module, and the name; no name for the whole module."""
    waiting: list[ast.AST] = [ast.parse(file.read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for name in names:
            module = f"{node.module}.{name}" if isinstance(node, ast.ImportFrom) else name
            found = next((one for one in (module, module.rpartition(".")[0]) if is_module(one)), None)
            if found and code._is_outside(found, more):
                yield found, "" if found == module else name


def is_module(name: str) -> bool:
    stem = ROOT.joinpath(*name.split("."))
    return stem.with_suffix(".py").is_file() or (stem / "__init__.py").is_file()


def test_user_code_that_is_neither_here_nor_installed_is_reported_by_its_field(work: Path) -> None:
    assert users_code({"data.path": "rows:read", "training.loss": "focal"}) == (["rows"], [])
    assert users_code({"data.path": "numpy.random:rand"}) == ([], ["numpy"])
    assert users_code({"evaluation.metrics[0]": f"hub:me/errors@{'a' * 40}"}) == ([], [])
    problems = raised_problems(users_code, {"data.path": "no_such:rows", "training.loss": "nor_this:loss"})
    assert [problem.where for problem in problems] == ["data.path", "training.loss"]


def test_installed_libraries_count_by_version_not_by_source() -> None:
    assert all(name.startswith(("tasks/", "training/")) for name in code_digests(["training.programs.fit"]))
    names = ["numpy", "torch", "PyYAML"]
    assert code.library_versions(names) == {
        **{name: importlib.metadata.version(name) for name in names},
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def test_code_is_found_while_another_thread_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Importing(FileFinder):
        def invalidate_caches(self) -> None:
            sys.path_importer_cache["/nowhere"] = None  # type: ignore[assignment]

    monkeypatch.setattr(sys, "path_importer_cache", {"/somewhere": Importing("/somewhere")})
    code._forget_folders()
    assert "/nowhere" in sys.path_importer_cache


MODULE = '''
"""A module."""
from training.problems import Problem, UserError

LOSS = "focal"
"""An attribute."""


class Task:
    """A class."""

    loss: str = "cross_entropy"

    def check(self, loss, events):
        if loss != "focal":
            message = f"{loss!r} is unknown: "
            message += "choose from focal."
            raise UserError.of("recipe", "training.loss", message)
        if loss == "none":
            return UserError.of("recipe", "training.loss", "is none")
        if loss is None:
            raise ValueError(f"no loss, but {loss}")
        events.warning("a warning")
        events.write({"kind": "note", "message": "a note"})
        suffix = "of rows"
        events.warning(f"mean {suffix}")
        return loss + suffix


def one():
    pass
'''


def digest(text: str, *, has_messages: bool = True) -> str:
    return digest_of_syntax(ast.parse(text), has_messages=has_messages)


def edited(old: str, new: str) -> str:
    assert old in MODULE
    return MODULE.replace(old, new)


STRINGS = {
    "a docstring": ('"""A class."""', '"""Another class."""'),
    "a docstring where none stood": (
        "    def check(self, loss, events):",
        '    def check(self, loss, events):\n        "x"',
    ),
    "a docstring in place of pass": ("    pass", '    """Nothing."""'),
    "no docstring": ('"""A module."""', ""),
    "a string under an attribute": ('"""An attribute."""', '"""The loss."""'),
    "a string under an attribute where none stood": (
        'loss: str = "cross_entropy"',
        'loss: str = "cross_entropy"\n    "x"',
    ),
    "a comment": ("    pass", "    pass  # nothing"),
}
MESSAGES = {
    "a variable": ("is unknown: ", "is not known: "),
    "a variable in one piece": ('f"{loss!r} is unknown: "\n            message += "choose from focal."', '"unknown"'),
    "a value in a message": ("choose from focal.", "choose another."),
    "an exception": ('f"no loss, but {loss}"', '"no loss"'),
    "an error that is returned": ("is none", "is missing"),
    "a warning": ("a warning", "another warning"),
    "a note": ("a note", "another note"),
    "a field that a message names": ("training.loss", "training.losses"),
}
CODE = {
    "a constant": ('LOSS = "focal"', 'LOSS = "focal_loss"'),
    "a default": ("cross_entropy", "mean_squared"),
    "a condition": ('loss != "focal"', 'loss != "dice"'),
    "a variable that is in a message": ('"of rows"', '"of texts"'),
    "another exception": ("ValueError", "TypeError"),
    "the condition of a message": ("loss is None", "not loss"),
    "the kind of an event": ('"kind": "note"', '"kind": "warning"'),
}


@pytest.mark.parametrize("edit", STRINGS)
def test_a_comment_or_a_string_that_is_a_statement_does_not_count(edit: str) -> None:
    for has_messages in (True, False):
        assert digest(edited(*STRINGS[edit]), has_messages=has_messages) == digest(MODULE, has_messages=has_messages)


@pytest.mark.parametrize("edit", MESSAGES)
def test_a_message_does_not_count_in_this_project_and_counts_in_user_code(edit: str) -> None:
    assert digest(edited(*MESSAGES[edit])) == digest(MODULE)
    assert digest(edited(*MESSAGES[edit]), has_messages=False) != digest(MODULE, has_messages=False)


@pytest.mark.parametrize("edit", CODE)
def test_a_text_that_can_shape_bytes_counts(edit: str) -> None:
    assert digest(edited(*CODE[edit])) != digest(MODULE)


def test_a_metric_of_the_users_is_named_by_its_own_field() -> None:
    data = {"source": "csv", "path": "rows", "text": ["text"], "label": "label"}
    values = {"name": "test", "task": "sequence-classification", "data": data}
    recipe = parse(
        {
            **values,
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": ["accuracy", "mine:second"]},
        }
    )
    assert code.metrics_code(recipe, ["mine:second"]) == {"evaluation.metrics[1]": "mine:second"}
