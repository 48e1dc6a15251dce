"""Slices, floors and metrics that the rows cannot have, and the inputs of scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tasks.cache.results import Artifact
from tasks.stages.score import require_fitting, require_fitting_lengths, score
from tests.arrow import write_arrow, write_kept
from tests.raised import raised_problems
from training.recipe import Recipe, parse

DATA = {
    name: name for name in ("validation.arrow", "test.arrow", "labels.json", "validation.slices.arrow", "train.arrow")
}

MADE = (
    Artifact(stage="load_data", key="k", digest="all of it", parts=DATA),
    *(
        Artifact(stage=stage, key="k", digest="d", parts=dict.fromkeys(parts, "d"))
        for stage, parts in {
            "tokenize": ("train.arrow", "validation.arrow"),
            "fit": ("model",),
            "predict": ("validation.parquet",),
        }.items()
    ),
)


def recipe(
    *slices: str,
    floors: dict[str, Any] | None = None,
    metrics: list[str] | None = None,
    splits: list[str] | None = None,
) -> Recipe:
    return parse(
        {
            "name": "test",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "stars"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {
                "slices": list(slices),
                "metrics": metrics or ["accuracy"],
                "splits": splits or ["validation"],
            },
            "release": {"gate": {"floors": floors or {}}},
        }
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "labels.json").write_text(json.dumps(["bad", "good", "rare"]))
    (tmp_path / "log").mkdir()
    for split in ("train", "validation"):
        (tmp_path / f"{split}.arrow").touch()
    counts = {"train": {"bad": 5, "good": 5, "rare": 5}, "validation": {"bad": 2, "good": 1, "rare": 0}}
    (tmp_path / "log/report.json").write_text(json.dumps({"labels": counts}))
    left_out = {"id": "has more than 1,000 different values", "score": "is of type double"}
    write_kept(tmp_path, "validation", {"genre": ["war", "horror", None], "length_bucket": ["a", "b", "c"]}, left_out)
    return tmp_path


@pytest.mark.parametrize(
    ("task", "fitting"), [("sequence-classification", 3_000), ("multi-label-classification", 1_200)]
)
def test_a_calibration_that_a_version_cannot_carry_is_refused_before_training(
    rows: Path, task: str, fitting: int
) -> None:
    values = recipe().model_dump(exclude_unset=True) | {"task": task}
    values["release"] = {"registry": "m", "calibrate": True}
    for count, refused in ((fitting, False), (3 * fitting, True)):
        (rows / "labels.json").write_text(json.dumps([f"department of label {number}" for number in range(count)]))
        if not refused:
            require_fitting(parse(values), rows)
            continue
        found = problems_of(parse(values), rows)
        assert found.keys() == {"release.calibrate"}
        assert f"the calibration of {count:,} labels has up to " in found["release.calibrate"]
        assert "and MLflow stores 100,000 with a version: leave it out." in found["release.calibrate"]
        require_fitting(parse(values, {"release.registry": None}), rows)


def problems_of(recipe: Recipe, rows: Path) -> dict[str, str]:
    return {problem.where: problem.message for problem in raised_problems(require_fitting, recipe, rows)}


def test_slices_that_the_rows_do_not_have_are_reported_with_those_they_have_and_all_other_mistakes(rows: Path) -> None:
    others = "Not kept: id has more than 1,000 different values; score is of type double."
    unfit = recipe("genre", "gnre", "id", "label", "length_bucket", metrics=["accuracy", "mse"])
    assert problems_of(unfit, rows) == {
        "evaluation.metrics[1]": (
            "'mse' needs numbers, and the label 'bad' is not one: choose another metric, or use labels such as 1 to 5."
        ),
        "evaluation.slices[1]": (
            "'gnre' is not a slice of these rows: choose from genre, label, length_bucket. Did you mean 'genre'? "
            + others
        ),
        "evaluation.slices[2]": (
            f"'id' is not a slice of these rows: choose from genre, label, length_bucket. {others}"
        ),
    }
    require_fitting(recipe("genre", "label", "length_bucket"), rows)
    require_fitting(recipe("genre", "gnre"), object())  # rows that are not known yet


def test_weights_of_labels_that_the_rows_do_not_have_are_known_before_training(rows: Path) -> None:
    weighted = recipe()
    weights = {"bad": 2.0, "goood": 1.0}
    weighted = weighted.model_copy(update={"training": weighted.training.model_copy(update={"class_weights": weights})})
    message = "the data has no such label: choose from 'bad', 'good', 'rare'. Did you mean 'good'?"
    assert problems_of(weighted, rows) == {"training.class_weights.goood": message}


def test_an_evaluated_split_without_rows_is_refused_before_training_with_all_other_mistakes(rows: Path) -> None:
    floors = {"label=god": {"accuracy": 0.5}}  # of the split that is not there, so nothing is known of its groups
    unfit = recipe("label", metrics=["accuracy", "mse"], splits=["validation", "test"], floors=floors)
    found = problems_of(unfit, rows)
    assert found.keys() == {"evaluation.splits[1]", "evaluation.metrics[1]"}
    assert found["evaluation.splits[1]"] == (
        "'test' has no rows: 'rows' has train and validation. Name its rows in data.splits.test, hold rows of train "
        "out by data.test_size, or leave it out."
    )


def chosen_by(metric: str, task: str = "sequence-classification", **release: Any) -> Recipe:
    return parse(
        {
            "name": "test",
            "task": task,
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "stars"},
            "model": {"source": "hub", "path": "me/model"},
            "training": {"metric_for_best_model": metric},
            "evaluation": {"metrics": [metric]},
            "release": {"registry": "test", **release},
        }
    )


def write_counts(rows: Path, **counts: int) -> None:
    (rows / "labels.json").write_text(json.dumps(list(counts)))
    splits = {"train": dict.fromkeys(counts, 5), "validation": counts}
    (rows / "log/report.json").write_text(json.dumps({"labels": splits}))


def test_a_metric_that_the_labels_give_no_value_is_refused_before_training_where_it_chooses(rows: Path) -> None:
    gate = {"gate": {"minimum": {"roc_auc": 0.5}}}
    found = problems_of(chosen_by("roc_auc", **gate), rows)
    places = ["training.metric_for_best_model", "release.gate.minimum.roc_auc", "evaluation.metrics[0]"]
    assert list(found) == places
    assert found[places[0]] == (
        "roc_auc has no value on validation and chooses no checkpoint: no row has the label 'rare'. Add such rows, or "
        "choose another metric."
    )
    assert "passes no gate" in found[places[1]]
    write_counts(rows, no=9, yes=0)
    for metric in ("f1", "precision", "recall", "roc_auc", "matthews_correlation"):
        assert "training.metric_for_best_model" in problems_of(chosen_by(metric), rows), metric
    require_fitting(chosen_by("f1_macro"), rows)
    write_counts(rows, no=0, yes=9)
    require_fitting(chosen_by("f1"), rows)
    write_counts(rows, no=1, yes=9)
    require_fitting(chosen_by("roc_auc"), rows)


def test_spans_of_a_split_that_has_none_are_refused_before_training(rows: Path) -> None:
    write_counts(rows, **{"O": 9, "B-LOC": 0, "I-LOC": 0})
    found = problems_of(chosen_by("f1", "token-classification"), rows)
    assert "all rows have the label 'O'" in found["training.metric_for_best_model"]
    write_counts(rows, **{"O": 9, "B-LOC": 1, "I-LOC": 0})
    require_fitting(chosen_by("f1", "token-classification"), rows)


def test_a_correlation_with_labels_that_are_all_alike_is_refused_before_training(rows: Path) -> None:
    (rows / "labels.json").write_text("[]")
    (rows / "log/report.json").write_text("{}")
    table = pa.table({"text": ["a", "b"], "label": [2.5, 2.5]})
    write_arrow(rows / "validation.arrow", table)
    for metric in ("pearson", "spearman", "r2"):
        found = problems_of(chosen_by(metric, "regression"), rows)
        assert "all rows have the label '2.5'" in found["training.metric_for_best_model"]
    require_fitting(chosen_by("mse", "regression"), rows)


def test_a_floor_of_a_group_that_no_row_has_is_reported_before_anything_is_trained(rows: Path) -> None:
    floors = {
        f"{key}": {"accuracy": 0.5}
        for key in ("genre=wra", "genre=none", "label=god", "label=rare", "label", "length_bucket=1-2 tokns")
    }
    unfit = recipe("genre", "label", "length_bucket", floors=floors)
    assert problems_of(unfit, rows) == {
        "release.gate.floors.genre=wra": (
            "genre has no group 'wra' in validation: choose from horror, none, war. Did you mean 'war'?"
        ),
        "release.gate.floors.label=god": (
            "label has no group 'god' in validation: choose from bad, good. Did you mean 'good'?"
        ),
        "release.gate.floors.label=rare": "label has no group 'rare' in validation: choose from bad, good.",
    }
    (problem,) = raised_problems(require_fitting_lengths, unfit, tokens(rows, [1, 2, 9, 9]))
    assert problem.where == "release.gate.floors.length_bucket=1-2 tokns"
    assert problem.message == (
        "length_bucket has no group '1-2 tokns' in validation: choose from 1 token, 2 tokens, 3-9 tokens. "
        "Did you mean '2 tokens'?"
    )
    require_fitting_lengths(unfit, object())  # tokens that are not known yet
    named = {"length_bucket=3-9 tokens": {"accuracy": 0.5}, "length_bucket": {"accuracy": 0.4}}
    require_fitting_lengths(recipe("length_bucket", floors=named), rows)


def tokens(folder: Path, lengths: list[int]) -> Path:
    """The folder, with validation's tokens in it as far as their lengths count."""
    table = pa.table({"length": pa.array(lengths, pa.int32())})
    write_arrow(folder / "validation.arrow", table)
    return folder


