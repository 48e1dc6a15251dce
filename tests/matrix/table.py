"""The matrix as it is kept (result.json) and shown (a table in the README)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.table import ROOT, commit
from tests.matrix.cells import Cell

RESULT = Path(__file__).with_name("result.json")
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- matrix -->\n).*?(\n<!-- /matrix -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """What a run of the whole matrix gave, and of what."""

    commit: str
    torch: str
    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, cells: list[Cell]) -> Result:
        return cls(commit(), version("torch"), tuple(cells))

    @classmethod
    def read(cls) -> Result:
        """The last one that was kept."""
        kept = json.loads(RESULT.read_text())
        return cls(kept["commit"], kept["torch"], tuple(Cell(**cell) for cell in kept["cells"]))

    def keep(self) -> None:
        """Writes it down, and shows it in the README."""
        RESULT.write_text(json.dumps(asdict(self), indent=1) + "\n")
        README.write_text(BLOCK.sub(lambda found: found[1] + self.markdown() + found[2], README.read_text()))

    def markdown(self) -> str:
        """A line a combination, under the commit."""
        lines = [
            f"Commit {self.commit}, torch {self.torch}:",
            "",
            "| engine | strategy | processes | trains | resumes to the byte | exports | reloads |",
            "|---|---|---|---|---|---|---|",
        ]
        for cell in self.cells:
            found = ["refused by the recipe", "", "", ""] if cell.refused else list(cell.promises.values())
            shown = [one if cell.refused or one.startswith("yes") else f"**{one}**" for one in found]
            lines.append(f"| {' | '.join([cell.engine, cell.strategy, str(cell.processes), *shown])} |")
        return "\n".join(lines)
