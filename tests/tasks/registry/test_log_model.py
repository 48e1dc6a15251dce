"""Registration of a model that predicts as it did, and predictions for pairs of texts as in training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from tasks.cache import store
from tasks.cache.results import Artifact, PinnedVersion
from tasks.cache.stage import Work
from tasks.registry.log_model import share_weights
from tasks.registry.pinned_versions import find_folders
from tasks.registry.versions import WEIGHTS_TAG
from tasks.registry.weight_files import TrainedModel, require_trained
from tasks.tracking.connection import connect, find_or_create_run
from tests.fork_server import call
from tests.made import artifact
from tests.training import tiny
from training.data.ipc_files import ipc_writer
from training.jobs.program import run_program
from training.jobs.protocol import Job, Outcome, read_outcome, sha256
from training.models.repository_files import part_of
from training.problems import UserError
from training.task_types.sequence_classification import SequenceClassification


class Unpiped(SequenceClassification):
    """One whose task no pipeline is for."""

    pipeline = False
    serves: ClassVar = {}


class Denied(Unpiped):
    """One that finds its served answers to be others."""

    def same_records(self, *given: Any) -> bool:
        return False


WEIGHTS = "model.safetensors"
VERSION = PinnedVersion(name="pairs", version="1", model="m" * 40, max_length=32)
PAIRS = [("a cat", "a saw and a nail"), ("bread " * 60, "soup"), ("a dog", "cheese")]


def make_model(world: Path) -> list[dict[str, float]]:
    """Writes a classifier to `world/model` and stores its logits. Returns its probabilities for each pair alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny.make_world(world)
    torch.manual_seed(3)
    labels = dict(enumerate(tiny.LABELS))
    network = AutoModelForSequenceClassification.from_pretrained(world / "base/model", id2label=labels)
    tokenizer = AutoTokenizer.from_pretrained(world / "base/tokenizer")
    network.save_pretrained(world / "model")
    tokenizer.save_pretrained(world / "model")
    found, stored = [], []
    for pair in PAIRS:
        tokens = tokenizer(*pair, truncation=True, max_length=32, return_tensors="pt")
        with torch.inference_mode():
            logits = network.eval()(**tokens).logits[0]
        stored.append(logits.numpy())
        found.append(dict(zip(tiny.LABELS, torch.softmax(logits, 0).tolist(), strict=True)))
    rows = pa.table({"text": [a for a, _ in PAIRS], "text_pair": [b for _, b in PAIRS], "label": [0, 0, 0]})
    with ipc_writer(world / "rows.arrow", rows.schema) as writer:
        writer.write_table(rows)
    tiny.write_predictions(world / "logged.parquet", [0, 0, 0], logits := np.array(stored), [9, 9, 9])
    logits[-1, 1] += 3
    tiny.write_predictions(world / "refused.parquet", [0, 0, 0], logits, [9, 9, 9])
    return found


def log_and_predict(world: Path, run_id: str, uri: str) -> None:
    """Logs a model wrongly, then rightly, then one of another task type; in one process, since imports take longest."""
    os.environ |= {"MLFLOW_TRACKING_URI": uri, "MLFLOW_REGISTRY_URI": uri}
    os.environ["MLFLOW_HUGGINGFACE_MODEL_MAX_SHARD_SIZE"] = "20KB"  # less than the weights have, as 500MB often are
    found = make_model(world)
    (world / "found.json").write_text(json.dumps(found))
    settings = {"experiment": "e", "run_id": run_id, "registry": "pairs", "task": "sequence-classification"}
    settings |= {"inputs": ["text", "text_pair"], "labels": tiny.LABELS, "probes": 8}
    settings |= {"max_length": 32, "requirements": ["torch"], "examples": 2, "tolerance": 1e-3}
    for name in ("refused", "logged"):
        inputs = {"model": world / "model", "rows": world / "rows.arrow", "predictions": world / f"{name}.parquet"}
        paths = {part: str(path) for part, path in inputs.items()}
        run(world / name, "tasks.registry.log_model", settings | {"tags": {"made": name}}, paths)
        if name == "refused":
            shutil.copytree(world / name, world / "logged")  # as a try leaves it that was killed after it had logged
    own = {"registry": "own", "task": f"{__name__}:Unpiped", "tags": {}}
    run(world / "unpiped", "tasks.registry.log_model", settings | own, paths)
    run(world / "denied", "tasks.registry.log_model", settings | own | {"task": f"{__name__}:Denied"}, paths)


def predict_pairs(world: Path, folders: dict[str, str]) -> None:
    """Predicts with a registered model whose task type is the test's own."""
    settings = {"task": f"{__name__}:Unpiped", "max_length": 32, "rows": [list(pair) for pair in PAIRS]}
    settings["columns"] = {"text": "first", "text_pair": "second"}
    run(world / "typed", "tasks.prediction.single_rows", settings, folders)


def run(job_dir: Path, program: str, settings: dict[str, Any], inputs: dict[str, str]) -> None:
    Job(program=program, key=job_dir.name, settings=settings, inputs=inputs).write(job_dir)
    sys.argv[1:] = [str(job_dir)]
    with open(job_dir / "log.txt", "a") as log, contextlib.redirect_stderr(log), contextlib.suppress(SystemExit):
        run_program(import_module(program).main)


