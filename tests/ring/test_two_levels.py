"""If this fails, rings over several hosts copy wrong rows inside a host, or hang. Rings whose ranks
copy inside a host and send messages between hosts."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringfa3.errors import StepError
from ringfa3.pass_interface import HopTensors
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.ring import connections
from ringfa3.ring.group import RingGroup
from ringfa3.ring.levels import two_levels
from ringfa3.ring.levels.host_group import HostGroup
from ringfa3.ring.levels.opening import open_two_levels
from ringfa3.ring.levels.two_level_pass import TwoLevelPass
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.ring.op import ring_attention
from ringfa3.ring.p2p import FakeTransport, Message
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.ring.prepare_call import PreparedCall
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric.ipc_memory import IpcMemory
from tests.ring.test_landing import check, numbers
from tests.support import ranks as processes
from tests.support.copying_ranks import CPU, Hosts, run_two_levels
from tests.support.dense import attention, gradients, mask, tensors, worst
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup
from tests.support.message_ring import Links, Transport, in_threads
from tests.support.strategies import Case, cases

topologies = st.sampled_from([(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1, 0, 2, 2)])


@settings(max_examples=8)
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
        for slot, wanted in ((0, expected(0)), (1, expected(1)), (0, [*free, *expected(0)])):
            backend.done = []
            sends = [Message(sent, 5, "K/V", 0, slot, 8)]
            transport.exchange(sends, [Message(received, 5, "K/V", 0, slot, 40)]).wait()
            assert backend.done == wanted


@pytest.mark.parametrize("sends", [True, False])
def test_rows_without_an_address_are_not_copied(sends: bool) -> None:
    """From any other one they would be wrong."""
    calls = SimpleNamespace(copy=mock.Mock(), issue=list)
    transport = TwoLevelTransport(mock.Mock(), Recording(), (3, 5), FakeTransport(), bool)  # type: ignore[arg-type]
    messages = [Message(torch.ones(2, 2), 5, "K/V", 0)]
    with (
        mock.patch.object(two_levels, "cuda_driver", calls),
        pytest.raises(ValueError, match="K/V: no byte of a slot is known for rank 5 of this host"),
    ):
        transport.exchange(*((messages, []) if sends else ([], messages)))


def test_the_last_exchange_of_a_pass_holds_no_buffer() -> None:
    """A copy's target lives until the compute stream has waited for the copy, and no longer."""
    calls = SimpleNamespace(copy=mock.Mock(), issue=list)
    transport = TwoLevelTransport(mock.Mock(), Recording(), (3, 5), FakeTransport(), bool)  # type: ignore[arg-type]
    sent, received = torch.ones(2, 2), torch.ones(1, 2)
    alive = weakref.ref(received)
    sends, receives = ([Message(x, 5, "K/V", 0, 0, at)] for x, at in ((sent, 8), (received, 40)))
    with mock.patch.object(two_levels, "cuda_driver", calls):
        exchange = transport.exchange(sends, receives)
        calls.copy.reset_mock()
        del sends, receives, received
        gc.collect()
        assert alive() is not None
        exchange.wait()
    gc.collect()
    assert alive() is None


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


def _results(plan: ContextPlan) -> list[Tensor]:
    """out, lse, dq, dk and dv of a rank, compared with the dense reference."""
    inputs, dout, dlse = tensors(0, plan.total_tokens, (4, 2), 4)
    leaves = [x.clone().requires_grad_() for x in inputs]
    whole = attention(*leaves, mask(LENGTHS, LENGTHS, -1, 0))
    token = plan.token_index
    expected = [g[token] for g in gradients(leaves, whole, dout, dlse)]
    mine = [x[token].requires_grad_() for x in inputs]
    there = ring_attention(*mine, None, plan.handle, 0.5, True, "native", "symmetric")
    found = [*there, *gradients(mine, there, dout[token], dlse[:, token])]
    expected = [whole[0][token], whole[1][:, token], *expected]
    assert worst(list(zip(found, expected, strict=True))) < 1e-12
    return found


LENGTHS = [400, 90]  # on six ranks exchanges have both K/V and dK/dV inside a host


