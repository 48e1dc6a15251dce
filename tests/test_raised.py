"""What a message must say."""

from __future__ import annotations

from tests.raised import Says


def test_a_message_begins_with_the_first_part_and_has_the_others_in_their_order() -> None:
    message = "3 is out of range: it must be at most 2."
    assert message == Says("3 is…range…at most 2") and {"where": message} == {"where": Says(message)}
    for other in ("is out", "3 is…at most 2…range", "3 is…at least", "4…"):
        assert message != Says(other)
