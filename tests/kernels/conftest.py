"""The emulator, one for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.emulation import Machine, machine


@pytest.fixture(scope="module")
def emulated() -> Iterator[Machine]:
    with machine() as m:
        yield m