def test_results_have_the_bits_of_messages_alone() -> None:
    """Deterministic calls in float64, 1e-12 from the dense reference, in two orders of copies."""
    cu = np.cumsum([0, *LENGTHS]).tolist()
    plans = [plan_context(cu, (r, 6), hosts=2) for r in range(6)]
    made: dict[int, Any] = {}

    def prepared(*given: Any, **_: Any) -> PreparedCall:
        return PreparedCall(given[3], given[-1], made[threading.get_ident()])

    def run(plan: ContextPlan, transport: Any, ring_pass: type[P2PRingPass]) -> list[Tensor]:
        made[threading.get_ident()] = partial(ring_pass, transport)
        found = _results(plan)
        transport.close(lost=False)
        return found

    links = Links()
    with mock.patch("ringfa3.ring.op.prepare_call", prepared):
        alone = in_threads(plans, lambda p: run(p, Transport(p.rank, links), P2PRingPass), links)
        for seed in range(2):
            ranks = Ranks(6, seed)
            hosts = Hosts(ranks, plans[0].hosts)
            with hosts.stand_in():
                found = ranks.run(
                    lambda g: run(plans[g.rank], hosts.transport(g), TwoLevelPass)  # noqa: B023
                )
            for bits, others in zip(alone, found, strict=True):
                assert all(map(torch.equal, bits, others))  # type: ignore[call-overload]
            assert hosts.copied > 0


def _opened(group: dist.ProcessGroup) -> list[tuple[list[str], str, list[bool]]]:
    """Lines of the ranks of a host; why there is no transport; whether they met to close it. With
    hosts that can copy, and with one that cannot."""
    own, results = RingGroup.of(group), []
    for refused in ("", NO_DRIVER):
        own.begin(Settings())
        backend, lines, met = mock.Mock(), list[str](), list[bool]()
        backend.close.side_effect = lambda meet, met=met: met.append(meet())

        def opened(host: HostGroup, _: object) -> object:
            lines.extend(host.gather(f"{own.rank} is {host.rank} of {host.world}"))  # noqa: B023
            return refused if refused and own.rank in (1, 3) else backend  # noqa: B023

        with mock.patch("ringfa3.ring.levels.opening.open_backend", opened):
            found = open_two_levels(own, (0, 1, 0, 1), CPU, FakeTransport(), f"test/{refused}")
        if isinstance(found, str):
            assert backend.close.called == (own.rank in (0, 2))
        else:
            found.close(lost=False)
        results.append((lines, found if isinstance(found, str) else "", met))
    return results


NO_DRIVER = "rank 3: no CUDA driver"


def test_all_hosts_open_or_none(ranks: processes.Ranks) -> None:
    """Ranks of a host meet apart from other hosts. If one host cannot copy, no host does, and the
    ranks of another one meet to free the memory of their test."""
    lines = ["0 is 0 of 2", "2 is 1 of 2"], ["1 is 0 of 2", "3 is 1 of 2"]
    for rank, (works, refused) in enumerate(ranks.run(4, _opened)):
        assert works == (lines[rank % 2], "", [True])
        assert refused == (lines[rank % 2], NO_DRIVER, [] if rank % 2 else [True])


def test_a_group_that_is_lost_while_it_opens_leaves_no_thread() -> None:
    """What this host has opened is closed, without its peers."""
    group = mock.Mock(rank=0, ranks=[4, 5], store=dist.HashStore())
    group.gather.side_effect = RuntimeError("rank 5 has given up")
    backend = mock.Mock()
    with (
        mock.patch("ringfa3.ring.levels.opening.open_backend", return_value=backend),
        pytest.raises(RuntimeError, match="rank 5 has given up"),
    ):
        open_two_levels(group, (0, 1), CPU, FakeTransport(), "test")
    assert backend.mock_calls == [mock.call.close()]


def test_connections_end_what_copies() -> None:
    """A refused call drops both levels, and the next one opens them anew. Copies end before the
    messages."""
    opened: list[mock.Mock] = []
    ended: list[str] = []

    def open_levels(*given: object) -> mock.Mock:
        opened.append(mock.Mock())
        opened[-1].close.side_effect = lambda lost: ended.append(f"copies, lost {lost}")
        return opened[-1]

    nccl = mock.Mock()
    nccl.close.side_effect = lambda lost: ended.append(f"messages, lost {lost}")
    group = mock.Mock(rank=0, world=4)
    with (
        mock.patch.multiple(connections, new_group=mock.Mock(), connect_ranks=mock.Mock()),
        mock.patch.dict(connections.P2P_TRANSPORTS, {"nccl": lambda *_: nccl}),
        mock.patch.object(connections, "open_two_levels", open_levels),
    ):
        made, hosts = connections.Connections(group, "name", lambda: None), (0, 0, 1, 1)
        assert made.memory_of_levels(hosts) is None
        assert made.two_levels(hosts, CPU) is made.two_levels(hosts, CPU) is opened[0]
        assert made.memory_of_levels(hosts) is opened[0].backend.memory
        opened[0].completed_before.return_value = False
        assert not made.completed_before(3)
        made.abandon()
        assert opened[0].abort.called
        assert nccl.abort.called
        assert made.memory_of_levels(hosts) is None
        assert made.two_levels(hosts, CPU) is opened[1]
        made.release()
        assert opened[1].abort.called
        made.close(lambda: True)
    now, then = "copies, lost False", "copies, lost True"
    assert ended == [now, "messages, lost False", "messages, lost True", then]
