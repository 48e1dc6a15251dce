"""Shards of files: the rows that were listed, each predicted as the model predicts it alone."""

from __future__ import annotations

import csv
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from tests.training import programs_here, tiny
from tests.training.programs_here import warnings_of
from training import task_types
from training.data.prediction_rows import RowReader, WantedShard, digest_inputs
from training.engine.predictor import Predictor
from training.evaluation.stored_calibration import Calibration
from training.jobs.protocol import read_events
from training.problems import UserError
from training.programs import predict_shards
from training.programs.predict_shards import PredictShardsSettings

TASK = "sequence-classification"


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.export_untrained(world / "base", tmp_path_factory.mktemp("trained"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Texts of many lengths, one of which is missing."""
    words = sorted(word for words in tiny.WORDS.values() for word in words)
    texts = [" ".join(words[: 1 + number * 5 % 11]) for number in range(25)]
    with (tmp_path / "rows.csv").open("w", newline="") as out:
        csv.writer(out).writerows([["id", "text"], *enumerate([*texts[:7], "", *texts[7:]])])
    return tmp_path / "rows.csv"


def listed(file: Path, shard_rows: int = 10) -> list[tuple[WantedShard, list[str]]]:
    """The shards of the file, and the usable texts of each."""
    parts = RowReader(task_types.load(TASK), {"text": "text"}).shards(str(file), shard_rows)
    return [
        (WantedShard(file=str(file), number=number, digest=digest_inputs(rows)), [text for (text,) in rows.usable()])
        for number, rows in enumerate(parts)
    ]


def run(trained: Path, job_dir: Path, shards: list[WantedShard], **more: Any) -> dict[str, Any]:
    settings = PredictShardsSettings(
        task=TASK, columns={"text": "text"}, shards=shards, shard_rows=10, max_length=32, batch_size=4,
        mixed_precision="no", **more,
    )  # fmt: skip
    inputs = {"model": trained, "tokenizer": trained}
    return programs_here.run(predict_shards, job_dir, inputs, **settings.model_dump(mode="json"))


@pytest.mark.parametrize("more", [{}, {"micro_batch_divisor": 4}])
def test_each_row_gets_the_prediction_that_it_gets_alone_whatever_the_batches(
    trained: Path, file: Path, tmp_path: Path, more: dict[str, int]
) -> None:
    shards = listed(file)
    assert run(trained, tmp_path, [shard for shard, _ in shards], **more)["rows"] == 25
    predictor = Predictor(task_types.load(TASK), trained, trained, 32)
    for shard, texts in shards:
        found = pq.read_table(tmp_path / "shards" / f"{shard.digest}.parquet").to_pylist()
        for text, record in zip(texts, found, strict=True):
            (alone,) = predictor.predict(pa.RecordBatch.from_pydict({"text": [text]}))
            assert record["label"] == alone["label"]
            assert record["probability"] == pytest.approx(alone["probability"], abs=1e-6)
    ended = [event for event in read_events(tmp_path / "events.jsonl", 0)[0] if event["kind"] == "shard"]
    assert [event["rows"] for event in ended] == [9, 10, 6] and [event["digest"] for event in ended] == [
        shard.digest for shard, _ in shards
    ]


def test_a_calibration_that_would_rename_the_labels_is_refused(trained: Path) -> None:
    labels = Predictor(task_types.load(TASK), trained, trained, 32).labels
    swapped = Calibration(function="softmax", labels=labels[::-1], scale=[1.0], offset=[0.0])
    with pytest.raises(UserError, match=r"calibration\.json: is of the labels .*, and the model has "):
        Predictor(task_types.load(TASK), trained, trained, 32, calibration=swapped)


def test_only_the_wanted_shards_are_predicted_and_a_shard_without_usable_rows_has_the_columns(
    trained: Path, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.csv").write_text("id,text\n1,\n2,\n")
    (empty, texts), last = listed(tmp_path / "empty.csv")[0], listed(file)[-1][0]
    assert texts == [] and run(trained, tmp_path, [last, empty])["rows"] == 6
    files = {path.name for path in (tmp_path / "shards").iterdir()}
    assert files == {f"{last.digest}.parquet", f"{empty.digest}.parquet"}
    table = pq.read_table(tmp_path / "shards" / f"{empty.digest}.parquet")
    assert table.column_names == ["label", "probability", "probabilities"] and table.num_rows == 0


@pytest.mark.parametrize("change", ["edited", "shorter"])
def test_rows_that_have_changed_since_they_were_listed_end_the_job(
    trained: Path, file: Path, tmp_path: Path, change: str
) -> None:
    shards = [shard for shard, _ in listed(file)]
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], "24,other"] if change == "edited" else lines[:-6]))
    with pytest.raises(UserError, match=r"rows\.csv: has changed since this run began"):
        run(trained, tmp_path, shards)
    assert len([*(tmp_path / "shards").iterdir()]) == 2


def test_a_shard_is_stored_while_the_next_one_is_predicted_with_the_same_bytes(
    trained: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [shard for shard, _ in listed(file)]
    run(trained, tmp_path / "undisturbed", shards)
    write, predict, begun, calls = predict_shards.write, Predictor.predict_table, threading.Event(), list[int]()

    def write_late(*given: Any) -> None:
        assert begun.wait(60)
        write(*given)

    def predict_noticed(*given: Any) -> pa.Table:
        calls.append(1)
        if len(calls) == 2:
            begun.set()
        return predict(*given)

    monkeypatch.setattr(predict_shards, "write", write_late)
    monkeypatch.setattr(Predictor, "predict_table", predict_noticed)
    run(trained, tmp_path / "late", shards)
    for shard in shards:
        name = f"shards/{shard.digest}.parquet"
        assert (tmp_path / "late" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_shard_that_cannot_be_written_ends_the_job_and_those_before_it_stay(
    trained: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    shards, write, calls = [shard for shard, _ in listed(file)], predict_shards.write, list[int]()

    def fail(*given: Any) -> None:
        calls.append(1)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        write(*given)

    monkeypatch.setattr(predict_shards, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        run(trained, tmp_path, shards)
    stored = [event["digest"] for event in read_events(tmp_path / "events.jsonl", 0)[0] if event["kind"] == "shard"]
    assert stored[: failing - 1] == [shard.digest for shard in shards[: failing - 1]]
    assert shards[failing - 1].digest not in stored


def test_a_row_with_tokens_that_the_model_does_not_have_is_the_only_one_without_a_prediction(
    trained: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained, tmp_path / "trained")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "rows.csv").write_text("text\ncat dog\nsaw <image> drill\nbread [SEP] soup\n")
    (tmp_path / "job").mkdir()
    [(shard, _)] = listed(tmp_path / "rows.csv")
    run(folder, tmp_path / "job", [shard])
    found = pq.read_table(tmp_path / "job/shards" / f"{shard.digest}.parquet").column("label").to_pylist()
    assert found[1] is None and found[0] in tiny.LABELS and found[2] in tiny.LABELS
    first, second = warnings_of(tmp_path / "job")
    assert first.startswith("1 rows have no prediction, because their texts have tokens that the model does not have")
    assert second.startswith("1 rows spell special tokens")
