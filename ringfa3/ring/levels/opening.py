"""Opens both levels: copies between the ranks of each host, if all hosts can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ringfa3.ring.agreement import Agreements, NoAgreementError
from ringfa3.ring.levels.host_group import HostGroup
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.ring.p2p import Peers, Transport
from ringfa3.symmetric.backend import Group
from ringfa3.symmetric.self_test import open_backend


class Owner(Peers, Group, Protocol):
    """What both levels need of `RingGroup`."""

    @property
    def store(self) -> Store: ...


def open_two_levels(
    group: Owner, hosts: Sequence[int], device: torch.device, between: Transport, name: str
) -> TwoLevelTransport | str:
    """The transport of a group, or why it cannot have one; the same on all ranks.

    Args:
        hosts: of each rank, as plans know them.
        between: sends messages to other hosts.
        name: of this attempt, the same on all ranks.
    """
    own = hosts[group.rank]
    mates = [rank for rank, host in enumerate(hosts) if host == own]

    def lost() -> str | None:
        return group.failure or group.peer_failure()

    ranks, store = [group.ranks[rank] for rank in mates], PrefixStore(f"{name}/{own}", group.store)
    meetings = Agreements(ranks, mates.index(group.rank), store, lambda: group.timeout_s, lost)

    def gather(line: str) -> list[str]:
        entry: dict[str, object] = {"settings": {}, "error": None, "mid_call": False, "line": line}
        try:
            return [str(found["line"]) for found in meetings.exchange(entry)]
        except NoAgreementError as problem:
            raise group.fail(str(problem)) from None

    def meet() -> bool:
        meetings.end()
        return meetings.meet("closed")

    opened = open_backend(HostGroup(group, mates, gather), device)
    if isinstance(opened, str):
        return next(filter(None, group.gather(opened)))
    try:
        reason = next(filter(None, group.gather("")), None)
    except BaseException:
        opened.close()  # nobody else would
        raise
    if reason is not None:
        opened.close(meet)  # all ranks of this host have opened it
        return reason
    return TwoLevelTransport(group, opened, mates, between, meet)
