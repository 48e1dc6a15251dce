"""The specification of a task type: the part of training.task_types.task_type.TaskType that recipes are checked
against.

Light to import: a recipe is checked before torch or any row is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from training.jobs.user_code import Place
from training.problems import Problem, UserError, nearest
from training.recipe.column_types import RowSpecification
from training.recipe.section import ClosedModel
from training.recipe.tables.task_types import TASK_TYPES


class TaskSpecification(RowSpecification):
    """The declarations of a task type: its options, metrics and the fields of the recipe that it reads."""

    class Options(ClosedModel):
        """The settings that a recipe may have for it: `options`. By default none."""

    options: Options
    loss_only_reason: str | None = None
    """Where the model answers nothing but what the loss of each row is: why that is, or nothing where the recipe asks
    for it. The recipe's metrics have to wait then."""
    option_stages: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The options that matter to a stage, by the stage's name, where not all of them do: only with these is what it
    makes another. `evaluate` stands for the evaluations while training, in so far as their figures change weights."""
    chat_template_columns: ClassVar[Sequence[str]] = ()
    """The columns that become a text by the tokenizer's chat template alone."""
    auto_class: ClassVar[str]
    """The class of transformers that loads and creates its models; a name, for scoring needs no torch."""
    metrics: ClassVar[Sequence[str]] = ()
    """The metrics of training.evaluation.metrics that fit its answers, or those that its Predictions has as `means`:
    what a recipe may name as they are."""
    loss_fields: ClassVar[Sequence[str]] = ()
    """The fields of the recipe's training section that `loss` goes by, of loss, focal_gamma, class_weights and
    label_smoothing_factor; the last is the Trainer's, too. A recipe that sets another of these is told."""

    hub_task: ClassVar[str]
    """What the Hub calls it, such as text-classification."""
    card_sentence: ClassVar[str]
    """What its models do, for their cards: a sentence without its full stop, in which `{text}` stands for a text or a
    pair of them, and `{labels}` for how many labels there are, and their names."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = self.Options.model_validate(dict(options or {}))

    def options_of(self, stage: str) -> dict[str, Any]:
        """The options that matter to a stage, those that are left to their defaults included."""
        names = self.option_stages.get(stage)
        return self.options.model_dump(mode="json", include=None if names is None else set(names))

    def position_limits(self) -> dict[str, int]:
        """The options that are numbers of tokens for which the model needs positions. tokens.max_length is another."""
        return {}

    def while_training(self, strategy: str) -> Self:
        """The task type as evaluations have it while a model trains, given compute.strategy: one that is
        `loss_only_reason` where answers take too long, or are not to be had of a shared model. By default itself."""
        return self

    def train_only_reason(self, split: str) -> str | None:
        """Why the rows of a split, as `token_rows` gives them, can be trained on and not predicted, in words that
        follow its name; None where they can."""
        return None


def specification(task: str, options: Mapping[str, Any] | None = None) -> TaskSpecification:
    """The task type of this name with these options. Raises UserError if there is none, or it has no such options."""
    found = specification_class(task)
    try:
        return found(options)
    except ValidationError as error:
        places = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        raise UserError(
            Problem(kind="recipe", where=f"options.{name}", message=f"{said}.") for name, said in places
        ) from error
    except Exception as error:  # it is the author's own, and may lack a method
        raise _PLACE.refused(f"{task!r} cannot be made: {error}.") from error


def specification_class(name: str) -> type[TaskSpecification]:
    """The class of a task type. Raises UserError as `specification` does."""
    if name not in TASK_TYPES and ":" not in name:
        message = f"{name!r} is unknown: choose from {', '.join(TASK_TYPES)}, or name a class as module:Class."
        raise UserError([Problem(kind="recipe", where="task", message=f"{message}{nearest(name, TASK_TYPES)}")])
    found: type[TaskSpecification] = _PLACE.load(TASK_TYPES.get(name, name))
    if lacking := [said for said in ("columns", "auto_class", "hub_task", "card_sentence") if not hasattr(found, said)]:
        raise _PLACE.refused(
            f"{name!r} does not say all of itself: give it {', '.join(f'`{said}`' for said in lacking)}."
        )
    return found


def code_modules(name: str) -> list[str]:
    """The module that holds the task type's code, where that is the project's own."""
    return [TASK_TYPES[name].partition(":")[0]] if name in TASK_TYPES else []


def user_code(name: str) -> dict[str, str]:
    """The recipe's field that names the task type's code, where that is its author's."""
    return {} if name in TASK_TYPES else {"task": name}


def _is_task_type(found: Any) -> bool:
    bases = (__name__, "training.task_types.task_type")
    return isinstance(found, type) and issubclass(found, TaskSpecification) and found.__module__ not in bases


_PLACE = Place(
    kind="recipe",
    where="task",
    example="my_kind:ExtractiveQA",
    accepted="a subclass of training.task_types.task_type.TaskType",
    fits=_is_task_type,
)
