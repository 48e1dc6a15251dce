"""The settings of a sweep: the fields to search, by which sampler and pruner, and for how long; and all problems of its
fields, of its space and of the recipe in one report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError

from training.problems import Problem, UserError, collected, nearest
from training.recipe.error_messages import describe
from training.recipe.field_types import MAPPING, WORD, Section, Text
from training.recipe.fields import Recipe
from training.recipe.overrides import SWEEP_ENTRYPOINT, read_entry
from training.recipe.rules.column_rules import task_type_of
from training.recipe.rules.rule import WrittenRecipe
from training.recipe.tables.metrics import METRICS, more_is_better
from training.recipe.tables.searches import PRUNERS, SAMPLERS
from training.recipe.validation import parse

NameOrSettings = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[dict[str, Any], Tag(MAPPING)],
    Discriminator(lambda value: MAPPING if isinstance(value, dict) else WORD),
]
"""A name from a table, or `{name: …}` with settings."""
Number = int | float


class Parameter(Section):
    """The values of one field to search: exactly one of log, range and choice."""

    log: list[Number] | None = Field(default=None, min_length=2, max_length=2)
    """Lowest and highest value, searched on a logarithmic scale. Two whole numbers give whole numbers."""
    range: list[Number] | None = Field(default=None, min_length=2, max_length=2)
    """Lowest and highest value, searched evenly. Two whole numbers give whole numbers."""
    step: Number | None = Field(default=None, gt=0)
    """The distance between two values of a range (null: any value, or every whole number)."""
    choice: list[Any] | None = Field(default=None, min_length=1)
    """The values themselves; lists and mappings may be among them."""
    when: dict[Text, Any] = Field(default_factory=dict)
    """The condition under which the field is searched: values of other fields of the space, such as `{training.optim:
    sgd}`; a list allows each of its values. Otherwise the recipe's own value holds."""


class Sweep(Section):
    """A search for the fields of a recipe that give the best model on the validation split; or, with variants, a
    comparison of some settings over several seeds."""

    space: dict[Text, Parameter] = Field(default_factory=dict, min_length=1)
    """The fields to search by dotted name, such as `{training.learning_rate: {log: [1.0e-5, 1.0e-4]}}`. Data and
    release are the same for all trials."""
    variants: dict[Text, dict[Text, Any]] = Field(default_factory=dict, min_length=1)
    """In place of a space: settings by name, each with the fields that it replaces, such as `{fast:
    {training.learning_rate: 1.0e-4}}`. The recipe and each variant are trained with the same seeds, to tell whether a
    variant is better or only another seed. No model is released."""
    seeds: list[int] | None = Field(default=None, min_length=3, max_length=1000)
    """With variants: the values of training.seed (null: five, counted up from that of the recipe)."""
    metric: Text | None = None
    """The metric on the validation split to optimize, one of evaluation.metrics or a figure of a metric of yours (null:
    metric_for_best_model if it is one of evaluation.metrics, else the first of these)."""
    direction: Literal["maximize", "minimize"] | None = None
    """Whether higher or lower values are better (null: as docs/reference/metrics.md lists the metric)."""
    trials: int | None = Field(default=None, ge=1, le=100_000)
    """The number of trials; trials that were stored count (null: 20, or the whole grid)."""
    sampler: NameOrSettings = "tpe"
    """Proposes settings: tpe, random, grid or cmaes of Optuna, or `{name: tpe, n_startup_trials: 5}`. grid needs
    choices, whole numbers or steps."""
    pruner: NameOrSettings = "none"
    """Stops trials early by their evaluations during training: none, asha, hyperband, median or percentile, or
    `{name: asha, min_resource: 1, reduction_factor: 3}`. A stopped trial keeps its checkpoint, and asha and hyperband
    resume it if it turns out to be among the best."""
    parallel: int = Field(default=1, ge=1, le=1000)
    """Trials that run at once: on this machine each with GPUs of its own, or on a cluster. With one at a time, the same
    seed gives the same trials."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which no trial starts and running ones are stopped with a checkpoint (null: no limit)."""
    max_failures: int = Field(default=3, ge=0)
    """Failed trials that the sweep tolerates; one more ends it."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of the sampler."""

    @property
    def fields(self) -> list[str]:
        """The dotted names of the fields in which trials differ."""
        replaced = dict.fromkeys(field for fields in self.variants.values() for field in fields)
        return [*replaced, SEED] if self.variants else list(self.space)

    @property
    def names(self) -> list[str]:
        """The names of the compared settings: of the recipe's, and of the variants."""
        return [THE_RECIPE, *self.variants]

    def settings_of_trial(self, number: int) -> dict[str, Any]:
        """With variants, the fields that a trial replaces: all settings have their turn with the first seed, then with
        the next one."""
        assert self.seeds is not None
        seed, place = divmod(number - 1, len(self.names))
        return {**self.variants.get(self.names[place], {}), SEED: self.seeds[seed]}

    @property
    def sampler_name(self) -> str:
        """The sampler's name."""
        return name_of(self.sampler)

    @property
    def pruner_name(self) -> str:
        """The pruner's name."""
        return name_of(self.pruner)


