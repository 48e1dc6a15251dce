"""The flow `sweep`: searches the settings of a recipe, and releases the best model by the ordinary flow."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.callers import WORKER, Caller, fail
from flows.finetune import FromSweep, finetune, run_finetune
from flows.naming import sweep_run_name
from flows.pipeline import Scored, TrainingInputs, prepare, train_and_score
from flows.plan import divide_gpus
from flows.reports.result import list_problems, state_of
from flows.reports.sweep_table import SweepTerminal, TrialProgress, format_settings, tabulate_trials
from flows.reports.tracked_run import MLFLOW_STATUS
from flows.trial import TrialRun, trial_recipe
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.planner import Planner
from tasks.cache.results import Artifact, Comparison, Lock, PinnedVersion, Selection
from tasks.cache.stage import Listener
from tasks.home import home
from tasks.jobs import fork_client
from tasks.jobs.engines.local import early_launches
from tasks.jobs.hardware import visible_gpus
from tasks.jobs.launch import JobFailed
from tasks.jobs.parallel_calls import ParallelCalls
from tasks.prefect import events
from tasks.prefect.prefect_artifacts import ArtifactSender, PrefectProgress, Table
from tasks.registry import untrusted_code
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.compare import compare, find_champion
from tasks.stages.compare_seeds import compare_seeds, describe_gain
from tasks.stages.fit import engine_for
from tasks.stages.predict import predict_champion
from tasks.stages.resolve import pin_variants
from tasks.sweeps.pictures import draw_pictures
from tasks.sweeps.study import Study, only_sweep, study_key
from tasks.sweeps.trial_state import UNFINISHED, Trial
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import STUDY_TAG
from training.problems import UserError, full_disk
from training.recipe import Recipe, Sweep, parse, parse_sweep

LOOK_S = 1.0
"""Between two looks at trials that run at once."""
RESOLVED = (
    "model",
    "compute",
    "data.unlabelled",
    *(f"training.teacher.{name}" for name in ("source", "path", "revision", "unlabelled_min_confidence")),
)
"""Parts of the recipe that `resolve` reads: a trial that changes one of them resolves them again."""
LEAST_SEEDS = 3
"""Seeds that have completed with all variants, for an interval."""
MOST_COMPARED = 5
"""The trials after the best that are compared with it."""
Show = Callable[[list[dict[str, str]], str], None]


@flow(name="sweep", flow_run_name=sweep_run_name)
def sweep(
    recipe: Recipe, sweep: Sweep, overrides: dict[str, Any] | None = None, trials: int | None = None
) -> dict[str, Any] | State[Any]:
    """Searches the settings of a recipe, and releases the best model.

    Args:
        recipe: All that makes the model, except the settings that are searched.
        sweep: The fields to search, and how.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        trials: The number of trials, instead of the sweep's own.
    """
    # Prefect and MLflow show the trials.
    return run_sweep(WORKER, recipe, sweep, overrides, trials, table=SweepTerminal(sweep, quiet=True))


def run_sweep(
    caller: Caller,
    recipe: Recipe,
    sweep: Sweep,
    overrides: dict[str, Any] | None,
    trials: int | None,
    *,
    table: SweepTerminal,
) -> dict[str, Any] | State[Any]:
    """Runs the flow `sweep` for a caller, who sees the table of trials."""
    values = recipe.model_dump(exclude_unset=True)
    with events.emit_heartbeats(str(flow_run.get_id())), events.without_prefect_heartbeats(), early_launches():
        _, search = parse_sweep(values, sweep.model_dump(exclude_unset=True), overrides, trials)
        return _run_sweep(caller, table, values, search, dict(overrides or {}))


def _run_sweep(
    caller: Caller, table: SweepTerminal, values: dict[str, Any], sweep: Sweep, overrides: dict[str, Any]
) -> dict[str, Any] | State[Any]:
    overrides |= divide_gpus(parse(values, overrides), sweep)
    recipe, run = parse(values, overrides), str(flow_run.get_id())
    with in_use(caller.report_removal), closing(RunTracker(recipe.name, run, str(flow_run.get_name()))) as tracker:
        tracker.log_params({f"sweep.{name}": _text(value) for name, value in sweep.model_dump(mode="json").items()})
        documents = {"recipe": recipe.model_dump(mode="json"), "sweep": sweep.model_dump(mode="json")}
        tracker.log_text("sweep.yaml", yaml.safe_dump(documents, sort_keys=False))
        untrusted_code.record_code(run, recipe)
        progress = PrefectProgress(lambda: tracker.pages)
        remote = open_remote()
        remote.deliver_earlier()
        executor = Executor(recipe.name, run, (tracker, progress, *caller.listeners), remote=remote)
        result: dict[str, Any] = {"flow_run_id": run, "study": None, "trials": [], "best": None, "run": None}
        error: BaseException | None = None
        try:
            with engine_for(recipe).keep_open(several=sweep.parallel > 1):
                _search(caller, table, values, overrides, sweep, executor, run, tracker, result)
        except BaseException as ended:
            error = full_disk(home(), ended) or ended
        state = state_of(error)
        table.close()
        warnings = executor.end_uploads(wait=state != "interrupted")
        progress.end()
        place = executor.rows[-1].name if executor.rows and result["study"] is None else "sweep"
        problems = [*list_problems(error, place), *((result["run"] or {}).get("problems") or [])]
        failed = state == "completed" and result["run"] is not None and result["run"]["state"] != "completed"
        result |= {"state": result["run"]["state"] if failed else state, "problems": problems}
        result["metrics"] = (result["run"] or {}).get("metrics", {})
        tracker.end(MLFLOW_STATUS[result["state"]])
        result |= {"mlflow_run_id": tracker.mlflow_run_id, "warnings": [*warnings, *tracker.warnings]}
        caller.send(result)
        if result["state"] == "completed":
            return result
        message = "\n".join(f"{problem['where']}: {problem['message']}" for problem in problems)
        return fail(error, message) if error else Failed(message=message)


def _search(
    caller: Caller,
    table: SweepTerminal,
    values: dict[str, Any],
    overrides: dict[str, Any],
    sweep: Sweep,
    executor: Executor,
    run: str,
    tracker: RunTracker,
    result: dict[str, Any],
) -> None:
    """Prepares the data, runs the trials, and releases the best. After an error, the result has what was known."""
    recipe = parse(values, overrides)
    ready = prepare(executor, recipe)
    fork_client.start()  # threads of several trials would each start one
    of_variants = pin_variants(recipe, sweep.variants.values())
    key = study_key(recipe, sweep, ready.lock, ready.data, ready.model, of_variants)
    with only_sweep(key), _table_artifact() as show:
        study = Study(key, recipe, sweep)
        tracker.set_tags({STUDY_TAG: study.name})
        result["study"] = study.name
        search = Search(recipe, sweep, study, ready, run, table, show)
        try:
            search.run_trials()
        except BaseException:
            with contextlib.suppress(Exception):  # the error that ended the search is the one to report
                result["trials"] = [summarize_trial(trial) for trial in study.trials]
            raise
        result["trials"] = [summarize_trial(trial) for trial in study.trials]
        if sweep.variants:
            result["gains"] = search.compare_variants()
            tracker.log_text("gains.json", json.dumps(result["gains"], indent=1))
            tracker.describe("\n\n".join(gain["summary"] for gain in result["gains"]))
            return
        _log_trials(tracker, study, sweep)
        best = study.best
        if best is None:
            message = "no trial has completed: raise sweep.trials or sweep.timeout_s, or correct the failed trials."
            raise UserError.of("sweep", "sweep.trials", message)
        selection = _select(study, sweep, best, search.find_similar(best))
        result["best"] = {**summarize_trial(best), "similar": selection.similar, "summary": search.describe_best()}
        if versus := search.against_champion:
            result["best"]["champion"] = versus.model_dump(mode="json")
        if selection.similar:
            numbers = ", ".join(map(str, selection.similar))
            text = f"Trial {best.number} cannot be told apart from {numbers} on the rows of validation (paired test)."
            result["best"]["warning"] = text
            get_run_logger().warning(text)
    result["run"] = _release(caller, values, {**overrides, **best.settings}, FromSweep(selection, run))


def _select(study: Study, sweep: Sweep, best: Trial, similar: list[int]) -> Selection:
    trials = study.trials
    return Selection(
        study=study.name,
        trial=best.number,
        trials=len(trials),
        completed=sum(trial.state == "completed" for trial in trials),
        metric=str(sweep.metric),
        direction=sweep.direction or "maximize",
        value=best.value or 0.0,
        sampler=sweep.sampler_name,
        pruner=sweep.pruner_name,
        settings=dict(best.settings),
        similar=similar,
    )


def _release(caller: Caller, values: dict[str, Any], overrides: dict[str, Any], sweep: FromSweep) -> dict[str, Any]:
    """Runs the ordinary flow with the chosen settings, whose training is stored. Returns its result."""
    keeper = _Keeper()
    caller = replace(caller, listeners=(*caller.listeners, keeper))
    release: Callable[..., State[Any]] = caller.bind(finetune, run_finetune, sweep=sweep)
    state = release(recipe=parse(values), overrides=overrides, return_state=True)
    if keeper.result is None:
        state.result()  # raises the error of a flow that failed outside its stages
    assert keeper.result is not None
    return keeper.result


class _Keeper(Listener):
    """Keeps the result of a run."""

    result: dict[str, Any] | None = None

    def run_ended(self, result: dict[str, Any]) -> None:
        """Keeps it."""
        self.result = result


@contextlib.contextmanager
def _table_artifact() -> Iterator[Any]:
    """Yields a function that shows the table of trials on the page of the flow run."""
    artifacts = ArtifactSender()

    def show(rows: list[dict[str, str]], headline: str) -> None:
        if rows:
            artifacts.put("trials", Table(rows, headline))

    try:
        yield show
    finally:
        artifacts.end()


def _log_trials(tracker: RunTracker, study: Study, sweep: Sweep) -> None:
    """Logs the values of the trials, the table and the pictures of the study to the sweep's MLflow run."""
    trials, best = study.trials, study.best
    for trial in trials:
        if trial.value is not None:
            tracker.log_points({f"trials/{sweep.metric}": trial.value}, trial.number)
    if best is not None and best.value is not None:
        chosen = "\n".join(f"- `{field}`: {value}" for field, value in best.settings.items())
        tracker.describe(f"Trial {best.number}: {sweep.metric} {best.value:.4g}\n\n{chosen}")
    tracker.log_text("trials.json", json.dumps([summarize_trial(trial) for trial in trials], indent=1))
    for picture in draw_pictures(study, str(sweep.metric)):
        tracker.log_file(picture, "pictures")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass
