"""Observations: of a stored split and of files alike, for every task type, and all drift reports read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.prediction.drift_samples import Sample
from tests.task_types import TINY, make_world, recipe_of
from tests.training import programs_here, tiny
from tests.training.counting import TEMPLATE, write_assistant
from training import task_types
from training.data.prediction_rows import RowReader
from training.engine.observation import Observer
from training.engine.predictor import Predictor
from training.evaluation.drift.verdict import Thresholds, build_report, read_observations
from training.programs import drift, observe
from training.recipe import parse
from training.recipe.rules.column_rules import source_columns
from training.recipe.tables.metrics import PAIRS, UNPAIRED

USUAL = Thresholds(cohens_w=0.1, distance=0.1, auc=0.55)
"""The defaults of the recipe."""


def write_sample(file: Path, reader: RowReader) -> Path:
    """The folder with the sample of all rows of the file, in its order."""
    folder = file.with_suffix("")
    folder.mkdir()
    Sample([inputs for rows in reader.read(str(file)) for inputs in rows.inputs], 0).write(folder / observe.SAMPLE)
    return folder


def run(job_dir: Path, settings: dict[str, Any], **inputs: Path) -> tuple[dict[str, Any], Path]:
    return programs_here.run(observe, job_dir, inputs, **settings), job_dir / "output"


# Rows that are pairs of answers are refused before the program starts: tasks.registry.monitored_versions.
@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [task for task in task_types.TASK_TYPES if task_types.class_of(task).prediction_type not in (PAIRS, UNPAIRED)],
)
def test_the_rows_of_a_split_and_of_a_file_are_observed_alike(task: str, tmp_path: Path) -> None:
    world = make_world(task, tmp_path / "world")
    base, labels = world / "base/output", json.loads((world / "data/labels.json").read_text())
    task_type = task_types.load(task, TINY[task].options)
    tiny.export_untrained(base, tmp_path / "trained", task_type, labels)
    columns = {
        column.name: column.source_name for column in source_columns(parse(recipe_of(task, world / "rows"))).inputs
    }
    settings = {"task": task, "options": TINY[task].options, "columns": columns, "max_length": 32, "max_rows": 40}
    settings |= {"batch_size": 16}
    folders = {"model": tmp_path / "trained", "tokenizer": tmp_path / "trained"}
    split = settings | {"split": "validation"}
    figures, stored = run(tmp_path / "split", split, **folders, rows=world / "data")
    assert figures == {"rows": 60, "observed": 40, "without_prediction": 0}
    sample = write_sample(world / "rows/validation.jsonl", RowReader(task_type, columns))
    figures, of_file = run(tmp_path / "file", settings, **folders, sample=sample)
    assert figures == {"rows": 60, "observed": 40, "without_prediction": 0}
    first, second = (pq.read_table(folder / "observations.parquet") for folder in (stored, of_file))
    assert first["text"].to_pylist() == second["text"].to_pylist()
    assert first["tokens"].to_pylist() == second["tokens"].to_pylist() and min(first["tokens"].to_pylist()) > 0
    embeddings = [np.stack(table["embedding"].to_pylist()) for table in (first, second)]
    np.testing.assert_allclose(*embeddings, atol=1e-5)
    reference, new = read_observations(stored), read_observations(of_file)
    assert reference.fields.keys() == new.fields.keys()
    assert reference.fields or task in ("token-classification", "embedding", "sentence-similarity")
    report = build_report(reference, new, USUAL, alpha=0.05, min_rows=20)
    assert report["verdict"] == "steady"
    assert {line["value"] for line in report["comparisons"] if line["unit"] != "auc"} <= {0.0}
    assert (reference.correct is not None) == (task in ("sequence-classification", "image-classification"))


def test_a_model_of_embeddings_is_observed_by_its_own(tmp_path: Path) -> None:
    base = make_world("embedding", tmp_path / "world") / "base/output"
    options = {"pooling": "cls", "normalize": True, "prompts": {"anchor": "red "}}
    task_type, model = task_types.load("embedding", options), tmp_path / "model"
    tiny.export_untrained(base, model, task_type, [])
    rows = pa.record_batch({"anchor": ["cat dog", "hammer", "red red saw"]})
    observed = Observer(task_type, model, model, 32).observe(rows)["embedding"].to_pylist()
    own = [record["embedding"] for record in Predictor(task_type, model, model, 32).predict(rows)]
    np.testing.assert_allclose(observed, own, atol=1e-6)


def test_a_conversation_is_observed_alike_with_and_without_its_answer(tmp_path: Path) -> None:
    """Otherwise every new conversation differs from the validation rows, whose conversations are answered."""
    assistant = write_assistant(tmp_path / "assistant")
    columns = {"messages": "talk"}
    settings: dict[str, Any] = {"task": "sft", "columns": columns, "max_length": 64, "max_rows": 9, "batch_size": 4}
    observed = []
    for answer in ([{"role": "assistant", "content": "six seven"}], []):
        talks = [[{"role": "user", "content": word}, *answer] for word in ("five", "count", "on on")]
        rows = tmp_path / f"{len(answer)}.jsonl"
        rows.write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
        sample = write_sample(rows, RowReader(task_types.load("sft"), columns))
        _, out = run(tmp_path / f"job-{len(answer)}", settings, model=assistant, tokenizer=assistant, sample=sample)
        observed.append(pq.read_table(out / "observations.parquet"))
    assert observed[0].equals(observed[1]) and observed[0].num_rows == 3
    assert not any("seven" in text for text in observed[0]["text"].to_pylist())


def test_a_row_without_a_text_is_observed_without_a_prediction(tmp_path: Path) -> None:
    task = "sequence-classification"
    world = make_world(task, tmp_path / "world")
    base, labels = world / "base/output", json.loads((world / "data/labels.json").read_text())
    tiny.export_untrained(base, tmp_path / "trained", task, labels)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": "cat" if n % 3 else None}) for n in range(30)))
    columns = {"text": "text"}
    settings = {"task": task, "columns": columns, "max_length": 32, "max_rows": 100, "batch_size": 16}
    folders = {"model": tmp_path / "trained", "tokenizer": tmp_path / "trained"}
    sample = write_sample(rows, RowReader(task_types.load(task), columns))
    figures, out = run(tmp_path / "job", settings, **folders, sample=sample)
    assert figures == {"rows": 30, "observed": 30, "without_prediction": 10}
    found = read_observations(out)
    assert len(found.texts) == 30 and found.texts.count("") == 10
    assert found.tokens is not None and len(found.tokens) == len(found.fields["label"]) == 20
    compared = {"title": "cat/1", "alpha": 0.05, "min_rows": 20, "cohens_w": 0.1, "distance": 0.1, "auc": 0.55}
    compared |= {"look": 1, "input": {"rows": 30, "without_prediction": 10}}
    report = programs_here.run(drift, tmp_path / "drift", {"profile": out, "rows": out}, **compared)
    assert report["verdict"] == "steady" and (tmp_path / "drift/output/log/report.png").stat().st_size > 10_000


@pytest.mark.parametrize("refused", [1, 3])
def test_a_conversation_that_the_template_refuses_has_no_prediction(refused: int, tmp_path: Path) -> None:
    rule = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    assistant = write_assistant(tmp_path / "assistant", rule + TEMPLATE)
    columns, system = {"messages": "talk"}, {"role": "system", "content": "five"}
    talks = [[{"role": "user", "content": word}] for word in ("five", "count", "on on")]
    talks[:refused] = [[system, *talk] for talk in talks[:refused]]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
    sample = write_sample(rows, RowReader(task_types.load("sft"), columns))
    settings = {"task": "sft", "columns": columns, "max_length": 64, "max_rows": 9, "batch_size": 4}
    figures, out = run(tmp_path / "job", settings, model=assistant, tokenizer=assistant, sample=sample)
    assert figures == {"rows": 3, "observed": 3, "without_prediction": refused}
    observed = pq.read_table(out / "observations.parquet")
    if refused < 3:
        assert observed["tokens"].null_count == refused and observed.num_rows == 3
    else:
        assert observed.column_names == ["text"] and observed.num_rows == 3
