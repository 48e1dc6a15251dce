"""Promises about the code as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND_MODULES = [f"flows.cli.{path.stem}" for path in sorted((ROOT / "flows" / "cli").glob("*.py"))]
HEAVY = ("torch", "transformers", "datasets", "evaluate", "sklearn", "matplotlib")
SIGNATURES = ("cryptography", "sigstore", "model_signing")
"""Libraries of signatures, which a command imports if it verifies or signs."""


def test_importing_the_flows_and_the_commands_loads_no_heavy_library() -> None:
    modules = ", ".join(["flows.finetune", "flows.batch_predict", "training.recipe", *COMMAND_MODULES])
    program = f"import sys, {modules}; print(*(name for name in {HEAVY + SIGNATURES!r} if name in sys.modules))"
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == []


def test_the_help_of_the_command_is_printed_without_importing_any_library() -> None:
    program = """
import sys
from flows.cli.main import main
try:
    main(["--help"])
finally:
    roots = {name.partition(".")[0] for name in sys.modules}
    own = {name for name in sys.modules if name.startswith(("tasks", "training", "flows.")) and "cli" not in name}
    print(sorted({"pydantic", "yaml", "rich", "prefect", "mlflow"} & roots | own), file=sys.stderr)
"""
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (0, "[]\n")
    assert "Continue a run that did not complete." in child.stdout
