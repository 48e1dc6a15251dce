"""Distribution strategies, one module each. A new one is a module with these names and a line in
training/recipe/tables/strategies.py:

    DISTRIBUTED_TYPE      accelerate's name of the strategy, on CPUs and on GPUs
    ONE_FILE              whether rank 0 alone writes the model and the optimizer's state into a checkpoint
    UNPICKLES             whether loading its checkpoints can execute code that they hold
    build_configuration   the configuration for accelerate or DeepSpeed that is known from the recipe alone
    build_arguments       fields of TrainingArguments; called before any communication between ranks
    adjust_arguments      sets values that TrainingArguments has no field for
    wrapping              a context in which accelerate wraps the model
    check_wrapper         the fault of a prepared model that is not distributed as requested, or None
    gather_weights        the weights to export, on rank 0; only those of adapters if there are any; all ranks call it

These modules import no torch at the top, because `finetune plan` reads their configuration.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from training.recipe.tables.strategies import STRATEGIES

FROM_THE_MODEL = "from the model"
"""A placeholder in a configuration for values that depend on the model."""


def load(name: str) -> ModuleType:
    """The module of a strategy."""
    return importlib.import_module(STRATEGIES[name].module)
