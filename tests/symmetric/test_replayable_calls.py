"""If this fails, ring calls that start in C++ do something else than Python's. Ring calls that the
host library begins and replays: what they do equals what Python does."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from ringfa3 import host
from ringfa3.planning import context_plan
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import op
from ringfa3.ring.calls import LatestCall
from ringfa3.ring.prepare_call import PreparedCall
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from tests.support.fake_driver import Computations, in_terms
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import equal
from tests.support.python_frames import frames
from tests.symmetric.test_ring_program import PASS_TYPES, SCALE, Call, Rank, on_ranks

# One for each pass type, so that the library tells them apart: in a call the plan chooses it.
TRANSPORTS = {"forward": "auto", "gathered": "symmetric", "backward": "auto"}
INPUTS = "q", "k", "v", "dout", "out", "lse"
Change = Callable[[dict[str, torch.Tensor]], None]
OWN_TURNS = 1  # of a pass type: the first call builds the schedule


class OpRank:
    """A rank whose calls are those of the ops."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.pass_type, self.prepared = rank, "", 0

    def prepare(self, plan: ContextPlan) -> PreparedCall:
        """In place of `prepare_call`, which takes CPU tensors to gloo."""
        self.prepared += 1
        return PreparedCall(plan, self.pass_type, partial(SymmetricRingPass, self.rank.backend))

    def agree(self, stream: Any, schedule: Any) -> SymmetricBackend | None:
        """In place of `agree_prepared`."""
        backend = self.rank.backend
        return backend if backend.is_ready(schedule, stream) else None

    def call(
        self,
        pass_type: str,
        seed: int,
        plan: ContextPlan | None = None,
        change: Change | None = None,
        scale: float = SCALE,
        deterministic: bool = False,
    ) -> Call:
        """change: of the inputs q, k, v, dout, out, LSE, by name."""
        self.pass_type, rank = pass_type, self.rank
        plan = plan or rank.plan
        inputs = dict(zip(INPUTS, rank.inputs(seed, plan), strict=True))
        if change is not None:
            change(inputs)
        q, k, v, dout, out, lse = (inputs[name] for name in INPUTS)
        sink = lse[:, 0].clone() if rank.group.world > 2 else None
        sink = inputs.get("sink", sink)
        waits = list(rank.backend.waits)
        settings = plan.handle, scale, deterministic, "native", TRANSPORTS[pass_type]
        given: tuple[torch.Tensor | None, ...]
        rank.cuda.taken()
        with torch.no_grad(), Computations(rank.cuda):
            if pass_type == "backward":
                dlse = inputs.get("dlse", lse + 1 if rank.group.world == 3 else None)
                given = dout, dlse, q, k, v, out, lse
                results = op.ring_attention_backward(*given, sink, *settings)
            else:
                given = q, k, v
                results = op.ring_attention(*given, sink, *settings)
        log = rank.cuda.taken()
        return in_terms(log, (*given, sink), rank.backend, waits), list(results)

    def all_kinds(self, times: int) -> list[list[torch.Tensor]]:
        """Results of the last turn."""
        for _ in range(times):
            results = [self.call(pass_type, 0)[1] for pass_type in PASS_TYPES]
        return results


@contextmanager
def ops_of() -> Iterator[dict[int, OpRank]]:
    """Ranks by thread; the ops prepare their calls by them."""
    ranks: dict[int, OpRank] = {}

    def prepare(q: Any, k: Any, v: Any, plan: ContextPlan, *_: Any, **__: Any) -> PreparedCall:
        return ranks[threading.get_ident()].prepare(plan)

    def agree(_: Any, __: Any, stream: Any, schedule: Any, ___: Any) -> SymmetricBackend | None:
        return ranks[threading.get_ident()].agree(stream, schedule)

    with mock.patch.multiple(op, prepare_call=prepare, agree_prepared=agree):
        yield ranks


def on_op_ranks(
    kernels: FakeKernels, world: int, work: Callable[[OpRank, Any], Any], form: str = "full"
) -> list[Any]:
    def enter(rank: Rank, choose: Callable[[str], None]) -> Any:
        mine = ranks[threading.get_ident()] = OpRank(rank)
        rank.grow()
        return work(mine, choose)

    with ops_of() as ranks:
        return on_ranks(kernels, world, enter, form)


