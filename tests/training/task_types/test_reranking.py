"""Rerankers: sentence-transformers' losses and scores, lists of candidates, exact training, scores of rows."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tests import fork_server
from tests import task_types as tiny_tasks
from tests.arrow import write_arrow
from tests.training.forks import assert_resumes, curve, finish
from tests.training.task_types import cross_encoder, preference_model
from training.batching.batches import TokenRows
from training.data.hard_negatives import Corpus, find_candidates
from training.engine.predictor import Predictor
from training.evaluation.baseline import choose_rival
from training.evaluation.rankings import WORST_RANK, Rankings, rank
from training.models.loading import load_tokenizer
from training.recipe import Training
from training.task_types.reranking import Reranking
from training.tokenization.encoder import load_fast_encoder

FIGURES = json.loads(cross_encoder.FIGURES.read_text())


def lists(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows with lists of documents, as load_data stores them."""
    stored = [{**row, "labels": json.dumps(row["labels"])} if "labels" in row else row for row in rows]
    return pa.RecordBatch.from_pylist(stored)


def pairs(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """The same with a document a row."""
    found = [
        {"query": row["query"], "document": document, "label": label}
        for row in rows
        for document, label in zip(row["documents"], row["labels"], strict=True)
    ]
    return pa.RecordBatch.from_pylist(found)


def token_rows(task: Reranking, rows: pa.RecordBatch, folder: Path, max_length: int = 32) -> TokenRows:
    return TokenRows(pa.Table.from_batches([task.features(load_fast_encoder(folder, max_length), rows).rows]))


def mean_loss(task: Reranking, rows: TokenRows, folder: Path, chosen: list[int]) -> tuple[Any, Any, int]:
    """The loss of some rows, the model, and the number of targets."""
    model = cross_encoder.make_model()
    batch = task.collator(load_tokenizer(folder), 1)([rows[number] for number in chosen])
    loss = task.loss(Training(), [], rows, outside=False)
    assert loss is not None and task.target_count(batch) == rows.targets[chosen].sum()
    return loss(task.forward(model, batch)["logits"], batch["labels"]), model, task.target_count(batch)


@pytest.mark.parametrize("name", cross_encoder.SETTINGS)
def test_losses_and_gradients_are_those_of_sentence_transformers_however_a_step_is_divided(
    name: str, tmp_path: Path
) -> None:
    task = Reranking({"loss": name.partition(",")[0], **cross_encoder.SETTINGS[name]})
    folder, expected = preference_model.tokenizer(tmp_path), FIGURES["losses"][name]
    rows = token_rows(task, lists(cross_encoder.LISTS), folder)
    found, model, targets = mean_loss(task, rows, folder, [0, 1, 2, 3])
    found.backward()
    gradients = preference_model.gradients(model)
    assert found.item() == pytest.approx(expected["loss"], abs=1e-5)
    for weight, values in expected["gradients"].items():
        assert gradients[weight] == pytest.approx(values, abs=1e-5), weight
    parts = [mean_loss(task, rows, folder, part) for part in ([2], [3, 1], [0])]
    assert sum(loss.item() * count for loss, _, count in parts) / targets == pytest.approx(found.item(), rel=1e-5)
    if name not in ("list_net", "lambda"):
        alone = token_rows(task, pairs(cross_encoder.LISTS), folder)
        loss, _, count = mean_loss(task, alone, folder, [*range(len(alone))])
        assert (loss.item(), count) == (pytest.approx(found.item(), rel=1e-6), targets)


def problems(task: Reranking, rows: pa.RecordBatch) -> list[tuple[str, str, list[bool]]]:
    found = [(check, description, mask.tolist()) for check, description, mask, *_ in task.row_problems(rows)]
    return [one for one in found if any(one[2])]


def test_labels_that_the_loss_cannot_learn_are_named_before_training() -> None:
    row = {"query": "a", "documents": ["b", "c"]}
    given = [[1, 0], [1], {"b": 1}, [1, "0"], [1, None], [1, float("nan")], [1, 1e300], [3, 0], [1, 1], [True, False]]
    rows = lists([{**row, "labels": labels} for labels in given])
    assert problems(Reranking({"loss": "lambda"}), rows) == [
        (
            "candidates",
            "has labels that cannot be learned ('labels' is no list of numbers)",
            [2 <= place <= 6 for place in range(10)],
        ),
        (
            "candidates",
            "has labels that cannot be learned ('documents' and 'labels' have different lengths)",
            [place == 1 for place in range(10)],
        ),
    ]
    alone = pa.RecordBatch.from_pylist([{"query": "a", "document": "b", "label": label} for label in (0.5, 2.0)])
    ((check, description, mask),) = problems(Reranking(), alone)
    assert (check, mask) == (
        "candidates",
        [False, True],
    ) and "binary_cross_entropy takes labels from 0 to 1" in description
    assert not problems(Reranking({"loss": "mse"}), alone)


def test_losses_that_compare_documents_take_lists_only() -> None:
    assert [[*columns] for columns in Reranking().column_sets()] == [
        ["query", "document", "label"],
        ["query", "documents", "labels"],
    ]
    for loss in ("lambda", "list_net"):
        assert [[*columns] for columns in Reranking({"loss": loss}).column_sets()] == [["query", "documents", "labels"]]


def test_each_document_is_cut_and_counted_with_its_query(tmp_path: Path) -> None:
    folder, task = preference_model.tokenizer(tmp_path), Reranking({"loss": "lambda"})
    features = task.features(load_fast_encoder(folder, 4), lists(cross_encoder.LISTS))
    stored = features.rows.to_pylist()
    assert stored[0]["text_lengths"] == [4, 3, 4] and stored[0]["length"] == 11 == len(stored[0]["input_ids"])
    assert [row["targets"] for row in stored] == [2, 0, 9, 0]
    assert features.lost.tolist() == [1, 3, 3, 0] and features.longest is not None
    assert features.longest.tolist() == [5, 7, 7, 4]
    (asked,) = task.features(
        load_fast_encoder(folder, 4), lists(cross_encoder.LISTS[:1]).drop_columns("labels")
    ).rows.to_pylist()
    assert asked == {name: stored[0][name] for name in asked} and "label" not in asked and "targets" not in asked


def predicted(task: Reranking, rows: TokenRows, folder: Path) -> pa.Table:
    model = cross_encoder.make_model()
    batch = task.collator(load_tokenizer(folder), 1)([rows[number] for number in range(len(rows))])
    with torch.no_grad():
        found = task.predictions(model, task.forward(model, batch), batch)
    return task.join_labels(pa.Table.from_batches([found]), rows)


def test_rows_of_one_query_are_ranked_together_and_as_a_list_of_it(tmp_path: Path) -> None:
    folder, task = preference_model.tokenizer(tmp_path), Reranking()
    listed = task.metric_inputs(predicted(task, token_rows(task, lists(cross_encoder.LISTS), folder), folder), [])
    single = task.metric_inputs(predicted(task, token_rows(task, pairs(cross_encoder.LISTS), folder), folder), [])
    assert listed.query_rows.tolist() == [0, 1, 2] and single.query_rows.tolist() == [0, 3, 4]
    assert listed.unjudged == single.unjudged == 1 and listed.documents.tolist() == [3, 1, 5]
    assert listed.ranks.tolist() == single.ranks.tolist() and listed.relevance.tolist() == single.relevance.tolist()
    assert len(task.empty_predictions([])) == 0


def test_a_record_has_the_documents_by_their_scores_which_are_probabilities_if_labels_are(tmp_path: Path) -> None:
    folder = preference_model.tokenizer(tmp_path)
    rows = token_rows(Reranking(), lists(cross_encoder.LISTS), folder)
    table = predicted(Reranking(), rows, folder)
    logits = table["logits"][2].as_py()
    order = sorted(range(5), key=lambda place: -logits[place])
    for loss, score in (("mse", logits), ("binary_cross_entropy", [1 / (1 + math.exp(-logit)) for logit in logits])):
        task = Reranking({"loss": loss})
        record = task.to_records(table, [])[2]
        assert [one["document"] for one in record["ranking"]] == order
        assert [one["score"] for one in record["ranking"]] == pytest.approx([score[place] for place in order])
        assert record["score"] == record["ranking"][0]["score"]
        other = {"score": 0.0, "ranking": [*record["ranking"][::-1]]}
        assert task.same_prediction(record, other, 1e-6) and len(task.lines(record)) == 5
        record["ranking"][0] = record["ranking"][0] | {"score": 9.0}
        assert not task.same_prediction(record, other, 1e-6)
    assert Reranking().lines(Reranking().to_records(table, [])[1]) == [
        f"{1 / (1 + math.exp(-table['logits'][1].as_py()[0])):.4f}"
    ]


def test_the_baseline_ranks_the_same_queries_by_the_words_they_share(tmp_path: Path) -> None:
    rows = [
        {"query": "red cat", "documents": ["a dog", "the red cat", "a cat"], "labels": [0.0, 1.0, 0.0]},
        {"query": "no word", "documents": ["cow", "pig"], "labels": [1.0, 0.0]},
        {"query": "none", "documents": ["none"], "labels": [0.0]},
    ]
    for name, stored in (("lists", lists(rows)), ("pairs", pairs(rows))):
        write_arrow(tmp_path / name / "test.arrow", pa.Table.from_batches([stored]))
        baseline = Reranking().baseline(tmp_path / name, tmp_path, tmp_path, [])
        rival = choose_rival(baseline, "ndcg_at_10")
        assert rival.description == "BM25"
        found = rival.predict(Reranking().empty_predictions([]), "test")
        assert found.ranks.tolist() == [1, 2] and found.unjudged == 1  # without a common word it is not found
        assert found.documents.tolist() == [3, 2]


def test_the_published_folder_names_the_function_and_the_length_that_cross_encoders_read(tmp_path: Path) -> None:
    folder = preference_model.tokenizer(tmp_path)
    for loss, activation in (("binary_cross_entropy", "activation.Sigmoid"), ("list_net", "linear.Identity")):
        fields = Reranking({"loss": loss}).config_fields([])
        assert fields["sentence_transformers"]["activation_fn"] == f"torch.nn.modules.{activation}"
    files = Reranking().published_files(folder, 5)
    before = json.loads((folder / "tokenizer_config.json").read_text())
    assert {name: json.loads(text) for name, text in files.items()} == {
        "tokenizer_config.json": before | {"model_max_length": 5}
    }


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mse"])
def test_sentence_transformers_gives_the_same_scores_to_texts_that_are_cut_too(loss: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder, task = preference_model.tokenizer(tmp_path), Reranking({"loss": loss})
    model = cross_encoder.make_model()
    model.config.update(task.config_fields([]))
    model.save_pretrained(folder)
    for name, text in task.published_files(folder, 5).items():
        (folder / name).write_text(text)
    records = Predictor(task, folder, folder, 5).predict(lists(cross_encoder.LISTS).drop_columns("labels"))
    found = library.CrossEncoder(str(folder), device="cpu")
    for row, record in zip(cross_encoder.LISTS, records, strict=True):
        scores = found.predict([(row["query"], document) for document in row["documents"]])
        assert [scores[one["document"]] for one in record["ranking"]] == pytest.approx(
            [one["score"] for one in record["ranking"]], abs=1e-5
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranking") / "world"
    return Path(fork_server.call(tiny_tasks.make_world, "reranking", folder))


def fit_job(world: Path, job_dir: Path, processes: int = 1, epochs: int = 1, **settings: Any) -> Path:
    training = {"num_train_epochs": epochs, "gradient_accumulation_steps": 2, "checkpoint_interval_s": 0.05}
    training |= {"per_device_train_batch_size": 10 // processes, "logging_steps": 1, **settings}
    compute = {"strategy": "ddp", "num_processes": processes}
    return tiny_tasks.fit_job("reranking", world, job_dir, compute, **training)


@pytest.mark.slow
def test_killed_while_it_learns_to_rank_it_ends_with_the_same_bytes(world: Path, tmp_path: Path) -> None:
    whole, killed = (fit_job(world, tmp_path / name, epochs=8) for name in ("whole", "killed"))
    assert finish(whole).state == "finished"
    assert_resumes(killed, whole, after=3)
    first, *_, last = [values["eval_ndcg_at_10"] for values in curve(whole).values() if "eval_ndcg_at_10" in values]
    assert last > first
    config = json.loads((whole / "output/model/config.json").read_text())
    assert config["sentence_transformers"] == {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(world: Path, tmp_path: Path) -> None:
    """Without dropout, which each rank draws for itself, and by SGD: Adam divides gradients by their size, so it
    enlarges the rounding of small ones."""
    shutil.copytree(world, tmp_path / "world")
    file = tmp_path / "world/base/output/model/config.json"
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | quiet))
    sgd = {"optim": "sgd", "learning_rate": 10.0}
    one, two = (fit_job(tmp_path / "world", tmp_path / f"{number}", number, **sgd) for number in (1, 2))
    assert finish(one).state == finish(two).state == "finished"
    losses = [[curve(job)[step]["train_loss"] for step in range(1, 8)] for job in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = (load_file(job / "output/model/model.safetensors") for job in (one, two))
    start = load_file(tmp_path / "world/base/output/model/model.safetensors")
    moved = max(
        float((ours[f"bert.{name}"] - weight).abs().max()) for name, weight in start.items() if "pooler" in name
    )
    assert moved > 1e-3
    assert max(float((weight - theirs[name]).abs().max()) for name, weight in ours.items()) < 1e-5


def searched(logits: list[list[float]], relevant: list[int], weight: float = 0.0) -> pa.Table:
    """Predictions for one query a row, each with two candidates. `relevant` is the place of its relevant one."""
    labels = [[float(place == one) for place in range(2)] for one in relevant]
    return pa.table(
        {
            "label": pa.array(labels, pa.list_(pa.float32())),
            "logits": pa.array(logits, pa.list_(pa.float32())),
            "query": [*range(len(logits))],
            "missed": pa.array([[] for _ in logits], pa.list_(pa.float32())),
        },
        metadata={"rank_weight": json.dumps(weight)},
    )


def test_the_weight_of_the_ranks_in_the_search_is_the_best_of_validation() -> None:
    """The model is right about the second row, by more than about the first, where the search is."""
    task, logits, relevant = Reranking({"rank_fusion": True}), [[0.0, 0.5], [0.0, 2.0]], [0, 1]
    for weight, ranks in ((0.0, [2, 1]), (1.0, [1, 1]), (9.0, [1, 2])):
        assert task.metric_inputs(searched(logits, relevant, weight), []).ranks.tolist() == ranks
    weight = task.calibrate(searched(logits, relevant), [])["rank_weight"]
    assert task.metric_inputs(searched(logits, relevant, weight), []).ranks.tolist() == [1, 1]
    assert task.calibrate(searched(logits, relevant, 9.0), [])["rank_weight"] == weight
    assert task.calibrate(searched(logits, [1, 1]), []) == {"rank_weight": 0.0}
    assert task.calibrate(searched([], []), []) == {"rank_weight": 0.0} and task.to_records(searched([], []), []) == []
    broken = task.calibrate(searched([*logits, [0.0, math.nan]], [*relevant, 0]), [])["rank_weight"]
    assert math.isfinite(broken)


def test_rows_in_the_order_of_a_file_are_measured_by_the_model_alone_and_new_rows_are_not(tmp_path: Path) -> None:
    folder, task, model = preference_model.tokenizer(tmp_path), Reranking(), cross_encoder.make_model()
    rows = token_rows(task, lists(cross_encoder.LISTS), folder)
    alone = predicted(task, rows, folder)
    model.config.update({"rank_weight": 0.5})
    batch = task.collator(load_tokenizer(folder), 1)([rows[number] for number in range(len(rows))])
    with torch.no_grad():
        found = pa.Table.from_batches([task.predictions(model, task.forward(model, batch), batch)])
    assert found["logits"] == alone["logits"]
    joined = task.join_labels(found, rows)
    assert task.metric_inputs(joined, []).ranks.tolist() == task.metric_inputs(alone, []).ranks.tolist()
    for logits, record in zip(
        found["logits"].to_pylist(), Reranking({"loss": "mse"}).to_records(found, []), strict=True
    ):
        scores = {one["document"]: one["score"] for one in record["ranking"]}
        for place, logit in enumerate(logits):
            assert scores[place] == pytest.approx(logit - 0.5 * math.log(place + 1), abs=1e-6)
    task.prepare(model, load_tokenizer(folder))
    assert model.config.rank_weight == 0.0


def test_the_candidates_of_a_search_are_ranked_and_what_it_missed_counts_as_not_found() -> None:
    rows = [("q1", "a", 1.0), ("q2", "b", 1.0), ("q1", "c", 1.0), ("q1", "d", 0.0)]
    batch = pa.RecordBatch.from_pylist([dict(zip(("query", "document", "label"), row, strict=True)) for row in rows])
    (found,) = Reranking().with_candidates([batch], {"q1": ["b", "a"], "q2": ["a", "b"]})
    assert found.to_pylist() == [
        {"query": "q1", "documents": ["b", "a"], "labels": "[0, 1.0]", "missed": [1.0]},
        {"query": "q2", "documents": ["a", "b"], "labels": "[0, 1.0]", "missed": []},
        {"query": "q1", "documents": ["c"], "labels": "[1.0]", "missed": []},
        {"query": "q1", "documents": ["d"], "labels": "[0.0]", "missed": []},
    ]
    predictions = pa.table(
        {
            "label": pa.array([[0, 1], [0, 1], [1], [0]], pa.list_(pa.float32())),
            "logits": pa.array([[0.1, 0.9], [0.8, 0.2], [9.0], [9.0]], pa.list_(pa.float32())),
            "query": [7, 3, 7, 7],
            "missed": found["missed"],
        },
        metadata={"rank_weight": "0.0"},
    )
    ranked = Reranking().metric_inputs(predictions, [])
    assert isinstance(ranked, Rankings) and ranked.query_rows.tolist() == [0, 1]
    assert (ranked.queries.tolist(), ranked.ranks.tolist()) == ([0, 0, 1], [1, WORST_RANK, 2])
    assert ranked.documents.tolist() == [2, 2]


def test_the_order_of_the_search_has_the_figures_of_a_search_of_all_documents(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    rows = [{"query": f"q{place // 2}", "document": f"d{place}", "label": 1.0 + place % 2} for place in range(40)]
    vectors = draw.standard_normal((20 + 40, 4))
    queries, documents = vectors[:20], vectors[20:]
    corpus = Corpus.of([(row["query"], [(row["document"], True)]) for row in rows])  # type: ignore[arg-type]
    near = find_candidates(corpus, lambda first, last: queries[first:last] @ documents.T, 10)
    (found,) = Reranking().with_candidates(
        [pa.RecordBatch.from_pylist(rows)], dict(zip(corpus.queries, near, strict=True))
    )
    labels = pa.array([json.loads(labels) for labels in found["labels"].to_pylist()], pa.list_(pa.float32()))
    numbers = [int(query[1:]) for query in found["query"].to_pylist()]
    tokens = pa.table({"label": labels, "query": numbers, "missed": found["missed"]})
    write_arrow(tmp_path / "test.arrow", tokens)
    rival = choose_rival(Reranking().baseline(tmp_path, tmp_path, tmp_path, []), "ndcg_at_10")
    assert rival.description == "the search that found the candidates"
    ranked = rival.predict(Reranking().empty_predictions([]), "test")
    relevant = np.array([(place // 2, place) for place in range(40)])
    whole = rank(queries, np.arange(0, 40, 2), documents, relevant, [row["label"] for row in rows])
    assert 0 < whole.row_scores.mean() < 1
    np.testing.assert_allclose(ranked.row_scores, whole.row_scores)
