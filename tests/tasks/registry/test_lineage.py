"""Records of runs: what is read of damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.home import home as create_home
from tasks.registry import lineage
from training.problems import UserError


def test_a_record_that_is_not_utf_8_is_damaged(home: Path) -> None:
    record = create_home() / "runs" / "0123abcd-0000" / lineage.LINEAGE
    record.parent.mkdir(parents=True)
    record.write_bytes(b'{"recipe": "caf\xe9"}')
    with pytest.raises(UserError, match="0123abcd"):
        lineage.find_record("0123abcd")
