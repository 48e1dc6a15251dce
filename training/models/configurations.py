"""Configurations of transformers' models, made from the values of a recipe or of config.json."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WELL_KNOWN = (
    *("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "electra", "xlm-roberta"),
    *("gpt2", "llama", "mistral", "qwen2", "opt", "t5", "mt5", "bart", "mbart", "marian", "pegasus"),
)
"""Model types that messages suggest; transformers has hundreds."""
MAX_SUGGESTED = 6
MIN_SIMILARITY = 0.8
"""The similarity to a known setting, up to 1, from which an unknown one counts as misspelt. Others may be settings of
another version of transformers, which ignores them."""
RECIPE = "model.config"


def make_config(values: Mapping[str, Any], field: str, more: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration with the user's `values` of the recipe's `field`, and `more` values. Raises UserError for an
    unknown type, misspelt settings, and invalid values."""
    from transformers import CONFIG_MAPPING

    name = values.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        message = f"{name!r} is no model type of transformers" if name else "no model_type is named"
        some = f"choose one such as {', '.join(WELL_KNOWN[:MAX_SUGGESTED])}"
        raise UserError.of("model", _type_field(field), f"{message}: {some}.{nearest(str(name), CONFIG_MAPPING)}")
    cls = CONFIG_MAPPING[name]
    require_unquantized(values, field)
    if problems := list(_find_out_of_range(values, field)):
        raise UserError(problems)
    if field == RECIPE and (chosen := code_fields(values)):
        message = f"{', '.join(chosen)}: code is chosen by model.attn_implementation alone: leave it out."
        raise UserError.of("model", field, message)
    with invalid_values(field, f"{name} does not accept it"):
        if field == RECIPE and (problems := list(_find_misspelt(values, cls()))):
            raise UserError(problems)
        config: PreTrainedConfig = cls.from_dict({**values, **(more or {})})
    return without_code(config)


LARGEST = {
    r"(?:layers?|blocks?|block_sizes|depths?|experts?)$": 10_000,
    "labels$": 2**20,
    "position": 2**26,
    "length": math.inf,
}
"""The largest number in a configuration, by a part of its name. Larger ones take memory or hours before they fail, even
without weights: transformers makes an object for each layer, and a name for each label."""
LARGEST_OTHER = 2**31 - 1
_COUNT = re.compile(r"^num_|^n_|^d_|(?<!chunk_)size$|(?:sizes|dim|heads?|layers|blocks?|depths?|experts?)$")
"""Names of numbers that cannot be negative. transformers makes a model without layers of a negative number of them."""


def _find_out_of_range(values: Mapping[str, Any], field: str) -> Iterator[Problem]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _find_out_of_range(value, f"{field}.{name}" if field == RECIPE else field)
        largest = next((limit for part, limit in LARGEST.items() if re.search(part, name)), LARGEST_OTHER)
        counts = _COUNT.search(name)
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int):
                continue
            bound = f"more than {largest:,}" if number > largest else "negative" if number < 0 and counts else ""
            if bound:
                where = f"{field}.{name}" if field == RECIPE else field
                message = f"{name} {number:,} of its configuration is {bound}: name another model."
                yield Problem(kind="model", where=where, message=message)
                break


CODE_FIELDS = ("attn_implementation", "experts_implementation", "fusion_config")
"""The settings of config.json by which transformers chooses or downloads code. Only the recipe chooses it."""


def code_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values of config.json that choose code, by name."""
    found = {name: value for name, value in values.items() if name.removeprefix("_") in CODE_FIELDS and value}
    for value in values.values():
        found |= code_fields(value) if isinstance(value, dict) else {}
    return found


def without_code(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration without settings that choose code. Changes and returns it. Raises UserError for a quantized
    model, which only further code can load."""
    require_unquantized(config.to_dict(), "model")
    config._attn_implementation = None  # with those of the configurations within
    config._experts_implementation = None
    if hasattr(config, "fusion_config"):
        config.fusion_config = None
    return config


def require_unquantized(values: Mapping[str, Any], field: str) -> None:
    """Raises UserError for config.json of a model whose weights are quantized."""
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        message = f"its weights are quantized (quantization_config in config.json: {method}): "
        message += "name the model that it was made from. training.lora.quantization trains adapters on it in 4 bits."
        raise UserError.of("model", field, message)


def require_class(config: PreTrainedConfig, auto_class: str, field: str) -> None:
    """Raises UserError if transformers has no such class for this type of model."""
    import transformers

    mapping = getattr(transformers, auto_class)._model_mapping
    if type(config) not in mapping:
        types = {known.model_type for known in mapping}
        some = ", ".join([*(name for name in WELL_KNOWN if name in types), *sorted(types)][:MAX_SUGGESTED])
        message = f"{config.model_type!r} has no {auto_class}, which this task type needs: choose a model of a type "
        raise UserError.of("model", _type_field(field), f"{message}such as {some}.")


@contextlib.contextmanager
def invalid_values(field: str, message: str) -> Iterator[None]:
    """Inside, raises UserError of the field for the exceptions that transformers and torch raise for invalid values."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except NotImplementedError:  # of the meta device
        raise
    except (
        *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError),
        StrictDataclassError,
    ) as error:
        text = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …").removesuffix(".")
        raise UserError.of("model", field, f"{message}: {text}.") from error


def _find_misspelt(values: Mapping[str, Any], default: PreTrainedConfig) -> Iterator[Problem]:
    """Settings that the configuration would silently ignore, and that resemble one that it has."""
    known = [*default.to_dict(), *default.attribute_map]
    for name in values:
        near = difflib.get_close_matches(name, known, n=1, cutoff=MIN_SIMILARITY)
        if near and name not in known and not hasattr(default, name):
            message = f"{default.model_type} has no such setting. Did you mean {near[0]!r}?"
            yield Problem(kind="model", where=f"{RECIPE}.{name}", message=message)


def _type_field(field: str) -> str:
    return f"{field}.model_type" if field == RECIPE else field
