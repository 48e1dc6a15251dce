"""`finetune search`: embeddings that `finetune predict` wrote, and the rows that are most similar to a text."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.served import add_version, register, store_model
from tests.made import KEY
from tests.training.counting import NUMBERS, WORDS, write_assistant

pytestmark = pytest.mark.slow


@pytest.fixture
def counter_home(registry_home: Path, tmp_path: Path) -> Path:
    """With `counter`, whose embedding of a text has positive numbers at the places of the text's words."""
    register(write_assistant(tmp_path / "model"), "sentence-similarity", prompts={"sentence2": "one "})
    return registry_home


def test_the_rows_most_similar_to_a_text_are_found_among_predicted_rows(
    counter_home: Path, server: dict[str, str], tmp_path: Path
) -> None:
    documents, vectors, out = tmp_path / "documents.jsonl", tmp_path / "vectors", tmp_path / "found.json"
    texts = [*NUMBERS, "two three", " "]
    documents.write_text("".join(json.dumps({"talk": text}) + "\n" for text in texts))
    paths = ["--input", str(documents), "--output", str(vectors), "--no-drift"]
    run = finetune(counter_home, "predict", "counter", *paths, "--embedding-type", "float16", **server)
    assert run.returncode == 0, run.stdout + run.stderr
    (part,) = vectors.glob("*.parquet")
    written = pq.read_schema(part).field("embedding").type
    assert written == pa.list_(pa.float16(), len(WORDS))

    words = ["counter", "--corpus", str(vectors), "--top", "3", "--json", str(out), "two"]
    found = finetune(counter_home, "search", *words, **server)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = json.loads(out.read_text())
    assert [row["talk"] for row in rows[:2]] == ["two", "two three"] and len(rows) == 3
    assert rows[0]["similarity"] == pytest.approx(1, abs=1e-3)
    first, place, *_ = found.stdout.splitlines()
    assert first.split() == ["1.0000", "two"] and place.strip() == f"{documents}, row 2"


@pytest.mark.parametrize("output", ["vectors", "vectors.parquet"])
def test_shards_without_a_usable_row_are_written_beside_others(
    output: str, counter_home: Path, server: dict[str, str], tmp_path: Path
) -> None:
    documents, place = tmp_path / "documents.jsonl", str(tmp_path / output)
    documents.write_text("".join(json.dumps({"talk": text}) + "\n" for text in (" ", "one", "two", " ")))
    options = ["--shard-rows", "1", "--max-error-rate", "1", "--no-drift"]
    run = finetune(counter_home, "predict", "counter", "--input", str(documents), "--output", place, *options, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    found = finetune(counter_home, "search", "counter", "--corpus", place, "two", **server)
    assert found.returncode == 0 and found.stdout.splitlines()[0].split()[1] == "two", found.stdout + found.stderr


def test_texts_are_searched_by_a_model_that_labels_have_trained(
    counter_home: Path, server: dict[str, str], tmp_path: Path
) -> None:
    key = KEY[::-1]
    version = add_version(store_model(tmp_path / "model", key), "embedding", key, ["text"], loss="batch_all_triplet")
    documents, vectors, name = tmp_path / "documents.jsonl", str(tmp_path / "vectors"), f"counter/{version}"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in NUMBERS))
    paths = ["--input", str(documents), "--output", vectors, "--no-drift"]
    run = finetune(counter_home, "predict", name, *paths, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    found = finetune(counter_home, "search", name, "--corpus", vectors, "three", **server)
    assert found.returncode == 0 and found.stdout.splitlines()[0].split() == ["1.0000", "three"], found.stderr


def test_documents_can_have_another_prompt_than_queries(counter_home: Path, server: dict[str, str]) -> None:
    printed = [
        finetune(counter_home, "predict", "counter", *words, "three", **server)
        for words in ((), ("--prompt", "sentence2"))
    ]
    numbers = [run.stdout.partition("(")[2].split(", ") for run in printed]  # the first, up to that of `one`
    assert [float(one[3]) > 0 for one in numbers] == [False, True], [run.stderr for run in printed]


def test_mistakes_are_one_message(counter_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    for words, message in {
        ("--corpus", str(tmp_path / "absent")): "has no Parquet files",
        ("--corpus", str(tmp_path / "rows.parquet"), "--top", "0"): "--top: 0 is too few rows",
    }.items():
        assert main(["search", "counter", "two", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # quotes were forgotten
        main(["search", "counter", "two", "words", "--corpus", str(tmp_path)])
    assert "unrecognized arguments: words" in capsys.readouterr().err
    assert main(["predict", "counter", "two", "--prompt", "sentence3"]) == 2
    assert "--prompt: 'sentence3' is no column of sentence-similarity" in capsys.readouterr().err
