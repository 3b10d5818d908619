"""If this fails, profilers and the trainer miss calls that start in C++. Observers of ops see calls
that the host library replays as those that Python runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ringfa3 import host
from ringfa3.custom_op import set_op_hook
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import equal
from tests.support.host_steps import attend, leaves, recorded, replays, step


class Observed:
    """An observer of ops that keeps what it sees: ops, launches, ends, and errors that end them."""

    def __init__(self, kernels: FakeKernels) -> None:
        self.kernels = kernels
        self.seen: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.kernels.take()
        self.seen.append(name)
        try:
            yield
        except RuntimeError as error:
            self.seen.append(str(error))
            raise
        finally:
            self.seen += [launched.name for launched in self.kernels.take()]
            self.seen.append(f"end of {name}")


@pytest.fixture
def observed(kernels: FakeKernels) -> Iterator[Observed]:
    observer = Observed(kernels)
    set_op_hook(observer)
    yield observer
    set_op_hook(None)


def test_an_observer_sees_every_op(kernels: FakeKernels, observed: Observed) -> None:
    """A replayed one as one that Python runs, with its launches inside; also autograd's thread."""
    host.select("python")
    wanted = step(leaves())
    seen = list(observed.seen)
    assert seen == [
        *("attention", "forward", "end of attention"),
        *("attention_backward", "preprocess", "backward", "postprocess"),
        "end of attention_backward",
    ]
    host.select("cpp")
    for count in (0, 2, 2):
        observed.seen.clear()
        with replays(count):
            assert all(map(equal, step(leaves()), wanted))
        assert observed.seen == seen
    set_op_hook(None)
    with replays(2):
        step(leaves())
    assert observed.seen == seen


def test_an_error_passes_through_the_observer(kernels: FakeKernels, observed: Observed) -> None:
    """Of a replayed call, with the text of Python; an observer's own error, too."""
    recorded()
    inputs = leaves()
    out = attend(*inputs)
    kernels.library.fake_fail(719)
    told = []
    for which in ("cpp", "python"):
        host.select(which)
        for call in (lambda: attend(*leaves()), lambda: torch.autograd.grad(out.sum(), inputs)):
            observed.seen.clear()
            with pytest.raises(RuntimeError) as caught:
                call()
            told.append((caught.type, str(caught.value), observed.seen.copy()))
            assert str(caught.value) in observed.seen
            kernels.library.fake_forget()
    assert told[:2] == told[2:]
    kernels.library.fake_fail(0)

    def refuses(name: str) -> Any:
        raise KeyError(name)

    host.select("cpp")
    set_op_hook(refuses)
    with replays(1), pytest.raises(KeyError, match="attention"):
        attend(*leaves())
