"""Equal inputs have equal keys, and different inputs different ones, whatever they are: drawn by hypothesis."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.cache.stage import Inputs, Stage
from tests.drawn import drawn, json_values, names

Values = dict[str, Any]
mappings = st.dictionaries(names, json_values, max_size=4).filter(lambda values: not has_dots(values))
"""Without dots in names: `a.b` and `a: {b}` would be one name of a key."""


def has_dots(value: Any) -> bool:
    """Whether a name of a mapping in it has a dot."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and any("." in name for name in value)) or any(map(has_dots, inner))


class Given:
    """A stage with these inputs."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def inputs(self) -> Inputs:
        return Inputs(self._values)

    def run(self, work: Any) -> None:
        """Never called."""


def key_of(values: Values) -> str:
    stage: Stage[Any] = Stage("copy", Given, cached=True)
    return stage.key(stage.flat_inputs(values)[0])


def reversed_order(value: Any) -> Any:
    """The same value with the names of all its mappings in another order."""
    if isinstance(value, dict):
        return {name: reversed_order(one) for name, one in reversed(value.items())}
    return [reversed_order(one) for one in value] if isinstance(value, list) else value


@pytest.mark.slow
@drawn
@given(one=mappings, other=mappings)
@example(one={"a": {}}, other={})
@example(one={"a": {"b": {}}}, other={"a": {"c": {}}})
def test_drawn_inputs_have_one_key_if_they_are_equal_and_two_if_not(one: Values, other: Values) -> None:
    assert key_of(one) == key_of(reversed_order(one))
    as_stored = [json.dumps(values, sort_keys=True) for values in (one, other)]
    assert (key_of(one) == key_of(other)) == (as_stored[0] == as_stored[1])


@drawn
@given(values=mappings.filter(bool), data=st.data())
def test_a_drawn_change_of_one_value_changes_the_key(values: Values, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(values)))
    value = data.draw(json_values.filter(lambda drawn: json.dumps(drawn) != json.dumps(values[name])))
    changed = json.dumps({**values, name: value}, sort_keys=True) != json.dumps(values, sort_keys=True)
    assert (key_of({**values, name: value}) != key_of(values)) == changed
