"""Batch predictions by a registered model: each row once, nothing predicted twice, nothing half-written."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from mlflow import MlflowClient

from flows import batch_plan, batch_predict
from flows.batch_plan import prepare
from flows.cli.main import main
from flows.reports.batch_prediction_report import Shards, count
from tasks.cache import store
from tasks.cache.remote import Remote
from tasks.cache.stage import Listener
from tasks.jobs.launch import JobFailed
from tasks.prediction import shard_job
from tasks.prediction.input_rows import require_few_errors
from tasks.prediction.output import MANIFEST
from tasks.prediction.shard_job import ShardPredictor
from tasks.registry.versions import READING_TAG, SIGNED_TAG
from tasks.stages.predict_shard import predict_shard
from tasks.tracking.connection import MODEL_TAG
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_rows
from tests.raised import raised_problems
from training.problems import UserError
from training.programs.predict_shards import ShardResult
from training.recipe import BatchPrediction, parse_batch_prediction

SHARD_ROWS = 50


@pytest.fixture
def home(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a registered model, in which nothing was predicted."""
    folder = tmp_path / "home"
    shutil.copytree(finished.home, folder, symlinks=True)
    shutil.rmtree(folder / "artifacts" / "predict_shard", ignore_errors=True)
    monkeypatch.setenv("FINETUNE_HOME", str(folder))
    return folder


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """Two files of rows, one of which has rows that cannot be used."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    write_rows(folder / "monday.csv", 120, seed=11)
    lines = [{"text": "a good film", "genre": "x"}, {"text": None}, {"text": 3}, {"text": "a dull plot"}]
    (folder / "tuesday.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def prediction(inbox: Path, out: Path, **more: Any) -> BatchPrediction:
    values = {"model": "small", "input": [str(inbox)], "output": str(out), "shard_rows": SHARD_ROWS}
    return parse_batch_prediction(values | more)


def rows_in(out: Path) -> list[dict[str, Any]]:
    """All rows of the output, in the order of the input."""
    rows = ds.dataset(str(out)).to_table().to_pylist()
    return sorted(rows, key=lambda row: (row["input_file"], row["input_row"]))


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "predicted_at"} for row in rows]


def command(home: Path, server: dict[str, str], inbox: Path, out: Path, *more: str) -> dict[str, Any]:
    """The result of `finetune predict`."""
    told = out.with_name("told.json")
    options = ["--input", str(inbox), "--output", str(out), "--shard-rows", str(SHARD_ROWS), "--json", str(told)]
    run = finetune(home, "predict", "small", *options, *more, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(json.loads(told.read_text()))


@pytest.mark.slow
def test_every_row_is_in_the_output_once_and_later_runs_predict_the_new_rows_alone(
    home: Path, server: dict[str, str], inbox: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert command(home, server, inbox, out, "--plan")["counts"]["new"] == 122 and not out.exists()
    result = command(home, server, inbox, out)
    assert result["counts"] | {"model_digest": ""} == {
        "model": "small",
        "version": "1",
        "model_digest": "",
        "files": 2,
        "shards": 4,
        "rows": 124,
        "new": 122,
        "errors": {
            "has no text in column 'text'": 1,
            "holds int in column 'text' where a text belongs": 1,
        },
    }
    rows = rows_in(out)
    with (inbox / "monday.csv").open() as file:
        given = [row["text"] for row in csv.DictReader(file)]
    assert [row["text"] for row in rows[:120]] == given and len(rows) == 124
    assert [row["label"] is None for row in rows[120:]] == [False, True, True, False]
    assert [bool(row["error"]) for row in rows[120:]] == [False, True, True, False]
    assert {(row["model"], row["version"]) for row in rows} == {("small", "1")}
    manifest = json.loads((out / MANIFEST).read_text())
    assert {part["name"] for part in manifest["parts"]} == {path.name for path in out.iterdir()} - {MANIFEST}

    # The next night: more rows in a file, and another file. Shards that are full stay as they are.
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with (inbox / "monday.csv").open("a") as file:
        file.write("a lovely film,pos,drama\n")
    write_rows(inbox / "wednesday.csv", 60, seed=12)
    assert command(home, server, inbox, out)["counts"]["new"] == 60 + 21
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    kept = [name for name in before if name != MANIFEST and after.get(name) == before[name]]
    assert len(kept) == 3 and len(rows_in(out)) == 124 + 61
    assert without_time(rows_in(out))[:100] == without_time(rows)[:100]

    # Nothing new: nothing is written. Other columns: nothing is predicted.
    assert command(home, server, inbox, out)["counts"]["new"] == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == after
    assert command(home, server, inbox, tmp_path / "other", "--keep", "text,genre")["counts"]["new"] == 0
    with_genre = rows_in(tmp_path / "other")
    assert [row["probability"] for row in with_genre] == [row["probability"] for row in rows_in(out)]
    assert with_genre[0]["genre"] == "drama" and not list(home.glob("jobs/*"))


def test_too_many_unusable_rows_end_the_run_with_their_counts_and_nothing_is_written(
    home: Path, server: dict[str, str], inbox: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = finetune(
        home, "predict", "small", "--input", str(inbox), "--output", str(out), "--max-error-rate", "0.01", **server
    )
    assert run.returncode == 2 and not out.exists()
    assert "--max-error-rate: 2 of 124 rows cannot be used, which is more than 0.01 of them" in run.stderr
    assert "has no text in column 'text': 1 row (such as" in run.stderr and "tuesday.jsonl row 2" in run.stderr


class Quiet(Listener):
    """Collects warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.warnings += [event["message"] for event in events if event["kind"] == "warning"]


