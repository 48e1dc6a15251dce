"""Comparisons on the same rows, counted by a real registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Barrier, current_thread
from typing import Any

import pyarrow as pa
import pytest
from mlflow import MlflowClient

from tasks.cache.results import Artifact, NumberedComparison, PinnedVersion
from tasks.cache.stage import Work
from tasks.registry import comparisons
from tasks.registry.comparisons import (
    CLAIM,
    COMPARISON_TAG,
    DIGITS,
    JUDGED_ROWS_TAG,
    JudgedRows,
    number_comparison,
)
from tasks.stages.compare import compare, count_comparison
from tasks.tracking.connection import MODEL_TAG, connect
from tests.task_types import TINY, recipe_of, write_rows
from training.data.duplicates import hash_rows
from training.data.ipc_files import ipc_writer
from training.data.load_rows import load
from training.evaluation.significance import alpha_spent
from training.recipe import Recipe, parse
from training.recipe.rules.column_rules import source_columns

CHAMPION = PinnedVersion(name="reviews", version="1", model="champion", max_length=32)


def recipe(metrics: Sequence[str] = ("accuracy", "f1"), **gate: Any) -> Recipe:
    return parse(
        {
            "name": "test",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": [*metrics]},
            "release": {"registry": "reviews", "gate": {"control": "all", **gate}},
        }
    )


def split(texts: Iterable[object], name: str) -> Artifact:
    """Judged rows with these texts, as load_data stores them."""
    data = Artifact(stage="load_data", key=name, digest="d", parts={"validation.arrow": name, "labels.json": "l"})
    data.path.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": [str(text) for text in texts]})
    with ipc_writer(data.path / "validation.arrow", table.schema) as writer:
        writer.write_table(table)
    return data


def rows(digest: str) -> Artifact:
    """Rows that no other split has."""
    return split((f"{digest} {number}" for number in range(3)), digest)


def judged(digest: str) -> JudgedRows:
    return JudgedRows(rows(digest).path / "validation.arrow", source_columns(recipe()).inputs)


def count(
    model: str, rival: str | None = "theirs", data: str | Artifact = "rows", predicted: str = "", **gate: Any
) -> NumberedComparison | None:
    """The number of a run that has trained this model. Its predictions are named like it by default."""
    trained = Artifact(stage="fit", key="k", digest="d", parts={"model": model})
    new, old = (
        Artifact(stage=stage, key="k", digest="d", parts={"validation.parquet": str(digest)})
        for stage, digest in (("predict", predicted or model), ("predict_champion", rival))
    )
    inputs = (recipe(**gate), rows(data) if isinstance(data, str) else data, trained, new, old if rival else None)
    found = count_comparison.make(Work("k", Path(), "run"), *inputs)
    assert found is None or isinstance(found, NumberedComparison)
    return found


@pytest.fixture
def client(tracked: Path) -> MlflowClient:
    return connect()


def number(model: str, **other: Any) -> int:
    found = count(model, **other)
    assert found
    return found.comparison


def test_each_comparison_on_the_same_rows_takes_more_confidence_and_a_known_one_keeps_its_own(
    client: MlflowClient,
) -> None:
    assert [number("a"), number("b"), number("a"), number("c")] == [1, 2, 1, 3]
    assert number("a", compare="f1") == 4  # another chance
    found = count("b")
    assert found and 1 - found.confidence == pytest.approx(alpha_spent(2, 0.05))


def test_other_predictions_of_one_model_or_of_its_rival_are_another_comparison(client: MlflowClient) -> None:
    assert [number("a"), number("a", predicted="beams"), number("a", rival="beams")] == [1, 2, 3]
    assert [number("b", predicted="a"), number("a", predicted="beams")] == [1, 2]  # the same tests


def test_an_edited_metric_of_the_users_is_another_comparison(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluation = {"metrics": ["accuracy", "mine:Errors"], "compare": "errors"}
    found = []
    for code in ("class Errors: share = 1", "class Errors: share = 2", "class Errors: share = 1  # as before"):
        (tmp_path / "mine.py").write_text(code)
        found.append(number("a", **evaluation))
    assert [*found, number("a", **evaluation, maximum={"errors": 9.0})] == [1, 2, 1, 3]  # less of it is better


def test_rows_of_which_none_was_judged_before_begin_anew(client: MlflowClient) -> None:
    assert [number("a"), number("b"), number("b", data="new"), number("b")] == [1, 2, 1, 2]


def test_the_count_goes_on_while_rows_are_added_or_their_window_moves(client: MlflowClient) -> None:
    growing = [split(range(40 + 10 * night), f"grown{night}") for night in range(4)]
    assert [number(f"m{night}", data=data) for night, data in enumerate(growing)] == [1, 2, 3, 4]
    window = [split(range(60 + 20 * night, 100 + 20 * night), f"window{night}") for night in range(4)]
    assert [number(f"w{night}", data=data) for night, data in enumerate(window)] == [5, 6, 7, 8]
    # The last window shares no row with the first split, which is connected with it by the others.
    assert number("later", data=growing[0]) == 9
    assert number("fresh", data=split(range(1000, 1040), "fresh")) == 1


def test_a_part_of_the_judged_rows_goes_on_with_their_count(client: MlflowClient) -> None:
    """Also one that the hash of the text has drawn: a smaller share of the same folder."""
    table = pa.table({"text": [f"row {number}" for number in range(30_000)]})
    hashes = hash_rows(table.to_batches()[0], source_columns(recipe()).inputs) / 2.0**64
    shares = {}
    for share in (0.2, 0.02):
        drawn = table.filter(pa.array(hashes >= 1 - share))["text"].to_pylist()
        shares[share] = split(drawn, f"share{share}".replace(".", "-"))
    assert [number("a", data=shares[0.2]), number("b", data=shares[0.02])] == [1, 2]


def test_two_counts_that_a_split_joins_go_on_as_one_from_the_higher_number(client: MlflowClient) -> None:
    old, new = split(range(50), "old"), split(range(50, 100), "new")
    assert [number("a", data=old), number("b", data=old), number("c", data=old), number("a", data=new)] == [1, 2, 3, 1]
    assert number("d", data=split(range(100), "both")) == 4
    assert [number("e", data=new), number("e", data=old)] == [5, 6]


def test_a_count_without_a_sketch_of_its_rows_goes_on(client: MlflowClient) -> None:
    """As earlier versions of this project stored it."""
    client.create_registered_model("reviews")
    for tag, before in (("rows.x", "1"), ("rows.y", "2"), ("other.x", "1")):
        client.set_registered_model_tag("reviews", f"{COMPARISON_TAG}{tag}", before)
    assert [number("a"), number("b", data=split(["rows 0", "more"], "grown")), number("c")] == [3, 4, 5]


def test_a_count_of_something_else_than_rows_goes_on_by_its_digest_alone(client: MlflowClient) -> None:
    assert number("a") == 1
    assert [number_comparison("reviews", digest, pair) for digest, pair in ("vx", "vy", "wx", "vx")] == [1, 2, 1, 1]


@pytest.mark.parametrize("task", TINY)
def test_the_rows_of_each_task_type_are_the_same_rows_when_some_are_added(task: str, tmp_path: Path) -> None:
    folder = write_rows(task, tmp_path / "rows")
    given = parse(recipe_of(task, folder))
    wanted = source_columns(given)
    found, lines = [], (folder / "validation.jsonl").read_text().splitlines()
    for name, some in (("first", lines[:30]), ("grown", lines), ("others", lines[40:])):
        (folder / "validation.jsonl").write_text("\n".join(some))
        files = {split: [str(folder / f"{split}.jsonl")] for split in ("train", "validation")}
        load(given.data, wanted.task_type, files, tmp_path / name)
        found.append(JudgedRows(tmp_path / name / "validation.arrow", wanted.inputs))
    first, grown, others = found
    assert 1 < len(first.hashes) < len(grown.hashes) and set(first.hashes.tolist()) < set(grown.hashes.tolist())
    assert grown.meet(first.sketch) and grown.meet(others.sketch)
    assert others.meet(first.sketch) == (not set(others.hashes.tolist()).isdisjoint(first.hashes.tolist()))


def test_a_tag_of_rows_has_room_in_mlflow(client: MlflowClient) -> None:
    number("a", data=split(range(2000), "many"))
    (value,) = [tag for name, tag in client.get_registered_model("reviews").tags.items() if JUDGED_ROWS_TAG in name]
    assert len(value) < 5000 - 100 * DIGITS


def test_a_repeated_comparison_reads_no_rows(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert number("a") == 1
    monkeypatch.setattr(comparisons, "hash_rows", None)
    assert number("a") == 1


def test_a_settled_number_never_moves_and_no_other_home_gets_it(client: MlflowClient) -> None:
    assert number_comparison("reviews", "rows", "ours", judged("rows")) == 1
    client.set_registered_model_tag("reviews", f"{COMPARISON_TAG}rows.theirs", f"{CLAIM}1")
    assert number_comparison("reviews", "rows", "ours", judged("rows")) == 1
    assert number_comparison("reviews", "rows", "theirs", judged("rows")) == 2
    assert number_comparison("reviews", "rows", "third", judged("rows")) == 3


@pytest.mark.parametrize("grows", [False, True])
def test_homes_that_count_in_step_settle_on_different_numbers(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    """On the same rows, and on splits of which neither home has seen the other's."""
    client.create_registered_model("reviews")
    both, rounds, read = Barrier(2, timeout=20), Counter[str](), comparisons._read_tags

    def in_step(*given: Any) -> Any:
        rounds[current_thread().name] += 1
        if rounds[current_thread().name] > 19:
            both.abort()
        both.wait()
        found = read(*given)
        both.wait()
        return found

    monkeypatch.setattr(comparisons, "_read_tags", in_step)
    monkeypatch.setattr(comparisons, "named_lock", lambda name: nullcontext())  # a lock of one home
    inputs = source_columns(recipe()).inputs
    ours, theirs = split(range(50), "ours"), split(range(40, 90) if grows else range(50), "theirs" if grows else "ours")
    given = [JudgedRows(data.path / "validation.arrow", inputs) for data in (ours, theirs)]
    with ThreadPoolExecutor(2) as homes:
        found = [*homes.map(partial(number_comparison, "reviews"), [ours.key, theirs.key], ["a", "b"], given)]
    assert len(set(found)) == 2


def test_the_champion_itself_is_not_counted(client: MlflowClient) -> None:
    client.create_registered_model("reviews")
    client.create_model_version("reviews", "file:///nowhere", tags={MODEL_TAG: "a"})
    client.set_registered_model_alias("reviews", "champion", "1")
    assert count("a", rival=None) is None
    assert number("b") == 1


def test_a_comparison_is_made_again_if_its_number_is_another(home: Path) -> None:
    predictions = Artifact(stage="predict", key="k", digest="d", parts={"validation.parquet": "p"})
    tokens, trained, rival = (
        Artifact(stage=stage, key="k", digest="r") for stage in ("tokenize", "fit", "predict_champion")
    )

    def values(count: NumberedComparison | None) -> Any:
        return (
            compare.prepare(recipe(), CHAMPION, count, rows("rows"), tokens, trained, predictions, rival)
            .inputs()
            .values
        )

    first, second = (NumberedComparison(comparison=n, confidence=0.99) for n in (1, 2))
    assert values(None) != values(first) != values(second) and values(first) == values(first)
