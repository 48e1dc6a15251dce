"""Training that starts from the champion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.results import Artifact, Lock, PinnedFile, PinnedVersion, VersionOfTask
from tasks.cache.stage import Work
from tasks.home import home as create_home
from tasks.registry.model_spec import find_model
from tasks.registry.monitored_versions import find_monitored, read_evaluations
from tasks.registry.pinned_versions import find_current, find_folders
from tasks.registry.reproduction import find_versions
from tasks.registry.versions import (
    CALIBRATION_TAG,
    COLUMNS_TAG,
    DATA_FILES_TAG,
    EVALUATIONS_TAG,
    METRICS_TAG,
    READING_TAG,
    RECIPE_TAG,
    ROWS_TAG,
    SPLIT_TAG,
    STARTED_FROM_TAG,
    TASK_TAG,
    list_models,
)
from tasks.stages.load_model import load_model, require_same_labels
from tasks.stages.predict import predict_champion
from tasks.stages.register import _build_origin_tags
from tasks.stages.resolve import pin
from tasks.tracking.connection import MAX_LENGTH_TAG, MODEL_TAG, connect
from tests.made import KEY, LABELS, NO_WEIGHTS, artifact
from tests.raised import raised_problems
from training.problems import UserError
from training.recipe import Recipe, parse

OTHER = PinnedVersion(name="small", version="7", model="o" * 40, max_length=32)
SCRATCH = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}


def written(folder: Path, **fields: Any) -> dict[str, Any]:
    """A recipe whose base model is nowhere."""
    return {
        "name": "small",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": str(folder), "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": "nowhere", "start_from": "champion"},
        "release": {"registry": "small"},
        **fields,
    }


@pytest.fixture
def recipe(tracked: Path, tmp_path: Path) -> Recipe:
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text("text,label\na,good\nb,bad\n")
    return parse(written(folder))


def register_champion(**tags: str) -> str:
    """A new champion with these tags; gives its version."""
    client = connect()
    if not client.search_registered_models("name = 'small'"):
        client.create_registered_model("small")
    version = str(client.create_model_version("small", "file:///nowhere", tags=tags).version)
    client.set_registered_model_alias("small", "champion", version)
    return version


def test_training_starts_from_the_champion_and_the_base_model_is_not_looked_at(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):  # no champion yet: the base model is wanted
        pin(recipe)
    register_champion(**{MODEL_TAG: "m" * 40})
    lock = pin(recipe)
    assert lock.started_from == PinnedVersion(name="small", version="1", model="m" * 40, max_length=512)
    assert lock.notes == ["training starts from small/1, the champion"] and lock.model_files == {}


def test_a_champion_predicts_with_the_prefix_that_it_has_learnt_and_todays_other_options(
    recipe: Recipe, tmp_path: Path
) -> None:
    learnt = json.dumps({"task": "seq2seq", "options": {"num_beams": 2, "prefix": "German: "}})
    inputs = []
    for tags in ({TASK_TAG: learnt}, {TASK_TAG: json.dumps({"task": "seq2seq", "options": {}})}, {}):
        register_champion(**tags)
        for max_target_length in (8, 9):
            options = {"prefix": "translate: ", "max_target_length": max_target_length}
            today = parse(
                written(tmp_path / "rows", task="seq2seq", options=options)
                | {"data": {"source": "csv", "path": "rows", "columns": {"source": "text", "target": "label"}}}
            )
            found = find_current(today)
            assert found is not None
            ref = Artifact(stage="load_data", key=KEY, digest="d", parts={"validation.arrow": "v", "labels.json": "l"})
            inputs.append(predict_champion.flat_inputs(today, Lock(), ref, found.champion)[0])
    assert [one["options.prefix"] for one in inputs[::2]] == ["German: ", "", "translate: "]
    assert [one["options.num_beams"] for one in inputs[::2]] == [1, 1, 1]
    changed = {name for name in inputs[0] if inputs[0][name] != inputs[1][name]}
    assert changed == {"options.max_target_length"}


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        (TASK_TAG, '{"task": "regres'),
        (TASK_TAG, '{"task": "regression"}'),
        (COLUMNS_TAG, "text"),
        (MAX_LENGTH_TAG, "many"),
        (READING_TAG, "[1]"),
        (METRICS_TAG, "[]"),
        (EVALUATIONS_TAG, "{}"),
        (COLUMNS_TAG, '{"nothing": "text"}'),
        (MAX_LENGTH_TAG, "9" * 40),
        (READING_TAG, "[]"),
        (READING_TAG, '[{"source": "csv", "filter": "__import__(1)"}]'),
        (READING_TAG, '[{"source": 7, "suffixes": 7}]'),
        (METRICS_TAG, '{"test": {"accuracy": {"value": "high"}}}'),
        (METRICS_TAG, '{"test": {"accuracy": 5}}'),
        (CALIBRATION_TAG, '{"function": "sigmoid", "labels": ["a", "b"], "scale": [], "offset": [0.0]}'),
        (CALIBRATION_TAG, '{"function": "softmax", "labels": ["a", "a"], "scale": [1.0], "offset": [0.0]}'),
        (CALIBRATION_TAG, '{"function": "softmax", "labels": ["a", "b"], "scale": [NaN], "offset": [0.0]}'),
        (CALIBRATION_TAG, '{"function": "sigmoid", "labels": ["a", "b"], "scale": [1.0], "offset": [0.0]}'),
        # Names of folders in the home, from whoever may write to the registry.
        ("finetune.fit.key", "../../elsewhere"),
        ("finetune.load_data.key", "/elsewhere"),
        ("finetune.predict.key", ".."),
        (RECIPE_TAG, "../../elsewhere"),
    ],
)
def test_a_damaged_tag_of_a_version_is_one_message_with_the_version_and_the_tag(
    tracked: Path, tag: str, value: str
) -> None:
    tags = {TASK_TAG: json.dumps({"task": "regression", "options": {}}), COLUMNS_TAG: "{}", MAX_LENGTH_TAG: "64"}
    tags |= {READING_TAG: "[{}]", MODEL_TAG: "m", RECIPE_TAG: "small", SPLIT_TAG: "test", "finetune.load_data.key": "k"}
    version = register_champion(**tags)
    find_monitored(f"small/{version}")
    damaged = register_champion(**{**tags, tag: value})
    with pytest.raises(UserError) as raised:
        if tag == EVALUATIONS_TAG:
            read_evaluations(connect().get_model_version("small", damaged))
        elif tag in (METRICS_TAG, RECIPE_TAG, "finetune.load_data.key", "finetune.predict.key"):
            find_monitored("small")
        else:
            find_model("small")
    assert list_models("small", 5)[0]["versions"][0]["figures"] == {}  # it leaves out what it cannot read
    (problem,) = raised.value.problems
    assert problem.where == f"small/{damaged}"
    assert problem.message.startswith(f"its tag {tag} is damaged, {value!r}: set it to its former value in MLflow")


@pytest.mark.parametrize("tag", [TASK_TAG, STARTED_FROM_TAG])
def test_a_damaged_tag_of_the_champion_is_one_message_in_a_run(recipe: Recipe, tag: str) -> None:
    register_champion(**{MODEL_TAG: "m" * 40, tag: "{"})
    with pytest.raises(UserError, match=f"small/1: its tag {tag} is damaged"):
        pin(recipe)


def test_to_look_for_a_champion_makes_no_database(recipe: Recipe, tracked: Path) -> None:
    (tracked / "mlflow.db").unlink()
    with pytest.raises(UserError, match="nowhere is not a folder"):
        pin(recipe)
    assert not (tracked / "mlflow.db").exists()


def test_a_mistake_in_the_data_is_reported_without_one_of_a_base_model_that_the_champion_may_replace(
    recipe: Recipe, tmp_path: Path
) -> None:
    register_champion(**{MODEL_TAG: "m" * 40})
    (tmp_path / "rows" / "train.csv").unlink()
    assert {problem.kind for problem in raised_problems(pin, recipe)} == {"data"}


def test_a_champion_of_the_same_rows_is_no_change_and_one_of_other_rows_or_unknown_ones_is(
    recipe: Recipe, tmp_path: Path
) -> None:
    rows = pin(parse(written(tmp_path / "rows", model=SCRATCH))).rows
    assert rows is not None
    own = {MODEL_TAG: "m" * 40, ROWS_TAG: rows, STARTED_FROM_TAG: OTHER.model_dump_json()}
    register_champion(**own)
    lock = pin(recipe)
    assert lock.started_from == OTHER
    assert lock.notes == ["small/1 was trained on these rows: training starts from small/7, as it did"]

    register_champion(**{MODEL_TAG: "n" * 40})  # by other means, by hand: whatever it has learnt from
    assert str(pin(recipe).started_from) == "small/2"
    connect().set_registered_model_alias("small", "champion", "1")  # rolled back
    assert pin(recipe).started_from == OTHER
    (tmp_path / "rows" / "validation.csv").write_text("text,label\nc,good\nd,bad\n")  # nothing is learnt from them
    assert pin(recipe).started_from == OTHER
    (tmp_path / "rows" / "train.csv").write_text("text,label\na,good\nb,bad\nc,bad\n")
    assert str(pin(recipe).started_from) == "small/1"


def test_rows_are_the_same_wherever_their_files_lie(recipe: Recipe, tmp_path: Path) -> None:
    moved = (tmp_path / "rows").rename(tmp_path / "moved")
    register_champion(**{MODEL_TAG: "m" * 40})
    there = parse(written(moved))
    (tmp_path / "rows").symlink_to(moved)
    assert pin(there).rows == pin(recipe).rows
    other = parse(written(moved), {"data.limit": 1})
    assert pin(other).rows != pin(recipe).rows


def test_a_version_records_the_rows_that_it_was_pinned_to_though_their_reader_changed_since(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    reader = tmp_path / "champions_rows.py"
    reader.write_text("def rows(split):\n    yield {'text': 'a', 'label': 'good'}\n")
    data = {"source": "python", "path": "champions_rows:rows", "text": ["text"], "label": "label"}
    recipe = parse(written(tmp_path, model=SCRATCH, data=data))
    lock = pin(recipe)
    reader.write_text("def rows(split):\n    yield {'text': 'b', 'label': 'good'}\n")
    fitted = Artifact(stage="fit", key="f", digest="d", parts={"model": "m"})
    assert _build_origin_tags(recipe, lock, "run", {"fit": fitted})[ROWS_TAG] == lock.rows != pin(recipe).rows


def test_a_version_names_the_files_of_its_rows_without_the_signatures_of_their_urls(recipe: Recipe) -> None:
    file = PinnedFile(path="https://host/train.csv?X-Amz-Signature=secret", sha256="f" * 64)
    fitted = Artifact(stage="fit", key="f", digest="d", parts={"model": "m"})
    tags = _build_origin_tags(recipe, Lock(data_files={"train": [file]}), "run", {"fit": fitted})
    assert json.loads(tags[DATA_FILES_TAG]) == {"train": [f"train.csv {file.sha256}"]}


def test_labels_that_the_champion_has_in_another_order_are_reported_before_training(home: Path) -> None:
    home.mkdir(mode=0o700)
    data = artifact("load_data", {"labels.json": LABELS})
    config = {"id2label": {"0": "good", "1": "bad"}}
    model = artifact("load_model", {"model/config.json": json.dumps(config).encode()})
    with pytest.raises(UserError, match=r"small/7.* gives the labels good, bad, and the rows have bad, good: make"):
        require_same_labels(Lock(started_from=OTHER), data, model)
    require_same_labels(Lock(), data, model)
    unnamed = Artifact(stage="fit", key=KEY, digest="d")
    with pytest.raises(UserError, match=r"small/7.* names no labels, and the rows have bad, good: set this to base"):
        require_same_labels(Lock(started_from=OTHER), data, unnamed)


def test_a_start_without_a_version_or_a_tokenizer_is_reported_with_its_version(tracked: Path, tmp_path: Path) -> None:
    recipe = parse(written(tmp_path, model=SCRATCH | {"start_from": "champion"}))
    with pytest.raises(
        UserError, match=r"start_from: the version small/7, .* no longer in MLflow: set this to base, and begin a"
    ):
        find_folders(Work("gone", tmp_path / "gone", "run"), OTHER, "model.start_from")
    trained = artifact("fit", {"model/config.json": b"{}", "model/model.safetensors": NO_WEIGHTS})
    start = OTHER.model_copy(update={"key": trained.key, "model": trained.parts["model"]})
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"model.path: small/7 has no tokenizer.json"):
        load_model.make(Work("k", tmp_path / "out", "run"), recipe, Lock(started_from=start), None)


def test_links_in_a_logged_model_to_files_of_elsewhere_are_refused_by_name(tracked: Path, tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("a password")
    model, tokenizer = tmp_path / "logged" / "model", tmp_path / "logged" / "components" / "tokenizer"
    for folder, names in ((model, ("config.json", "model.safetensors")), (tokenizer, ("tokenizer_config.json",))):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("{}")
    (tokenizer / "vocab.txt").symlink_to(secret)
    client = connect()
    client.create_registered_model("small")
    version = client.create_model_version("small", f"file://{tmp_path / 'logged'}").version
    champion = PinnedVersion(name="small", version=str(version), model="m", max_length=8)
    with pytest.raises(UserError, match=f"vocab.txt: is a link to {secret}, outside of its folder"):
        find_folders(Work(key="k", out=tmp_path, run=""), champion, "model.path")


def test_a_logged_model_without_weights_in_safetensors_is_refused_and_no_pickle_is_read(
    tracked: Path, tmp_path: Path
) -> None:
    model = tmp_path / "logged" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    client = connect()
    client.create_registered_model("small")
    version = client.create_model_version("small", f"file://{tmp_path / 'logged'}").version
    champion, work = PinnedVersion(name="small", version=str(version), model="m", max_length=8), Work("k", tmp_path, "")
    with pytest.raises(UserError, match=r"small/1 has no whole model in safetensors .* run its recipe again"):
        find_folders(work, champion, "NAME")
    assert not [*work.job.rglob("*.bin")]


def test_the_start_of_a_model_is_linked_to_while_it_is_made_again(home: Path) -> None:
    home.mkdir(mode=0o700)
    kept = artifact("load_model", {"model/model.safetensors": b"weights", "tokenizer/tokenizer.json": b"{}"})
    lock = Lock(started_from=OTHER).model_dump(mode="json")
    with find_versions({"lock": lock, "stages": [{"name": "load_model", "key": KEY}]}, ()) as versions:
        folder = versions.start
        assert folder is not None and all((folder / file.name).samefile(file) for file in kept.path.glob("*/*"))
    assert not any((create_home() / "jobs").iterdir())


def test_a_reproduction_gets_the_files_of_a_teacher_if_it_needs_them_and_hears_if_they_are_gone(tracked: Path) -> None:
    trained = artifact("fit", {"model/config.json": b"{}", "model/model.safetensors": NO_WEIGHTS})
    own = {"key": trained.key, "model": trained.parts["model"], "task": "regression"}
    lock = Lock(teacher_version=VersionOfTask(**{**dict(OTHER), **own})).model_dump(mode="json")
    record: dict[str, Any] = {"lock": lock, "stages": [], "libraries": {}, "code": {"files": {}}}
    with find_versions(record, ()) as versions:
        folder = versions.others["teacher_version"].folder
        assert folder is not None and (folder / "config.json").samefile(trained.path / "model/config.json")
    assert not folder.exists()
    with find_versions(record, {"teacher_outputs"}) as versions:
        assert versions.others["teacher_version"].folder is None and not versions.warnings

    shutil.rmtree(trained.path)
    with pytest.raises(UserError, match="small/7, which is the teacher, is no longer in MLflow"):
        find_versions(record, ()).__enter__()
    with find_versions(record | {"libraries": {"torch": "0"}}, {"teacher_outputs"}) as versions:
        (warning,) = versions.warnings
        assert warning.startswith("teacher_outputs is stored; other code would need small/7, which is not available")


def test_only_a_recipe_with_a_registry_can_start_from_a_champion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.start_from: 'champion' needs a registry: set release.registry"):
        parse(written(tmp_path, release={}))
