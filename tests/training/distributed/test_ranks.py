"""Training with two processes: really two, each row once, and the same bytes however often one was killed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tasks.jobs.commands import accelerate_argv, accelerate_environment
from tasks.jobs.launch import run_job
from tests.training import tiny
from tests.training.failing import predict_but_on_second_rank
from tests.training.forks import (
    assert_same,
    batches,
    checkpoints_written,
    curve,
    events,
    finish,
    kill_when,
    run_main,
    within_a_step,
)
from training.engine.state_check import SWITCH
from training.jobs.protocol import Failure, Job, Outcome, read_outcome
from training.programs import predict, predict_champion

# 150 rows: 12 full steps, and 6 rows left over that make unequal micro-batches.
EPOCHS = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "checkpoint_interval_s": 0.05,
}


@pytest.fixture(scope="module")
def launched(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two undisturbed ranks, as the product launches them."""
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "launched", processes=2, **EPOCHS)
    argv = accelerate_argv("training.programs.fit", num_processes=2, mixed_precision="no", use_cpu=True)
    env = accelerate_environment(num_processes=2, use_cpu=True) | {SWITCH: "1"}
    outcome = run_job(job_dir, argv, env=env, on_events=lambda event: None, stall_timeout_s=120)
    assert outcome.state == "finished", outcome
    return job_dir


def failure(outcome: Outcome | None) -> Failure:
    assert outcome is not None and outcome.failure is not None
    return outcome.failure


@pytest.mark.slow
def test_two_ranks_are_launched_and_one_of_them_reports(launched: Path) -> None:
    assert sorted(event["rank"] for event in events(launched, "started")) == [0, 1]
    steps = [event["step"] for event in events(launched, "metrics") if "train_loss" in event["values"]]
    assert steps == sorted(set(steps))
    assert {path.name for path in (launched / "logs").glob("*.log")} == {"1.log", "rank1.log", "supervisor.log"}


@pytest.mark.slow
def test_ranks_killed_again_and_again_end_with_the_same_weights_and_curve_as_two_undisturbed(
    world: Path, launched: Path, tmp_path: Path
) -> None:
    """In an epoch's middle, between two micro-batches of a step in the second epoch, while rank 0 saves, and while it
    evaluates."""
    job_dir = tiny.fit_job(world, tmp_path / "killed", processes=2, **EPOCHS)
    folder, kills = job_dir / "checkpoints", 0
    for victim, reached in (
        (1, lambda: checkpoints_written(job_dir) >= 1),
        (0, lambda: within_a_step(job_dir, 15)),
        (1, lambda: any(folder.glob(".writing-checkpoint-1[6-9]"))),
        (0, lambda: any(event["step"] == 26 for event in events(job_dir, "metrics"))),
    ):
        kills += kill_when(job_dir, reached, victim=victim)
        if victim == 1 and not (job_dir / "output/model").exists():
            assert failure(read_outcome(job_dir)).kind == "lost_rank"
    assert finish(job_dir).state == "finished"
    assert kills >= 3
    assert_same(job_dir, launched)


