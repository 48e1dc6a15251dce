"""The declarations of a task type: the part of TaskType that a recipe is checked against, before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import ValidationError

from training.jobs.user_code import CodeField
from training.problems import Problem, UserError, nearest
from training.recipe.column_types import RowSpecification
from training.recipe.field_types import ClosedModel
from training.recipe.tables.metrics import metric_modules as modules_of_metrics
from training.recipe.tables.task_types import TASK_TYPES

TargetForm: TypeAlias = Literal["classes", "labels", "binary", "places", "tokens", "numbers"]
FORMER_NAMES = {"faults": "row_problems", "faults_on_request": "row_problems_on_request"}
"""Methods of task types that had another name before: a user's class with one would pass unchecked rows."""


class TaskSpecification(RowSpecification):
    """The declarations of a task type: its names, options and metrics."""

    class Options(ClosedModel):
        """The fields of the recipe's `options` for the task type, by default none."""

    options: Options
    auto_class: ClassVar[str]
    """The name of the class of transformers that loads and creates its models. A name, because scoring needs no
    torch."""
    prediction_type: ClassVar[str | None] = None
    """The type of its predictions, one of those of training.recipe.tables.metrics; None for a type of the author's."""
    hub_task: ClassVar[str]
    """The Hub's name of the task, such as text-classification."""
    card_sentence: ClassVar[str]
    """The purpose of its models for their cards: a sentence without a full stop. `{text}` becomes a text or a pair of
    texts, `{labels}` the number and the names of the labels."""
    metrics: ClassVar[Sequence[str]] = ()
    """The metrics that a recipe may name: those of training.evaluation.metrics that fit its predictions, and the
    `means` of its Predictions."""
    usual_metrics: ClassVar[Sequence[str]] = ()
    """The metrics of a recipe that names none; if empty, accuracy if it fits, else the first of `metrics`."""
    answer_metrics: ClassVar[Sequence[str]] = ()
    """Those of `metrics` that need generated answers, in options.answered_prompts rows. Only an evaluation of the
    trained model generates them."""
    answers: ClassVar[Literal["prompts", "turns"] | None] = None
    """How answers are generated: to the prompt of a row, as in AnswersPrompts of training.task_types.task_type, which
    evaluation.judge compares; in place of each message of a row's assistant, as in AnswersTurns; or not at all."""
    embeds: ClassVar[bool] = False
    """Whether its models give texts embeddings, as those of training.task_types.text_embedding do."""
    takes_candidates: ClassVar[bool] = False
    """Whether a search may give its evaluated rows their documents: data.negatives.num_candidates."""
    target_form: ClassVar[TargetForm | None] = None
    """What its loss is the mean of, if the recipe can choose the loss, as in training.task_types.targets: one of
    `classes` a target, any number of `labels` a row, `binary` answers without names, one of several `places`, `tokens`,
    or `numbers`. None if it has a loss of its own. A class that overrides `loss` declares it again if its loss is still
    the recipe's."""
    loss_fields: ClassVar[Sequence[str]] = ()
    """If the recipe cannot choose the loss, the fields of its training section that `loss` reads, of loss, focal_gamma,
    class_weights and label_smoothing_factor. A recipe that sets another of these is refused."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = self.Options.model_validate(dict(options or {}))

    teacher_outputs: ClassVar[Literal["classes", "labels", "numbers", "vectors", "tokens"] | None] = None
    """The outputs of a teacher from which its models can learn, as in training.task_types.losses.distillation_loss, of
    tokens as in token_distillation; None if they learn from no teacher."""
    teacher_writes: ClassVar[bool] = False
    """Whether a teacher can write the targets of its rows."""

    # Rarer

    option_stages: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The options that are inputs of a stage, by the stage's name; a stage that is not named has all options.
    `evaluate` stands for evaluations during training, if their figures can change the weights."""
    chat_template_columns: ClassVar[Sequence[str]] = ()
    """The columns that need the tokenizer's chat template to become a text."""
    loss_only_reason: str | None = None
    """The reason that evaluations give only the loss; empty if the recipe disables predictions; None if they give
    predictions."""

    def options_of(self, stage: str) -> dict[str, Any]:
        """The options that are inputs of a stage, with defaults filled in."""
        names = self.option_stages.get(stage)
        return self.options.model_dump(mode="json", include=None if names is None else set(names))

    @property
    def recipe_loss_form(self) -> TargetForm | None:
        """`target_form`, or None if it is inherited by a class with a `loss` of its own."""
        bases = type(self).__mro__
        declares = next(place for place, base in enumerate(bases) if "target_form" in vars(base))
        return None if any("loss" in vars(base) for base in bases[:declares]) else self.target_form

    def position_limits(self) -> dict[str, int]:
        """The options, besides tokens.max_length, that are numbers of tokens for which the model needs positions."""
        return {}

    @property
    def corpus_column(self) -> str | None:
        """The column whose texts data.corpus adds to the documents of an evaluation; None if there are none."""
        return None

    @property
    def negative_sources(self) -> Sequence[str]:
        """The values of data.negatives.source for its rows; empty if they take no mined negatives."""
        return ()

    def while_training(self, strategy: str) -> Self:
        """The task type for evaluations during training, given compute.strategy: with a `loss_only_reason` if
        predictions are too slow, or impossible with sharded weights."""
        return self

    def train_only_reason(self, split: str) -> str | None:
        """Why the stored rows of a split can be trained on but not predicted, in words that follow its name; None if
        they can be predicted."""
        return None


