"""The matrix as it is kept (result.json) and shown (docs/evidence/matrix.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tests.architectures import ARCHITECTURES
from tests.benchmarks.table import ROOT
from tests.matrix.cells import COMBINATIONS, OF_ONE_TASK_TYPE, WAYS, Cell, Combination
from tests.task_types import TINY

RESULT = Path(__file__).with_name("result.json")
PAGE = ROOT / "docs" / "evidence" / "matrix.md"
BLOCK = re.compile(r"(<!-- matrix -->\n).*?(\n<!-- /matrix -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """The result of the last run of each cell, with its commit."""

    torch: str
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls) -> Result:
        """The stored results."""
        kept = json.loads(RESULT.read_text())
        return cls(kept["torch"], tuple(Cell(**cell) for cell in kept["cells"]))

    def renewed(self, cells: list[Cell]) -> Result:
        """With these cells in place of what was known of them; what is tried no more is left out."""
        known = {place(cell): cell for cell in (*self.cells, *cells)}
        return Result(version("torch"), tuple(known[place] for place in map(place, COMBINATIONS) if place in known))

    def keep(self) -> None:
        """Writes it down, and shows it on its page."""
        RESULT.write_text(json.dumps(asdict(self), indent=1) + "\n")
        PAGE.write_text(BLOCK.sub(lambda found: found[1] + self.markdown() + found[2], PAGE.read_text()))

    def markdown(self) -> str:
        """A line an engine with a strategy, a line a task type, then a line an architecture, each with the commits that
        were tried."""
        tables = [self._engines(), self._kinds(), self._architectures()]
        return "\n".join([f"With torch {self.torch}:", *(line for table in tables for line in ("", *table))])

    def _engines(self) -> Iterator[str]:
        yield "| engine | strategy | processes | trains | resumes to the byte | exports | reloads | commit |"
        yield "|---|---|---|---|---|---|---|---|"
        for cell in self.cells:
            if cell.launched:
                promises = map(_shown, cell.promises.values())
                found = ["refused by the recipe", "", "", ""] if cell.refused else promises
                yield _line(cell.engine, cell.strategy, str(cell.processes), *found, cell.commit)

    def _kinds(self) -> Iterator[str]:
        yield _line("task type", *(f"{strategy}, {processes}" for strategy, processes in WAYS), "commit")
        yield "|---|" + "---|" * (len(WAYS) + 1)
        reasons: list[str] = []
        for task in TINY:
            of_kind = [cell for cell in self.cells if cell.task == task and not (cell.launched or cell.architecture)]
            cells = {(cell.strategy, cell.processes): cell for cell in of_kind}
            results = [_result(cells[way], reasons) if way in cells else _left_out(way[0]) for way in WAYS]
            yield _line(f"`{task}`", *results, ", ".join(dict.fromkeys(cell.commit for cell in of_kind)))
        if reasons:
            yield ""
        yield from (f"{number}. {reason}" for number, reason in enumerate(reasons, 1))

    def _architectures(self) -> Iterator[str]:
        heads = ("trains", "resumes to the byte", "exports", "reloads", "answers", "ONNX")
        yield _line("architecture", "models", "task type", *heads, "commit")
        yield "|---|" + "---|" * (len(heads) + 3)
        for cell in self.cells:
            if cell.architecture:
                promises = {**cell.promises, "onnx": cell.onnx}
                found = [f"refused: {cell.refused}", *[""] * 5] if cell.refused else map(_shown, promises.values())
                models = ARCHITECTURES[cell.architecture].known
                yield _line(f"`{cell.architecture}`", models, f"`{cell.task}`", *found, cell.commit)


def place(cell: Cell | Combination) -> tuple[object, ...]:
    """Where it stands in the tables."""
    return cell.task, cell.engine, cell.strategy, cell.processes, cell.launched, cell.architecture


def _result(cell: Cell, reasons: list[str]) -> str:
    """`yes`, what does not hold, or that it is refused, for the reason of which number."""
    if cell.refused:
        if cell.refused not in reasons:
            reasons.append(cell.refused)
        return f"refused ({reasons.index(cell.refused) + 1})"
    return "yes" if cell.holds else "; ".join(_shown(f"{name}: {found}") for name, found in _broken(cell))


def _broken(cell: Cell) -> list[tuple[str, str]]:
    return [(name, found) for name, found in cell.promises.items() if found and not found.startswith("yes")]


def _left_out(strategy: str) -> str:
    return "as ZeRO-2" if strategy in OF_ONE_TASK_TYPE else "**not tried**"


def _shown(found: str) -> str:
    return found if not found or found.startswith("yes") else f"**{found}**"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