def test_a_floor_of_a_column_that_only_another_split_has_is_reported(rows: Path) -> None:
    write_kept(rows, "test", {"late": ["a"]})
    floors = {"late": {"accuracy": 0.5}, "late=a": {"accuracy": 0.5}}
    message = (
        "validation is the gate's split and has no column 'late': set release.gate.split to another, or leave it out."
    )
    assert problems_of(recipe("late", floors=floors), rows) == dict.fromkeys(
        ("release.gate.floors.late", "release.gate.floors.late=a"), message
    )
    require_fitting(recipe("late"), rows)


def test_kept_columns_are_made_into_scores_where_a_slice_is_one_of_them_and_nowhere_else(home: Path) -> None:
    plain, by_length, by_genre = (
        score.flat_inputs(recipe(*slices), *MADE)[0] for slices in ((), ("length_bucket",), ("genre",))
    )
    read = {name.removeprefix("upstream.") for name in plain if name.startswith("upstream.")}
    of_baseline = {"load_data/train.arrow", "tokenize/train.arrow", "tokenize/validation.arrow", "fit/model"}
    rows = {"load_data/validation.arrow", "load_data/labels.json"}
    assert read == {"predict/validation.parquet", *rows, *of_baseline}
    assert {name for name in by_length if by_length[name] != plain.get(name)} == {"slices"}
    assert by_genre.keys() - plain.keys() == {"upstream.load_data/validation.slices.arrow"}


