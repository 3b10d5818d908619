"""If this fails, rings over several hosts copy wrong rows inside a host, or hang. Rings whose ranks
copy inside a host and send messages between hosts."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3.errors import StepError
from ringfa3.pass_interface import HopTensors
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.ring.levels import two_levels
from ringfa3.ring.levels.two_level_pass import TwoLevelPass
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.ring.p2p import FakeTransport, Message
from ringfa3.symmetric.ipc_memory import IpcMemory
from tests.ring.test_landing import check, numbers
from tests.support.copying_ranks import Hosts, run_two_levels
from tests.support.dense import mask
from tests.support.fake_cuda import FakeGroup, Ranks
from tests.support.strategies import Case, cases

topologies = st.sampled_from([(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 0, 1, 1, 2)])


@settings(max_examples=15)
@given(case=cases, hosts=topologies)
def test_documents_and_windows(case: Case, hosts: tuple[int, ...]) -> None:
    """Exactly: pairs of the forward, sums of the backward, rows between hosts. Reference: the dense
    mask. Copies run in any order that streams and signals allow."""
    cu, world = np.cumsum([0, *case.lengths]).tolist(), len(hosts)
    given = case.layout, case.causal, case.window, hosts
    plans = [plan_context(cu, (rank, world), *given) for rank in range(world)]
    check(plans, mask(case.lengths, case.lengths, *case.band), run_two_levels)


def test_a_slow_reader_still_gets_the_rows_of_its_call() -> None:
    """Exactly. Contiguous: rank 0 waits for nobody's rows, and is passes ahead of rank 1, which
    reads rows of rank 0 alone. Key n of pass p is 1000 * p + n."""
    plans = [plan_context(64, (r, 4), "contiguous", hosts=2) for r in range(4)]
    ranks = Ranks(4)
    hosts = Hosts(ranks, plans[0].hosts)

    def run(group: FakeGroup) -> int:
        plan, transport, wrong = plans[group.rank], hosts.transport(group), 0
        for number in range(8):

            def attend(launch: int, x: HopTensors, number: int = number) -> None:
                nonlocal wrong
                wrong += int(((x.k < 1000 * number) | (x.k >= 1000 * (number + 1))).sum())
                wrong += int(x.k.isnan().sum())
                time.sleep(0.003 if group.rank == 1 else 0)

            ring = TwoLevelPass(transport, plan, "forward")
            k = torch.from_numpy(1000.0 * number + plan._key_index[:, None, None])
            ring.start(k, k.clone())
            ring.run(attend)
        transport.close(lost=False)
        return wrong

    with hosts.stand_in():
        assert ranks.run(run) == [0] * 4
    assert hosts.copied > 0


class Recording:
    """A backend that lists what its streams do."""

    def __init__(self) -> None:
        self.group, self.done = SimpleNamespace(rank=0), list[str]()

    def prepare(self, operations: Any, _: object) -> list[str]:
        return [self._named(x) for x in operations]

    def _named(self, x: Any) -> str:
        what = x.event.name if hasattr(x, "event") else f"{x.signal.purpose.name} {x.signal.parity}"
        return f"{x.stream.name} {type(x).__name__} {what}"

    def issue(self, names: list[str]) -> None:
        self.done += names

    def local(self, _: object, slot: int) -> torch.Tensor:
        self.done.append(f"publish in slot {slot}")
        return torch.zeros(64, dtype=torch.uint8)

    def address(self, part: Any) -> int:
        return int(part.begin)

    def handle(self, stream: Any) -> str:
        return str(stream.name)


def test_streams_order_the_copies_of_an_exchange() -> None:
    """Exactly the operations, in order. A copy comes after all earlier work on the compute stream,
    which may use the memory that it fills. Readers of a slot copy before it is written again."""
    backend = Recording()

    def copy(stream: str, _: int, source: int, size: int) -> str:
        return f"{stream} copies [{source}:{source + size}]"

    calls = SimpleNamespace(copy=copy, issue=lambda calls: backend.issue(list(calls)))
    transport = TwoLevelTransport(mock.Mock(), backend, (3, 5), FakeTransport(), bool)  # type: ignore[arg-type]
    sent, received = torch.ones(2, 2), torch.ones(1, 2)
    exchange = [Message(sent, 5, "K/V", 0, 8)], [Message(received, 5, "K/V", 0, 40)]
    publishes = ["COMPUTE RecordEvent published", "KV WaitEvent published"]

    def expected(slot: int) -> list[str]:
        return [
            f"publish in slot {slot}",
            *publishes,
            f"KV SetSignal KV_READY {slot}",
            *publishes,
            f"KV WaitAndReset KV_READY {slot}",
            "KV copies [40:48]",
            f"KV SetSignal KV_CONSUMED {slot}",
            "KV RecordEvent arrived",
            "COMPUTE WaitEvent arrived",
        ]

    free = ["KV WaitAndReset KV_CONSUMED 0", "KV RecordEvent free", "COMPUTE WaitEvent free"]
    with mock.patch.object(two_levels, "cuda_driver", calls):
        for wanted in (expected(0), expected(1), [*free, *expected(0)]):
            backend.done = []
            transport.exchange(*exchange).wait()
            assert backend.done == wanted


def test_a_rank_without_memory_raises_on_all_hosts() -> None:
    """The group stays usable, also for passes that would have had room before."""
    allocate, full = IpcMemory._allocate, [False]

    def no_room(memory: IpcMemory, capacity: Any) -> str:
        if full[0] and threading.current_thread().name == "2":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(memory, capacity)

    small, large = ([plan_context(n, (r, 4), hosts=2) for r in range(4)] for n in (16, 256))
    ranks = Ranks(4)
    hosts = Hosts(ranks, small[0].hosts)

    def run(group: FakeGroup) -> list[str]:
        transport, errors = hosts.transport(group), []

        def call(plan: ContextPlan) -> None:
            ring = TwoLevelPass(transport, plan, "forward")
            ring.start(numbers(plan), numbers(plan))
            ring.run(lambda launch, x: None)

        call(small[group.rank])
        for plans in (large, small):
            group.gather("")
            full[0] = True
            with pytest.raises(StepError) as raised:
                call(plans[group.rank])
            errors.append(str(raised.value))
        group.gather("")
        full[0] = False
        call(large[group.rank])
        transport.close(lost=False)
        return errors

    with hosts.stand_in(), mock.patch.object(IpcMemory, "_allocate", no_room):
        found = ranks.run(run)
    text = "allocating the shared memory failed on rank 0 of its host: CUDA out of memory"
    assert found == [[f"rank 12: {text}"] * 2] * 4