def test_rows_of_another_format_with_the_same_values_are_predicted_already(
    home: Path, inbox: Path, tmp_path: Path
) -> None:
    """Keys hang on values, not on files: so a moved or converted file costs nothing."""
    first = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    with (inbox / "monday.csv").open() as file:
        rows = [*csv.DictReader(file)]
    other = tmp_path / "other"
    other.mkdir()
    (other / "renamed.jsonl").write_text("".join(json.dumps({"n": 1, "text": row["text"]}) + "\n" for row in rows))
    second = prepare(prediction(other, tmp_path / "out"), Remote(), Quiet())
    assert [shard.digest for shard in second.scan.shards] == [shard.digest for shard in first.scan.shards][:3]
    assert second.keys.items() <= first.keys.items()


def forget_signatures(home: Path) -> None:
    """Makes the home one that trusts nobody and uses versions unverified, so that a test can edit them."""
    (home / "trust.yaml").unlink()
    shutil.rmtree(home / "signatures", ignore_errors=True)


def as_other_table(inbox: Path) -> None:
    """monday.csv with other delimiters, without a header, and as another encoding."""
    with (inbox / "monday.csv").open(newline="") as file:
        rows = [[row["text"], row["label"]] for row in csv.DictReader(file)]
    with (inbox / "monday.csv").open("w", newline="", encoding="cp1252") as file:
        csv.writer(file, delimiter=";").writerows(rows)


TABLE = {"source": "csv", "delimiter": ";", "header": ["text", "label"], "encoding": "cp1252"}


def test_files_are_read_as_the_recipe_of_the_version_read_them(home: Path, inbox: Path, tmp_path: Path) -> None:
    """The registered version carries it; for one of an earlier release it is in the record of its run."""
    forget_signatures(home)
    client, out = MlflowClient(f"sqlite:///{home / 'mlflow.db'}"), tmp_path / "out"
    sets = json.loads(client.get_model_version("small", "1").tags[READING_TAG])
    assert sets == [{"name": "", "suffixes": [], "source": "csv", "text": ["text"], "label": "label"}]
    first = prepare(prediction(inbox, out), Remote(), Quiet()).scan
    as_other_table(inbox)
    with pytest.raises(UserError, match=r"monday\.csv"):
        prepare(prediction(inbox, out), Remote(), Quiet())
    client.set_model_version_tag("small", "1", READING_TAG, json.dumps([sets[0] | TABLE]))
    assert prepare(prediction(inbox, out), Remote(), Quiet()).scan.shards[0].digest == first.shards[0].digest
    client.delete_model_version_tag("small", "1", READING_TAG)
    (record,) = (home / "runs").glob("*/lineage.json")
    known = json.loads(record.read_text())
    known["recipe_without_defaults"]["data"] |= TABLE
    record.write_text(json.dumps(known))
    assert prepare(prediction(inbox, out), Remote(), Quiet()).scan.shards[0].digest == first.shards[0].digest


