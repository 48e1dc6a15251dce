"""Configurations of transformers' models, made from the values of a recipe or of config.json, or refused by field."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WELL_KNOWN = (
    *("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "electra", "xlm-roberta"),
    *("gpt2", "llama", "mistral", "qwen2", "opt", "t5", "mt5", "bart", "mbart", "marian", "pegasus"),
)
"""Model types that a message offers; transformers has hundreds."""
OFFERED = 6
ALIKE = 0.8
"""The least likeness, of 1, to a known setting for which an unknown one is taken as misspelt. Any other may be of
another version of transformers, which passes over it."""
RECIPE = "model.config"


def configuration(values: Mapping[str, Any], field: str, more: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration of these values, and of `more` that are not the user's. Raises UserError of the recipe's
    `field` for an unknown type, misspelt settings, and values that are refused."""
    from transformers import CONFIG_MAPPING

    name = values.get("model_type")
    if name not in CONFIG_MAPPING:
        message = f"{name!r} is no type of model that transformers knows" if name else "no model_type is named"
        some = f"choose such as {', '.join(WELL_KNOWN[:OFFERED])}"
        raise _refused(_type_field(field), f"{message}: {some}.{nearest(str(name), CONFIG_MAPPING)}")
    made = CONFIG_MAPPING[name]
    with refusals(field, f"{name} does not take it"):
        if field == RECIPE and (problems := list(_misspelt(values, made()))):
            raise UserError(problems)
        config: PreTrainedConfig = made.from_dict({**values, **(more or {})})
    return config


def need_class(config: PreTrainedConfig, auto_class: str, field: str) -> None:
    """Raises UserError if transformers has no such class for this type of model."""
    import transformers

    mapping = getattr(transformers, auto_class)._model_mapping
    if type(config) not in mapping:
        types = {known.model_type for known in mapping}
        some = ", ".join([*(name for name in WELL_KNOWN if name in types), *sorted(types)][:OFFERED])
        message = f"{config.model_type!r} has no {auto_class}, which this task type needs: choose a model of a type "
        raise _refused(_type_field(field), f"{message}such as {some}.")


@contextlib.contextmanager
def refusals(field: str, message: str) -> Iterator[None]:
    """Raises UserError of the field in place of what transformers and torch raise for values that do not fit each
    other."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except NotImplementedError:  # what the meta device cannot do
        raise
    except (
        *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError),
        StrictDataclassError,
    ) as error:
        raise _refused(field, f"{message}: {_in_a_line(error)}") from error


def _misspelt(values: Mapping[str, Any], usual: PreTrainedConfig) -> Iterator[Problem]:
    """Settings that the configuration passes over in silence, and that are nearly spelt as one that it has."""
    known = [*usual.to_dict(), *usual.attribute_map]
    for name in values:
        near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
        if near and name not in known and not hasattr(usual, name):
            message = f"{usual.model_type} has no such setting. Did you mean {near[0]!r}?"
            yield Problem(kind="model", where=f"{RECIPE}.{name}", message=message)


def _type_field(field: str) -> str:
    return f"{field}.model_type" if field == RECIPE else field


def _in_a_line(error: Exception, most: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text if len(text) <= most else text[: most - 1] + '…'}{'' if text.endswith('.') else '.'}"


def _refused(field: str, message: str) -> UserError:
    return UserError([Problem(kind="model", where=field, message=message)])