def outcome(job_dir: Path) -> Outcome:
    found = read_outcome(job_dir)
    assert found is not None, (job_dir / "log.txt").read_text()
    return found


@pytest.mark.slow
def test_pairs_are_registered_if_the_logged_model_predicts_as_before(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    world = tmp_path / "world"
    world.mkdir()
    run_id = find_or_create_run(client, "e", "run")
    call(log_and_predict, world, run_id, f"sqlite:///{tracked / 'mlflow.db'}")

    refused = outcome(world / "refused").failure
    assert refused is not None and refused.kind == "internal" and "was stored when it was evaluated" in refused.message
    assert outcome(world / "logged").result == {"version": "1"}
    (version,) = client.search_model_versions("name = 'pairs'")
    assert version.tags == {"made": "logged"}
    copies = [*(tracked / "mlartifacts").rglob("*.safetensors")]
    assert len(copies) == 4 and all(copy.samefile(world / "model" / copy.name) for copy in copies)
    # A training that starts from it reads the bytes that a training from the folder reads.
    for part, folder in find_folders(Work("start", tmp_path, "run"), VERSION, "model.path").items():
        names = {file.name for file in (world / "model").iterdir() if part_of(file.name) == part}
        assert {file.name for file in folder.iterdir()} == names
        assert [name for name in names if sha256(folder / name) != sha256(world / "model" / name)] == []

    assert outcome(world / "unpiped").result == {"version": "1"}
    denied = outcome(world / "denied").failure
    assert denied is not None and "predicts otherwise if MLflow serves it" in denied.message
    for name in ("pairs", "own"):  # all that MLflow writes is known, or no version could be signed
        place = client.get_model_version_download_uri(name, "1").removeprefix("file://")
        assert f"run_id: {run_id}" in Path(place, "MLmodel").read_text()
        logged = digest_all(Path(place))
        trained = TrainedModel(world / "model", digest_all(world / "model"))
        assert require_trained(Path(place), logged, trained) == logged
    own = VERSION.model_copy(update={"name": "own"})
    fetched = find_folders(Work("own", tmp_path, "run"), own, "NAME")
    call(predict_pairs, world, {part: str(folder) for part, folder in fetched.items()})
    likeliest = [lines[0].split()[-1] for lines in outcome(world / "typed").result["predictions"]]
    found = json.loads((world / "found.json").read_text())
    assert likeliest == [max(one, key=one.__getitem__) for one in found]
    assert [*tracked.rglob("pyfunc_model.py")] and not [*tracked.rglob("*.pkl")]

    weights = world / "model" / WEIGHTS
    client.set_model_version_tag("pairs", "1", WEIGHTS_TAG, json.dumps({WEIGHTS: sha256(weights)}))
    find_folders(Work("intact", tmp_path, "run"), VERSION, "model.path")
    with weights.open("r+b") as file:  # MLflow's file is the same
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(UserError, match=f"is damaged in MLflow: {WEIGHTS} has changed since it was registered"):
        find_folders(Work("damaged", tmp_path, "run"), VERSION, "model.path")


def digest_all(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256(path) for path in folder.rglob("*") if path.is_file()}


def share(home: Path, copied: bytes = b"weights", location: str = "mlflow-artifacts:/e/m") -> tuple[Artifact, Path]:
    """Weights in an artifact, and the copy of MLflow after it may have become a link."""
    stored = artifact("fit", {f"model/{WEIGHTS}": b"weights"})
    copy = home / "mlartifacts" / "e" / "m" / "model" / WEIGHTS
    copy.parent.mkdir(parents=True)
    copy.write_bytes(copied)
    share_weights(location, stored.path / "model", home / "aside")
    assert not (home / "aside").exists()
    return stored, copy


@pytest.mark.parametrize("location", ["mlflow-artifacts:/e/m", "file://{home}/mlartifacts/e/m"])
def test_weights_are_stored_once_and_either_file_may_be_removed(home: Path, location: str) -> None:
    stored, copy = share(home, location=location.format(home=home))
    assert copy.samefile(stored.path / "model" / WEIGHTS)
    assert store.find("fit", stored.key) == stored
    shutil.rmtree(stored.path)
    assert copy.read_bytes() == b"weights"
    again, _ = artifact("fit", {f"model/{WEIGHTS}": b"weights"}), copy.unlink()
    assert store.find("fit", again.key) == again


def test_weights_that_are_changed_in_place_by_mlflows_name_are_noticed_in_the_artifact(home: Path) -> None:
    stored, copy = share(home)
    assert store.find("fit", stored.key) == stored
    copy.write_bytes(b"Weights")
    with pytest.raises(store.Damaged, match="has changed"):
        store.find("fit", stored.key)


@pytest.mark.parametrize(
    ("copied", "location"),
    [
        (b"others!", "mlflow-artifacts:/e/m"),
        (b"weights", "s3://bucket/e/m"),
        (b"weights", "file:///elsewhere/e/m"),
        (b"weights", "mlflow-artifacts:/../artifacts"),
    ],
)
def test_other_bytes_and_other_places_are_left_as_they_are(home: Path, copied: bytes, location: str) -> None:
    stored, copy = share(home, copied, location)
    assert copy.read_bytes() == copied and copy.stat().st_nlink == 1
    assert (stored.path / "model" / WEIGHTS).stat().st_nlink == 1
