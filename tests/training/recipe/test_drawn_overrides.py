"""Every JSON value can be set from a command: drawn by hypothesis."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.drawn import drawn, json_values
from training.recipe.overrides import parse_set

fields = st.lists(st.text("abcxyz_", min_size=1, max_size=5), min_size=1, max_size=3).map(".".join)


@pytest.mark.slow
@drawn
@given(field=fields, value=json_values)
@example(field="data.filter", value="🙂")
def test_a_drawn_value_that_is_written_as_json_is_set(field: str, value: Any) -> None:
    assert parse_set([f"{field}=1", f"{field}={json.dumps(value)}"]) == {field: value}