def name_of(value: NameOrSettings) -> str:
    """The name of a sampler or pruner."""
    return value if isinstance(value, str) else str(value.get("name"))


USUAL_TRIALS, USUAL_SEEDS = 20, 5
SEED, THE_RECIPE = "training.seed", "recipe"
LEAST = {"min_resource": 1, "reduction_factor": 2, "brackets": 1, "n_min_trials": 1, "n_ei_candidates": 1}
"""The least value of a setting, if it is not 0."""
MOST = {"percentile": 100}
FIXED_SECTIONS = {
    "name": "it names the runs of all trials",
    "data": "trials are judged on the same rows",
    "release": "it changes no figure of a trial",
    "evaluation": "trials are judged by the same metrics",
}
"""Parts of the recipe that are the same for all trials, with the reason."""
VARIED = ("data.unlabelled",)
"""Fields of these parts that variants may replace, because no trial is judged on their rows."""


def parse_sweep(
    recipe: Mapping[str, Any],
    sweep: Any,
    overrides: Mapping[str, Any] | None = None,
    trials: int | None = None,
) -> tuple[Recipe, Sweep]:
    """The recipe after `overrides`, and its sweep with all defaults resolved. `trials` replaces the sweep's own number.

    Raises UserError with every mistake found in both.
    """
    problems: list[Problem] = []
    base: Recipe | None = None
    with collected(problems):
        base = parse(recipe, overrides)
    if isinstance(sweep, Mapping) and trials is not None:
        sweep = {**sweep, "trials": trials}
    search = _read(sweep, problems)
    if search is not None:
        problems += _broken_rules(search)
        if base is not None:
            problems += _find_unfitting(search, base, recipe, overrides or {})
            search = _resolve(search, base)
    if problems or base is None or search is None:
        raise UserError(problems)
    return base, search


def load_sweep(
    file: Path,
    overrides: Mapping[str, Any] | None = None,
    entry: str | None = None,
    trials: int | None = None,
) -> tuple[Recipe, Sweep]:
    """The recipe and the sweep of a deployment file's entry for the sweep flow. Raises UserError."""
    parameters = read_entry(file, SWEEP_ENTRYPOINT, entry)
    overrides = {**parameters.get("overrides", {}), **(overrides or {})}
    given = parameters.get("trials") if trials is None else trials
    return parse_sweep(parameters["recipe"], parameters.get("sweep"), overrides, given)


