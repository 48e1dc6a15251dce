"""The Hub's stand-in, for clients in the tests' own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from tests.hub.server import Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with Hub() as hub:
        yield hub