def same(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> bool:
    return all(all(map(equal, x, y)) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("world", "form"), [(2, "full"), (3, "full"), (4, "full"), (2, "documents")]
)
def test_a_call_that_begins_again_does_what_python_does(
    kernels: FakeKernels, world: int, form: str
) -> None:
    """Driver calls, memory operations, launches, waits and results, as in `test_ring_program`."""
    steps = 2 * (OWN_TURNS + 2)  # of both parities

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        made: dict[str, list[Any]] = {}
        backend, group = rank.rank.backend, rank.rank.group
        for which in host.HOSTS:
            choose(which)
            rank.prepared = 0
            for step in range(steps):
                for pass_type in PASS_TYPES:
                    before = list(backend.waits)
                    log, results = rank.call(pass_type, step // 2)
                    waits = [n - m for n, m in zip(backend.waits, before, strict=True)]
                    made.setdefault(which, []).append((pass_type, step, log, waits, results))
        begun = len(PASS_TYPES) * (steps - OWN_TURNS)
        assert (group.begun, rank.prepared) == (begun, OWN_TURNS * len(PASS_TYPES))
        for python, cpp in zip(made["python"], made["cpp"], strict=True):
            # a log of Python begins with the call that sets the context
            assert cpp[2] in (python[2], python[2][1:]), f"{cpp[:2]}"
            assert (cpp[:2], cpp[3]) == (python[:2], python[3])
            assert all(map(equal, cpp[4], python[4])), f"{cpp[:2]}"

    on_op_ranks(kernels, world, work, form)


def strided(name: str) -> Change:
    """Rows twice as far from each other."""

    def change(inputs: dict[str, torch.Tensor]) -> None:
        x = inputs[name]
        wide = x.new_zeros(x.shape[0], 2 * x.shape[1], *x.shape[2:])
        inputs[name] = wide[:, : x.shape[1]].copy_(x)

    return change


def shifted(name: str) -> Change:
    """The first byte elsewhere in 16."""

    def change(inputs: dict[str, torch.Tensor]) -> None:
        x = inputs[name]
        inputs[name] = x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)

    return change


def given(name: str) -> Change:
    def change(inputs: dict[str, torch.Tensor]) -> None:
        lse = inputs["lse"]
        inputs[name] = lse[:, 0].clone() if name == "sink" else lse + 1

    return change


def half(inputs: dict[str, torch.Tensor]) -> None:
    inputs.update({name: inputs[name].half() for name in INPUTS if name != "lse"})


CHANGES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.25},
    "deterministic": {"deterministic": True},
    "dtype": {"change": half},
    "dlse": {"change": given("dlse")},
    "sink": {"change": given("sink")},
    **{f"strides of {name}": {"change": strided(name)} for name in ("q", "k", "v", "dout")},
    **{f"alignment of {name}": {"change": shifted(name)} for name in ("q", "k", "v")},
}