def test_which_groups_have_a_floor_counts_as_they_must_have_figures_and_its_height_does_not(home: Path) -> None:
    floors: list[dict[str, Any]] = [
        {},
        *({key: {"accuracy": at}} for key in ("genre", "genre=war") for at in (0.5, 0.6)),
    ]
    none, each, higher, one, one_higher = (
        score.flat_inputs(recipe("genre", floors=limits), *MADE)[0] for limits in floors
    )
    assert none != each == higher != one == one_higher != none


@pytest.mark.parametrize(
    ("split", "fits", "message"),
    [
        ({}, 30, "31 is more than the 30 rows of train: choose fewer folds, or leave it out."),
        (
            {"groups": {"train": 4}, "without_group": {"train": 2}},
            6,
            "7 is more than the 6 groups of train: choose fewer folds, or leave it out.",
        ),
    ],
)
def test_more_folds_than_rows_or_groups_are_found_before_training(
    rows: Path, split: dict[str, Any], fits: int, message: str
) -> None:
    file = rows / "log/report.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rows": {"train": 30}, "split": split}))

    def with_folds(number: int) -> Recipe:
        return parse(recipe().model_dump(exclude_unset=True), {"evaluation.folds": number})

    require_fitting(with_folds(fits), rows)
    (problem,) = raised_problems(require_fitting, with_folds(fits + 1), rows)
    assert (problem.where, problem.message) == ("evaluation.folds", message)
