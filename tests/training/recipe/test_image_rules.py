"""A recipe for images: what it needs, and fields for texts, which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.raised import raised_problems
from training.recipe import parse


def recipe(**fields: Any) -> dict[str, Any]:
    values = {
        "name": "photos",
        "task": "image-classification",
        "data": {"source": "imagefolder", "path": "photos", "label": "label"},
        "model": {"source": "scratch", "config": {"model_type": "vit", "image_size": 16}},
    }
    for name, value in fields.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
    return values


def test_a_recipe_for_images_names_neither_texts_nor_tokens() -> None:
    assert parse(recipe()).evaluation.metrics == ["accuracy"]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tokens": {"max_length": 64}}, "tokens.max_length"),
        ({"model": {"chat_template": "chat.jinja"}}, "model.chat_template"),
        ({"training": {"lora": {"r": 4}}}, "training.lora"),
        ({"training": {"use_liger_kernel": True}}, "training.use_liger_kernel"),
        ({"training": {"teacher": {"source": "hub", "path": "a/b"}}}, "training.teacher"),
        ({"release": {"exports": ["gguf-f16"]}}, "release.exports[0]"),
        ({"release": {"gate": {"must_hold": {"path": "held.csv"}}}}, "release.gate.must_hold"),
        ({"data": {"text": ["text"]}}, "data.text"),
        ({"data": {"corrections": "labels.csv"}}, "data.corrections"),
        ({"data": {"checks": {"truncated": "error"}}}, "data.checks.truncated"),
        ({"options": {"contrastive": True}}, "options"),
    ],
)
def test_fields_for_texts_are_refused_by_name(fields: dict[str, Any], where: str) -> None:
    assert where in {problem.where for problem in raised_problems(parse, recipe(**fields))}


def test_a_model_from_scratch_needs_the_size_of_its_images() -> None:
    values = recipe()
    values["model"]["config"] = {"model_type": "vit"}
    (problem,) = raised_problems(parse, values)
    assert problem.where == "model.config.image_size"


PARTS = "training.augment.RandomResizedCrop"


@pytest.mark.parametrize(
    ("augment", "where"),
    [
        ({}, "training.augment"),
        ({"RandomFlip": {}}, "training.augment.RandomFlip"),
        ({"RandomCrop": {"padding": 2}, "RandomResizedCrop": {}}, "training.augment.RandomCrop"),
        ({"ColorJitter": {"hue": 0.0}}, "training.augment.ColorJitter"),
        ({"RandomResizedCrop": {"scale": [0.9, 0.1]}}, f"{PARTS}.scale"),
        ({"RandomResizedCrop": {"scale": [0.9, 1.1]}}, f"{PARTS}.scale"),
        ({"RandomResizedCrop": {"ratio": [1.5, 0.5]}}, f"{PARTS}.ratio"),
        ({"RandomRotation": {}}, "training.augment.RandomRotation.degrees"),
    ],
)
def test_augmentation_that_changes_nothing_or_leaves_its_limits_is_refused(augment: Any, where: str) -> None:
    (problem,) = raised_problems(parse, recipe(training={"augment": augment}))
    assert problem.where == where


def test_texts_are_not_augmented() -> None:
    texts = {"task": "sequence-classification", "data": {"source": "csv", "path": "rows", "text": ["t"]}}
    values = recipe(**texts, training={"augment": {"RandomHorizontalFlip": {}}})
    values["model"] = {"source": "hub", "path": "a/b"}
    (problem,) = raised_problems(parse, values)
    assert problem.where == "training.augment" and "has none" in problem.message


def test_several_labels_of_an_image_are_cut_at_a_separator_and_one_label_is_not() -> None:
    cells = {"source": "csv", "path": "rows", "label_separator": ";"}
    several = recipe(task="image-multi-label-classification", data=cells)
    assert parse(several).data.label_separator == ";"
    (problem,) = raised_problems(parse, recipe(data=cells))
    assert problem.where == "data.label_separator"
