"""The ranks of one host of a CP group, as the backend over peers' memory knows its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringfa3.schedules.settings import Settings
from ringfa3.symmetric.backend import Group
from ringfa3.symmetric.signals import Gather


class HostGroup:
    """`ringfa3.symmetric.backend.Group` of the ranks of a CP group that share this rank's host.

    A failure of one of them is a failure of the whole group.

    rank, world  among the ranks of the host
    """

    def __init__(self, group: Group, mates: Sequence[int], gather: Gather) -> None:
        """mates: ranks of the host in the CP group. gather: passes lines between them."""
        self._group, self._gather = group, gather
        self.ranks = [group.ranks[rank] for rank in mates]
        self.rank, self.world = mates.index(group.rank), len(mates)

    @property
    def failure(self) -> str | None:
        return self._group.failure

    @property
    def timeout_s(self) -> float:
        return self._group.timeout_s

    @property
    def call(self) -> int:
        return self._group.call

    def gather(self, line: str) -> list[str]:
        return list(self._gather(line))

    def peer_failure(self) -> str | None:
        return self._group.peer_failure()

    def lose(self, message: str) -> None:
        self._group.lose(message)

    def report_failure(self, problem: Exception) -> None:
        self._group.report_failure(problem)

    def agreed(self, settings: Settings, direction: str) -> Any:
        return self._group.agreed(settings, direction)

    def agreement_snapshot(self) -> Any:
        return self._group.agreement_snapshot()
