"""What a user writes, as pydantic models: the one way in which all of them are strict."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Closed(BaseModel):
    """Frozen and closed; strict, so that `true` is no number and `"3"` no whole number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