def test_an_option_says_how_files_are_read_that_are_not_like_the_training_data(
    home: Path, inbox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet()).scan
    as_other_table(inbox)
    data = {name: value for name, value in TABLE.items() if name != "source"}
    found = prepare(prediction(inbox, tmp_path / "out", data=data), Remote(), Quiet()).scan
    assert found.shards[0].digest == first.shards[0].digest
    options = ["predict", "small", "--input", str(inbox), "--output", str(tmp_path / "out"), "--plan"]
    named = ["--set", "data.delimiter=;", "--set", "data.header=[text, label]", "--set", "data.encoding=cp1252"]
    assert main([*options, *named]) == 0
    capsys.readouterr()
    assert main([*options, "--set", "data.delimeter=;", "--set", "data.encoding=utf8x"]) == 2
    error = capsys.readouterr().err
    assert "data.delimeter: does not shape rows" in error and "data.encoding: 'utf8x' is not a text encoding" in error
    assert main([*options, "--set", "training.seed=1"]) == 2
    assert "--set: training.seed: only fields of data can be set here" in capsys.readouterr().err


def test_files_in_which_no_row_can_be_used_end_the_run_by_their_names(home: Path, inbox: Path, tmp_path: Path) -> None:
    """Many rows on one line are one bad row, which the allowed share would hide."""
    (inbox / "lines.jsonl").write_text("text\n")
    (inbox / "table.json").write_text('["a", "b"]')
    (inbox / "empty.jsonl").write_text('{"text": ""}\n')  # read, and of no use
    prepared = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    with pytest.raises(UserError, match=r"input: no row can be used of 2 files: .*lines.*, .*table") as raised:
        require_few_errors(prepared.scan, 0.5)
    assert "empty.jsonl" not in str(raised.value)
    require_few_errors(prepared.scan, 1)


def test_files_without_rows_are_counted_and_named(home: Path, inbox: Path, tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "c.jsonl"):
        (inbox / name).write_text("" if name != "b.csv" else "\ufeff")
    scan = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet()).scan
    (warning,) = scan.warnings()
    assert warning.startswith("3 files without rows: ") and "b.csv" in warning and scan.files == 2
    for file in inbox.glob("*day*"):
        file.unlink()
    with pytest.raises(UserError, match="input: there are no rows"):
        prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())


def test_folders_of_an_input_folder_that_are_not_read_are_named_without_that_of_the_output(
    home: Path, inbox: Path
) -> None:
    for name in ("2024", "out"):
        (inbox / name).mkdir()
        (inbox / name / "more.csv").write_text("text\ngood\n")
    (warning,) = prepare(prediction(inbox, inbox / "out"), Remote(), Quiet()).scan.warnings()
    assert "1 folder in it is not read (2024): to read all folders, give " in warning


def test_another_model_or_other_options_have_other_keys_and_names_have_not(home: Path, inbox: Path) -> None:
    forget_signatures(home)
    out = inbox.with_name("out")
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    tags = client.get_model_version("small", "1").tags
    del tags[SIGNED_TAG]
    client.create_model_version("small", "file:///nowhere", tags=tags)
    client.create_model_version("small", "file:///nowhere", tags=tags | {MODEL_TAG: "other"})

    def keys(**more: Any) -> set[str]:
        return {*prepare(prediction(inbox, out, **more), Remote(), Quiet()).keys.values()}

    champion = keys()
    assert keys(model="small/2") == champion == keys(keep=["genre", "text"], id=None, max_error_rate=1.0)
    assert keys(model="small/3").isdisjoint(champion) and keys(batch_size=8).isdisjoint(champion)


def predict_all(
    prepared: batch_plan.PreparedBatch, listener: Listener, folder: Path, processes: int = 1
) -> list[ShardResult]:
    """The results of all shards."""
    found = []
    folder.mkdir(exist_ok=True)
    with ShardPredictor(prepared.model, 64, SHARD_ROWS, prepared.new, listener, processes=processes) as predictor:
        for number, shard in enumerate(prepared.new):
            (folder / str(number)).mkdir()
            found.append(predictor.predict(shard, folder / str(number)))
    return found


