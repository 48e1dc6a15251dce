"""Images: trained from rows to a model that transformers' pipeline loads, with the same scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.task_types import CORNERS, VIT, fit_job, make_world
from tests.training import programs_here, tiny
from tests.training.forks import assert_resumes, finish, weights
from tests.training.pictures import file_of, noise, stored
from training import task_types
from training.engine.predictor import Predictor
from training.programs import create_image_model, predict

pytestmark = pytest.mark.slow

TASK = "image-classification"
CONFIGS = {
    "vit": VIT,
    "resnet": {
        "model_type": "resnet",
        "image_size": 32,
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
    },
    "convnext": {"model_type": "convnext", "image_size": 32, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "swin": {
        "model_type": "swin",
        "image_size": 32,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 1],
        "window_size": 4,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_transformers_pipeline(name: str, tmp_path: Path) -> None:
    from transformers import pipeline

    programs_here.run(create_image_model, tmp_path / "base", {}, config=CONFIGS[name], seed=0)
    task_type, model = task_types.load(TASK), tmp_path / "trained"
    tiny.export_untrained(tmp_path / "base/output", model, task_type, CORNERS)
    images = [stored(file_of(noise(seed, 40, 30), kind)) for seed, kind in enumerate(["PNG", "JPEG", "WEBP"])]
    images.append(stored(file_of(noise(3).convert("CMYK"), "JPEG")))
    images.append(stored(file_of(noise(4).convert("RGBA"))))
    records = Predictor(task_type, model, model, 1).predict(pa.RecordBatch.from_pydict({"image": images}))
    answers = pipeline(TASK, model=str(model), top_k=len(CORNERS))(images)
    for record, answer in zip(records, answers, strict=True):
        for one in answer:
            assert record["probabilities"][one["label"]] == pytest.approx(one["score"], abs=1e-5)


def test_a_model_learns_from_images_and_is_exported_with_its_processor(tmp_path: Path) -> None:
    world = make_world(TASK, tmp_path / "world")
    job = fit_job(TASK, world, tmp_path / "fit", {"num_processes": 1, "strategy": "ddp"}, num_train_epochs=6)
    assert finish(job).state == "finished", (job / "log.txt").read_text()
    model = job / "output/model"
    assert json.loads((model / "preprocessor_config.json").read_text())["size"] == {"height": 16, "width": 16}
    settings = {"task": TASK, "options": {}, **programs_here.PREDICT}
    programs_here.run(predict, tmp_path / "predict", {"model": model, "tokens": world / "tokens"}, **settings)
    found = pq.read_table(tmp_path / "predict/output/validation.parquet")
    right = sum(a == b for a, b in zip(found["label"].to_pylist(), found["prediction"].to_pylist(), strict=True))
    assert right / len(found) > 0.8


@pytest.mark.parametrize("task", ["image-multi-label-classification", "image-regression"])
def test_a_model_learns_several_labels_and_numbers_of_images(task: str, tmp_path: Path) -> None:
    world = make_world(task, tmp_path / "world")
    job = fit_job(task, world, tmp_path / "fit", {"num_processes": 1, "strategy": "ddp"}, num_train_epochs=12)
    assert finish(job).state == "finished", (job / "log.txt").read_text()
    inputs, settings = {"model": job / "output/model", "tokens": world / "tokens"}, {"task": task, "options": {}}
    programs_here.run(predict, tmp_path / "predict", inputs, **settings, **programs_here.PREDICT)
    found = pq.read_table(tmp_path / "predict/output/validation.parquet")
    given, expected = (found[name].to_pylist() for name in ("prediction", "label"))
    if task == "image-regression":
        assert np.corrcoef(given, expected)[0, 1] > 0.8
    else:
        # Of three labels, each there or not.
        assert np.mean([len({*one} ^ {*other}) for one, other in zip(given, expected, strict=True)]) < 0.6


def test_a_killed_training_of_a_model_that_is_saved_under_old_names_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Transformers saves ViT under the names of its first release, and restores by its present ones."""
    world, one = make_world(TASK, tmp_path / "world"), {"num_processes": 1, "strategy": "ddp"}
    jobs = [fit_job(TASK, world, tmp_path / name, one, num_train_epochs=3) for name in ("undisturbed", "killed")]
    assert finish(jobs[0]).state == "finished"
    assert_resumes(jobs[1], jobs[0], after=1)


def test_a_killed_training_with_augmentation_ends_with_the_same_bytes_in_two_data_workers_or_none(
    tmp_path: Path,
) -> None:
    world, one = make_world(TASK, tmp_path / "world"), {"num_processes": 1, "strategy": "ddp"}
    augment = {"RandomCrop": {"padding": 2}, "RandomHorizontalFlip": {}, "ColorJitter": {"brightness": 0.3}}
    workers = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"}
    made = {"undisturbed": {"extra": workers}, "killed": {"extra": workers}, "without": {}, "plain": {}}
    jobs = {
        name: fit_job(
            TASK, world, tmp_path / name, one, num_train_epochs=3, **more, augment=None if name == "plain" else augment
        )
        for name, more in made.items()
    }
    for name in ("undisturbed", "without", "plain"):
        assert finish(jobs[name]).state == "finished", (jobs[name] / "log.txt").read_text()
    assert_resumes(jobs["killed"], jobs["undisturbed"], after=1)
    assert weights(jobs["without"]) == weights(jobs["undisturbed"]) != weights(jobs["plain"])
