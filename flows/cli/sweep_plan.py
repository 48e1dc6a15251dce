"""The plan of a sweep, for `finetune plan`: the stages that trials share, and the trainings that are left."""

from __future__ import annotations

from collections.abc import Iterator

from flows.pipeline import Scored
from flows.plan import divide_gpus
from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.results import Artifact
from tasks.home import home
from tasks.stages.load_data import counts_tokens
from tasks.sweeps.study import Study, only_sweep, study_key
from tasks.sweeps.trial import UNFINISHED, Trial
from training.problems import UserError
from training.recipe import Recipe, Sweep, parse

FIRST_STAGE = {"model": "load_model", "tokens": "tokenize", "options": "tokenize"}
"""The first stage that reads a section of the recipe; fields of other sections first matter to fit."""


def share_gpus(recipe: Recipe, sweep: Sweep) -> Recipe:
    """The recipe with the number of processes of a trial. Raises UserError if there are too few GPUs."""
    return parse(recipe.model_dump(exclude_unset=True), divide_gpus(recipe, sweep))


def summary_lines(recipe: Recipe, sweep: Sweep, planned: Scored) -> Iterator[str]:
    """What trials share, how many trainings there are at most, and what one costs."""
    sections = {name.partition(".")[0] for name in sweep.space}
    loading = ("load_model", "load_data") if counts_tokens(recipe) else ("load_data", "load_model")
    before_fit = ("resolve", *loading, "tokenize")
    varied = [before_fit.index(FIRST_STAGE.get(section, "tokenize")) for section in sections & FIRST_STAGE.keys()]
    shared = before_fit[: min(varied, default=len(before_fit))]
    yield f"All trials share {', '.join(shared)}; they differ in {', '.join(sweep.space)}."
    stored = _stored_trials(recipe, sweep, planned)
    left = (sweep.trials or 0) - len([trial for trial in stored if trial.state not in UNFINISHED])
    if left <= 0:
        yield f"All {sweep.trials} trials are stored."
        return
    text = f"At most {left} trainings, {sweep.parallel} at once"
    text += f" ({len(stored)} of {sweep.trials} trials are stored)" if stored else ""
    stops = "" if sweep.pruner_name == "none" else f", and {sweep.pruner_name} stops most of them early"
    yield f"{text}{stops}."
    if seconds := _seconds_of_training(recipe, stored, planned):
        yield f"One takes about {seconds:,.0f} s, by {'the stored trials' if stored else 'the last training here'}."


def _stored_trials(recipe: Recipe, sweep: Sweep, planned: Scored) -> list[Trial]:
    if not (isinstance(planned.data, Artifact) and isinstance(planned.model, Artifact)):
        return []
    key = study_key(recipe, sweep, planned.lock, planned.data, planned.model)
    if not (home() / "sweeps" / key).is_dir():
        return []
    try:
        with only_sweep(key):
            return Study(key, recipe, sweep).trials
    except UserError:  # it is running: its study is not touched
        return []


def _seconds_of_training(recipe: Recipe, stored: list[Trial], planned: Scored) -> float | None:
    """The mean time of the completed trials; without any, that of a training at the speed of the recipe's last one."""
    spent = [trial.seconds for trial in stored if trial.state == "completed"]
    if spent:
        return sum(spent) / len(spent)
    key = History(recipe.name).last_key("fit")
    last = store.manifest_of("fit", key) if key else None
    if last is None or not isinstance(planned.data, Artifact):
        return None
    rows = planned.data.figures["train_rows"] * recipe.training.num_train_epochs
    return float(rows / max(last[0].figures["train_samples_per_second"], 1e-9))
