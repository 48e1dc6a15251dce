"""Metrics of the Hub, `hub:owner/name@COMMIT`: the code of one commit, and no other.

Not by `evaluate.load`: that takes owner/name/name.py of the working directory before the Hub's, and where the Hub does
not answer, the newest commit that it has ever loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType

from training.evaluation.hub_metrics import fetched, place
from training.evaluation.metrics.definition import evaluate, refused


@cache
def load(name: str) -> type[evaluate.Metric]:
    """The metric's class, of the one file that the repository is named like. Runs that file.

    With HF_HUB_OFFLINE it must have been fetched before. Raises UserError where it cannot be had, or run.
    """
    _, file, commit = place(name)
    module = _imported(name, f"hub_metric_{commit}_{file.removesuffix('.py')}", fetched(name))
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, evaluate.Metric) and found.__module__ == module.__name__:
            return found
    raise refused(f"{name!r}: its {file} defines no evaluate.Metric.")


def _imported(name: str, module_name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise refused(f"running {name!r} failed: {type(error).__name__}: {error}") from error
    return module
