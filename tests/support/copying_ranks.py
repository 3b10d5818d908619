"""The passes of all ranks of a ring over two levels, in threads of one process.

Inside a host a stand-in for CUDA copies, between hosts messages go by queues. What a copy fills is
NaN until it has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ringfa3.pass_interface import Attend
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.levels import two_levels
from ringfa3.ring.levels.host_group import HostGroup
from ringfa3.ring.levels.two_level_pass import TwoLevelPass
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.ring.p2p import Exchange, Message
from ringfa3.symmetric.backend import SymmetricBackend
from tests.support.fake_cuda import LIMIT_S, Ranks
from tests.support.fake_group import FakeGroup
from tests.support.message_ring import Links, Transport, nan_memory

CPU = torch.device("cpu")


class Hosts:
    """Makes the transports of ranks, which are threads of `ranks`.

    hosts   of each rank
    copied  rows that a rank has from others of its host
    """

    def __init__(self, ranks: Ranks, hosts: Sequence[int]) -> None:
        self.hosts, self.links, self.copied = hosts, Links(), 0
        self._ranks = ranks
        self._lines: list[object] = [None] * len(hosts)
        self._barriers = {
            host: threading.Barrier(hosts.count(host), timeout=LIMIT_S) for host in set(hosts)
        }

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        with (
            mock.patch.object(two_levels, "cuda_driver", self._ranks.cuda),
            mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64),
            nan_memory(self.links),
        ):
            yield

    def mates(self, rank: int) -> list[int]:
        return [r for r, host in enumerate(self.hosts) if host == self.hosts[rank]]

    def meet(self, rank: int) -> bool:
        self._barriers[self.hosts[rank]].wait()
        return True

    def gather(self, rank: int, line: object) -> list[Any]:
        self._lines[rank] = line
        self.meet(rank)
        lines = [self._lines[r] for r in self.mates(rank)]
        self.meet(rank)
        return lines

    def transport(self, group: FakeGroup) -> TwoLevelTransport:
        rank, mates = group.rank, self.mates(group.rank)
        own = HostGroup(group, mates, lambda line: self.gather(rank, line))  # type: ignore[arg-type]
        backend = SymmetricBackend(own, CPU, 60.0, lambda text: group.lose(text))
        far: Any = Transport(rank, self.links)
        return Checked(self, group, backend, mates, far, lambda: self.meet(rank))  # type: ignore[arg-type]


class Checked(TwoLevelTransport):
    def __init__(self, hosts: Hosts, *given: Any) -> None:
        self._hosts = hosts
        super().__init__(*given)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        for m in receives:
            m.tensor.fill_(torch.nan)
        for m in sends:
            assert not m.tensor.isnan().any(), f"{m.what} leaves before it has come"
        here = [m for m in receives if m.peer in self._number]
        with self._hosts.links.lock:
            self._hosts.copied += sum(len(m.tensor) for m in here)
        return super().exchange(sends, receives)


def run_two_levels(
    plans: Sequence[ContextPlan],
    pass_type: str,
    kv: Callable[[ContextPlan], torch.Tensor],
    attend: Callable[[ContextPlan, TwoLevelPass], Attend],
    seed: int = 0,
) -> tuple[list[Any], Links]:
    """As `message_ring.run_passes`. The links have rows between hosts alone."""
    ranks = Ranks(len(plans), seed)
    hosts = Hosts(ranks, plans[0].hosts)

    def run(group: FakeGroup) -> TwoLevelPass:
        plan, transport = plans[group.rank], hosts.transport(group)
        ring = TwoLevelPass(transport, plan, pass_type)
        k = kv(plan)
        try:
            ring.start(k, k.clone())
            ring.run(attend(plan, ring))
            transport.close(lost=False)
        except BaseException:
            hosts.links.broken = True
            raise
        return ring

    with hosts.stand_in():
        rings = ranks.run(run)
    moved = (p.by_messages() for p in plans)
    assert not ranks.cuda.torn
    if any(x.direct.leaving != [[]] * len(x.rows) for x in moved):
        assert hosts.copied > 0
    for _, sender, receiver in hosts.links.sent:
        assert plans[0].hosts[sender] != plans[0].hosts[receiver]
    return rings, hosts.links
