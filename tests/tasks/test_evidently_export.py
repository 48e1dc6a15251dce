"""The samples of a drift report as a report of Evidently's, which runs in a Python of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli.main import main
from tasks.tracking.evidently_export import PYTHON, export_report, require_evidently
from training.problems import UserError

needs_evidently = pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"{PYTHON} names no Python with Evidently")


def write_observations(folder: Path, rows: int, label: str, without_prediction: int = 0) -> Path:
    """Observed rows, the first of them without a prediction."""
    draw = random.Random(rows)
    texts = [" ".join(draw.choice(["a", "Good", "film", "with", "actors", "7"]) for _ in range(6)) for _ in range(rows)]
    predicted = [None] * without_prediction
    columns = {
        "tokens": [draw.randint(3, 9) for _ in range(rows)],
        "unknown": [0.0] * rows,
        "embedding": [[0.5]] * rows,
        "field.label": [draw.choice(["neg", label]) for _ in range(rows)],
        "field.probability": [draw.random() for _ in range(rows)],
    }
    folder.mkdir()
    shown = {name: [*predicted, *values[without_prediction:]] for name, values in columns.items()}
    pq.write_table(pa.table({"text": texts, **shown}), folder / "observations.parquet")
    return folder


def test_without_evidently_the_option_is_refused_before_anything_runs_with_the_next_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    monkeypatch.delenv(PYTHON, raising=False)
    command = ["drift", "small", "--input", str(tmp_path), "--evidently"]
    assert main([*command, str(tmp_path / "report.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("--evidently: Evidently cannot be imported by ") and "No module named 'evidently'" in error
    assert "pip install 'evidently>=0.7.23,<0.8' 'pandas<3.1'`, and set FINETUNE_EVIDENTLY_PYTHON=" in error
    assert main([*command, str(tmp_path / "report.pdf")]) == 2
    assert "report.pdf has an unknown suffix: name a file that ends in .html" in capsys.readouterr().err
    monkeypatch.setenv(PYTHON, str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none .*No such file"):
        require_evidently(tmp_path / "report.json")


def test_the_columns_of_both_samples_reach_evidentlys_python_without_secrets_and_with_tracking_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"  # in place of Evidently: it keeps what it is given
    python.write_text(f'#!/bin/sh\ncp "$3" {tmp_path}/samples.json; env > {tmp_path}/env; echo "Evidently x"; > "$4"\n')
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(python))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    profile = write_observations(tmp_path / "profile", 40, "pos")
    observed = write_observations(tmp_path / "observed", 30, "other", without_prediction=5)
    out = tmp_path / "report.html"
    assert export_report(profile, observed, "drift demo/1", {"verdict": "drifted"}, out) == ["Evidently x"]
    assert out.is_file() and not [*tmp_path.glob("finetune-*")]
    samples = json.loads((tmp_path / "samples.json").read_text())
    kinds = {"predicted label": "categorical", "predicted probability": "numerical", "tokens": "numerical"}
    kinds |= {"upper case": "numerical", "digits": "numerical", "text": "text"}
    assert samples["kinds"] == kinds  # without columns that never change, such as unknown tokens
    assert len(samples["reference"]["text"]) == 40 and samples["current"]["tokens"][:6].count(None) == 5
    assert samples["metadata"] == {"verdict": "drifted"}
    env = (tmp_path / "env").read_text()
    assert "DO_NOT_TRACK=1" in env and "hf_secret" not in env and "PYTHONPATH" not in env


@needs_evidently
def test_evidently_loads_the_snapshot_and_its_page_needs_no_other_file(tmp_path: Path) -> None:
    profile = write_observations(tmp_path / "profile", 60, "pos")
    observed = write_observations(tmp_path / "observed", 60, "other", without_prediction=5)
    for out in (tmp_path / "report.html", tmp_path / "report.json"):
        require_evidently(out)
        export_report(profile, observed, "drift demo/1", {"verdict": "drifted"}, out)
    code = "import sys; from evidently.core.report import Snapshot; s = Snapshot.load(sys.argv[1]); "
    code += "print(s.get_name(), [m['value'] for m in s.dict()['metrics']][0])"
    argv = [os.environ[PYTHON], "-I", "-c", code, str(tmp_path / "report.json")]
    read = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert read.stdout.startswith("drift demo/1 {'count': ")
    assert b"predicted label" in (tmp_path / "report.html").read_bytes()
