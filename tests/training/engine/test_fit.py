"""The promise of training: the same bytes, however often it was killed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.drill.full_disk import SmallDisk, enter, why_not
from tests.fork_server import Fork
from tests.training import tiny
from tests.training.forks import (
    assert_same,
    checkpoints_written,
    curve,
    events,
    finish,
    kill_when,
    run_fit,
)
from training.engine.checkpoints import find_damage
from training.jobs.protocol import Job, Outcome, read_outcome

EPOCHS = {"gradient_accumulation_steps": 3, "checkpoint_interval_s": 0.02}


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed job: 3 epochs, accumulation with a remainder, an evaluation each epoch."""
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "undisturbed", **EPOCHS)
    assert finish(job_dir).state == "finished"
    return job_dir


@pytest.mark.slow
def test_run_killed_at_many_instants_ends_with_the_same_weights_and_curve(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "killed", **EPOCHS)
    kills = 0
    for count in (1, 3, 7, 9, 12, 14):
        kills += kill_when(job_dir, lambda count=count: checkpoints_written(job_dir) >= count)
    assert finish(job_dir).state == "finished"
    assert kills >= 4
    assert_same(job_dir, undisturbed)


@pytest.mark.slow
def test_run_killed_while_saving_and_while_evaluating_ends_with_the_same_weights_and_curve(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "saving", **EPOCHS)
    folder = job_dir / "checkpoints"

    def evaluated(step: int) -> bool:
        return any(event["step"] >= step and "eval_loss" in event["values"] for event in events(job_dir, "metrics"))

    assert kill_when(job_dir, lambda: any(folder.glob(".writing-checkpoint-*/optimizer.pt")))
    assert kill_when(job_dir, lambda: evaluated(7))  # the checkpoint of this evaluation is not written yet
    assert kill_when(job_dir, lambda: evaluated(14))
    assert finish(job_dir).state == "finished"
    assert not list(folder.glob(".*"))
    assert_same(job_dir, undisturbed)


@pytest.mark.slow
def test_after_kills_each_step_has_one_point_of_each_name_its_speed_and_epoch_among_them(
    world: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "repeated", **EPOCHS | {"logging_steps": 7, "checkpoint_interval_s": 60.0})
    for step in (7, 14):  # what is evaluated then is repeated, as its checkpoint is not written yet
        assert kill_when(
            job_dir,
            lambda step=step: any(event["step"] >= step for event in events(job_dir, "speed")),
        )
    assert finish(job_dir).state == "finished"
    found = [*events(job_dir, "metrics"), *events(job_dir, "speed")]
    points = [(event["kind"], event["step"], name) for event in found for name in event["values"]]
    assert {step for _, step, _ in points} == {7, 14, 21} and len(points) == len({*points})


@pytest.mark.slow
def test_a_stopped_training_saves_and_reports_interrupted_and_the_next_run_resumes_there(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "stopped", **EPOCHS | {"checkpoint_interval_s": 600.0})
    assert kill_when(job_dir, lambda: bool(events(job_dir, "metrics")), signal.SIGTERM)
    outcome = read_outcome(job_dir)
    assert outcome is not None and outcome.failure is not None
    assert (outcome.state, outcome.failure.kind) == ("failed", "interrupted")
    (checkpoint,) = (job_dir / "checkpoints").glob("checkpoint-*")
    assert finish(job_dir, program=run_fit_with_three_threads).state == "finished"
    notes = [event["message"] for event in events(job_dir, "note")]
    assert f"resuming from {checkpoint.name}" in notes
    assert f"computing with 1 threads per process, not 3, because {checkpoint.name} was written with them" in notes
    assert_same(job_dir, undisturbed)


@pytest.mark.slow
def test_stopped_where_an_epoch_ends_with_an_evaluation_of_its_own_steps_nothing_of_the_epochs_end_is_lost(
    world: Path, tmp_path: Path
) -> None:
    """An epoch has 7 steps; what is logged at its end comes after the evaluation. The last step is within an epoch."""
    settings = {"eval_strategy": "steps", "eval_steps": 7, "max_steps": 17, "extra": {"logging_strategy": "epoch"}}
    settings |= EPOCHS | {"checkpoint_interval_s": 600.0}
    whole = tiny.fit_job(world, tmp_path / "whole", **settings)
    stopped = tiny.fit_job(world, tmp_path / "stopped", **settings, callbacks=["tests.training.own:StopsAtSeven"])
    assert finish(whole).state == "finished"
    failure = finish(stopped).failure
    assert failure is not None and failure.message.startswith("stopped after step 7;")
    assert finish(stopped).state == "finished"
    assert "train_loss" in curve(stopped)[7]
    assert_same(stopped, whole)


