"""If this fails, an error of a ring call in C++ hangs the peers. Errors of ring calls that the host
library begins: peers are told of them, as Python tells it."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ringfa3 import host
from ringfa3.planning import context_plan
from ringfa3.ring import op
from ringfa3.schedules.schedule import DTYPES
from ringfa3.schedules.steps import ALLOCATE
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.ring_program import ReplayableCall
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup
from tests.support.fake_kernels import FakeKernels
from tests.symmetric.test_replayable_calls import OWN_TURNS, OpRank, on_op_ranks
from tests.symmetric.test_ring_program import SCALE


def test_a_program_that_lacks_memory_is_told_to_the_peers(
    kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program by hand, with a buffer of 2^60 bytes."""
    library: Any = host._library
    buffer, view = [ALLOCATE, DTYPES[torch.float32], 1, 1 << 58], [4, 0, 1, 1 << 58, 1]
    words = [1, *buffer, 1, *view]  # of four inputs; the buffer is the result
    program = library.program(array.array("q", words), b"", b"", b"", (), ())
    told: list[tuple[bool, str]] = []

    class Failing(ReplayableCall):
        def failed(self, memory: bool, text: str) -> None:
            told.append((memory, text))

    group, state = FakeGroup(Ranks(2), 0, 60.0), {"cache_version": 0, "last_compute": None}
    backend: Any = SimpleNamespace(group=group, calls=0, waits=[0] * 3, posted=[], **state)
    call = Failing(backend, library, mock.Mock(waits=()), mock.Mock())
    call.agreed = group.agreement_snapshot()
    call.programs = [program] * 2

    def prepare(*_: object, **__: object) -> None:
        library.keep_ring(call)
        raise LookupError("Python ran the call")

    monkeypatch.setattr(op, "prepare_call", prepare)
    plan = context_plan.plan_context(24, (0, 1))
    q, k, v = (torch.randn(24, n, 64).bfloat16() for n in (4, 2, 2))
    arguments = q, k, v, None, plan.handle, SCALE, False, "native", "auto"
    with pytest.raises(LookupError):
        op.ring_attention(*arguments)
    with pytest.raises(RuntimeError, match="memory") as caught:
        op.ring_attention(*arguments)
    ((memory, text),) = told
    assert not memory  # an out-of-memory error of a GPU has a type of its own
    assert text.partition("\n")[0] in str(caught.value)


def test_an_observer_that_fails_is_told_to_the_peers(kernels: FakeKernels) -> None:
    @contextmanager
    def observer(name: str) -> Iterator[None]:
        raise LookupError(f"observing {name}")
        yield

    def work(rank: OpRank, choose: Callable[[str], None]) -> list[str]:
        choose("cpp")
        rank.all_kinds(8)
        choose("cpp")
        library.observe(observer)
        with pytest.raises(LookupError, match="observing ring_attention_backward"):
            rank.call("backward", 0)
        choose("cpp")
        library.observe(None)
        return rank.rank.group.failures

    library: Any = host._library
    for told in on_op_ranks(kernels, 2, work):
        (line,) = told
        assert "observing ring_attention_backward" in line


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("refused", ["cuEventRecord", "cuStreamBatchMemOp_v2", "a launch"])
def test_an_error_is_told_to_the_peers_and_raised(
    kernels: FakeKernels, refused: str, observed: bool
) -> None:
    """Type and text as Python's, also through an observer."""
    seen: list[str] = []

    @contextmanager
    def observer(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    def work(rank: OpRank, choose: Callable[[str], None]) -> tuple[type, str, list[str]]:
        choose("cpp")
        rank.all_kinds(2 * OWN_TURNS + 2)
        choose("cpp")  # both ranks have ended their calls
        group = rank.rank.group
        before = group.begun
        if refused == "a launch":
            kernels.library.fake_fail(719)
        else:
            rank.rank.cuda.refused = refused
        with pytest.raises(RuntimeError) as caught:
            rank.call("backward", 0)
        assert group.begun == before + 1
        return caught.type, str(caught.value), group.failures

    def error(name: str, status: int) -> cuda_driver.DriverError:
        return cuda_driver.DriverError(f"{name}: CUDA error {status}")

    library: Any = host._library
    with mock.patch.object(cuda_driver, "error", error):
        library.observe(observer if observed else None)
        try:
            found = on_op_ranks(kernels, 2, work)
        finally:
            library.observe(None)
            kernels.library.fake_fail(0)
    kind = RuntimeError if refused == "a launch" else cuda_driver.DriverError
    name = "publish of backward-d64-bf16" if refused == "a launch" else refused
    for raised, text, told in found:
        assert raised is kind
        assert text.startswith(name)
        assert [x.partition("\n")[0] for x in told] == [
            f"{kind.__name__}: {text.partition(chr(10))[0]}"
        ]
    assert ("ring_attention_backward" in seen) == observed
