"""Studies: what a sweep proposes, pauses and resumes, and what a kill leaves of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tasks.sweeps.search_algorithms import SuccessiveHalving
from tasks.sweeps.study import Study, only_sweep
from tasks.sweeps.trial_state import Trial
from training.problems import UserError
from training.recipe import parse_sweep

RECIPE: dict[str, Any] = {
    "name": "test",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
    "model": {"source": "hub", "path": "me/model"},
}
SPACE: dict[str, Any] = {
    "training.learning_rate": {"log": [1e-5, 1e-3]},
    "training.num_train_epochs": {"range": [1, 4]},
    "training.weight_decay": {"range": [0.0, 0.1], "step": 0.05},
    "training.optim": {"choice": ["adamw_torch", "sgd"]},
    "training.extra": {
        "choice": [{"adam_beta2": 0.9}, {"adam_beta2": 0.99}],
        "when": {"training.optim": "adamw_torch"},
    },
}


def study(key: str = "study", **sweep: Any) -> Study:
    recipe, search = parse_sweep(RECIPE, {"space": SPACE, **sweep})
    return Study(key, recipe, search)


def loss_of(trial: Trial) -> float:
    """A figure that depends on the settings alone; more is better."""
    return 1.0 - abs(math.log10(trial.settings["training.learning_rate"]) + 4) / 10


def finish(study: Study, evaluations: int = 4, stop_after: int | None = None) -> None:
    """Runs trials until there are no more, or until so many steps were taken, as a killed sweep does."""
    steps = 0
    while trial := study.next():
        ended = False
        for evaluation in range(1, evaluations + 1):
            steps += 1
            if stop_after is not None and steps > stop_after:
                return
            # The curve of a training is the same whenever it is run.
            if (
                study.evaluated(trial, evaluation, loss_of(trial) * evaluation / evaluations)
                and evaluation < evaluations
            ):
                study.pause(trial, 1.0)
                ended = True
                break
        if not ended:
            study.complete(trial, loss_of(trial), None, None, 1.0)


def outcomes(study: Study) -> list[tuple[Any, ...]]:
    return [(t.number, dict(t.settings), t.state, t.value, t.evaluations) for t in study.trials]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [
        ("tpe", "none"),
        ("random", "hyperband"),
        ("cmaes", "median"),
        ({"name": "tpe", "n_startup_trials": 2}, "asha"),
        ({"name": "tpe", "n_startup_trials": 2}, {"name": "percentile", "percentile": 50.0}),
    ],
)
def test_a_sweep_that_is_killed_at_any_step_ends_with_the_trials_of_an_undisturbed_one(
    home: Path, sampler: Any, pruner: Any
) -> None:
    settings: dict[str, Any] = {"sampler": sampler, "pruner": pruner, "trials": 9, "seed": 3}
    undisturbed = study("undisturbed", **settings)
    finish(undisturbed)
    expected = outcomes(undisturbed)
    assert len(expected) == 9
    for stop_after in (1, 8, 15):
        finish(study(f"killed-{stop_after}", **settings), stop_after=stop_after)
        resumed = study(f"killed-{stop_after}", **settings)  # a new process has nothing but the journal
        finish(resumed)
        assert outcomes(resumed) == expected, stop_after
    assert outcomes(study("other-seed", **{**settings, "seed": 4})) == []
    other = study("other-seed", **{**settings, "seed": 4})
    finish(other)
    assert [t.settings for t in other.trials] != [t.settings for t in undisturbed.trials]


def test_values_lie_in_the_space_and_a_condition_decides_whether_a_field_is_searched(home: Path) -> None:
    found = study(sampler="random", trials=40)
    finish(found)
    chosen = [trial.settings for trial in found.trials]
    assert all(1e-5 <= one["training.learning_rate"] <= 1e-3 for one in chosen)
    assert {one["training.num_train_epochs"] for one in chosen} == {1, 2, 3, 4}
    assert {round(one["training.weight_decay"], 9) for one in chosen} == {0.0, 0.05, 0.1}
    for one in chosen:
        assert ("training.extra" in one) == (one["training.optim"] == "adamw_torch")
        assert one.get("training.extra", {"adam_beta2": 0.9}) in ({"adam_beta2": 0.9}, {"adam_beta2": 0.99})


def test_a_grid_is_tried_once_and_as_a_whole(home: Path) -> None:
    space = {"training.num_train_epochs": {"range": [1, 3]}, "training.optim": {"choice": ["adamw_torch", "sgd"]}}
    found = study(space=space, sampler="grid")
    tried = []
    while trial := found.next():
        tried.append(tuple(trial.settings.values()))
        found.complete(trial, 0.5, None, None, 0.0)
    assert sorted(tried) == [(epochs, optim) for epochs in (1, 2, 3) for optim in ("adamw_torch", "sgd")]


def test_a_grid_has_steps_of_a_tenth_exactly(home: Path) -> None:
    found = study(space={"training.weight_decay": {"range": [0.0, 0.3], "step": 0.1}}, sampler="grid")
    values = []
    while trial := found.next():
        values.append(trial.settings["training.weight_decay"])
        found.complete(trial, 0.5, None, None, 0.0)
    assert sorted(values) == [0.0, 0.1, 0.2, 0.3]


def trials(*curves: list[float], state: str = "paused") -> list[Trial]:
    """Trials with these evaluations, that all paused after the last."""
    return [
        Trial(number, {}, state, dict(enumerate(curve, 1)))  # type: ignore[arg-type]
        for number, curve in enumerate(curves, 1)
    ]


def more(value: float) -> float:
    return -value


def test_of_every_three_trials_at_a_rung_one_continues_however_late_it_is_known() -> None:
    halving = SuccessiveHalving(more, min_resource=1, reduction_factor=3)
    first, second, third = found = trials([0.5], [0.7], [0.6])
    assert halving.pauses(first, 1, found[:1]) and halving.pauses(second, 1, found[:2])
    assert halving.find_resumable(found[:2], at_end=False) is None
    assert halving.pauses(third, 1, found)
    resumable = halving.find_resumable(found, at_end=False)
    assert resumable is not None and resumable.number == 2
    better = trials([0.5], [0.7], [0.9])
    assert not halving.pauses(better[2], 1, better)
    assert not halving.pauses(found[0], 2, found)  # evaluation 2 is no rung: 1, 3, 9, …


def test_at_the_end_the_best_of_the_highest_rung_is_trained_to_its_end_if_no_trial_is() -> None:
    halving = SuccessiveHalving(more, min_resource=1, reduction_factor=3)
    found = trials([0.5], [0.7])
    assert halving.find_resumable(found, at_end=False) is None
    resumable = halving.find_resumable(found, at_end=True)
    assert resumable is not None and resumable.number == 2
    completed = [*found, Trial(3, {}, "completed", {1: 0.4}, 0.4)]
    last = halving.find_resumable(completed, at_end=True)
    assert last is not None and last.number == 2  # one of three, and the completed one is not among the best
    assert halving.find_resumable([found[0], completed[2]], at_end=True) is None


def test_the_brackets_of_hyperband_begin_at_different_rungs() -> None:
    halving = SuccessiveHalving(more, min_resource=1, reduction_factor=3, brackets=2)
    one, two = trials([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    assert [halving.pauses(one, n, [one]) for n in (1, 2, 3)] == [True, False, True]
    assert [halving.pauses(two, n, [two]) for n in (1, 2, 3)] == [False, False, True]


def test_a_resumed_trial_keeps_its_number_its_evaluations_and_its_flow_run(home: Path) -> None:
    found = study(sampler="random", trials=3, pruner="asha")
    for value in (0.5, 0.7, 0.6):
        trial = found.next()
        assert trial is not None
        found.set_flow_run(trial, f"run-{trial.number}")
        assert found.evaluated(trial, 1, value)
        found.pause(trial, 2.0)
    again = found.next()
    assert again is not None and (again.number, again.flow_run_id, again.resumed_after) == (2, "run-2", 1)
    assert not found.evaluated(again, 1, 0.7)  # the training replays its events
    assert not found.evaluated(again, 2, 0.8)
    found.complete(again, 0.9, 0.8, 1.0, 3.0)
    assert [trial.state for trial in found.trials] == ["paused", "completed", "paused"]
    assert found.best is not None and (found.best.value, found.best.seconds) == (0.9, 5.0)
    assert len(found.optuna.trials) == 4 and found.next() is None


def test_a_study_continues_after_a_kill_that_cut_the_last_line_of_its_journal(home: Path) -> None:
    found = study(trials=2, sampler="random")
    first = found.next()
    assert first is not None
    found.complete(first, 0.5, None, None, 0.0)
    journal = found.folder / "journal.log"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')
    resumed = study(trials=2, sampler="random")
    assert [trial.state for trial in resumed.trials] == ["completed"]
    finish(resumed)
    assert [trial.state for trial in study(trials=2, sampler="random").trials] == ["completed", "completed"]


def test_a_full_disk_leaves_no_part_of_a_line_in_the_journal(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = study(trials=2, sampler="random")
    first = found.next()
    assert first is not None
    before = (found.folder / "journal.log").read_bytes()

    def fills_up(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.fsync", fills_up)
        with pytest.raises(OSError, match="No space"):
            found.evaluated(first, 1, 0.5)
    assert (found.folder / "journal.log").read_bytes() == before
    finish(study(trials=2, sampler="random"))
    assert [trial.state for trial in study(trials=2, sampler="random").trials] == ["completed", "completed"]


def test_two_processes_do_not_run_one_study_over_one_home(home: Path) -> None:
    with only_sweep("study"):
        with pytest.raises(UserError, match="another process runs this sweep"), only_sweep("study"):
            pass
        with only_sweep("another"):
            pass


def test_a_database_keeps_the_studies_of_a_team(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_SWEEPS", f"sqlite:///{tmp_path}/studies.db")
    finish(study(trials=3, pruner="asha"))
    elsewhere = study(trials=3, pruner="asha")
    assert len(elsewhere.trials) == 3 and not (elsewhere.folder / "journal.log").exists()
    monkeypatch.setenv("FINETUNE_SWEEPS", "postgresql://user:secret@127.0.0.1:1/studies")
    with pytest.raises(UserError) as error:
        study()
    assert error.value.problems[0].where == "FINETUNE_SWEEPS" and "secret" not in str(error.value)