def run_fit_with_three_threads(job_dir: str, rank: dict[str, str]) -> None:
    """As on a machine that has more cores; with them, the first step would end with other bytes."""
    torch.set_num_threads(3)
    run_fit(job_dir, rank)


@pytest.mark.slow
def test_damaged_checkpoints_are_put_aside_and_an_older_one_or_none_gives_the_same_weights(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tmp_path / "damaged"
    shutil.copytree(undisturbed, job_dir)
    newest, older, *_ = sorted((job_dir / "checkpoints").glob("checkpoint-*"), key=step, reverse=True)
    flip_one_bit(newest / "optimizer.pt")
    assert finish(job_dir).state == "finished"
    assert f"resuming from {older.name}" in [event["message"] for event in events(job_dir, "note")]
    assert_same(job_dir, undisturbed)

    for checkpoint in (job_dir / "checkpoints").glob("checkpoint-*"):
        (checkpoint / "rng_state.pth").unlink()
    assert finish(job_dir).state == "finished"
    assert_same(job_dir, undisturbed)
    assert len(list((job_dir / "checkpoints/quarantine").iterdir())) >= 3


def run_fit_on_disk(job_dir: str, holder: int) -> None:
    enter(holder)
    run_fit(job_dir, {})


def problem_on(disk: SmallDisk, job_dir: Path, folder: Path) -> str:
    failure = finish_on(disk, job_dir).failure
    assert failure is not None and failure.kind == "user_error"
    (problem,) = failure.problems
    assert problem.where == str(folder)
    return problem.message


def finish_on(disk: SmallDisk, job_dir: Path) -> Outcome:
    Fork(run_fit_on_disk, (str(job_dir), disk.holder)).start().join(60)
    return read_outcome(job_dir) or Outcome(state="failed")


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_a_disk_too_small_or_full_ends_training_with_one_message_and_with_room_again_it_ends_with_the_same_bytes(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "full", **EPOCHS)
    folder = job_dir / "checkpoints"
    folder.mkdir()
    with SmallDisk(folder, megabytes=1) as disk:
        assert problem_on(disk, job_dir, folder).startswith("checkpoints and the model need about 1.2 MB, and 1.0 MB")
        assert not list(disk.seen.iterdir()) and not events(job_dir, "progress")
        # As if there had been room when it began.
        (job_dir / "events.jsonl").write_text(
            json.dumps({"time": 0.0, "kind": "estimate", "micro_batch_size": 8}) + "\n"
        )
        assert problem_on(disk, job_dir, folder).startswith("the disk is full: 0 of 1 MB are free. Make room")
        kept = sorted(disk.seen.iterdir(), key=step)  # and nothing that is half written
        assert kept and all(find_damage(checkpoint) is None for checkpoint in kept)
        disk.resize(megabytes=50)
        assert finish_on(disk, job_dir).state == "finished"
    assert f"resuming from {kept[-1].name}" in [event["message"] for event in events(job_dir, "note")]
    assert_same(job_dir, undisturbed)


@pytest.mark.slow
def test_a_run_that_was_over_when_it_was_killed_only_exports(world: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Also from another place: the folder of the checkpoints moved between the two."""
    for name, ending in {"early": EARLY, "mid-epoch": MID_EPOCH}.items():
        whole = tiny.fit_job(world, tmp_path / name, **ending)
        before = finish(whole).result
        moved = tmp_path / "elsewhere" / name
        shutil.copytree(whole, moved)
        shutil.rmtree(moved / "output")
        after = finish(moved).result
        assert after["steps"] == before["steps"] < 19 * 6
        assert {k: after[k] for k in STABLE} == {k: before[k] for k in STABLE}
        assert_same(moved, whole)


@pytest.mark.slow
def test_a_training_resumes_from_a_checkpoint_of_another_job_with_all_that_it_needs(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    newest = max((undisturbed / "checkpoints").glob("checkpoint-*"), key=step)
    settings = EPOCHS | {"lr_scheduler_type": "constant", "resume_from_checkpoint": str(newest)}
    longer = tiny.fit_job(world, tmp_path / "longer", **settings, num_train_epochs=4)
    (needed,) = json.loads((newest / "manifest.json").read_text())["needs"]
    shutil.copytree(newest.with_name(needed), longer / "checkpoints" / needed)  # killed before the other was copied
    figures = finish(longer).result
    assert figures["steps"] == step(newest) // 3 * 4
    assert not [point for point in curve(longer) if point <= step(newest)]

    messages = []
    for name, wrong in (
        ("no-more", {}),
        ("damaged", {"resume_from_checkpoint": str(damaged_copy(newest, tmp_path))}),
        ("other", {"resume_from_checkpoint": str(tmp_path)}),
        ("versions", {"resume_from_checkpoint": str(of_another_version(newest, tmp_path))}),
        ("rate", {"num_train_epochs": 4, "learning_rate": 1e-5, "weight_decay": 0.25, "extra": {"adam_beta2": 0.9}}),
    ):
        failure = finish(tiny.fit_job(world, tmp_path / name, **settings | wrong)).failure
        assert failure is not None and failure.problems[0].where == "training.resume_from_checkpoint"
        messages.append(failure.problems[0].message)
    assert "is where this training ends, after 21 steps: raise num_train_epochs, or if it had" in messages[0]
    assert "optimizer.pt changed after it was written" in messages[1]
    assert "is no checkpoint: name a folder such as checkpoint-40" in messages[2]
    assert (
        f"written with torch 1.0 (here {torch.__version__}): resuming from it would end with other weights"
        in messages[3]
    )
    assert not list((tmp_path / "versions/checkpoints").iterdir())
    assert "(here adamw_torch_fused, adam_beta2 0.9), learning rate" in messages[4]
    assert "(here 1e-05), weight decay 0.0 (here 0.25)" in messages[4]
    assert (
        "the checkpoint's optimizer keeps it: for another one, begin with weights alone, by model.path" in messages[4]
    )

    accepted = {"resume_from_checkpoint": str(tmp_path / "version/checkpoints" / newest.name), "inexact_resume": True}
    inexact = tiny.fit_job(world, tmp_path / "inexact", **settings | accepted, num_train_epochs=4)
    assert finish(inexact).state == "finished"
    (warning,) = (event["message"] for event in events(inexact, "warning"))
    assert "torch 1.0" in warning and "ends with other weights" in warning


def of_another_version(checkpoint: Path, folder: Path) -> Path:
    copy = shutil.copytree(checkpoint.parent, folder / "version/checkpoints") / checkpoint.name
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["written_by"]["torch"] = "1.0"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def damaged_copy(checkpoint: Path, folder: Path) -> Path:
    shutil.copytree(checkpoint.parent, folder / "copied")
    copy = folder / "copied" / checkpoint.name
    flip_one_bit(copy / "optimizer.pt")
    return copy


@pytest.mark.slow
def test_patience_of_early_stopping_is_remembered(world: Path, tmp_path: Path) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "patience", **EARLY)
    assert kill_when(job_dir, lambda: checkpoints_written(job_dir) >= 2)
    assert finish(job_dir).result["steps"] == 3 * 19  # the best epoch, and two that are no better


STABLE = ["steps", "epochs", "train_loss", "best_step", "best_metric"]
EARLY = {  # the learning rate is so small that the accuracy does not change
    "num_train_epochs": 6,
    "learning_rate": 1e-9,
    "metric_for_best_model": "accuracy",
    "early_stopping_patience": 2,
}
MID_EPOCH = {"max_steps": 25, "eval_strategy": "steps", "eval_steps": 10}


def step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def flip_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_export_is_the_best_model_with_its_labels_the_tokenizer_and_no_trace_of_this_machine(
    world: Path, undisturbed: Path
) -> None:
    output = undisturbed / "output/model"
    tokenizer = {file.name: file.read_bytes() for file in (world / "base/tokenizer").iterdir()}
    files = {file.name: file.read_bytes() for file in output.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", *tokenizer}
    assert tokenizer.items() <= files.items()
    assert str(world).encode() not in b"".join(files.values())
    config = json.loads(files["config.json"])
    assert config["id2label"] == dict(zip("012", tiny.LABELS, strict=True))
    assert config["label2id"] == {label: index for index, label in enumerate(tiny.LABELS)}
    best = (read_outcome(undisturbed) or Outcome(state="failed")).result["best_step"]
    best_checkpoint = undisturbed / f"checkpoints/checkpoint-{best}"
    assert (best_checkpoint / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_nothing_kept_holds_the_training_arguments_as_a_pickle(undisturbed: Path) -> None:
    assert not list(undisturbed.rglob("training_args.bin"))


def test_few_checkpoints_are_kept_and_the_best_is_among_them(undisturbed: Path) -> None:
    best = (read_outcome(undisturbed) or Outcome(state="failed")).result["best_step"]
    kept = {step(path) for path in (undisturbed / "checkpoints").glob("checkpoint-*")}
    assert best in kept and len(kept) <= 4  # the last but one may need what was best before


def test_a_metric_that_does_not_fit_the_labels_is_reported_before_the_first_step(world: Path, tmp_path: Path) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "of-numbers", max_steps=1)
    job = Job.read(job_dir)
    job.settings["metrics"].append("mse")
    job.write(job_dir)
    failure = finish(job_dir).failure
    assert failure is not None and failure.kind == "user_error", failure
    (problem,) = failure.problems
    assert problem.where == "evaluation.metrics[3]" and "the label 'animal' is not one" in problem.message
    assert events(job_dir, "progress") == events(job_dir, "estimate") == []


def test_accumulated_micro_batches_train_like_one_batch(world: Path, tmp_path: Path) -> None:
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base)
    config = json.loads((base / "model/config.json").read_text())
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "model/config.json").write_text(json.dumps(config | quiet))
    losses = []
    for batch, accumulation in ((10, 1), (5, 2)):
        job_dir = tiny.fit_job(
            world,
            tmp_path / f"batch{batch}",
            base=base.name,
            num_train_epochs=1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        losses.append(finish(job_dir).result["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bf16_and_fields_of_training_arguments_are_passed_on(world: Path, tmp_path: Path) -> None:
    extra = {"adam_beta1": 0.5, "logging_first_step": True}
    job_dir = tiny.fit_job(world, tmp_path / "bf16", precision="bf16", max_steps=2, extra=extra)
    assert finish(job_dir).state == "finished"
    assert 1 in curve(job_dir)
    checkpoint = next((job_dir / "checkpoints").glob("checkpoint-*"))
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert optimizer["param_groups"][0]["betas"][0] == 0.5
    assert optimizer["param_groups"][0]["fused"]


def test_value_that_training_arguments_refuses_is_the_users_mistake(world: Path, tmp_path: Path) -> None:
    outcome = finish(tiny.fit_job(world, tmp_path / "wrong", extra={"torch_empty_cache_steps": -1}))
    assert outcome.failure is not None and outcome.failure.kind == "user_error"
    assert "torch_empty_cache_steps" in outcome.failure.problems[0].message


@pytest.mark.slow
def test_the_estimate_before_the_first_step_changes_neither_weights_nor_curve(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    without = tiny.fit_job(world, tmp_path / "without", **EPOCHS)
    # As if an earlier try had written the estimate and was killed before its first checkpoint.
    (without / "events.jsonl").write_text(json.dumps({"time": 0.0, "kind": "estimate", "micro_batch_size": 8}) + "\n")
    assert finish(without).state == "finished"
    assert (len(events(undisturbed, "estimate")), len(events(without, "note"))) == (1, 0)
    assert_same(without, undisturbed)


def test_the_estimate_before_the_first_step_comes_true(undisturbed: Path) -> None:
    (estimate,), figures = (
        events(undisturbed, "estimate"),
        (read_outcome(undisturbed) or Outcome(state="failed")).result,
    )
    assert (estimate["steps"], estimate["micro_batch_size"]) == (figures["steps"], figures["micro_batch_size"])
    assert figures["estimated_memory_mb"] == pytest.approx(figures["peak_memory_mb"], rel=0.3)
    model = (undisturbed / "output/model/model.safetensors").stat().st_size
    assert estimate["parameters"] == estimate["trainable"] == pytest.approx(model / 4, rel=0.05)
    checkpoints = sum(path.stat().st_size for path in (undisturbed / "checkpoints").rglob("*") if path.is_file())
    assert checkpoints + model <= estimate["disk_mb"] * 1e6
    (note,) = (event["message"] for event in events(undisturbed, "note"))
    assert note.startswith(f"{estimate['parameters']:,} parameters, all trained; 21 steps, ")


def test_speed_counts_each_row_and_its_tokens_once_and_is_reported_as_often_as_the_loss(undisturbed: Path) -> None:
    speeds, (estimate,) = events(undisturbed, "speed"), events(undisturbed, "estimate")
    assert [event["step"] for event in speeds] == [4, 8, 12, 16, 20, 21]
    rows, tokens, seconds = (sum(event[name] for event in speeds) for name in ("rows", "tokens", "seconds"))
    assert (rows, tokens) == (3 * 150, 3 * estimate["tokens_per_epoch"])
    figures = (read_outcome(undisturbed) or Outcome(state="failed")).result
    assert figures["train_tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
    assert 0 < figures["hardware_share"] < 1
