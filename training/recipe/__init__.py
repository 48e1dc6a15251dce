"""The recipe: what the user writes, and how a file or mapping becomes one.

fields.py                           the sections, field by field
data_fields.py training_fields.py   the sections data, with mixtures, and training, with LoRA and a teacher
row_split.py                        the section data.split, with its times and durations
field_types.py                      the types that fields share; fields by their dotted names
tables/                             allowed names, one table a concept: metrics, optimizers, checks, …
overrides.py                        values from a deployment file and from --set
referenced_files.py                 values from files that fields name; accelerate_file.py: from that of accelerate
validation.py rules/                all problems of a recipe in one report; contradictions between fields
error_messages.py                   mistakes as sentences
extra_arguments.py                  fields of TrainingArguments that training.extra may set
credentials.py filters.py           secrets in URLs; the language of data.filter
column_types.py source_columns.py   the columns of a task type, and those that the recipe takes from its source
task_specification.py               the declarations of a task type
reading_rules.py                    how the rows of a registered version are read
sweep.py batch_prediction.py        the parameters of a sweep and of a batch prediction
"""

from __future__ import annotations

from training.recipe.batch_prediction import BatchPrediction, parse_batch_prediction
from training.recipe.data_fields import Data
from training.recipe.field_types import split_version_name
from training.recipe.fields import (
    Compute,
    Drift,
    Model,
    Recipe,
    ResolvedCompute,
)
from training.recipe.overrides import ENTRYPOINT, SWEEP_ENTRYPOINT, parse_set, read_entries
from training.recipe.rules.release_rules import fits_slice
from training.recipe.rules.slice_rules import FEWEST_ROWS
from training.recipe.sweep import Parameter, Sweep, grid_values, is_whole, load_sweep, parse_sweep, settings_of
from training.recipe.tables.exports import EXPORTS
from training.recipe.tables.metrics import more_is_better
from training.recipe.training_fields import Lora, Training
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
    "Lora",
    "Model",
    "Parameter",
    "Recipe",
    "ResolvedCompute",
    "Sweep",
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