def settings_of(value: NameOrSettings, table: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The name of a sampler or pruner, and its settings with defaults."""
    given = {"name": value} if isinstance(value, str) else dict(value)
    name = given.pop("name")
    return name, {**table[name], **given}


def grid_values(parameter: Parameter) -> list[Any] | None:
    """All values of a parameter in order; None if there is no end of them."""
    if parameter.choice is not None:
        return list(parameter.choice)
    step = parameter.step or (1 if is_whole(parameter) else None)
    if parameter.range is None or step is None:
        return None
    low, high = parameter.range
    first, distance = Decimal(str(low)), Decimal(str(step))  # 3 * 0.1 is more than 0.3
    values = [first + number * distance for number in range(int((Decimal(str(high)) - first) / distance) + 1)]
    return [int(value) if is_whole(parameter) else float(value) for value in values]


def is_whole(parameter: Parameter) -> bool:
    """Whether a parameter with bounds has whole numbers as its values."""
    return all(isinstance(bound, int) for bound in (*(parameter.log or parameter.range or ()), parameter.step or 1))


def _read(values: Any, problems: list[Problem]) -> Sweep | None:
    """The sweep's fields; parameters are read one by one, so that a mistake names the fields of a parameter."""
    if not isinstance(values, Mapping):
        message = "is missing: write `sweep: {space: {training.learning_rate: {log: [1.0e-5, 1.0e-4]}}}` beside recipe."
        problems.append(Problem(kind="sweep", where="sweep", message=message))
        return None
    before = len(problems)
    given = values.get("space")
    if isinstance(given, Mapping) and given:
        space = {
            name: _validate(Parameter, parameter, f"sweep.space.{name}", problems) or Parameter()
            for name, parameter in given.items()
        }
        values = {**values, "space": space}
    search = _validate(Sweep, values, "sweep", problems)
    return search if len(problems) == before else None


def _validate(model: type[BaseModel], values: Any, where: str, problems: list[Problem]) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            problem = describe(detail, model)
            place = f"{where}.{problem.where}" if problem.where else where
            problems.append(problem.model_copy(update={"kind": "sweep", "where": place}))
    return None


def _broken_rules(sweep: Sweep) -> Iterator[Problem]:
    for where, message in _rules_of_variants(sweep):
        yield Problem(kind="sweep", where=where, message=message)
    for name, parameter in sweep.space.items():
        for message in _parameter_rules(name, parameter, sweep):
            yield Problem(kind="sweep", where=f"sweep.space.{name}", message=message)
    for field, table in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        for where, message in _settings_rules(getattr(sweep, field), table):
            yield Problem(kind="sweep", where=f"sweep.{field}{where}", message=message)


def _rules_of_variants(sweep: Sweep) -> Iterator[tuple[str, str]]:
    if not sweep.variants:
        if not sweep.space:
            yield "sweep.space", "is missing: name the fields to search, or sweep.variants to compare with the recipe."
        if sweep.seeds is not None:
            yield "sweep.seeds", "has no effect without sweep.variants: leave it out."
        return
    if sweep.space:
        yield "sweep.space", "does not go with sweep.variants: leave one of them out."
    if sweep.seeds is not None and len({*sweep.seeds}) < len(sweep.seeds):
        yield "sweep.seeds", f"{sweep.seeds} has a seed twice: each must be another."
    for field, usual in (("sampler", "tpe"), ("pruner", "none"), ("seed", 0)):
        if getattr(sweep, field) != usual:
            yield f"sweep.{field}", "has no effect with sweep.variants, which are all trained to the end: leave it out."
    for name, fields in sweep.variants.items():
        where = f"sweep.variants.{name}"
        if name == THE_RECIPE:
            yield where, "is the name of the recipe's own settings: choose another."
        if SEED in fields:
            yield where, f"replaces {SEED}, which sweep.seeds sets: leave it out."
        elif not fields:
            yield where, "replaces no field: name some, such as {training.learning_rate: 1.0e-4}."


def _parameter_rules(name: str, parameter: Parameter, sweep: Sweep) -> Iterator[str]:
    given = [field for field in ("log", "range", "choice") if getattr(parameter, field) is not None]
    if len(given) != 1:
        yield f"has {' and '.join(given) or 'none'} of log, range and choice: give exactly one."
        return
    if bounds := parameter.log or parameter.range:
        if bounds[0] >= bounds[1]:
            yield f"{bounds} is empty: the first bound must be below the second."
        if parameter.log and bounds[0] <= 0:
            yield f"{bounds} has no logarithm: log takes bounds above 0; use range."
    if parameter.step is not None and parameter.range is None:
        yield "has a step without a range: leave it out, or use range."
    if parameter.step is not None and parameter.range and parameter.step > parameter.range[1] - parameter.range[0]:
        yield f"has a step of {parameter.step}, which leaves one value of {parameter.range}: lower it."
    if sweep.sampler_name == "grid":
        if grid_values(parameter) is None:
            yield "has no end of values for the sampler grid: use choice, a range of whole numbers, or a step."
        if parameter.when:
            yield "has a condition, which the sampler grid does not have: use tpe or random."
    earlier = list(sweep.space)[: list(sweep.space).index(name)]
    for other, values in parameter.when.items():
        choices = sweep.space[other].choice if other in earlier else None
        if choices is None:
            hint = nearest(other, earlier)
            yield f"depends on {other!r}, which is no choice above it in the space: list that field first.{hint}"
        elif strange := [value for value in _as_list(values) if value not in choices]:
            yield f"depends on {other}: {strange[0]!r}, which is none of its choices {choices}."


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _settings_rules(value: NameOrSettings, table: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    given = {"name": value} if isinstance(value, str) else value
    name = name_of(value)
    if name not in table:
        yield "", f"{name!r} is unknown: choose from {', '.join(table)}.{nearest(name, table)}"
        return
    allowed = table[name]
    for setting, chosen in given.items():
        if setting == "name":
            continue
        default = allowed.get(setting)
        if setting not in allowed:
            names = ", ".join(allowed) or "none"
            yield f".{setting}", f"no such setting: {name} has {names}.{nearest(setting, allowed)}"
        elif isinstance(default, bool) != isinstance(chosen, bool) or not isinstance(chosen, int | float):
            yield f".{setting}", f"{chosen!r} is of the wrong type: it takes {_kind(default)}."
        elif isinstance(default, int) and not isinstance(chosen, int):
            yield f".{setting}", f"{chosen!r} is of the wrong type: it takes a whole number."
        elif not isinstance(default, bool) and chosen < (least := LEAST.get(setting, 0)):
            yield f".{setting}", f"{chosen!r} is out of range: it must be at least {least}."
        elif not isinstance(default, bool) and chosen > (most := MOST.get(setting, math.inf)):
            yield f".{setting}", f"{chosen!r} is out of range: it must be at most {most}."
    if name == "tpe" and given.get("group") and not given.get("multivariate"):
        yield ".group", "needs multivariate: set that to true, or leave this out."
    if name == "cmaes" and given.get("lr_adapt") and given.get("with_margin"):
        yield ".lr_adapt", "does not go with with_margin: leave one of them out."


def _kind(default: Any) -> str:
    return "true or false" if isinstance(default, bool) else "a number"


def _find_unfitting(
    sweep: Sweep, base: Recipe, values: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Iterator[Problem]:
    """Problems of the space, the variants, the metric and the pruner with this recipe."""
    for variant, fields in sweep.variants.items():
        fixed = [field for field in fields if field.partition(".")[0] in FIXED_SECTIONS and field not in VARIED]
        for field in fixed:
            reason = FIXED_SECTIONS[field.partition(".")[0]]
            message = f"replaces {field}: {reason}. Replace fields of training, model, tokens or options."
            yield Problem(kind="sweep", where=f"sweep.variants.{variant}", message=message)
        if not fixed:
            try:
                parse(values, {**overrides, **fields})
            except UserError as error:
                for problem in error.problems:
                    text = f"{problem.where}: {problem.message}"
                    yield Problem(kind="sweep", where=f"sweep.variants.{variant}", message=text)
    whole = len(sweep.names) * len(sweep.seeds or range(USUAL_SEEDS))
    if sweep.variants and sweep.trials not in (None, whole):
        message = f"{sweep.trials} is not the number of trials of these settings and seeds, {whole}: leave it out."
        yield Problem(kind="sweep", where="sweep.trials", message=message)
    for name, parameter in sweep.space.items():
        where, section = f"sweep.space.{name}", name.partition(".")[0]
        if section in FIXED_SECTIONS:
            message = f"cannot be searched: {FIXED_SECTIONS[section]}. Search training, model, tokens or options."
            yield Problem(kind="sweep", where=where, message=message)
            continue
        for value in parameter.choice or parameter.log or parameter.range or ():
            try:
                parse(values, {**overrides, **_companions(sweep, name, value), name: value})
            except UserError as error:
                problem = error.problems[0]
                text = problem.message if problem.where == name else f"{problem.where}: {problem.message}"
                yield Problem(kind="sweep", where=where, message=f"with {value!r}: {text}")
                break
    yield from _find_unfitting_metric(sweep, base)
    if sweep.pruner_name != "none":
        yield from _find_unfitting_pruner(base)


def _find_unfitting_pruner(base: Recipe) -> Iterator[Problem]:
    """Evaluations during training that a pruner needs and the recipe lacks."""
    if base.training.eval_strategy == "no":
        message = "stops trials by evaluations during training, but training.eval_strategy is no: set that to epoch."
        yield Problem(kind="sweep", where="sweep.pruner", message=message)
    elif _computes_only_the_loss(base):
        message = "stops trials by a metric, but only the loss is computed during training: set it to none, or let "
        message += "metrics be computed then (docs/reference/task-types.md has the options)."
        yield Problem(kind="sweep", where="sweep.pruner", message=message)


def _computes_only_the_loss(base: Recipe) -> bool:
    """Whether evaluations during training have no metrics."""
    task_type = task_type_of(WrittenRecipe(Recipe, base.model_dump(), set()))
    return task_type.while_training(base.compute.strategy).loss_only_reason is not None


def _companions(sweep: Sweep, name: str, value: Any) -> dict[str, Any]:
    """Values of other fields with which a trial may have this one: those of its condition, and of the fields whose
    condition it meets."""
    needed = {other: _as_list(values)[0] for other, values in sweep.space[name].when.items()}
    allowed = {
        other: (parameter.choice or parameter.log or parameter.range or [None])[0]
        for other, parameter in sweep.space.items()
        if value in _as_list(parameter.when.get(name, []))
    }
    return {**needed, **allowed}


def _find_unfitting_metric(sweep: Sweep, base: Recipe) -> Iterator[Problem]:
    """A metric of the user's own chooses the names of its figures, which are known only after a training."""
    metrics = base.evaluation.metrics
    has_own = any(":" in metric for metric in metrics)
    if sweep.metric is None and ":" in metrics[0]:
        message = f"is missing: {metrics[0]!r} has figures of its own names; name one, and the direction."
        yield Problem(kind="sweep", where="sweep.metric", message=message)
    elif sweep.metric is not None and sweep.metric not in metrics and not has_own:
        message = f"{sweep.metric!r} is not computed: choose from evaluation.metrics, {', '.join(metrics)}."
        yield Problem(kind="sweep", where="sweep.metric", message=message + nearest(sweep.metric, metrics))
    elif sweep.metric is not None and sweep.metric not in metrics and sweep.direction is None:
        message = f"is missing for {sweep.metric!r}, a figure of your own: maximize or minimize."
        yield Problem(kind="sweep", where="sweep.direction", message=message)
    metric = _metric_of(sweep, base)
    if sweep.direction is not None and metric in METRICS and not metric.endswith("_length"):
        usual = _direction_of(metric)
        if sweep.direction != usual:
            message = f"{sweep.direction} would release the worst model by {metric}: leave it out, or set {usual}."
            yield Problem(kind="sweep", where="sweep.direction", message=message)


def _metric_of(sweep: Sweep, base: Recipe) -> str:
    best = (base.training.metric_for_best_model or "").removeprefix("eval_")
    return sweep.metric or (best if best in base.evaluation.metrics else base.evaluation.metrics[0])


def _direction_of(metric: str) -> Literal["maximize", "minimize"]:
    return "maximize" if more_is_better(metric) else "minimize"


def _resolve(sweep: Sweep, base: Recipe) -> Sweep:
    metric = _metric_of(sweep, base)
    trials, seeds = sweep.trials, sweep.seeds
    if sweep.variants:
        seeds = seeds or [base.training.seed + place for place in range(USUAL_SEEDS)]
        trials = len(sweep.names) * len(seeds)
    elif sweep.sampler_name == "grid":
        whole = math.prod(len(grid_values(parameter) or ()) for parameter in sweep.space.values())
        trials = min(trials or whole, whole)
    direction = sweep.direction or _direction_of(metric)
    resolved = {"metric": metric, "trials": trials or USUAL_TRIALS, "direction": direction}
    return sweep.model_copy(update=resolved | ({"seeds": seeds} if sweep.variants else {}))
