"""The README shows the last run of the matrix, and that one tried everything there is."""

from __future__ import annotations

from tests.matrix.cells import COMBINATIONS
from tests.matrix.table import BLOCK, README, Result


def test_the_readme_shows_what_the_last_run_of_the_whole_matrix_gave() -> None:
    shown = BLOCK.search(README.read_text())
    assert shown is not None
    result = Result.read()
    assert shown[0] == f"<!-- matrix -->\n{result.markdown()}\n<!-- /matrix -->"
    assert not result.commit.endswith(("-dirty", "unknown"))


def test_every_engine_was_tried_with_every_strategy_and_keeps_its_promises() -> None:
    cells = Result.read().cells
    assert [(cell.engine, cell.strategy, cell.processes) for cell in cells] == [
        (tried.engine, tried.strategy, tried.processes) for tried in COMBINATIONS
    ]
    assert [cell for cell in cells if not cell.holds] == []
