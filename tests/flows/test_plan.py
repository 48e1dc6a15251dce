"""`finetune plan`: what it foresees after an edit, and what it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.main import main
from flows.cli.plan import _seconds_of_training
from flows.pipeline import pipeline
from flows.plan import find_unchanged_run
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.home import MARK
from tasks.home import home as create_home
from tasks.stages.preflight import training_estimate
from tests.flows.forked import code_with_forked_programs
from tests.flows.small import FinishedRun, command, environment, write_project
from tests.fork_server import NEW_PYTHON
from tests.made import KEY, ROWS, artifact
from tests.task_types import recipe_of, write_rows
from training.jobs.protocol import Outcome
from training.recipe import load, parse_set

ROOT = Path(__file__).parents[2]
BELOW_SCORE = ["find_champion", "gate", "register", "promote"]
NEEDS = {
    **{"parameters": 3000, "trainable": 3000, "steps": 7, "tokens_per_epoch": 5, "micro_batch_size": 16},
    **{"memory_mb": 5, "memory_per_row_mb": 0.1, "disk_mb": 1},
}
BELOW_TOKENS = ["fit", "predict", "score", *BELOW_SCORE]
PERHAPS_BELOW_TOKENS = [
    *("fit", "predict", "score", "find_champion", "predict_champion", "compare", "gate", "register", "promote")
]


@pytest.fixture
def project(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_unchecked: None) -> Path:
    """The finished run's home, and the same project written again somewhere else."""
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    return write_project(tmp_path / "project")


