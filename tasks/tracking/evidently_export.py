"""Drift reports by Evidently, for dashboards that show its format: the samples of a report of this project.

Evidently runs in a process, and usually in an environment, of its own: Evidently 0.7.23 cannot be imported with pandas
3.1. It sends nothing: its telemetry, which its servers have, is switched off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.jobs.child_environment import environment
from training.evaluation.drift.text_statistics import FIELD
from training.problems import UserError

if TYPE_CHECKING:
    import pyarrow as pa

PYTHON = "FINETUNE_EVIDENTLY_PYTHON"
"""Names the Python that has Evidently; by default it is this one."""
INSTALL = "python -m venv evidently && evidently/bin/pip install 'evidently>=0.7.23,<0.8' 'pandas<3.1'"
SUFFIXES = (".html", ".json")
SCRIPT = Path(__file__).with_name("evidently_script.py")
IMPORT_TIMEOUT_S, TIMEOUT_S = 120.0, 600.0
MAX_CATEGORIES = 100
"""Texts of predictions with more different values are compared by length."""

Columns = Mapping[str, list[Any]]


def require_evidently(out: Path) -> None:
    """Raises UserError if Evidently cannot be imported, or does not write files with this suffix."""
    if out.suffix not in SUFFIXES:
        message = f"{out.name} has an unknown suffix: name a file that ends in .html (a page) or .json (a snapshot)."
        raise UserError.of("option", "--evidently", message)
    # Not by find_spec: an Evidently that is installed may be one that this pandas breaks.
    try:
        run = _run("-c", "import evidently", timeout_s=IMPORT_TIMEOUT_S)
        reason = run.stderr.strip().rpartition("\n")[2] if run.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason is not None:
        message = (
            f"Evidently cannot be imported by {_python()} ({reason}): give it an environment of its own, `{INSTALL}`"
        )
        raise UserError.of("option", "--evidently", f"{message}, and set {PYTHON}=evidently/bin/python.")


def export_report(profile: Path, observed: Path, name: str, metadata: Mapping[str, Any], out: Path) -> list[str]:
    """Writes Evidently's comparison of the samples that a drift report compares. Returns its remarks.

    Raises UserError if Evidently fails.

    Args:
        profile: the artifact of the validation rows.
        observed: the artifact of the new rows.
        name: of the report.
        metadata: texts and numbers that travel along.
        out: the file, which appears whole.
    """
    import pyarrow.parquet as pq

    samples = [_read_columns(pq.read_table(folder / "observations.parquet")) for folder in (profile, observed)]
    kinds = {column: kind for column in samples[0] if (kind := _kind_of(column, *samples)) is not None}
    reference, current = (
        {column: _as_kind(sample[column], kind) for column, kind in kinds.items()} for sample in samples
    )
    job = {
        "name": name,
        "metadata": dict(metadata),
        "kinds": {column: "numerical" if kind == "length" else kind for column, kind in kinds.items()},
        "reference": reference,
        "current": current,
    }
    with tempfile.TemporaryDirectory(prefix="finetune-", dir=out.parent) as aside:
        file, made = Path(aside) / "samples.json", Path(aside) / out.name
        file.write_text(json.dumps(job))
        run = _run(str(SCRIPT), str(file), str(made), timeout_s=TIMEOUT_S)
        if run.returncode or not made.is_file():
            reason = run.stderr.strip().rpartition("\n")[2]
            raise UserError.of(
                "option", "--evidently", f"Evidently failed ({reason}); the report of this project is complete."
            )
        os.replace(made, out)
    return [line for line in run.stdout.splitlines() if line.startswith("Evidently ")]


def _read_columns(table: pa.Table) -> Columns:
    """The columns of observations as a report names them, null where a row has no prediction."""
    from training.evaluation.drift.text_statistics import count_characters, find_scripts

    texts = table["text"].to_pylist()
    columns = {
        f"predicted {name.removeprefix(FIELD)}": table[name].to_pylist()
        for name in table.column_names
        if name.startswith(FIELD)
    }
    names = {"tokens": "tokens", "unknown": "unknown tokens"}
    columns |= {name: table[own].to_pylist() for own, name in names.items() if own in table.column_names}
    columns |= {name.replace("_", " "): shares.tolist() for name, shares in count_characters(texts).items()}
    return {**columns, "script": find_scripts(texts), "text": texts}


def _kind_of(column: str, *samples: Columns) -> str | None:
    """numerical, categorical, text, or length (of texts, a number); None for a column that cannot be compared: one that
    a sample lacks, or whose values are all the same."""
    values = [{value for value in sample.get(column, ()) if value is not None} for sample in samples]
    if not all(values) or len(values[0] | values[1]) == 1:
        return None
    if column == "text":
        return "text"
    if any(isinstance(value, str) for value in values[0] | values[1]):
        return "categorical" if len(values[0] | values[1]) <= MAX_CATEGORIES else "length"
    return "numerical"


def _as_kind(values: list[Any], kind: str) -> list[Any]:
    return [None if value is None else len(value) for value in values] if kind == "length" else values


def _python() -> str:
    return os.environ.get(PYTHON) or sys.executable


def _run(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs Evidently's Python, without the search path of this one. DO_NOT_TRACK switches the telemetry off."""
    env = {name: value for name, value in environment({}).items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [_python(), "-I", *arguments], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
