"""Promises about the code as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "datasets", "evaluate", "sklearn", "matplotlib")


@pytest.mark.parametrize("module", ["flows.finetune", "flows.cli.main", "training.recipe"])
def test_importing_the_flow_or_the_command_loads_no_heavy_library(module: str) -> None:
    program = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == []
