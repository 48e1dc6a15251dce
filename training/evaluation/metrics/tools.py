"""Metrics of tool calls, over the answers that a model generates in place of the assistant's messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Value

from training.evaluation.metrics.definition import RatioMetric
from training.evaluation.predictions import Floats
from training.evaluation.tool_use import SHARES


class _ToolRatio(RatioMetric):
    """The sum of one figure of training.evaluation.tool_use over all rows, divided by that of another."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls._given = dict.fromkeys(SHARES.get(getattr(cls, "name", ""), ()), Value("float64"))

    def statistics(self, **inputs: Any) -> Floats:
        return np.stack([np.asarray(inputs[name], np.float64) for name in SHARES[self.name]], axis=1)


class ToolCallAccuracy(_ToolRatio):
    """Of the assistant's messages that call tools, the share for which the model makes the same calls: equal names, and
    arguments that are equal as JSON values; the calls of a message in any order. From 0 to 1; it has no value if no
    message calls a tool."""


class ToolNameAccuracy(_ToolRatio):
    """Of the assistant's messages that call tools, the share for which the model calls the same tools, with any
    arguments. From 0 to 1; it has no value if no message calls a tool."""


class ToolDecisionAccuracy(_ToolRatio):
    """Of the assistant's messages in rows with tools, the share for which the model calls a tool if the message does,
    and none if it does not. From 0 to 1; it has no value if no row has tools."""


class ValidToolCalls(_ToolRatio):
    """Of the calls that the model writes, the share that can be read, are of a declared tool, and fit the JSON Schema
    of its parameters. From 0 to 1; it has no value if the model calls no tool."""
