"""Hard negatives whole: found once for several recipes, by words, and by the embeddings of a registered version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.flows.forked import finetune
from tests.flows.small import states
from tests.task_types import write_project
from training.task_types.reranking import Reranking


@pytest.mark.drill
def test_negatives_are_found_once_and_a_reranker_gets_those_of_registered_embeddings(
    server: dict[str, str], tmp_path: Path
) -> None:
    home, out = tmp_path / "home", tmp_path / "out.json"

    def run(task: str, *settings: str) -> dict[str, str]:
        changes = [word for setting in settings for word in ("--set", setting)]
        done = finetune(home, "run", str(tmp_path / task / "tiny.yaml"), *changes, "--json", str(out), **server)
        assert done.returncode == 0, done.stdout + done.stderr
        return states(out)

    for task in ("embedding", "reranking"):
        write_project(task, tmp_path / task)
    by_words = ("data.negatives={source: bm25}", "training.num_train_epochs=8")
    assert run("embedding", *by_words)["mine_negatives"] == "ran"
    again = run("embedding", *by_words, "options.scale=10", "training.learning_rate=2e-3")
    assert (again["mine_negatives"], again["tokenize"], again["fit"]) == ("cached", "cached", "ran")
    changes = [word for setting in (*by_words, "training.seed=9") for word in ("--set", setting)]
    plan = finetune(home, "plan", str(tmp_path / "embedding/tiny.yaml"), *changes, **server)
    lines = {words[0]: words[1] for line in plan.stdout.splitlines() if len(words := line.split()) > 1}
    assert (lines["mine_negatives"], lines["fit"]) == ("cached", "will")

    negatives = "{source: registry, path: embedding/1, num_negatives: 2, num_candidates: 3}"
    found = (f"data.negatives={negatives}", "training.num_train_epochs=1")
    first = run("reranking", *found)
    assert first["mine_negatives"] == "ran" and json.loads(out.read_text())["state"] == "completed"
    assert run("reranking", *found, "options.loss=list_net")["mine_negatives"] == "cached"

    fused = run("reranking", *found, "options.rank_fusion=true")
    assert (fused["mine_negatives"], fused["fit"]) == ("cached", "ran")
    ended = {stage["name"]: stage["artifact"] for stage in json.loads(out.read_text())["stages"]}
    folders = {name: home / ended[name] for name in ("fit", "predict")}
    weight = json.loads((folders["fit"] / "model/config.json").read_text())["rank_weight"]
    predicted = pq.read_table(folders["predict"] / "validation.parquet")
    assert json.loads(predicted.schema.metadata[b"rank_weight"]) == weight
    reported = json.loads(out.read_text())["metrics"]["validation"]["ndcg_at_10"]["value"]
    scores = Reranking().metric_inputs(predicted, []).row_scores
    assert reported == pytest.approx(scores.mean())

    shutil.rmtree(home / "artifacts/mine_negatives")  # as after an update, when they have another key
    reproduced = finetune(home, "reproduce", "reranking/1", **server)
    assert reproduced.returncode == 0 and "The same bytes: sha256" in reproduced.stdout, reproduced.stdout
