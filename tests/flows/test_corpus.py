"""Further documents of an evaluation, `data.corpus`: read, checked, searched and in the key."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.small import states
from tests.task_types import GERMAN, write_project

DOCUMENTS = [*(" ".join(words) for count in (2, 3) for words in product(GERMAN.values(), repeat=count)), ""]
"""252 texts, and none."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A recipe of embeddings with a corpus."""
    file = write_project("embedding", tmp_path / "project")
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"positive": text}) + "\n" for text in DOCUMENTS))
    content = yaml.safe_load(file.read_text())
    recipe = content["deployments"][0]["parameters"]["recipe"]
    recipe["data"]["corpus"] = str(corpus)
    recipe["training"]["num_train_epochs"] = 1
    file.write_text(yaml.safe_dump(content))
    return file


def test_check_shows_its_documents_and_every_problem_with_them(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    assert main(["check", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "data.corpus: 252 documents beside those of the rows" in shown
    assert "1 of 253 rows are left out; the first is row 253 of" in " ".join(shown.split())

    def problems(*settings: str) -> str:
        assert main(["check", str(file), *(word for one in settings for word in ("--set", one))]) == 2
        found = capsys.readouterr()
        return found.out + found.err

    missing = problems("data.corpus=none.jsonl")
    assert "data.corpus" in missing and "none.jsonl" in missing
    other = problems("options.loss=batch_all_triplet", "data.text=[anchor]", "data.label=positive")
    assert "data.corpus" in other and "searches none: set it to null" in other
    (tmp_path / "documents.jsonl").write_text('{"text": "Hund"}\n')
    assert "positive" in problems()


@pytest.mark.drill
def test_it_is_searched_beside_the_documents_of_the_rows_and_a_new_document_is_a_new_evaluation(
    file: Path, server: dict[str, str], tmp_path: Path
) -> None:
    home, out = tmp_path / "home", tmp_path / "out.json"

    def run(*settings: str) -> tuple[dict[str, str], dict[str, float]]:
        changes = [word for one in settings for word in ("--set", one)]
        done = finetune(home, "run", str(file), *changes, "--json", str(out), **server)
        assert done.returncode == 0, done.stdout + done.stderr
        newest = max((home / "artifacts/score").glob("*/metrics.json"), key=lambda file: file.stat().st_mtime_ns)
        scores = json.loads(newest.read_text())["validation"]["ndcg_at_10"]
        return states(out), {name: scores[name] for name in ("value", "baseline")}

    _, with_corpus = run()
    (predicted,) = (home / "artifacts/predict").glob("*/validation.parquet")
    table = pq.read_table(predicted)
    assert {"corpus_ahead", "corpus_documents"} <= {*table.column_names}
    found, alone = run("data.corpus=null")
    assert found["fit"] == "cached" and found["predict"] == "ran"
    assert alone["baseline"] >= with_corpus["baseline"]
    assert alone["value"] > with_corpus["value"]
    with (tmp_path / "documents.jsonl").open("a") as corpus:
        corpus.write('{"positive": "Hund Hund"}\n')
    found, _ = run()
    assert (found["load_data"], found["fit"], found["predict"]) == ("ran", "cached", "ran")