@pytest.mark.slow
def test_a_stop_that_reaches_one_rank_stops_both_after_the_same_step(
    world: Path, launched: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "stopped", processes=2, **EPOCHS | {"checkpoint_interval_s": 600.0})
    assert kill_when(job_dir, lambda: bool(events(job_dir, "metrics")), signal.SIGTERM, victim=1)
    outcomes = [Outcome.model_validate_json(path.read_bytes()) for path in sorted(job_dir.glob("outcome*.json"))]
    (checkpoint,) = (job_dir / "checkpoints").glob("checkpoint-*")
    stopped = f"stopped after step {checkpoint.name.split('-')[1]}"
    assert len(outcomes) == 2 and all(stopped in failure(outcome).message for outcome in outcomes)
    assert finish(job_dir).state == "finished"
    assert_same(job_dir, launched)


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns_from_the_same_steps(world: Path, tmp_path: Path) -> None:
    """Without dropout, which each rank draws for itself; an epoch's last step has unequal shares."""
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base, dirs_exist_ok=True)
    config = json.loads((base / "model/config.json").read_text())
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "model/config.json").write_text(json.dumps(config | quiet))
    found = []
    two = {**EPOCHS, "num_train_epochs": 1, "logging_steps": 1, "checkpoint_interval_s": 600.0}
    one = {**two, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    for name, processes, division, settings in (
        ("one", 1, 1, one),
        ("one-short-of-memory", 1, 3, one),
        ("two", 2, 1, two),
    ):
        job_dir = tiny.fit_job(
            world, tmp_path / name, base=base.name, processes=processes, division=division, **settings
        )
        assert finish(job_dir).state == "finished"
        found.append({step: point["train_loss"] for step, point in curve(job_dir).items() if "train_loss" in point})
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for other in found[1:]:
        assert list(other.values()) == pytest.approx(list(found[0].values()), rel=1e-4)


def test_with_another_number_of_processes_it_goes_on_only_where_that_is_accepted_and_no_row_comes_twice_an_epoch(
    world: Path, launched: Path, tmp_path: Path
) -> None:
    newest = sorted(int(path.name.split("-")[1]) for path in (launched / "checkpoints").glob("checkpoint-*"))[-2]
    named = {"resume_from_checkpoint": str(launched / f"checkpoints/checkpoint-{newest}"), "num_train_epochs": 3}
    one, accepted = {**EPOCHS, **named, "per_device_train_batch_size": 4}, {"inexact_resume": True}
    refused = [
        failure(finish(tiny.fit_job(world, tmp_path / name, **{**one, **settings}))).message
        for name, settings in (("exact", {}), ("fewer", {**accepted, "per_device_train_batch_size": 2}))
    ]
    assert "processes 2 (here 1): resuming from it would end with other weights" in refused[0]
    assert "global batch size: with another number of processes, it must stay the same" in refused[1]

    job_dir = tiny.fit_job(world, tmp_path / "inexact", **{**one, **accepted})
    assert finish(job_dir).result["steps"] == 3 * 13
    before, after = rows_of_steps(launched), rows_of_steps(job_dir)
    assert min(after) == newest and all(before[step] == after[step] for step in range(newest, 26))
    assert sorted(row for step in range(26, 39) for row in after[step]) == list(range(150))


def rows_of_steps(job_dir: Path) -> dict[int, list[int]]:
    """The rows of each step over all ranks, sorted."""
    found: dict[int, list[int]] = {}
    for (_, step, _), line in batches(job_dir).items():
        found[step] = sorted([*found.get(step, []), *line["rows"]])
    return found


def test_an_evaluation_counts_each_row_once_over_two_ranks_in_the_order_of_one_process(
    world: Path, tmp_path: Path
) -> None:
    """60 rows in passes of 14: the last has two for each rank."""
    found = []
    extra = {"eval_on_start": True}
    for processes, rows in ((1, 14), (2, 7)):
        settings = {"max_steps": 1, "eval_strategy": "no", "per_device_eval_batch_size": rows, "extra": extra}
        job_dir = tiny.fit_job(world, tmp_path / str(processes), processes=processes, **settings)
        job = Job.read(job_dir)
        job.model_copy(update={"settings": {**job.settings, "metrics": ["tests.training.own:Places"]}}).write(job_dir)
        assert finish(job_dir).state == "finished"
        found.append(curve(job_dir)[0])
    assert found[0]["eval_rows"] == 60
    loss = [point.pop("eval_loss") for point in found]
    assert found[0] == found[1] and loss[0] == pytest.approx(loss[1], rel=1e-6)


def test_the_true_traceback_of_the_rank_that_failed_first_is_reported(world: Path, tmp_path: Path) -> None:
    collator = "tests.training.failing:on_second_rank"
    job_dir = tiny.fit_job(world, tmp_path / "failing", processes=2, **EPOCHS, collator=collator)
    problem = failure(finish(job_dir))
    assert (problem.kind, problem.rank, problem.message) == ("internal", 1, "ZeroDivisionError: only here")
    assert "failing.py" in problem.traceback and "in collate" in problem.traceback


def test_ranks_that_would_train_alone_are_refused(world: Path, tmp_path: Path) -> None:
    problem = failure(finish(tiny.fit_job(world, tmp_path / "alone", processes=2, **EPOCHS), launched=1))
    assert problem.kind == "internal" and "requested {'processes': 2" in problem.message


def predict_job(world: Path, launched: Path, job_dir: Path, program: str = "predict", **settings: object) -> Path:
    """60 rows in batches of 7: nine, of which the last has four rows."""
    model, tokens, data = launched / "output/model", world / "tokens", world / "data"
    inputs = {"model": model, "tokens": tokens} if program == "predict" else {"model": model, "data": data}
    if program == "predict_champion":
        inputs["tokenizer"] = model
    say = {"task": "sequence-classification", "batch_size": 14, "micro_batch_divisor": 2, "mixed_precision": "no"}
    places = {name: str(path) for name, path in inputs.items()}
    Job(program=f"training.programs.{program}", key=job_dir.name, settings=say | settings, inputs=places).write(job_dir)
    return job_dir


def test_two_processes_predict_the_bytes_of_one(world: Path, launched: Path, tmp_path: Path) -> None:
    splits = {"splits": ["train", "validation"]}
    judged = {"split": "validation", "champion": "small/1", "max_length": 64}
    for program, say in ((predict, splits), (predict_champion, judged)):
        name = program.__name__.rpartition(".")[2]
        written = []
        for processes in (1, 2):
            job_dir = predict_job(world, launched, tmp_path / f"{name}{processes}", name, **say)
            outcome = finish(job_dir, processes, run_main(program))
            assert outcome.state == "finished", outcome
            written.append({file: (job_dir / "output" / file).read_bytes() for file in outcome.files})
            progress = events(job_dir, "progress")[-1]
            assert progress["done"] == progress["total"] == outcome.result["rows"]
        assert len(events(job_dir, "started")) == 2
        assert written[0] == written[1] and "validation.parquet" in written[0]


def test_a_process_that_fails_to_predict_fails_the_job_with_its_own_traceback(
    world: Path, launched: Path, tmp_path: Path
) -> None:
    job_dir = predict_job(world, launched, tmp_path / "failing", splits=["validation"])
    problem = failure(finish(job_dir, 2, predict_but_on_second_rank))
    assert (problem.kind, problem.rank, problem.message) == ("internal", 1, "ZeroDivisionError: only here")
    assert "in predict" in problem.traceback and not (job_dir / "output/validation.parquet").exists()
