"""If this fails, a call uses outdated sequence lengths. Cumulative lengths on a GPU, which the host
library knows by tensor and version: how many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringfa3 import host
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import Shape, call

TENSORS = 256  # kMaxDocuments of csrc/host/programs.h
SHAPE = Shape(tokens=8, keys=8, documents=(5, 3))


@pytest.fixture
def kernels(fake_kernels: FakeKernels, host_library: Any) -> Iterator[FakeKernels]:
    host.start(host_library, "cpu", fake_kernels.driver(), lengths_by_value=False)
    host.select("cpp")
    yield fake_kernels
    host.stop()


def test_tensors_that_live_are_bounded(kernels: FakeKernels) -> None:
    """The one that was used least recently is forgotten with its programs; it comes back as new."""
    inputs = SHAPE.inputs()

    def attend(lengths: torch.Tensor) -> str:
        """What counts the forward."""
        before = host.counts()
        call(kernels, SHAPE, inputs, lengths, backward=False)
        after = host.counts()
        (found,) = (x for x in ("built", "replayed") if after[x] > before[x])
        return found

    used, unused, *others = (SHAPE.cumulative() for _ in range(TENSORS + 1))
    for lengths in (used, unused):
        assert [attend(lengths) for _ in range(2)] == ["built", "replayed"]
    assert host.counts()["programs"] == 2
    for lengths in others:
        assert attend(lengths) == "built"
        assert attend(used) == "replayed"
    assert [attend(unused) for _ in range(2)] == ["built", "replayed"]
    assert attend(others[-1]) == "replayed"