class Search:
    """The trials of a sweep in a flow run.

    Args:
        recipe: with the overrides of the sweep's run.
        sweep: with all defaults resolved.
        ready: what all trials share.
        run: the sweep's flow run.
        show: called with the table of trials and a line on the best one whenever a trial ends.
    """

    recipe: Recipe
    sweep: Sweep
    study: Study
    ready: TrainingInputs
    run: str
    terminal: SweepTerminal
    show: Show
    failures: list[Trial] = field(default_factory=list)
    """The trials that failed in this run."""
    against_champion: Comparison | None = None
    """The best trial so far against the champion on the validation split."""
    _scored: dict[int, Scored] = field(default_factory=dict)
    _compared: int = 0
    _began: float = field(default_factory=time.monotonic)

    def run_trials(self) -> None:
        """Runs trials until all are done, the time is over, or too many failed. Raises UserError if too many failed,
        and what interrupts a trial."""
        self._refresh()
        if self.sweep.parallel == 1:
            while trial := self._next():
                self._end(self._run_trial(trial))
        else:
            self._run_at_once()
        self.terminal.close()

    def find_similar(self, best: Trial) -> list[int]:
        """The numbers of completed trials that are not significantly worse than the best on the same rows, among the
        next best."""
        others = [trial for trial in self.study.trials if trial.state == "completed" and trial.number != best.number]
        others.sort(key=lambda trial: (self.study.rank(trial.value or 0.0), trial.number))
        similar = []
        for other in others[:MOST_COMPARED]:
            found, rival = self._find_scored(best), self._find_scored(other)
            if found is None or rival is None:
                continue
            champion = PinnedVersion(
                name="trial", version=str(other.number), model=rival.trained.parts["model"], max_length=0
            )
            comparison = self._compare(best, found, champion, rival.predictions)
            if not comparison.better:
                similar.append(other.number)
        return similar

    def compare_variants(self) -> list[dict[str, Any]]:
        """The gain of each variant over the recipe. Raises UserError if fewer than three seeds have completed with all
        settings."""
        names, trials = self.sweep.names, self.study.trials
        found = {trial.number: self._find_scored(trial) for trial in trials if trial.state == "completed"}
        turns = [range(first, first + len(names)) for first in range(1, 1 + len(trials), len(names))]
        complete = [
            of_seed for turn in turns if len(of_seed := [one for n in turn if (one := found.get(n))]) == len(names)
        ]
        if len(complete) < LEAST_SEEDS:
            message = f"{len(complete)} seeds have completed with all settings, and it takes {LEAST_SEEDS}: raise "
            raise UserError.of("sweep", "sweep.seeds", f"{message}sweep.timeout_s, or correct the failed trials.")
        predictions = {name: [of_seed[place].predictions for of_seed in complete] for place, name in enumerate(names)}
        less, data = self.sweep.direction == "minimize", complete[0][0].data
        recipe = trial_recipe(self.recipe, {}, str(self.sweep.metric))
        gains = self._quiet_executor()(compare_seeds, recipe, str(self.sweep.metric), less, data, predictions).result
        return [gain.model_dump(mode="json") | {"summary": describe_gain(gain)} for gain in gains]

    def _run_at_once(self) -> None:
        divides_gpus = engine_for(self.recipe).runs_here
        with ParallelCalls(self.sweep.parallel, self._run_trial, divides_gpus) as calls:
            while True:
                while calls.free and (trial := self._next()):
                    calls.start(trial)
                if not calls.busy:
                    return
                for _, ended in calls.wait(LOOK_S):
                    self._end(ended)
                self._refresh()

    def _next(self) -> Trial | None:
        """The trial to run now; None if there is none, or if the time is over."""
        return None if self._is_over else self.study.next()

    def _run_trial(self, trial: Trial) -> TrialRun:
        self._refresh()
        run = TrialRun(
            trial,
            self.study,
            self.recipe,
            str(self.sweep.metric),
            self.run,
            self._lock,
            (TrialProgress(trial.number, self.terminal),),
            self._deadline,
        )
        run.run()
        return run

    def _end(self, run: TrialRun) -> None:
        """Takes note of a trial that has ended."""
        self.terminal.progress.pop(run.trial.number, None)
        trial = self.study.trials[run.trial.number - 1]
        if trial.state in UNFINISHED and not self._is_over:
            raise RuntimeError(f"trial {trial.number} did not begin: see its flow run in Prefect")
        if run.scored is not None:
            self._scored[trial.number] = run.scored
        if trial.state == "failed":
            self.failures.append(trial)
        self._refresh()
        best = self.study.best
        if best is not None and best.number != self._compared and not self._shares_gpus and not self.sweep.variants:
            self._compared = best.number
            self.against_champion = self._compare_with_champion(best)
            self._refresh()
        if len(self.failures) > self.sweep.max_failures:
            reasons = "; ".join(f"trial {failed.number}: {failed.reason}" for failed in self.failures)
            message = f"{len(self.failures)} trials failed, and {self.sweep.max_failures} may. {reasons}"
            raise UserError.of("sweep", "sweep.max_failures", message)

    def _compare_with_champion(self, best: Trial) -> Comparison | None:
        """None if there is no champion, or if it is this model."""
        scored = self._find_scored(best)
        if scored is None or self.recipe.release.registry is None:
            return None
        recipe, build = self._recipe_of(best), self._quiet_executor()
        try:
            champion = build(find_champion, recipe, scored.trained, scored.scores)
            if champion is None:
                return None
            opponent = build(predict_champion, recipe, scored.lock, scored.data, champion, scored.mined)
            return self._compare(best, scored, champion, opponent)
        except (MlflowFailed, UserError, JobFailed):  # the release of the best model meets it again, and reports it
            return None

    def _compare(self, best: Trial, scored: Scored, champion: PinnedVersion, opponent: Artifact) -> Comparison:
        arguments = (scored.data, scored.tokens, scored.trained, scored.predictions, opponent)
        found = self._quiet_executor()(compare, self._recipe_of(best), champion, None, *arguments)
        return found.result

    def _find_scored(self, trial: Trial) -> Scored | None:
        """The trial's artifacts; None if they were removed since."""
        if trial.number not in self._scored:
            found = train_and_score(Planner(self.recipe.name), self._recipe_of(trial), self._lock)
            if not isinstance(found.scores, Artifact):
                return None
            self._scored[trial.number] = found
        return self._scored[trial.number]

    def _recipe_of(self, trial: Trial) -> Recipe:
        return trial_recipe(self.recipe, trial.settings, str(self.sweep.metric))

    def _quiet_executor(self) -> Executor:
        return Executor(self.recipe.name, self.run)

    @property
    def _shares_gpus(self) -> bool:
        """Whether trials use all GPUs of this machine at once: the champion's predictions would take their memory."""
        return self.sweep.parallel > 1 and bool(visible_gpus())

    @property
    def _lock(self) -> Lock | None:
        """What all trials have resolved; None if their settings change it."""
        fields = [f"{name}." for name in self.sweep.fields]
        parts = [f"{part}." for part in RESOLVED]
        changes = any(name.startswith(part) or part.startswith(name) for name in fields for part in parts)
        return None if changes else self.ready.lock

    @property
    def _deadline(self) -> float | None:
        return None if self.sweep.timeout_s is None else self._began + self.sweep.timeout_s

    @property
    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _refresh(self) -> None:
        trials = self.study.trials
        headline = "  ".join(filter(None, [self.describe_best(), self._describe_rest(trials)]))
        self.terminal.show(trials, headline)
        self.show(tabulate_trials(trials, self.sweep, self.terminal.progress), headline)

    def describe_best(self) -> str:
        """`best: trial 3, accuracy 0.912 (learning_rate 3.1e-05); champion sst2/7 0.901, that is +0.011`"""
        best = self.study.best
        if best is None or best.value is None:
            return "no trial has completed yet" if self.study.trials else ""
        text = f"best: trial {best.number}, {self.sweep.metric} {best.value:.4g} ({format_settings(best.settings)})"
        if (versus := self.against_champion) and self._compared == best.number:
            text += f"; champion {versus.champion} {versus.champion_value:.4g}, a gain of {versus.gain:+.4g}"
            text += f", at least {versus.at_least:+.4g} at {versus.confidence:.0%}"
        return text

    def _describe_rest(self, trials: Sequence[Trial]) -> str:
        """`4 of 12 trials; about 3 minutes left`"""
        limit, ended = self.sweep.trials or 0, [trial for trial in trials if trial.state not in UNFINISHED]
        text = f"{len(ended)} of {limit} trials"
        spent = [trial.seconds for trial in ended if trial.seconds]
        if spent and len(ended) < limit:
            left_s = math.ceil((limit - len(ended)) / self.sweep.parallel) * sum(spent) / len(spent)
            text += f"; about {left_s / 60:,.0f} minutes left" if left_s >= 90 else f"; about {left_s:,.0f} s left"
        return text


def summarize_trial(trial: Trial) -> dict[str, Any]:
    """A trial as JSON values."""
    return {
        "number": trial.number,
        "settings": dict(trial.settings),
        "state": trial.state,
        "value": trial.value,
        "low": trial.low,
        "high": trial.high,
        "evaluations": {str(number): value for number, value in sorted(trial.evaluations.items())},
        "seconds": round(trial.seconds, 3),
        "flow_run_id": trial.flow_run_id,
        "reason": trial.reason,
    }
