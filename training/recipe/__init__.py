"""The recipe: what the user writes, and how a file or mapping becomes one.

fields.py data_fields.py lora.py
section.py                          the sections, field by field; the types that their fields share
tables/                             allowed names, one table a concept: metrics, optimizers, checks, …
validation.py rules/                all problems of a recipe in one report; contradictions
sweep.py sweep_validation.py        the search of a sweep for the best settings, and its problems
batch_prediction.py                 the parameters of a batch prediction
version_names.py                    the names of registered versions
overrides.py referenced_files.py    values from --set, and from files that fields name
error_messages.py                   mistakes as sentences
"""

from __future__ import annotations

from training.recipe.batch_prediction import BatchPrediction, parse_batch_prediction
from training.recipe.data_fields import Data
from training.recipe.fields import (
    Compute,
    Drift,
    Evaluation,
    Gate,
    Hub,
    Lora,
    Model,
    Recipe,
    Release,
    ResolvedCompute,
    Tokens,
    Training,
)
from training.recipe.overrides import ENTRYPOINT, SWEEP_ENTRYPOINT, parse_set, read_entries
from training.recipe.rules.release_rules import fits_slice
from training.recipe.rules.slice_rules import FEWEST_ROWS
from training.recipe.section import split_version_name
from training.recipe.sweep import Parameter, Sweep, grid_values, is_whole, load_sweep, parse_sweep, settings_of
from training.recipe.tables.exports import EXPORTS
from training.recipe.tables.metrics import more_is_better
from training.recipe.tables.row_checks import Level
from training.recipe.validation import load, parse

__all__ = [
    "ENTRYPOINT",
    "EXPORTS",
    "FEWEST_ROWS",
    "SWEEP_ENTRYPOINT",
    "BatchPrediction",
    "Compute",
    "Data",
    "Drift",
    "Evaluation",
    "Gate",
    "Hub",
    "Level",
    "Lora",
    "Model",
    "Parameter",
    "Recipe",
    "Release",
    "ResolvedCompute",
    "Sweep",
    "Tokens",
    "Training",
    "fits_slice",
    "grid_values",
    "is_whole",
    "load",
    "load_sweep",
    "more_is_better",
    "parse",
    "parse_batch_prediction",
    "parse_set",
    "parse_sweep",
    "read_entries",
    "settings_of",
    "split_version_name",
]