def plan(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> dict[str, str]:
    """Stage to the reason for which it will run."""
    assert main(["plan", str(file), *arguments]) == 0
    return _reasons(capsys.readouterr().out)


def _reasons(printed: str, sure: str = "will") -> dict[str, str]:
    lines = [line.split(maxsplit=3) for line in printed.splitlines()[:-1]]
    return {words[0]: words[3] for words in lines if words[1:3] == [sure, "run"]}


def test_the_same_content_in_another_folder_is_cached(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(project.parent / "train.csv")
    # Only the recipe's path of the rows differs.
    assert "load_data" not in plan(capsys, project)
    assert plan(capsys, project) == {}


def test_a_field_that_reaches_no_output_changes_nothing_for_a_run_either(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ["training.logging_steps=7", "data.max_file_gb=2", "compute.stall_timeout_s=900"]
    recipe = load(project, parse_set(changed))
    planner = Planner(recipe.name)
    pipeline(planner, recipe)
    assert find_unchanged_run(recipe.name, planner.rows) is not None
    assert main(["plan", str(project), *(word for one in changed for word in ("--set", one))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing changed."


def test_a_plan_does_not_say_that_nothing_changed_where_a_run_would_run(
    project: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shutil.copytree(os.environ["FINETUNE_HOME"], tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    (home / "recipes" / "small" / "completed.json").unlink()
    assert main(["plan", str(project)]) == 0
    assert "no run has completed" in capsys.readouterr().out.splitlines()[-1]


def test_a_learning_rate_leaves_data_model_and_tokens_cached(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child program estimates the training; the stored estimate does not depend on the learning rate."""
    assert main(["plan", str(project), "--set", "training.learning_rate=1e-3"]) == 0
    printed = capsys.readouterr().out
    reasons = _reasons(printed)
    assert list(reasons) == BELOW_TOKENS
    assert reasons["fit"] == "training.learning_rate 0.005 → 0.001"
    assert reasons["predict"] == "fit runs before it"
    estimate = r"  fit: [\d,]{5,} parameters, all trained; 120 steps, [\d,]{5} tokens per epoch; about .* of disk\n"
    assert re.search(estimate, printed)

    monkeypatch.setattr(training_estimate, "run_job", None)
    arguments = ["plan", str(project), "--set", "training.learning_rate=1e-4", "--show-launch"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(estimate, printed)

    # A training that has begun has its own estimate.
    job = Path(shlex.split(printed)[-1])
    job.mkdir(parents=True)
    (job / "events.jsonl").write_text(json.dumps({"time": 0.0, "kind": "estimate", **NEEDS}) + "\n")
    assert main(arguments) == 0
    assert "  fit: begun: 3,000 parameters, all trained; 7 steps, " in capsys.readouterr().out
    shutil.rmtree(job)


def test_training_is_estimated_again_after_an_edit_of_the_users_code_or_where_memory_ran_out(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[dict[str, object]] = []

    def run_job(*given: Any, **named: Any) -> Outcome:
        ran.append(NEEDS | {"memory_mb": 5 if ran else None})
        return Outcome(state="finished", result=ran[-1])

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(training_estimate, "run_job", run_job)
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "my_losses_to_come.py"
    for change, times in (("A = 1", 1), ("A = 1", 2), ("A = 1", 2), ("A = 20", 3)):
        mine.write_text(change)
        plan(capsys, project, "--set", "training.loss=my_losses_to_come:hinge")
        assert len(ran) == times
    monkeypatch.setattr(training_estimate, "write_atomically", full)
    mine.write_text("A = 300")
    assert "fit" in plan(capsys, project, "--set", "training.loss=my_losses_to_come:hinge") and len(ran) == 4


def test_folds_need_the_disk_of_all_and_the_memory_of_those_at_once(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = NEEDS | {"memory_mb": 4_000, "disk_mb": 1_000, "parameters": 50_000_000}
    monkeypatch.setattr(training_estimate, "run_job", lambda *given, **named: Outcome(state="finished", result=needs))
    monkeypatch.setattr(training_estimate, "visible_gpus", list)
    monkeypatch.setattr(training_estimate, "memory_left", lambda processes: 9_000_000_000 // processes)
    recipe = ["plan", str(project), "--set", "evaluation.folds=5", "--set", "training.learning_rate=2e-3"]
    recipe += ["--set", "training.optim=adafactor"]  # its estimate is not stored
    assert main(recipe) == 0
    printed = capsys.readouterr().out
    assert "\n  folds: 5 trainings need 1.8 GB of disk\n" in printed and "parallel_folds" not in printed
    assert main([*recipe, "--set", "evaluation.parallel_folds=4"]) == 0
    printed = capsys.readouterr().out
    assert "\n  folds: 5 trainings need 4.2 GB of disk, and 4 at once about 16.0 GB of memory\n" in printed
    assert (
        "\n  folds: evaluation.parallel_folds: 4 at once need about 16.0 GB of memory, and 9.0 GB are free: "
        "set it to 2.\n"
    ) in printed
    free = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(training_estimate.shutil, "disk_usage", lambda folder: free)
    assert main(recipe) == 0
    shown = "\n  folds: evaluation.folds: 5 trainings need 1.8 GB of disk, and 1.0 GB are free: free some space, set "
    assert shown in capsys.readouterr().out


def test_a_length_leaves_data_and_model_cached(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(project), "--set", "tokens.max_length=16"]) == 0
    printed = capsys.readouterr().out
    assert "  fit: steps, tokens, memory and disk: ?, until the stages before it have run\n" in printed
    assert _reasons(printed) == {"tokenize": "tokens.max_length 32 → 16"}
    perhaps = _reasons(printed, "may")
    assert (
        list(perhaps) == PERHAPS_BELOW_TOKENS
        and perhaps["fit"] == "only if tokenize gives something else than last time"
    )
    assert printed.splitlines()[-1].endswith("stages will run, and perhaps 9 more.")


def test_other_line_ends_announce_no_training_for_sure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = project.parent / "train.csv"
    rows.write_bytes(rows.read_bytes().replace(b"\r\n", b"\n"))
    assert main(["plan", str(project)]) == 0
    printed = capsys.readouterr().out
    assert _reasons(printed) == {"load_data": f"{rows} changed"}
    perhaps = _reasons(printed, "may")
    assert list(perhaps) == ["load_model", "tokenize", *PERHAPS_BELOW_TOKENS]
    assert perhaps["load_model"] == "only if load_data gives something else than last time"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("metrics=[accuracy, f1]", "evaluation.metrics ['accuracy', 'f1', 'precision', 'reca… → ['accuracy', 'f1']"),
        ("slices=[label, length_bucket]", "evaluation.slices [] → ['label', 'length_bucket']"),
    ],
)
def test_a_metric_or_a_slice_recomputes_the_score_alone(
    project: Path, capsys: pytest.CaptureFixture[str], setting: str, reason: str
) -> None:
    reasons = plan(capsys, project, "--set", f"evaluation.{setting}")
    assert list(reasons) == ["score", *BELOW_SCORE] and reasons["score"] == reason


def test_a_floor_of_lengths_that_no_row_has_is_reported_before_anything_is_trained(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floors = "release.gate.floors={length_bucket=1-2 tokns: {accuracy: 0.5}}"
    settings = ["--set", "evaluation.slices=[length_bucket]", "--set", floors, "--set", "training.learning_rate=1e-3"]
    assert main(["plan", str(project), *settings]) == 2
    error = "release.gate.floors.length_bucket=1-2 tokns: length_bucket has no group '1-2 tokns' in validation: choose"
    assert error in capsys.readouterr().err


def test_a_metric_of_numbers_is_refused_by_a_plan_where_the_labels_are_none(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(project), "--set", "evaluation.metrics=[accuracy, mse, pearson]"]) == 2
    printed = capsys.readouterr().err
    for index, name in ((1, "mse"), (2, "pearson")):
        assert f"evaluation.metrics[{index}]: {name!r} needs numbers, and the label 'neg' is not one: choose" in printed


def test_one_cell_changed_with_size_and_mtime_kept_is_noticed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = project.parent / "train.csv"
    before, content = rows.stat(), rows.read_bytes()
    rows.write_bytes(content.replace(b"film", b"flim", 1))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (rows.stat().st_size, rows.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    reasons = plan(capsys, project)
    assert next(iter(reasons)) == "load_data"
    assert reasons["load_data"] == f"{rows} changed"


def test_planning_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_unchecked: None
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    reasons = plan(capsys, write_project(tmp_path / "project"))
    assert reasons["load_data"] == "it has not run before"
    assert {path.name for path in (tmp_path / "home").iterdir()} <= {"digests.db", MARK}


@pytest.mark.slow
def test_how_training_is_launched_is_shown_without_loading_torch(finished: FinishedRun) -> None:
    program = (
        "import sys; from flows.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'prefect',"
        " 'cryptography', 'sigstore', 'model_signing'}), "
        "file=sys.stderr)"
    )
    sets = [word for field in ("strategy=fsdp", "num_processes=2") for word in ("--set", f"compute.{field}")]
    code = code_with_forked_programs(program)
    argv = [NEW_PYTHON, "-c", code, "plan", str(finished.file), "--show-launch", *sets]
    run = subprocess.run(argv, env=environment(finished.home, MY_SECRET="s3cret"), capture_output=True, text=True)
    assert run.stderr.split() == []
    shown = run.stdout.partition("\n\n")[2]
    assert "OMP_NUM_THREADS=" in shown and "--num_processes 2 --num_machines 1" in shown and "s3cret" not in shown
    assert "transformer_layer_cls_to_wrap: from the model" in shown


def test_the_shown_launch_is_the_one_that_ran(
    finished: FinishedRun, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(project), "--show-launch"]) == 0
    (artifact,) = (stage["artifact"] for stage in finished.result["stages"] if stage["name"] == "fit")
    launched = json.loads((finished.home / artifact / "log/launch.json").read_text())
    *argv, job = launched["argv"]
    here = str(finished.home / "jobs" / Path(job).name)  # the run may have had another home
    assert capsys.readouterr().out.rstrip().endswith(shlex.join([*argv, here]))
    assert launched["environment"]["PYTHONSAFEPATH"] == "1" and launched["configuration"] == {}


def checkout(tmp_path: Path) -> Path:
    """The project's own code, somewhere else."""
    for package in ("flows", "tasks", "training"):
        shutil.copytree(ROOT / package, tmp_path / "checkout" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "checkout"


def plan_from(checkout: Path, finished: FinishedRun) -> dict[str, str]:
    """The reasons that a checkout's own `finetune plan` prints."""
    env = environment(finished.home, PYTHONPATH=str(checkout))
    run = subprocess.run(
        [sys.executable, *command("plan", str(finished.file))[1:]],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return _reasons(run.stdout)


@pytest.mark.slow
def test_a_moved_checkout_a_reformat_and_an_edit_of_the_runtime_change_nothing(
    finished: FinishedRun, tmp_path: Path
) -> None:
    moved = checkout(tmp_path)
    assert plan_from(moved, finished) == {}
    for name, line in (
        ("training/tokenization/encoder.py", "# a comment\n"),
        ("tasks/jobs/launch.py", "CHANGED = True\n"),
    ):
        module = moved / name
        module.write_text(module.read_text() + "\n\n" + line)
    assert plan_from(moved, finished) == {}


@pytest.mark.slow
def test_one_line_of_a_stages_helper_is_noticed_and_named(finished: FinishedRun, tmp_path: Path) -> None:
    moved = checkout(tmp_path)
    module = moved / "training" / "tokenization" / "encoder.py"
    module.write_text(module.read_text() + "\nCHANGED = True\n")
    reasons = plan_from(moved, finished)
    assert reasons == {"tokenize": "training/tokenization/encoder.py changed"}


def test_trials_of_images_share_their_processing_and_have_no_single_launch(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("image-classification", write_rows("image-classification", tmp_path / "rows"))
    sweep = {"space": {"training.learning_rate": {"log": [1e-4, 1e-3]}}, "trials": 2}
    entry = {"name": "a", "entrypoint": "flows.sweep:sweep", "parameters": {"recipe": recipe, "sweep": sweep}}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    assert main(["plan", str(file)]) == 0
    shared = "All trials share resolve, load_data, load_model, process_images; they differ in training.learning_rate."
    assert shared in capsys.readouterr().out
    assert main(["plan", str(file), "--show-launch"]) == 2
    assert capsys.readouterr().err.startswith("--show-launch: is for the training of a run, and a sweep has several")


def test_the_time_of_trials_is_unknown_if_another_version_of_the_project_stored_the_last_training(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_home()
    artifact("fit", {"model": b""}, {"steps": 3, "train_samples_per_second": 9.0})
    monkeypatch.setattr(History, "last_key", lambda history, stage: KEY)
    data = artifact("load_data", {"rows": b""}, ROWS)
    recipe = load(write_project(tmp_path / "project"))
    assert _seconds_of_training(recipe, [], data) is None