@pytest.mark.parametrize("changed", [*CHANGES, "forward mode", "transport"])
def test_a_call_that_differs_is_of_another_kind(
    kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Python looks at the first one that differs, whose results are those of Python."""
    monkeypatch.setenv(FORWARD_MODE_ENV, "hops")

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        options = CHANGES.get(changed, {})
        rank.call("backward", 0, **options)  # room in the shared memory
        rank.call("backward", 0, **options)
        wanted = rank.call("backward", 0, **options)
        choose("cpp")
        for _ in range(2 * (OWN_TURNS + 1)):
            rank.call("backward", 0)
        choose("cpp")
        if changed == "forward mode":
            os.environ[FORWARD_MODE_ENV] = "gathered"
        if changed == "transport":
            TRANSPORTS["backward"] = "symmetric"
        choose("cpp")
        begun, prepared = rank.rank.group.begun, rank.prepared
        assert begun == 2 * (OWN_TURNS + 1) - OWN_TURNS
        found = rank.call("backward", 0, **options)
        assert (rank.rank.group.begun, rank.prepared) == (begun, prepared + 1)
        assert all(map(equal, found[1], wanted[1]))

    monkeypatch.setitem(TRANSPORTS, "backward", "auto")
    on_op_ranks(kernels, 2, work)


def test_a_call_begins_again_after_another_agreement(kernels: FakeKernels) -> None:
    """Once Python has begun it with the group's new mark."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        group = rank.rank.group
        rank.all_kinds(2)  # makes room in the shared memory
        choose("cpp")
        rank.all_kinds(4)
        for begun in (3, 6, 9):
            assert group.begun == begun * len(PASS_TYPES)
            group.agreements.cache_version += 1
            rank.all_kinds(4)  # the first of them Python begins

    on_op_ranks(kernels, 2, work)


def test_a_call_of_earlier_memory_does_not_begin(kernels: FakeKernels) -> None:
    """Also where something holds its programs."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        rank.all_kinds(2)  # makes room in the shared memory
        choose("cpp")
        rank.all_kinds(4)
        held = list(rank.rank.backend.call_cache.values())
        assert rank.rank.group.begun == 3 * len(PASS_TYPES)
        larger = rank.rank.new_plan(64)
        for pass_type in 2 * PASS_TYPES:
            rank.call(pass_type, 0, larger)
        begun = rank.rank.group.begun
        rank.all_kinds(1)
        assert held
        assert rank.rank.group.begun == begun

    on_op_ranks(kernels, 2, work)


def test_python_looks_at_a_call_that_may_not_begin(kernels: FakeKernels) -> None:
    """A group in trouble, larger memory, another stream, a capture, a host that Python starts."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        group, ranks, cuda = rank.rank.group, rank.rank.group.meeting, rank.rank.cuda
        wanted = rank.all_kinds(2)
        choose("cpp")

        def expect(turns: int, begun: int) -> None:
            before = group.begun
            assert same(rank.all_kinds(turns), wanted)
            assert group.begun - before == len(PASS_TYPES) * begun

        expect(4, 3)
        group.monitor.peer_failure = "a rank has given up"
        expect(2, 0)
        group.monitor.peer_failure = None
        expect(2, 2)
        larger = rank.rank.new_plan(64)
        for pass_type in 2 * PASS_TYPES:
            rank.call(pass_type, 0, larger)
        expect(4, 3)
        first = ranks._current[group.rank]
        ranks._current[group.rank] = cuda.stream(compute=True)
        kernels.use(8)
        expect(4, 3)
        ranks._current[group.rank] = first
        kernels.use()
        before = group.begun
        rank.call("forward", 0)  # after which this stream is the last one again
        rank.call("forward", 0)
        assert group.begun == before + 1
        expect(2, 2)
        with ranks.capture():
            kernels.library.fake_capture(1)
            rank.call("forward", 0)
            kernels.library.fake_capture(0)
        assert group.begun == before + 1 + 2 * len(PASS_TYPES)
        expect(4, 3)
        choose("python")
        expect(2, 0)

    on_op_ranks(kernels, 2, work)


def test_a_call_goes_with_its_plan(kernels: FakeKernels) -> None:
    """Nothing of the library keeps a plan's tables."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        choose("cpp")
        plan = rank.rank.new_plan(40)
        for pass_type in 2 * PASS_TYPES:  # makes room in the shared memory
            rank.call(pass_type, 0, plan)
        for pass_type in 4 * PASS_TYPES:
            rank.call(pass_type, 0, plan)
        assert rank.rank.group.begun >= 2 * len(PASS_TYPES)
        known = len(rank.rank.backend.call_cache) - 1
        context_plan._cached_plan.cache_clear()
        del plan
        for _ in range(600):
            gc.collect()  # does nothing while another thread collects
            if len(rank.rank.backend.call_cache) == known:
                return
            threading.Event().wait(0.05)
        raise AssertionError("the cached calls of a plan outlive it")

    on_op_ranks(kernels, 2, work)


def test_a_steady_call_enters_no_frame_of_python(kernels: FakeKernels) -> None:
    """Below its op, a function of Python. It does what `RingGroup.begin` does: it counts the call,
    names the forward of a backward, posts waits to the watchdog, and notes the thread."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> list[str]:
        choose("cpp")
        rank.all_kinds(2 * OWN_TURNS + 2)
        q, k, v, dout, out, _ = rank.rank.inputs(0, rank.rank.plan)
        settings, posted = (rank.rank.plan.handle, SCALE, False, "native"), list[Any]()
        rank.rank.backend.posted = posted  # type: ignore[assignment]
        group = rank.rank.group
        before, of_group = group.calls.latest, group.interruption
        of_group.caller = weakref.ref(threading.main_thread())
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),  # as a node's backward
            frames() as entered,
        ):
            for pass_type in ("forward", "gathered"):
                of_op = *settings, TRANSPORTS[pass_type]
                _, lse = torch.ops.ringfa3.ring_attention(q, k, v, None, *of_op)
            of_op = dout, None, q, k, v, out, lse, None, *settings, TRANSPORTS["backward"]
            torch.ops.ringfa3.ring_attention_backward(*of_op)
        latest, number = group.calls.latest, before.number
        assert latest == LatestCall(number + 3, *latest[1:])
        assert latest.forward == number + 2
        expected = before.next(before.settings, 0).next(before.settings, 0)
        assert latest.history == expected.next(before.settings, number + 2).history
        assert list(group.calls.recent)[-1] is latest
        assert [x[0] for x in posted] == [number + 1, number + 2, number + 3]
        assert all(waits for _, of_streams in posted for _, waits in of_streams)
        assert of_group.caller() is threading.current_thread()
        assert group.connections.last_transport == "symmetric"
        return entered

    assert on_op_ranks(kernels, 2, work) == [[], []]
