"""`release.calibrate`, `abstain` and `prediction_sets`: one run, and all that predicts by its version."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml

from tasks.home import tracking_uri
from tasks.registry.versions import CALIBRATION_TAG
from tasks.tracking.connection import connect
from tests import fork_server
from tests.flows.forked import finetune
from tests.flows.served import Server
from tests.flows.small import BAD, FILLER, GOOD, artifact_of, states, write_project
from training.evaluation.stored_calibration import Calibration

pytestmark = [pytest.mark.usefixtures("shared_server"), pytest.mark.slow]

ROWS = {"train": 500, "validation": 300, "test": 700}
RELEASE = {"abstain": {"max_error": 0.05}, "prediction_sets": 0.95}


@dataclass(frozen=True)
class Released:
    home: Path
    file: Path
    result: dict[str, Any]
    printed: str

    @property
    def calibration(self) -> Calibration:
        return Calibration.read(artifact_of(self.home, self.result, "calibrate"))


def write_texts(path: Path, rows: int, seed: int) -> None:
    """Texts with a word that tells the label; in one of six the word is missing, and the label is drawn."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label"])
        for _ in range(rows):
            label, words = draw.choice([("pos", GOOD), ("neg", BAD)])
            text = [draw.choice(FILLER) for _ in range(draw.randint(3, 10))]
            text += [draw.choice(words)] * (draw.random() < 5 / 6)
            draw.shuffle(text)
            table.writerow([" ".join(text), label])


