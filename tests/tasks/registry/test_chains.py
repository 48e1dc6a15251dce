"""A recipe whose model is a version that another recipe registered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.runs import _lines
from tasks.cache.results import Artifact, Lock, PinnedVersion, Verdict, VersionOfTask
from tasks.cache.stage import Work
from tasks.jobs.job import job_of
from tasks.registry import lineage
from tasks.registry.model_card import _build_introduction, pin_recipe
from tasks.registry.reproduction import find_versions, recorded_lock, recorded_recipe
from tasks.registry.versions import BASE_VERSION_TAG, STARTED_FROM_TAG, TASK_TAG
from tasks.stages.load_model import load_model
from tasks.stages.mine_negatives import mine_negatives
from tasks.stages.preflight.model_check import require_model
from tasks.stages.preflight.token_check import find_tokenizer
from tasks.stages.register import _build_origin_tags
from tasks.stages.resolve import pin, pin_model
from tasks.tracking.connection import MAX_LENGTH_TAG, MODEL_TAG, connect
from tests.made import NO_WEIGHTS, artifact
from tests.raised import raised_problems
from training.problems import UserError
from training.recipe import Recipe, parse

MODEL, OTHER_MODEL = "m" * 40, "o" * 40
VERSION = PinnedVersion(name="first", version="7", model=MODEL, max_length=32)


def second(folder: Path, path: str = "first@champion", **fields: Any) -> Recipe:
    """The recipe of the second model."""
    return parse(
        {
            "name": "second",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": str(folder / "rows"), "text": ["text"], "label": "label"},
            "model": {"source": "registry", "path": path},
            "release": {"registry": "second"},
        },
        fields,
    )


@pytest.fixture
def recipe(tracked: Path, tmp_path: Path) -> Recipe:
    (tmp_path / "rows").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "rows" / f"{split}.csv").write_text("text,label\na,good\nb,bad\n")
    return second(tmp_path)


def register(name: str = "first", alias: str = "champion", source: str = "file:///nowhere", **tags: str) -> str:
    """A new version with the alias and these tags; gives its number."""
    client = connect()
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    version = str(client.create_model_version(name, source, tags=tags).version)
    client.set_registered_model_alias(name, alias, version)
    return version


def key(recipe: Recipe) -> str:
    """The key of load_model."""
    return load_model.key(load_model.flat_inputs(recipe, pin(recipe), None)[0])


def test_an_alias_is_pinned_to_its_version_whose_content_and_not_number_is_in_the_key(
    recipe: Recipe, tmp_path: Path
) -> None:
    register(**{MODEL_TAG: MODEL})
    lock = pin(recipe)
    assert lock.model_version == PinnedVersion(name="first", version="1", model=MODEL, max_length=512)
    assert (lock.started_from, lock.notes) == (None, ["training starts from first/1, which is first@champion"])
    first = key(recipe)
    register(**{MODEL_TAG: OTHER_MODEL})  # a new champion
    assert str(pin(recipe).model_version) == "first/2" and key(recipe) != first
    pinned = second(tmp_path, "first/1")
    assert key(pinned) == first and pin(pinned).notes == []
    register(**{MODEL_TAG: MODEL})  # the same bytes again, registered under another number
    assert str(pin(recipe).model_version) == "first/3" and key(recipe) == first


def test_the_version_that_finds_negatives_is_pinned_with_its_own_task(recipe: Recipe, tmp_path: Path) -> None:
    register(**{MODEL_TAG: OTHER_MODEL})
    task = {"task": "sentence-similarity", "options": {"prompts": {"sentence1": "query: "}}}
    register("found", **{MODEL_TAG: MODEL, TASK_TAG: json.dumps(task), MAX_LENGTH_TAG: "64"})
    (tmp_path / "rows/train.csv").write_text("query,document,label\na,good,1\nb,bad,0\n")
    (tmp_path / "rows/validation.csv").write_text("query,document,label\na,good,1\nb,bad,0\n")
    data = {"source": "csv", "path": str(tmp_path / "rows"), "label": "label"}
    data["negatives"] = {"source": "registry", "path": "found@champion"}
    changes = {"task": "reranking", "data": data}
    mined = second(tmp_path, **changes)
    lock = pin(mined)
    version = VersionOfTask(name="found", version="1", model=MODEL, max_length=64, **task)
    assert lock.negatives_version == version and "negatives are found by found/1, which is found@champion" in lock.notes
    assert lineage.resolve_fields(mined, lock)["data"]["negatives"]["path"] == "found/1"
    assert pin_recipe(mined, lock)["data"]["negatives"]["path"] == "found/1"
    job = job_of(mine_negatives, mined, lock, artifact("load_data", {"train.arrow": b""}), None)
    assert job.inputs().values["upstream"]["champion"] == MODEL
    assert job.settings.model_dump(include={"max_length"}) == {"max_length": 64}

    other = second(tmp_path, **changes, **{"data.negatives.path": "first/1"})
    (problem,) = raised_problems(pin, other)
    assert problem.where == "data.negatives.path" and "first/1 was not registered by finetune" in problem.message
    (problem,) = raised_problems(pin, second(tmp_path, **changes, **{"data.negatives.path": "found/9"}))
    assert (problem.where, problem.message.partition(":")[0]) == ("data.negatives.path", "'found' has no version '9'")


def test_a_champion_of_its_own_comes_before_the_base_model_if_the_recipe_starts_from_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    register(**{MODEL_TAG: MODEL})
    night = second(tmp_path, **{"model.start_from": "champion"})
    assert str(pin(night).start) == "first/1" and pin(night).start_field == "model.path"
    register("second", **{MODEL_TAG: OTHER_MODEL})
    lock = pin(night)
    assert (str(lock.start), lock.model_version, lock.start_field) == ("second/1", None, "model.start_from")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("frist@champion", r"no model 'frist' is registered in .*: first\. Did you mean 'first'\? Name a version"),
        ("first@best", r"'first' has no alias 'best': it has champion\. .* promote first VERSION --alias best\."),
        ("first/1", r"'first' has no version '1': it has 2\. Name a version that exists, or run the recipe"),
        ("first/9", r"'first' has no version '9': it has 2\."),
    ],
)
def test_a_version_that_does_not_exist_is_refused_with_those_that_do(
    recipe: Recipe, tmp_path: Path, path: str, message: str
) -> None:
    register(**{MODEL_TAG: MODEL})
    register(**{MODEL_TAG: OTHER_MODEL})
    connect().delete_model_version("first", "1")
    with pytest.raises(UserError, match=rf"^model\.path: {message}"):
        pin(second(tmp_path, path))


def test_a_plan_in_a_home_without_a_registry_creates_none_and_reports_the_model(recipe: Recipe, tracked: Path) -> None:
    (tracked / "mlflow.db").unlink()
    with pytest.raises(UserError, match=r"no model 'first' is registered: nothing is registered in .* yet\. Run"):
        pin(recipe)
    assert not (tracked / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("first", "'first' names no version: write first@champion (an alias) or first/1 (a number)."),
        ("first/x", "'first/x' names no version: write first@champion"),
        ("a/b@c", "'a/b@c' names no version"),
        ("second@champion", "name a version, such as second/1, or another base model with model.start_from: champion"),
        ("second@challenger", "'second@challenger' is an alias that each run of this recipe may move"),
        (None, "is missing: `source: registry` needs a registered version, such as support-sft@champion"),
    ],
)
def test_a_path_that_names_no_version_or_the_recipes_own_alias_is_refused(
    tmp_path: Path, path: str | None, message: str
) -> None:
    (problem,) = raised_problems(second, tmp_path, **{"model.path": path})
    assert problem.where == "model.path" and message in problem.message


def test_a_recipe_may_name_a_version_or_an_alias_of_its_own_registry_that_no_run_moves(tmp_path: Path) -> None:
    assert [second(tmp_path, path).model.path for path in ("second/1", "second@old")] == ["second/1", "second@old"]


def test_the_version_is_in_the_lineage_the_tags_the_card_and_what_is_shown(home: Path, tmp_path: Path) -> None:
    run, recipe = home / "runs" / "run", second(tmp_path)
    run.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    lock = Lock(model_version=VERSION)
    (run / "lock.json").write_text(lock.model_dump_json())
    record = lineage.build_record(recipe, "run", [], mlflow_run=None)
    assert record["recipe"]["model"]["path"] == "first/7" == record[lineage.RECIPE_WITHOUT_DEFAULTS]["model"]["path"]
    shown = " ".join("\n".join(_lines(record, 100)).split())
    assert f"base model registry first version 7 digest {MODEL}" in shown
    fitted = Artifact(stage="fit", key="f", digest="d", parts={"model": "n"})
    tags = _build_origin_tags(recipe, lock, "run", {"fit": fitted})
    assert tags[BASE_VERSION_TAG] == "first/7" and STARTED_FROM_TAG not in tags
    verdict = Verdict(decision="promote", reason="")
    assert "Fine-tuned from version 7 of `first`." in _build_introduction(recipe, lock, ["a", "b"], fitted, verdict)
    assert pin_recipe(recipe, lock)["model"] == {"source": "registry", "path": "first/7"}


def logged(folder: Path, config: dict[str, Any]) -> Path:
    """A model as mlflow.transformers logs it, with code that nothing should read."""
    for name, content in {
        "model/config.json": json.dumps(config),
        "model/model.safetensors": NO_WEIGHTS.decode(),
        "model/modeling_own.py": "raise SystemExit('executed')",
        "components/tokenizer/tokenizer.json": "{}",
        "components/tokenizer/tokenization_own.py": "raise SystemExit('executed')",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_a_version_of_another_machine_is_fetched_for_checks_and_for_training_without_its_code(
    recipe: Recipe, tmp_path: Path, model_unchecked: None
) -> None:
    folder = logged(tmp_path / "logged", {"model_type": "gpt2", "auto_map": {"AutoModel": "modeling_own.Own"}})
    register(source=folder.as_uri(), **{MODEL_TAG: MODEL})
    lock = pin_model(recipe)
    tokenizer = find_tokenizer(recipe, lock, tmp_path, tmp_path / "tokenizer")
    assert [file.name for file in tokenizer.iterdir()] == ["tokenizer.json"]
    assert require_model(recipe, lock).notes == [
        "model.path was not checked: its config.json is empty, or not on this machine yet."
    ]
    (tmp_path / "out").mkdir()
    load_model.make(Work("k", tmp_path / "out", "run"), recipe, lock, None)
    files = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert files == {"model/config.json", "model/model.safetensors", "tokenizer/tokenizer.json"}


def test_a_version_of_another_program_is_refused_before_anything_runs_if_it_is_an_adapter_alone(
    recipe: Recipe, tmp_path: Path
) -> None:
    folder = logged(tmp_path / "logged", {"model_type": "gpt2"})
    register(source=folder.as_uri())
    assert str(pin(recipe).model_version) == "first/1"
    (folder / "model/model.safetensors").rename(folder / "model/adapter_model.safetensors")
    message = r"^model\.path: the version first/1, .* has no whole model .* \(an adapter of peft alone is none\): name"
    with pytest.raises(UserError, match=message):
        pin(recipe)


def test_a_model_of_a_type_that_the_task_cannot_use_is_refused_with_its_version(recipe: Recipe, tmp_path: Path) -> None:
    register(source=logged(tmp_path / "logged", {"model_type": "bert"}).as_uri(), **{MODEL_TAG: MODEL})
    translation = {"data.text": None, "data.label": None, "data.columns": {"source": "text", "target": "label"}}
    wrong = second(tmp_path, task="seq2seq", **translation, **{"evaluation.metrics": ["chrf"]})
    message = r"^model\.path: first/1: 'bert' has no AutoModelForSeq2SeqLM, .*: choose a model of a type such as t5"
    with pytest.raises(UserError, match=message):
        require_model(wrong, pin(wrong), download=True)


def test_a_version_that_is_deleted_after_it_was_pinned_is_reported_by_its_field(recipe: Recipe, tmp_path: Path) -> None:
    register(**{MODEL_TAG: MODEL})
    lock = pin(recipe)
    connect().delete_model_version("first", "1")
    with pytest.raises(
        UserError, match=r"^model\.path: the version first/1, which .* no longer in MLflow: name another"
    ):
        load_model.make(Work("gone", tmp_path / "gone", "run"), recipe, lock, None)


def test_a_reproduction_starts_from_the_pinned_version_and_not_from_todays_champion(
    recipe: Recipe, tmp_path: Path
) -> None:
    folder = logged(tmp_path / "logged", {"model_type": "bert"})
    register(source=folder.as_uri(), **{MODEL_TAG: MODEL})
    lock = pin(recipe)
    register(**{MODEL_TAG: OTHER_MODEL})
    values = lineage.resolve_fields(recipe, lock)
    record = {
        "lock": lock.model_dump(mode="json"),
        "recipe": values,
        lineage.RECIPE_WITHOUT_DEFAULTS: values,
        "stages": [],
    }
    with find_versions(record, ()) as versions:
        start = versions.start
        assert start is not None and (start / "model.safetensors").read_bytes() == NO_WEIGHTS
        again = recorded_recipe(record, start)
        assert (again.model.source, again.model.path) == ("folder", str(start))
        # If rows are missing here, the lock is the recorded one, and the fresh home has neither store nor registry.
        files = pin(again).model_files
        kept = recorded_lock(record, versions, files)
        assert (kept.start, kept.model_files, kept.data_files) == (None, files, lock.data_files)