def test_several_programs_predict_what_one_predicts(home: Path, inbox: Path, tmp_path: Path) -> None:
    prepared, listener = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet()), Quiet()
    assert sum(one.rows for one in predict_all(prepared, listener, tmp_path / "one")) == 122
    assert sum(one.rows for one in predict_all(prepared, listener, tmp_path / "two", processes=2)) == 122
    one, two = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.parquet")}
        for folder in (tmp_path / "one", tmp_path / "two")
    )
    assert one == two and len(one) == len(prepared.new) > 2 and listener.warnings == []
    assert not list(home.glob("jobs/predict-*"))


def test_if_memory_runs_out_the_program_goes_on_with_half_the_batch(
    home: Path, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_job, "PROGRAM", "tests.flows.scarce_memory")
    prepared, listener = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet()), Quiet()
    found = predict_all(prepared, listener, tmp_path / "shards")
    assert sum(one.rows for one in found) == 122
    assert [warning.partition(". ")[2] for warning in listener.warnings] == [
        "Continuing with at most 32 rows at a time.",
        "Continuing with at most 16 rows at a time.",
    ]
    assert list(home.glob("memory/*.json")) and not list(home.glob("jobs/predict-*"))


def test_a_file_that_changes_after_it_was_listed_ends_the_run(home: Path, inbox: Path, tmp_path: Path) -> None:
    prepared = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    file = inbox / "monday.csv"
    file.write_text(file.read_text().replace("film", "movie"))
    with pytest.raises(UserError, match=r"monday\.csv: has changed since this run began"):
        predict_all(prepared, Quiet(), tmp_path / "shards")


def test_a_version_whose_training_is_no_longer_stored_is_fetched_from_mlflow(
    home: Path, inbox: Path, tmp_path: Path
) -> None:
    shutil.rmtree(home / "artifacts" / "fit")
    prepared = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    found = predict_all(prepared, Quiet(), tmp_path / "shards")
    assert sum(one.rows for one in found) == 122 and not list(home.glob("jobs/predict-*"))


def test_a_shard_that_was_taken_for_stored_is_predicted_when_it_turns_out_to_be_damaged(
    home: Path, inbox: Path, tmp_path: Path
) -> None:
    prepared = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    damaged, *others = prepared.new
    with ShardPredictor(prepared.model, 64, SHARD_ROWS, others, Quiet()) as predictor:
        assert predictor.predict(others[0], tmp_path).rows == others[0].usable
        (tmp_path / "again").mkdir()
        assert predictor.predict(damaged, tmp_path / "again").rows == damaged.usable


def test_a_program_that_cannot_run_is_a_failure_and_leaves_nothing(
    home: Path, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_job, "PROGRAM", "tests.flows.no_such_program")
    prepared = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    with pytest.raises(JobFailed, match="ended before it began"):
        predict_all(prepared, Quiet(), tmp_path / "shards")
    assert not list(home.glob("jobs/predict-*"))