def specification(task: str, options: Mapping[str, Any] | None = None) -> TaskSpecification:
    """The task type of this name with these options. Raises UserError if the name or an option is unknown."""
    found = specification_class(task)
    try:
        return found(options)
    except ValidationError as error:
        places = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        raise UserError(
            Problem(kind="recipe", where=f"options.{name}", message=f"{message}.") for name, message in places
        ) from error
    except Exception as error:  # the user's class may lack a method
        raise _FIELD.error(f"{task!r} cannot be made: {error}.") from error


def specification_class(name: str) -> type[TaskSpecification]:
    """The class of a task type. Raises UserError as `specification` does."""
    if name not in TASK_TYPES and ":" not in name:
        message = f"{name!r} is unknown: choose from {', '.join(TASK_TYPES)}, or name a class as module:Class."
        raise UserError.of("recipe", "task", f"{message}{nearest(name, TASK_TYPES)}")
    found: type[TaskSpecification] = _FIELD.load(TASK_TYPES.get(name, name))
    if missing := [
        field for field in ("columns", "auto_class", "hub_task", "card_sentence") if not hasattr(found, field)
    ]:
        raise _FIELD.error(f"{name!r} lacks {', '.join(f'`{field}`' for field in missing)}: declare them in the class.")
    for old, new in FORMER_NAMES.items():
        if hasattr(found, old):
            raise _FIELD.error(f"`{old}` of {name!r} would not be called: it is `{new}` now.")
    return found


def code_modules(name: str) -> list[str]:
    """The module of a task type of the project; empty for one of the user's."""
    return [TASK_TYPES[name].partition(":")[0]] if name in TASK_TYPES else []


def metric_modules(name: str, metrics: Iterable[str]) -> list[str]:
    """The modules that compute these metrics for the task type, where they are the project's own."""
    return modules_of_metrics(metrics, specification_class(name).prediction_type)


def user_code(name: str) -> dict[str, str]:
    """The recipe's field `task` for a task type of the user's; empty for one of the project."""
    return {} if name in TASK_TYPES else {"task": name}


def _is_task_type(found: Any) -> bool:
    bases = (__name__, "training.task_types.task_type")
    return isinstance(found, type) and issubclass(found, TaskSpecification) and found.__module__ not in bases


_FIELD = CodeField(
    kind="recipe",
    where="task",
    example="ordinal_regression:OrdinalRegression",
    accepted="a subclass of training.task_types.task_type.TaskType",
    accepts=_is_task_type,
)
