"""Tests by hypothesis: `EXAMPLES=5000 make test TEST="-k drawn"` draws that many examples, other ones each time."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st

_EXAMPLES = os.environ.get("EXAMPLES")
drawn = settings(max_examples=int(_EXAMPLES or 60), derandomize=not _EXAMPLES, deadline=None, database=None)
"""Decorates a test with @given."""

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4) | st.sampled_from(["a", "b", "a.b", "a.", '"a"'])
# A library of the process may have made its numbers below 2e-308 zeros (-ffast-math), so none of those is drawn.
floats = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
plain = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | floats
json_values = st.recursive(
    plain | st.text(st.characters(codec="utf-8"), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
"""Values as JSON has them, without surrogates."""
