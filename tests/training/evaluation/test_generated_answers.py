"""Answers to some prompts of a split, by the trained model and its base: the same by any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import fork_server
from tests import task_types as tiny_tasks
from tests.arrow import read_arrow
from tests.training.forks import events, finish, run_main
from training.engine.predictor import Predictor
from training.evaluation import metrics
from training.evaluation.preferences import Preferences, lengths_of
from training.jobs.protocol import Job
from training.problems import UserError
from training.programs import predict, score
from training.recipe import parse
from training.recipe.fields import answered_prompts
from training.task_types.preference import Preference

OPTIONS = {"max_new_tokens": 6}
LENGTHS = ["generated_length", "base_generated_length"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fork_server.call(tiny_tasks.make_world, "preference", tmp_path_factory.mktemp("answers") / "world"))


def run_predict(world: Path, job_dir: Path, processes: int) -> Path:
    """The predictions of the base model, which is also the trained one here, with 20 of 60 prompts answered."""
    settings = {"task": "preference", "options": OPTIONS, "splits": ["validation"], "answered_prompts": 20}
    settings |= {"batch_size": 16, "mixed_precision": "no"}
    base = world / "base/output"
    model = job_dir / "model"
    model.mkdir(parents=True)
    for file in (*(base / "model").iterdir(), *(base / "tokenizer").iterdir()):
        (model / file.name).write_bytes(file.read_bytes())
    inputs = {"model": str(model), "base": str(base / "model"), "tokens": str(world / "tokens")}
    Job(program=predict.__name__, key=job_dir.name, settings=settings, inputs=inputs).write(job_dir)
    assert finish(job_dir, processes, run_main(predict)).state == "finished"
    return job_dir / "output/validation.parquet"


@pytest.fixture(scope="module")
def predictions(world: Path) -> Path:
    return run_predict(world, world / "one", 1)


def test_evenly_spaced_prompts_are_answered_as_on_request_and_their_tokens_counted(
    world: Path, predictions: Path
) -> None:
    table = pq.read_table(predictions)
    answered = np.flatnonzero(table["generated_answer"].is_valid().to_numpy()).tolist()
    assert len(answered) == 20 and answered[0] == 0 and answered[-1] == 59
    assert table["generated_answer"] == table["base_generated_answer"]  # the same model here
    assert all(1 <= table["generated_tokens"][row].as_py() <= 6 for row in answered)
    rows = read_arrow(world / "data/validation.arrow").take(pa.array(answered))
    task, folder = Preference(OPTIONS), world / "one/model"
    given = Predictor(task, folder, folder, 32).predict(rows.select(["prompt"]).to_batches()[0])
    assert [one["generated_text"] for one in given] == table["generated_answer"].take(pa.array(answered)).to_pylist()


def test_two_processes_write_the_same_answers_and_cut_ones_are_warned_of(
    world: Path, predictions: Path, tmp_path: Path
) -> None:
    two = run_predict(world, tmp_path / "two", 2)
    assert pq.read_table(two).equals(pq.read_table(predictions))
    cut = sum(count == 6 for count in pq.read_table(predictions)["generated_tokens"].to_pylist())
    messages = [event["message"] for event in events(predictions.parent.parent, "warning")]
    limit = "to prompts of validation reached options.max_new_tokens, 6 tokens, and were cut"
    names = ("the base model", "the model")
    assert [message.partition(": ")[0] for message in messages] == [
        f"{cut} of 20 answers of {name} {limit}" for name in names
    ]


def test_mean_lengths_have_intervals_and_no_value_without_answers(predictions: Path) -> None:
    table = pq.read_table(predictions)
    rows = Preference(OPTIONS).metric_inputs(table, [])
    answered = np.flatnonzero(np.isfinite(rows.generated_tokens))
    rows.generated_tokens[answered] = tokens = np.arange(20.0)
    found = score.compute_scores(["accuracy", *LENGTHS], rows)
    assert found["base_generated_length"]["value"] == np.mean(table["base_generated_tokens"].drop_null().to_numpy())
    assert found["generated_length"]["value"] == pytest.approx(np.mean(tokens))
    low, high = found["generated_length"]["low"], found["generated_length"]["high"]
    assert low is not None and high is not None and low < np.mean(tokens) < high
    alone = rows.take(np.array([1, 2]))  # not answered
    assert np.isnan(list(metrics.compute(LENGTHS, alone).values())).all()


def test_groups_of_pairs_have_figures_with_intervals(predictions: Path) -> None:
    rows, names = Preference(OPTIONS).metric_inputs(pq.read_table(predictions), []), ["accuracy", "margin", *LENGTHS]
    groups = {"even": np.arange(0, 60, 2), "odd": np.arange(1, 60, 2)}
    whole = score.compute_scores(names, rows)
    for group in score.score_groups(groups, groups, rows, whole, names, lambda done, total: None):
        figures = group["metrics"]
        assert figures.keys() == whole.keys() and group["rows"] == 30
        assert figures["accuracy"]["value"] == rows.take(groups[group["group"]]).correct.mean()
        assert figures["margin"]["low"] <= figures["margin"]["value"] <= figures["margin"]["high"]


def test_predictions_without_answers_can_be_pooled_with_others() -> None:
    answered = pa.table({"generated_tokens": pa.array([3, None], pa.int64())})
    ones, counts = np.ones(2), np.ones(2, np.int64)
    first = Preferences(ones, ones, counts, counts, **lengths_of(answered))
    pooled = first.concatenate(Preferences(ones, ones, counts, counts))
    assert pooled.generated_tokens.tolist()[0] == 3 and np.isnan(pooled.generated_tokens[1:]).all()


def recipe(**evaluation: Any) -> dict[str, Any]:
    return tiny_tasks.recipe_of("preference", Path("rows")) | {"evaluation": evaluation}


def test_prompts_are_answered_if_a_metric_or_a_judge_reads_the_answers() -> None:
    assert answered_prompts(parse(recipe())) == 32  # the usual metrics
    assert answered_prompts(parse(recipe(metrics=["accuracy"]))) == 0
    assert answered_prompts(parse(recipe(metrics=["accuracy"], judge="mine:judge"))) == 32
    other = tiny_tasks.recipe_of("sft", Path("rows"))
    assert answered_prompts(parse(other)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"max_new_tokens": 0}}, "options.max_new_tokens: 0 generates no answers, which generated_length"),
        (
            {"training": {"metric_for_best_model": "generated_length"}},
            "training.metric_for_best_model: 'generated_length' is of the trained model alone",
        ),
        (
            {"task": "reward-modeling", "options": {}, "evaluation": {"metrics": ["generated_length"]}},
            "'generated_length' does not fit task reward-modeling",
        ),
        (
            {"task": "reward-modeling", "options": {}, "evaluation": {"judge": "mine:judge", "metrics": ["accuracy"]}},
            "evaluation.judge: does nothing with task reward-modeling, whose models answer no prompts: leave it out, "
            "or choose preference or kto.",
        ),
        ({"release": {"gate": {"compare": "win_rate"}}}, "release.gate.compare: win_rate needs a judge"),
    ],
)
def test_answers_that_nobody_generates_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(json.loads(json.dumps(recipe() | change)))
    assert message in str(refused.value)
