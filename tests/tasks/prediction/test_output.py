"""Outputs of batch predictions, in a folder and in a bucket: whole or absent, each part once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.prediction import output as outputs
from tasks.prediction.input_rows import Scan, Shard
from tasks.prediction.output import MANIFEST, open_output
from tasks.registry.model_spec import ModelSpec
from tests.raised import raised_problems
from tests.s3 import BUCKET, S3
from tests.tasks.shared import on_s3, s3
from training.data.prediction_files import KeptColumns
from training.data.prediction_rows import Rows, digest_all, digest_inputs
from training.problems import NETWORK, UserError
from training.recipe import parse_batch_prediction

__all__ = ["on_s3", "s3"]

MODEL = ModelSpec("models:/reviews/1", 32, {"task": "sequence-classification", "options": {}}, {"text": "text"},
                  name="reviews", version="1", digest="d1")  # fmt: skip


def rows_of(*texts: str) -> Rows:
    return Rows([*range(2, 2 + len(texts))], [(text,) for text in texts], [None] * len(texts), {"text": [*texts]})


class Predicted:
    """A file with a shard for each list of texts, and its output."""

    def __init__(self, out: str, *shards: list[str], model: ModelSpec = MODEL) -> None:
        self.parts = [rows_of(*texts) for texts in shards]
        self.prediction = parse_batch_prediction({"model": "reviews", "input": ["in.csv"], "output": out})
        self.model, kept = model, KeptColumns()
        for rows in self.parts:
            kept = kept.seen(rows)
        self.shards = [
            Shard("/rows/in.csv", number, len(rows.numbers), len(rows.numbers), digest_inputs(rows), digest_all(rows))
            for number, rows in enumerate(self.parts)
        ]
        self.scan = Scan(self.shards, kept)

    def write(self, on_write: Callable[[int], None] = lambda number: None) -> list[int]:
        """Writes what the output lacks; gives the numbers of the shards."""
        written = []
        keys = {shard.digest: f"k{shard.digest}" for shard in self.shards}
        with open_output(self.prediction, self.model, self.scan, keys) as output:
            for shard, rows in zip(self.shards, self.parts, strict=True):
                if output.lacks(shard):
                    on_write(shard.number)
                    output.write(shard, rows, pa.table({"label": [values[0] for values in rows.usable()]}), 1000)
                    written.append(shard.number)
            output.finish({"rows": self.scan.rows})
        return written


class Bucket:
    """A folder of a bucket, or of this machine."""

    def __init__(self, url: str, folder: Path, server: S3 | None) -> None:
        self.url, self._folder, self._s3 = url, folder, server

    def files(self) -> dict[str, bytes]:
        if self._s3 is None:
            found = self._folder.iterdir() if self._folder.is_dir() else ()
            return {path.name: path.read_bytes() for path in found}
        prefix = self.url.removeprefix(f"s3://{BUCKET}/") + "/"
        return {name.removeprefix(prefix): content for name, content in self._s3.objects(prefix).items()}

    def put(self, name: str, content: bytes) -> None:
        if self._s3 is None:
            self._folder.mkdir(exist_ok=True)
            (self._folder / name).write_bytes(content)
        else:
            self._s3.put(f"{self.url.removeprefix(f's3://{BUCKET}/')}/{name}", content)

    def texts(self) -> list[str]:
        """The texts of all parts, sorted."""
        parts = [content for name, content in self.files().items() if name.endswith(".parquet")]
        return sorted(text for part in parts for text in pq.read_table(pa.BufferReader(part))["text"].to_pylist())


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Iterator[Bucket]:
    """An output that is not there yet."""
    if request.param == "folder":
        yield Bucket(str(tmp_path / "out"), tmp_path / "out", None)
    else:
        url = str(request.getfixturevalue("on_s3"))
        yield Bucket(url, tmp_path, request.getfixturevalue("s3"))


def test_a_manifest_comes_last_and_a_second_run_writes_nothing(place: Bucket) -> None:
    predicted = Predicted(place.url, ["a", "b"], ["c"])
    seen: list[Any] = []
    assert predicted.write(lambda number: seen.append(MANIFEST in place.files())) == [0, 1] and seen == [False, False]
    manifest = json.loads(place.files()[MANIFEST])
    assert [part["rows"] for part in manifest["parts"]] == [2, 1] and place.texts() == ["a", "b", "c"]
    before = place.files()
    assert predicted.write() == [] and place.files() == before


def test_parts_that_are_no_longer_wanted_are_removed_and_others_stay(place: Bucket) -> None:
    Predicted(place.url, ["a", "b"], ["c"]).write()
    assert Predicted(place.url, ["a", "b"], ["c", "d"], ["e"]).write() == [1, 2]
    assert place.texts() == ["a", "b", "c", "d", "e"]
    other = ModelSpec(**{**vars(MODEL), "version": "2", "digest": "d2"})
    assert Predicted(place.url, ["a", "b"], ["c", "d"], model=other).write() == [0, 1]
    assert place.texts() == ["a", "b", "c", "d"] and len(place.files()) == 3


def test_a_run_that_stops_leaves_no_manifest_and_the_next_one_completes_it(place: Bucket) -> None:
    Predicted(place.url, ["a"]).write()

    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    predicted = Predicted(place.url, ["a"], ["b"], ["c"])
    with pytest.raises(KeyboardInterrupt):
        predicted.write(stop)
    assert MANIFEST not in place.files() and not [name for name in place.files() if name.startswith(".")]
    predicted.write()
    assert place.texts() == ["a", "b", "c"] and MANIFEST in place.files()


@pytest.mark.parametrize("kind", ["pipe", "device", "longer than the memory"])
def test_a_manifest_that_has_no_end_is_replaced(home: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "out").mkdir()
    manifest = tmp_path / "out" / MANIFEST
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "device":
        manifest.symlink_to("/dev/zero")
    else:
        manifest.touch()
        os.truncate(manifest, 2**40)
    assert Predicted(str(tmp_path / "out"), ["a"]).write() == [0]
    assert not manifest.is_symlink() and json.loads(manifest.read_bytes())["rows"] == 1


def test_a_part_of_another_size_or_a_broken_manifest_is_written_again(place: Bucket) -> None:
    predicted = Predicted(place.url, ["a"], ["b"])
    predicted.write()
    whole = {name: content for name, content in place.files().items() if name != MANIFEST}
    damaged = sorted(whole)[1]
    place.put(damaged, whole[damaged][:-1])
    assert predicted.write() == [1]
    place.put(MANIFEST, b"{")
    assert predicted.write() == [0, 1] and place.texts() == ["a", "b"]


def test_a_folder_with_other_files_is_refused_untouched(place: Bucket) -> None:
    place.put("thesis.doc", b"x")
    with pytest.raises(UserError, match=r"has files of something else, such as thesis\.doc: name an empty folder"):
        Predicted(place.url, ["a"]).write()
    assert place.files() == {"thesis.doc": b"x"}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_single_file_appears_whole_or_stays_as_it_was(place: Bucket, suffix: str) -> None:
    name = f"all{suffix}"
    place.put(name, b"old")
    predicted = Predicted(f"{place.url}/{name}", ["a"], ["b"])

    def stop(number: int) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predicted.write(stop)
    assert place.files() == {name: b"old"}
    assert predicted.write() == [0, 1]
    content = place.files()[name]
    if suffix == ".parquet":
        assert pq.read_table(pa.BufferReader(content))["text"].to_pylist() == ["a", "b"]
    else:
        assert len(content.decode().splitlines()) == 2 + (suffix != ".jsonl")
        assert (b"\t" in content) == (suffix == ".tsv")


def test_two_runs_do_not_write_to_one_output(home: Path, tmp_path: Path) -> None:
    predicted = Predicted(str(tmp_path / "out"), ["a"])

    def other(number: int) -> None:
        with pytest.raises(UserError, match="another run writes to"):
            Predicted(str(tmp_path / "out"), ["a"]).write()

    assert predicted.write(other) == [0]


def test_a_folder_that_cannot_be_written_is_the_users_error(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be made"):
        Predicted(str(tmp_path / "file" / "out"), ["a"]).write()


@pytest.mark.slow
def test_a_bucket_that_fails_for_a_while_gets_all_and_one_that_fails_on_is_a_problem_of_the_network(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    server, url = request.getfixturevalue("s3"), str(request.getfixturevalue("on_s3"))
    monkeypatch.setattr(outputs, "RETRY_S", 0.01)
    place, left = Bucket(url, tmp_path, server), [0] * 50 + [1] * 2
    predicted = Predicted(url, ["a"], ["b"])
    monkeypatch.setattr(server, "fault", lambda request: 503 if request.startswith("PUT") and left.pop() else None)
    predicted.write()
    assert place.texts() == ["a", "b"]
    monkeypatch.setattr(server, "fault", lambda request: 403 if request.startswith("PUT") else None)
    (problem,) = raised_problems(Predicted(url, ["a"], ["c"]).write)
    assert problem.kind == NETWORK and "Nothing is predicted twice" in problem.message
    assert os.environ["AWS_ACCESS_KEY_ID"] not in problem.message
