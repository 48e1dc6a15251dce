"""How several processes share the work, each strategy one file. A new one is a new line in
training/recipe/tables/strategies.py and a file with these names in it:

    DISTRIBUTED_TYPE   what accelerate calls it, on the CPU and on GPUs
    ONE_FILE           whether rank 0 alone writes the model and the optimizer's state into a checkpoint
    UNPICKLES          whether loading a checkpoint of it can execute code that the checkpoint holds
    configuration      what accelerate or DeepSpeed is given for it, as far as the recipe alone says
    arguments          what TrainingArguments is given for it; called before any of its processes talk to each other
    settle             what TrainingArguments has no field for is put into them
    wrong_wrapper      what is wrong with the model that is about to train; None where it is shared as asked
    whole_weights      the weights for the export, on rank 0, of adapters these alone; every rank takes part

Importing one imports no torch, for `finetune plan` asks for its configuration.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from training.recipe.tables.strategies import STRATEGIES

FROM_THE_MODEL = "from the model"
"""Stands in a configuration for what is known once the model is there."""


def load(name: str) -> ModuleType:
    """The module of a strategy."""
    return importlib.import_module(STRATEGIES[name].module)