@pytest.mark.slow
def test_damaged_shards_and_files_are_made_again_and_equal_the_first_ones(
    home: Path, server: dict[str, str], inbox: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command(home, server, inbox, out)
    rows = without_time(rows_in(out))
    shard, part = sorted(home.glob("artifacts/predict_shard/*/predictions.parquet"))[0], sorted(out.glob("part-*"))[1]
    shard.chmod(0o600)
    shard.write_bytes(shard.read_bytes()[:-10])
    part.write_bytes(part.read_bytes()[:-10])
    result = command(home, server, inbox, out)
    assert 0 < result["counts"]["new"] <= SHARD_ROWS and without_time(rows_in(out)) == rows


def test_ids_that_are_there_twice_are_named_before_anything_is_predicted(
    home: Path, inbox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inbox / "a.csv").write_text("id,text\n1,x\n2,y\n")
    (inbox / "b.jsonl").write_text('{"id": "2", "text": "z"}\n{"id": "", "text": "z"}\n')
    for name in ("monday.csv", "tuesday.jsonl"):
        (inbox / name).unlink()
    argv = ["predict", "small", "--input", str(inbox), "--output", str(tmp_path / "out"), "--id", "id", "--plan"]
    assert main(argv) == 2
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert "b.jsonl row 2: has no value in column 'id' (1 row" in first.replace("rows", "row")
    assert "b.jsonl row 1: has the id of" in second and "a.csv row 3 in column 'id'" in second


def test_all_mistakes_of_the_inputs_are_reported_together(home: Path, inbox: Path, tmp_path: Path) -> None:
    inside = tmp_path / "out" / "x.csv"
    inside.parent.mkdir()
    inside.write_text("text\na\n")
    (tmp_path / "x.dat").write_text("a\n")
    (tmp_path / "empty").mkdir()
    wrong = [str(inside), str(tmp_path / "nowhere"), str(tmp_path / "empty"), str(tmp_path / "x.dat")]
    problems = raised_problems(prepare, prediction(inbox, tmp_path / "out", input=wrong), Remote(), Quiet())
    messages = [f"{problem.where} {problem.message}" for problem in problems]
    assert [message.partition(" ")[0] for message in messages] == [f"input[{number}]" for number in range(4)]
    for message, words in zip(
        messages, ["in the output", "does not exist", "no file of rows", "unknown format"], strict=True
    ):
        assert words in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"format": "openai"}, "format: 'openai' is for assistants, which answer conversations, and small is a model"),
        ({"keep": ["genre", "version"]}, "keep: version would be twice in the output"),
        ({"model": "small/9"}, "'small' has no version '9': it has 1."),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused_before_rows_are_read(
    home: Path, inbox: Path, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as raised:
        prepare(prediction(tmp_path / "nowhere", tmp_path / "out", **more), Remote(), Quiet())
    assert words in str(raised.value)


def test_what_the_last_batch_needs_is_kept_by_garbage_collection(
    home: Path, server: dict[str, str], inbox: Path, tmp_path: Path
) -> None:
    from tasks.registry.retention import find_needs

    command(home, server, inbox, tmp_path / "out")
    keys = {path.name for path in (home / "artifacts/predict_shard").iterdir()}
    needed = find_needs().needed_by
    assert keys and all(any("batch small" in who for who in needed[key]) for key in keys)


@pytest.fixture
def flows_of_this_process(prefect_server: None) -> Iterator[None]:
    """Flows that are called here use the server of the tests."""
    yield


@pytest.mark.slow
def test_the_flow_is_called_with_its_parameters_as_plain_values(
    home: Path, inbox: Path, tmp_path: Path, flows_of_this_process: None
) -> None:
    values = prediction(inbox, tmp_path / "out.csv", keep=["genre"], max_error_rate=0.5).model_dump()
    result = batch_predict.batch_predict(prediction=values)
    assert result["state"] == "completed" and result["counts"]["rows"] == 124
    with (tmp_path / "out.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 124 and rows[0]["genre"] == "drama" and rows[0]["label"] in ("pos", "neg")


def test_shards_are_shown_as_one_stage() -> None:
    shown: list[str] = []

    class Follower(Listener):
        def stage_started(self, stage: str, key: str) -> None:
            shown.append(f"started {stage}")

        def stage_ended(self, row: Any, result: Any) -> None:
            shown.append(f"ended {row.name} {row.state}")

    from tasks.cache.stage import Row

    shards = Shards([Follower()])
    for state in ("cached", "ran", "ran"):
        shards.stage_started("predict_shard", "k")
        shards.stage_ended(Row("predict_shard", "k", state, 0.1), None)
    shards.end()
    shards.end()
    assert shown == ["started predict", "ended predict ran"] and shards.states == {"cached": 1, "ran": 2}


def test_a_stage_of_a_stored_shard_needs_no_program(home: Path, inbox: Path, tmp_path: Path) -> None:
    prepared = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    shard = prepared.scan.shards[0]
    flat, _ = predict_shard.flat_inputs(prepared.model, 64, shard, None)
    assert predict_shard.key(flat) == prepared.keys[shard.digest]
    assert not any(name.startswith("code.training/data/prediction") for name in flat)
    with store.filling(predict_shard.name, prepared.keys[shard.digest]) as aside:
        store.publish(aside, predict_shard.name, prepared.keys[shard.digest], flat, {"rows": 0})
    again = prepare(prediction(inbox, tmp_path / "out"), Remote(), Quiet())
    assert again.stored == {shard.digest} and count(again)["new"] == count(prepared)["new"] - shard.usable
