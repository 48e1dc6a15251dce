"""The page of the matrix shows the last run of each cell of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.cells import COMBINATIONS
from tests.matrix.table import BLOCK, PAGE, Result, place
from tests.task_types import TINY, recipe_of
from training.recipe import parse
from training.recipe.tables.task_types import TASK_TYPES


def test_the_page_shows_what_the_last_run_of_each_cell_gave() -> None:
    shown = BLOCK.search(PAGE.read_text())
    assert shown is not None
    result = Result.read()
    assert shown[0] == f"<!-- matrix -->\n{result.markdown()}\n<!-- /matrix -->"
    assert not [cell for cell in result.cells if cell.commit.endswith(("-dirty", "unknown"))]


def test_every_engine_and_every_kind_was_tried_with_every_strategy_and_keeps_its_promises() -> None:
    cells = Result.read().cells
    assert [place(cell) for cell in cells] == [place(one) for one in COMBINATIONS]
    assert [cell for cell in cells if not cell.holds] == []


@pytest.mark.parametrize("task", TASK_TYPES)
def test_every_kind_has_a_tiny_recipe(task: str, tmp_path: Path) -> None:
    assert task in TINY, f"give tests/task_types.py a recipe of {task}, and run make matrix MATRIX='--only {task}'"
    assert parse(recipe_of(task, tmp_path)).task == task
