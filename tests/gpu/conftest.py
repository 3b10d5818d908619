"""GPU tests begin without programs of the host library: some change what would be recorded."""

from __future__ import annotations

import pytest

from ringfa3 import host


@pytest.fixture(autouse=True)
def no_programs() -> None:
    if host._library is not None:
        host._library.clear()
