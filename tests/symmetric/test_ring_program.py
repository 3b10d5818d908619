"""If this fails, ring calls from C++ issue other steps than Python's. Programs of ring calls: what
the host library replays equals what Python does, call by call."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from ringfa3 import Mask, host
from ringfa3.planning import context_plan
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.ring.op import run_backward, run_forward
from ringfa3.ring.prepare_call import PreparedCall
from ringfa3.schedules import program_cache
from ringfa3.schedules.steps import STRUCTURES
from ringfa3.symmetric import cuda_driver, ring_program, self_test
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.ring_program import RingProgram
from ringfa3.symmetric.self_test import open_backend
from tests.support.fake_cuda import Ranks
from tests.support.fake_driver import Computations, Entry, LoggedCuda, in_terms
from tests.support.fake_group import FakeGroup
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import equal

CPU = torch.device("cpu")
PASS_TYPES = ("forward", "gathered", "backward")  # an odd number, so that parities take turns
SCALE = 0.125
Call = tuple[list[Entry], list[torch.Tensor]]  # log and results


class Rank:
    """One rank of a ring, and the calls that it makes."""

    def __init__(self, group: FakeGroup, cuda: LoggedCuda, tokens: int, form: str = "full") -> None:
        """form: of plans. "documents": causal, of which ranks publish rows that do not follow each
        other; "clipped": the same with images."""
        backend = open_backend(group, CPU)  # type: ignore[arg-type]
        assert isinstance(backend, SymmetricBackend), backend
        self.group, self.cuda, self.backend = group, cuda, backend
        self.form = form
        self.plan = self.new_plan(tokens)

    def new_plan(self, tokens: int) -> ContextPlan:
        placed = self.group.rank, self.group.world
        end = tokens * self.group.world
        if self.form == "full":
            return plan_context([0, end], placed, causal=False)
        documents = [0, 7 * end // 24, 10 * end // 24, end]
        if self.form == "documents":
            return plan_context(documents, placed)
        images = [x * end // 24 for x in (1, 3, 12, 15, 18)]
        mask = Mask.documents(documents).with_bidirectional(images, [x + 2 for x in images])
        return plan_context(mask, placed)

    def inputs(self, seed: int, plan: ContextPlan) -> list[torch.Tensor]:
        """q, k, v, dout, out and LSE."""
        generator = torch.Generator().manual_seed(100 * seed + self.group.rank)
        made = [
            torch.randn(n, h, 64, generator=generator).bfloat16()
            for h in (4, 2, 2, 4, 4)
            for n in [plan.local_keys if h == 2 else plan.local_tokens]
        ]
        return [*made, torch.randn(4, plan.local_tokens, generator=generator)]

    def grow(self) -> None:
        """Makes room in the shared memory for all calls of the plan; an even number of calls."""
        for pass_type in 2 * PASS_TYPES:
            self.call(pass_type, 0)

    def call(self, pass_type: str, seed: int, plan: ContextPlan | None = None) -> Call:
        plan = plan or self.plan
        q, k, v, dout, out, lse = self.inputs(seed, plan)
        sink = lse[:, :1].sum(1) if self.group.world > 2 else None
        call = PreparedCall(plan, pass_type, partial(SymmetricRingPass, self.backend))
        waits = list(self.backend.waits)
        given: tuple[torch.Tensor | None, ...]
        self.cuda.taken()
        with torch.no_grad(), Computations(self.cuda):
            if pass_type == "backward":
                dlse = lse + 1 if self.group.world == 3 else None
                given = dout, dlse, q, k, v, out, lse
                results = run_backward(*given, SCALE, False, call, sink)
            else:
                given = q, k, v
                results = run_forward(*given, SCALE, call, sink)
        log = self.cuda.taken()
        return in_terms(log, (*given, sink), self.backend, waits), list(results)


@contextmanager
def replays() -> Iterator[dict[int, int]]:
    """How many programs each thread has run."""
    counts: dict[int, int] = {}
    run = RingProgram.run

    def counted(self: RingProgram, *given: Any) -> Any:
        counts[threading.get_ident()] = counts.get(threading.get_ident(), 0) + 1
        return run(self, *given)

    with mock.patch.object(RingProgram, "run", counted):
        yield counts


def on_ranks(
    kernels: FakeKernels,
    world: int,
    work: Callable[[Rank, Any], Any],
    form: str = "full",
) -> list[Any]:
    """Runs work(rank, choose) on ranks; choose(host) makes all of them choose it."""
    ranks = Ranks(world, seed=world)
    ranks.cuda = cuda = LoggedCuda(world, kernels)
    meet = threading.Barrier(world, timeout=20.0)

    def enter(group: FakeGroup) -> Any:
        cuda.log("begins")

        def choose(which: str) -> None:
            if meet.wait() == 0:
                host.select(which)
            meet.wait()

        choose("python")
        rank = Rank(group, cuda, 24, form)
        try:
            return work(rank, choose)
        finally:
            rank.backend.close()  # a watchdog in C++ would abort the process at its end

    with (
        cuda.stands_in(),
        mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=20.0),
        mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64),
    ):
        results = ranks.run(enter)
    assert not cuda.problems
    return results


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 1), (1, 64)])
def test_ranks_without_tokens_have_empty_results(
    kernels: FakeKernels, queries: int, keys: int, world: int
) -> None:
    """Without queries, without keys, or without both. Python runs these calls: a program returns no
    empty results."""
    given = Mask.documents([0, queries], [0, keys], causal=False)

    def work(rank: Rank, choose: Callable[[str], None]) -> bool:
        rank.grow()
        plan = plan_context(given, (rank.group.rank, world))
        for which in host.HOSTS:
            choose(which)
            for pass_type in ("forward", "backward"):  # a gathered fake waits for keys of all ranks
                for _ in range(3):
                    _, results = rank.call(pass_type, 1, plan)
                    q, k = plan.local_tokens, plan.local_keys
                    sizes = [q, k, k] + [4] * (world > 2) if pass_type == "backward" else [q, 4]
                    assert [len(x) for x in results] == sizes
        return min(plan.local_tokens, plan.local_keys) == 0

    assert any(on_ranks(kernels, world, work))


@pytest.mark.parametrize(
    ("world", "form"),
    [(2, "full"), (3, "full"), (4, "full"), (2, "documents"), (2, "clipped")],
)
def test_a_replayed_call_does_what_python_does(kernels: FakeKernels, world: int, form: str) -> None:
    """Each driver call with its words, memory operation, launch and tensor operation in its order,
    the waits that are posted and counted, and results bit for bit; both parities, several calls."""
    steps = 4  # two of each parity: the first one builds the program

    def work(rank: Rank, choose: Callable[[str], None]) -> None:
        made: dict[str, list[Any]] = {}
        assert rank.plan.hops.clipped.clips == (form == "clipped")
        rank.grow()
        for which in host.HOSTS:
            choose(which)
            for step in range(steps):
                for pass_type in PASS_TYPES:
                    before = list(rank.backend.waits)
                    log, results = rank.call(pass_type, step // 2)
                    waits = [n - m for n, m in zip(rank.backend.waits, before, strict=True)]
                    made.setdefault(which, []).append((pass_type, step, log, waits, results))
        for python, cpp in zip(made["python"], made["cpp"], strict=True):
            assert cpp[:2] == python[:2]
            assert cpp[2] == python[2], f"{cpp[:2]}"
            assert cpp[3] == python[3]
            assert len(python[2]) > 5
            assert all(map(equal, cpp[4], python[4])), f"{cpp[:2]}"
        done = {str(entry[0]) for _, _, log, *_ in made["cpp"] for entry in log}
        assert {x for x in done if not x.startswith("cu")} <= {*STRUCTURES, "sum", "zero_"}
        assert {"publish", "round_gradients"} <= done
        assert ("add_returns" in done) == (world > 3)

    with replays() as counts:
        on_ranks(kernels, world, work, form)
    assert list(counts.values()) == [3 * steps] * world


# At 4 ranks: calls of the driver, with the one that sets the context; kernels. In longer shards a
# backward has one kernel less.
COSTS = {"forward": (18, 5), "gathered": (14, 2), "backward": (40, 10)}


def test_a_replayed_call_of_4_ranks_computes_in_kernels_alone(kernels: FakeKernels) -> None:
    """Counted on the rank with most calls. PyTorch allocates; beyond that it fills tiles that are
    split over SMs with zeros, as here where they are few, and adds up what blocks add to dsink."""

    def work(rank: Rank, choose: Callable[[str], None]) -> dict[str, tuple[int, int]]:
        rank.grow()
        choose("cpp")
        found = {}
        for pass_type in PASS_TYPES:
            names = [str(entry[0]) for entry in rank.call(pass_type, 0)[0]]
            driver = sum(name.startswith("cu") for name in names)
            launched = sum(name in STRUCTURES for name in names)
            others = {name for name in names if name not in STRUCTURES and name[:2] != "cu"}
            assert others <= ({"zero_", "sum"} if pass_type == "backward" else set())
            found[pass_type] = (1 + driver, launched)
        return found

    with replays() as counts:
        costs = on_ranks(kernels, 4, work)
    assert min(counts.values()) == len(PASS_TYPES)
    for pass_type, most in COSTS.items():
        assert max(cost[pass_type] for cost in costs) == most, pass_type


def _all_kinds(rank: Rank, times: int) -> list[list[torch.Tensor]]:
    """Results of the last turn."""
    for _ in range(times):
        results = [rank.call(pass_type, 0)[1] for pass_type in PASS_TYPES]
    return results


def _same(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> bool:
    return all(all(map(equal, x, y)) for x, y in zip(found, wanted, strict=True))


def test_programs_go_when_what_they_hold_changes(kernels: FakeKernels) -> None:
    """Larger shared memory, another stream, a capture, which Python runs, a plan that dies. Each
    time schedules are built again, and results are equal."""

    def work(rank: Rank, choose: Callable[[str], None]) -> None:
        me, ranks, cuda = threading.get_ident(), rank.group.meeting, rank.cuda
        rank.grow()
        wanted = _all_kinds(rank, 2)
        choose("cpp")

        def expect(programs: int) -> None:
            before, known = counts.get(me, 0), built.get(me, 0)
            assert _same(_all_kinds(rank, 3), wanted)
            assert counts.get(me, 0) - before == len(PASS_TYPES) * 3
            assert built.get(me, 0) - known == len(PASS_TYPES) * programs

        expect(2)
        expect(0)
        larger = rank.new_plan(64)
        for pass_type in 2 * PASS_TYPES:
            rank.call(pass_type, 0, larger)
        expect(2)
        number = rank.group.rank
        first, ranks._current[number] = ranks._current[number], cuda.stream(compute=True)
        kernels.use(8)
        expect(2)
        ranks._current[number] = first
        kernels.use()
        expect(0)
        before = counts[me]
        for _ in range(2):
            with ranks.capture():
                rank.call("forward", 0)
        assert counts[me] == before
        expect(2)
        known, plan = len(rank.backend.call_cache), rank.new_plan(40)
        for pass_type in PASS_TYPES:
            rank.call(pass_type, 0, plan)
        assert len(rank.backend.call_cache) == known + 1
        context_plan._cached_plan.cache_clear()
        del plan
        deadline = time.monotonic() + 30
        while len(rank.backend.call_cache) > known and time.monotonic() < deadline:
            gc.collect()  # does nothing while another thread collects
            time.sleep(0.05)
        assert len(rank.backend.call_cache) == known

    built: dict[int, int] = {}
    link = ring_program.link

    def counted(*given: Any) -> Any:
        me = threading.get_ident()
        built[me] = built.get(me, 0) + 1
        return link(*given)

    with replays() as counts, mock.patch.object(ring_program, "link", counted):
        on_ranks(kernels, 2, work)


@pytest.mark.parametrize("refused", ["cuEventRecord", "cuStreamBatchMemOp_v2", "a launch"])
def test_a_refused_call_raises_the_error_of_python(kernels: FakeKernels, refused: str) -> None:
    texts: dict[str, list[tuple[type, str]]] = {}

    def work(rank: Rank, choose: Callable[[str], None]) -> tuple[type, str]:
        rank.grow()
        choose(which)
        _all_kinds(rank, 6)
        choose(which)  # both ranks have ended their calls
        if refused == "a launch":
            kernels.library.fake_fail(719)
        else:
            rank.cuda.refused = refused
        with pytest.raises(RuntimeError) as caught:
            rank.call("backward", 0)
        return caught.type, str(caught.value)

    def error(name: str, status: int) -> cuda_driver.DriverError:
        return cuda_driver.DriverError(f"{name}: CUDA error {status}")

    with mock.patch.object(cuda_driver, "error", error), replays() as counts:
        for which in host.HOSTS:
            texts[which] = on_ranks(kernels, 2, work)
            kernels.library.fake_fail(0)
    assert len(counts) == 2
    assert texts["cpp"] == texts["python"]
    name = "publish of backward-d64-bf16" if refused == "a launch" else refused
    assert texts["cpp"][0][1].startswith(name)


def test_programs_of_a_plan_are_bounded(kernels: FakeKernels) -> None:
    """One too many forgets all."""

    def work(rank: Rank, choose: Callable[[str], None]) -> list[int]:
        rank.grow()
        choose("cpp")
        made = []
        for _ in range(2):
            for pass_type in PASS_TYPES:
                rank.call(pass_type, 0)
                made.append(len(rank.backend.call_cache[rank.plan.hops].programs))
        return made

    with mock.patch.object(program_cache, "MAX_PROGRAMS", 2):
        assert on_ranks(kernels, 2, work) == [[1, 2, 1, 2, 1, 2]] * 2


def test_inputs_that_no_program_serves_are_run_by_python(kernels: FakeKernels) -> None:
    """A narrow V, which is widened. The kernels of local K/V are selected by its own head dim."""

    def work(rank: Rank, choose: Callable[[str], None]) -> None:
        rank.grow()
        q, k, v, *_ = rank.inputs(0, rank.plan)
        call = PreparedCall(rank.plan, "forward", partial(SymmetricRingPass, rank.backend))
        given = q, k, v[..., :32]
        choose("python")
        wanted = run_forward(*given, SCALE, call)
        choose("cpp")
        for _ in range(4):
            assert all(map(equal, run_forward(*given, SCALE, call), wanted))

    select = mock.Mock(wraps=SymmetricRingPass.make_local_kv)
    with replays() as counts, mock.patch.object(SymmetricRingPass, "make_local_kv", select):
        on_ranks(kernels, 2, work)
    assert not counts
    assert {call.args[-1] for call in select.call_args_list} == {32, 64}  # 64: of `grow`
