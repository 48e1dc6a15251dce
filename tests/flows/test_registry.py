"""A registered model: predictions by file and over HTTP, and rollback."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli.main import main
from tasks.jobs.hardware import mixed_precision
from tasks.stages.register import MIXED_TOLERANCE
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun
from tests.fork_server import search_path_of_shell
from tests.servers import Server

# One that MLflow would take for a number, one for a string of Python's, and some that are cut.
TEXTS = ["a great film", "1984", '"awful"', "the plot was dull, " * 40, "Ünïcode — 好", "fine"]


def test_after_a_rollback_a_run_of_what_was_taken_back_changes_nothing(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    client.create_model_version("small", "file:///nowhere")
    assert [main(["promote", "small", "2"]), main(["promote", "small", "1"]), main(["rollback", "small"])] == [0, 0, 0]
    run = finetune(home, "run", str(finished.file))
    assert run.returncode == 0 and "Nothing changed" in run.stdout, run.stderr
    assert str(client.get_model_version_by_alias("small", "champion").version) == "2"


@pytest.mark.slow
def test_a_model_gives_the_same_answers_by_file_and_served_over_http(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    served = Server("/ping", ["mlflow", "models", "serve", "-m", "models:/small@champion", "--env-manager", "local"], {
        "MLFLOW_TRACKING_URI": f"sqlite:///{finished.home / 'mlflow.db'}",
        "PATH": search_path_of_shell(),
    })  # fmt: skip
    served.start()
    try:
        rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
        file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        file.write_text("\n".join(map(json.dumps, [*rows, {"id": 6, "text": None}])))
        options = ["--input", str(file), "--output", str(out), "--keep", "id,text", "--max-error-rate", "0.2"]
        predicted = finetune(finished.home, "predict", "small", *options, **server)
        assert predicted.returncode == 0, predicted.stderr
        printed = predicted.stdout.splitlines()[1:]
        assert printed[0] == f"7 rows in 1 file, predicted by small version 1, 6 of them now: {out}"
        assert printed[1] == "Without a prediction: 1 row (has no text in column 'text': 1 row)"
        *found, empty = map(json.loads, out.read_text().splitlines())
        assert [{"id": row["id"], "text": row["text"]} for row in found] == rows and empty["label"] is None
        assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in found)
        assert sorted(tmp_path.iterdir()) == [file, out] and not list(finished.home.glob("jobs/*"))
        # Files are predicted in the number format of training, and MLflow serves full precision.
        rounding = 1e-6 if mixed_precision() == "no" else MIXED_TOLERANCE
        expected = [{"label": row["label"], "score": pytest.approx(row["probability"], abs=rounding)} for row in found]
        served.wait()
        records = [{"text": text} for text in TEXTS]
        for body in (
            {"dataframe_records": records},
            {"dataframe_split": {"columns": ["text"], "data": [[text] for text in TEXTS]}},
            {"inputs": records},
            {"inputs": TEXTS},
            {"instances": records},
        ):
            assert _invoked(served.url, body) == expected, list(body)
        assert _invoked(served.url, {"dataframe_records": records[1:2]}) == expected[1:2]
    finally:
        served.kill()


def _invoked(url: str, body: dict[str, Any]) -> Any:
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/invocations", json.dumps(body).encode(), header)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]
