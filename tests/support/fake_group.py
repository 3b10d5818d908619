"""A stand-in for the group of a rank over `symmetric`."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ringfa3.ring.agreement import AgreementSnapshot
from ringfa3.ring.calls import CallHistory
from ringfa3.schedules.settings import Settings
from ringfa3.threads import Interruption

if TYPE_CHECKING:
    from tests.support.fake_cuda import Ranks

SETTINGS = Settings({"of": "all calls"})
SETTINGS.complete()


class FakeGroup:
    """`ringfa3.symmetric.backend.Group`; ranks meet in shared lists."""

    def __init__(self, ranks: Ranks, rank: int, timeout_s: float) -> None:
        self.meeting, self.rank, self.timeout_s = ranks, rank, timeout_s
        self.world, self.name = ranks.world, "fake"
        self.ranks = [10 + r for r in range(ranks.world)]  # of the job
        self.failures: list[str] = []
        self.failure: str | None = None
        self.call = 0
        # of `RingGroup`, by which the C++ launcher begins calls
        self.calls, self.interruption = CallHistory(), Interruption()
        self.agreements = SimpleNamespace(agreement_id=0, cache_version=0)
        self.monitor = SimpleNamespace(peer_failure=None, join_request=0)
        self.connections = SimpleNamespace(last_transport=None)
        self.process_group, self.process_groups = weakref.ref(ranks), {ranks: None}

    @property
    def begun(self) -> int:
        """How many calls the launcher has begun."""
        return self.calls.latest.number

    def agreed(self, settings: Settings, direction: str) -> AgreementSnapshot:
        return AgreementSnapshot(settings.of_pass(direction), self.agreements.cache_version)

    def agreement_snapshot(self) -> AgreementSnapshot:
        return self.agreed(SETTINGS, "forward")

    def report_failure(self, problem: Exception) -> None:
        self.failures.append(f"{type(problem).__name__}: {problem}")

    def gather(self, line: object) -> list[object]:
        return self.meeting.gather(self.rank, line)

    def peer_failure(self) -> str | None:
        return None

    def lose(self, message: str) -> None:
        self.failures.append(message)