def write_recipe(folder: Path, **changes: Any) -> Path:
    """A recipe that calibrates, with other values of its sections."""
    file = write_project(folder)
    for seed, (split, rows) in enumerate(ROWS.items()):
        write_texts(folder / f"{split}.csv", rows, seed)
    written = yaml.safe_load(file.read_text())
    recipe = written["deployments"][0]["parameters"]["recipe"]
    recipe["evaluation"] = {"splits": ["validation", "test"], "metrics": ["accuracy", "log_loss"]}
    recipe["training"] |= {"metric_for_best_model": "log_loss", "greater_is_better": False}
    recipe["release"] = {"registry": "small", **RELEASE}
    recipe["compute"] = {"mixed_precision": "no"}  # an evaluation computes in full precision, too
    for section, values in changes.items():
        recipe[section] = values if isinstance(values, str) else recipe[section] | values
    file.write_text(yaml.safe_dump(written, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    folder = tmp_path_factory.mktemp("confidence")
    file, out = write_recipe(folder / "project"), folder / "out.json"
    run = finetune(folder / "home", "run", str(file), "--json", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    return Released(folder / "home", file, json.loads(out.read_text()), run.stdout)


@pytest.fixture
def home(released: Released, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_HOME", str(released.home))
    return released.home


def test_the_report_has_the_calibration_error_before_and_after_and_the_answered_rows(released: Released) -> None:
    found = released.result["calibration"]
    assert found["test_rows"] == ROWS["test"] and found["validation_rows"] == ROWS["validation"]
    assert 0 <= found["calibration_error"] < found["calibration_error_before"] + 0.02
    assert 0.5 < found["answered"]["share"] < 1 and found["answered"]["error"] <= 0.05
    assert 1 < found["mean_set_size"] < 2
    assert "Confidence: calibration error 0." in released.printed and "% answered" in released.printed
    pictures = artifact_of(released.home, released.result, "calibrate") / "log"
    assert {"calibrated_test.png", "risk_coverage_test.png"} <= {file.name for file in pictures.iterdir()}


def test_the_version_has_its_calibration_and_its_card_the_promise(released: Released, home: Path) -> None:
    version = connect().get_model_version("small", "1")
    assert Calibration.model_validate_json(version.tags[CALIBRATION_TAG]) == released.calibration
    assert "With 95% confidence, at most 5.0% of the others err" in version.description


def test_a_batch_of_a_fresh_process_has_the_calibrated_probabilities_and_its_share_of_review(
    released: Released, tmp_path: Path
) -> None:
    out, result = tmp_path / "out", tmp_path / "result.json"
    inputs = str(released.file.parent / "test.csv")
    run = finetune(
        released.home, "predict", "small", "--input", inputs, "--output", str(out), "--no-drift", "--json", str(result)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = sorted(ds.dataset(str(out)).to_table().to_pylist(), key=lambda row: row["input_row"])
    stored = pq.read_table(artifact_of(released.home, released.result, "predict") / "test.parquet")
    calibration = released.calibration
    expected = calibration.probabilities(np.array(stored["logits"].to_pylist()))
    given = np.array([[row["probabilities"][label] for label in calibration.labels] for row in rows])
    assert given == pytest.approx(expected, abs=1e-4)
    review = [row["review"] for row in rows]
    assert review == calibration.review(calibration.judge(stored)).tolist()
    assert all(row["label_set"][0] == row["label"] and len(row["label_set"]) <= 2 for row in rows)
    counts = json.loads(result.read_text())["counts"]
    assert counts["review"] == sum(review) == json.loads((out / "_SUCCESS").read_text())["review"]
    assert f"For a person: {sum(review)} rows ({sum(review) / len(rows):.1%})" in run.stdout
    again = finetune(
        released.home, "predict", "small", "--input", inputs, "--output", str(out), "--no-drift", "--json", str(result)
    )
    assert again.returncode == 0 and json.loads(result.read_text())["counts"]["review"] == sum(review)


def test_a_single_row_and_a_server_mark_rows_for_a_person(released: Released) -> None:
    stored = pq.read_table(artifact_of(released.home, released.result, "predict") / "test.parquet")
    review = released.calibration.review(released.calibration.judge(stored)).tolist()
    with (released.file.parent / "test.csv").open(newline="") as file:
        given = [row["text"] for row in csv.DictReader(file)]
    texts = [given[review.index(False)], given[review.index(True)]]
    run = finetune(released.home, "predict", "small", *texts)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("for a person") == 1 and run.stdout.count("one of: ") == 2, run.stdout
    with Server(released.home, "small") as server:
        sure, unsure = server.client.post("/predict", json={"rows": [{"text": text} for text in texts]}).json()[
            "predictions"
        ]
        figures = server.client.get("/metrics").text
    assert (sure["review"], unsure["review"]) == (False, True)
    assert sure["label_set"][0] == sure["label"] and unsure["label_set"][0] == unsure["label"]
    assert "finetune_review_total 1.0" in figures


def ask_mlflow(text: str) -> Any:
    """The answer of version 1, loaded by MLflow alone."""
    mlflow.set_tracking_uri(tracking_uri())
    return mlflow.pyfunc.load_model("models:/small/1").predict([{"text": text}])


def test_mlflow_serves_the_calibrated_probabilities_in_a_process_of_its_own(released: Released, home: Path) -> None:
    (record,) = fork_server.call(ask_mlflow, "the film was superb")
    printed = finetune(home, "predict", "small", "the film was superb").stdout
    assert record["label"] == "pos" and record["review"] is False
    assert f"{record['probability']:6.1%}" in printed


def test_an_exported_version_has_its_calibration_beside_it(released: Released, tmp_path: Path) -> None:
    run = finetune(released.home, "export", "small", "safetensors", "--out", str(tmp_path / "exported"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert Calibration.read(tmp_path / "exported") == released.calibration


def test_another_bound_registers_another_version_of_the_same_model_and_trains_nothing(
    released: Released, tmp_path: Path, home: Path
) -> None:
    out = tmp_path / "out.json"
    change = "release.abstain.max_error=0.1"
    run = finetune(home, "run", str(released.file), "--set", change, "--json", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert states(out)["fit"] == states(out)["predict"] == "cached" and states(out)["calibrate"] == "ran"
    model = json.loads(out.read_text())["model"]
    assert (model["registered"], model["alias"]) == ("small/2", "champion")
    assert model["sha256"] == released.result["model"]["sha256"]
    again = finetune(home, "run", str(released.file), "--json", str(out))
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(out.read_text())["model"]["registered"] == "small/1"


def test_wrong_uses_are_refused_together_before_anything_runs(tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "project", evaluation={"splits": ["validation"]})
    run = finetune(tmp_path / "home", "check", str(file), "--set", "release.abstain.max_error=0.7")
    assert run.returncode == 2 and "Traceback" not in run.stdout + run.stderr
    assert "release.abstain.max_error" in run.stdout + run.stderr
    assert "release.prediction_sets: needs rows that have chosen neither" in run.stdout + run.stderr
    regression = finetune(
        tmp_path / "home", "check", str(file), "--set", "task=regression", "--set", "evaluation.metrics=[mse]"
    )
    assert regression.returncode == 2
    for field in ("abstain", "prediction_sets"):
        assert f"release.{field}: does nothing with task regression" in regression.stdout + regression.stderr


def test_later_labels_measure_the_promise_and_drift_compares_the_rows_for_a_person(
    released: Released, tmp_path: Path
) -> None:
    inputs, out = str(released.file.parent / "test.csv"), tmp_path / "out.json"
    run = finetune(released.home, "evaluate", "small/1", "--input", inputs, "--json", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    found, expected = json.loads(out.read_text())["evaluation"]["confidence"], released.result["calibration"]
    assert found["calibration_error"] == pytest.approx(expected["calibration_error"], abs=1e-4)
    assert found["answered"] == pytest.approx(expected["answered"]["share"], abs=0.005)
    assert "(at most 5.0% by the bound at registration)" in " ".join(run.stdout.split())
    run = finetune(released.home, "drift", "small/1", "--input", inputs, "--json", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    compared = {line["name"]: line for line in json.loads(out.read_text())["drift"]["comparisons"]}
    assert any("review" in name for name in compared), list(compared)
