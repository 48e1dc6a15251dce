"""The plan of a sweep, for `finetune plan`: the stages that trials share, and the trainings that are left."""

from __future__ import annotations

from collections.abc import Iterator

from flows.pipeline import Scored, train_and_score
from flows.plan import divide_gpus
from tasks.cache import settings, store
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.cache.refs import Ref
from tasks.sweeps.study import Study, study_key
from tasks.sweeps.trial import Trial
from training.recipe import Recipe, Sweep, parse

FIRST_STAGE = {"model": "load_model", "tokens": "tokenize", "options": "tokenize"}
"""The first stage that reads a section of the recipe; fields of other sections first matter to fit."""
BEFORE_FIT = ("resolve", "load_data", "load_model", "tokenize")


def plan_sweep(recipe: Recipe, sweep: Sweep, planner: Planner) -> Scored:
    """Walks the stages of a trial with the recipe's own settings. Raises UserError as they do."""
    recipe = parse(recipe.model_dump(exclude_unset=True), divide_gpus(recipe, sweep))
    return train_and_score(planner, recipe)


def summary_lines(recipe: Recipe, sweep: Sweep, planned: Scored) -> Iterator[str]:
    """What trials share, how many trainings there are at most, and what one costs."""
    sections = {name.partition(".")[0] for name in sweep.space}
    varied = [BEFORE_FIT.index(FIRST_STAGE.get(section, "tokenize")) for section in sections & FIRST_STAGE.keys()]
    shared = BEFORE_FIT[: min(varied, default=len(BEFORE_FIT))]
    yield f"All trials share {', '.join(shared)}; they differ in {', '.join(sweep.space)}."
    stored = _stored_trials(recipe, sweep, planned)
    left = (sweep.trials or 0) - len([trial for trial in stored if trial.state != "running"])
    if left <= 0:
        yield f"All {sweep.trials} trials are stored."
        return
    text = f"At most {left} trainings, {sweep.parallel} at once"
    text += f" ({len(stored)} of {sweep.trials} trials are stored)" if stored else ""
    stops = "" if sweep.pruner_name == "none" else f", and {sweep.pruner_name} stops most of them early"
    yield f"{text}{stops}."
    if seconds := _seconds_of_training(recipe, stored):
        yield f"One takes about {seconds:,.0f} s, by {'the stored trials' if stored else 'the last training here'}."


def _stored_trials(recipe: Recipe, sweep: Sweep, planned: Scored) -> list[Trial]:
    if not (isinstance(planned.data, Ref) and isinstance(planned.model, Ref)):
        return []
    key = study_key(recipe, sweep, planned.lock, planned.data, planned.model)
    if not (settings.home() / "sweeps" / key).is_dir():
        return []
    return Study(key, recipe, sweep).trials


def _seconds_of_training(recipe: Recipe, stored: list[Trial]) -> float | None:
    """The mean time of the stored trials; without any, that of a training at the speed of the recipe's last one."""
    spent = [trial.seconds for trial in stored if trial.seconds]
    if spent:
        return sum(spent) / len(spent)
    key = History(recipe.name).last_key("fit")
    last = store.manifest_of("fit", key) if key else None
    if last is None:
        return None
    figures, training = last[0].figures, recipe.training
    rows = figures["steps"] * training.per_device_train_batch_size * training.gradient_accumulation_steps
    return float(rows / max(figures["train_samples_per_second"], 1e-9))
