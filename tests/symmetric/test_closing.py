"""If this fails, a group that ends frees memory that peers still read, or never frees it. A group
that ends gives its shared memory back, once no rank uses it, on stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ringfa3.symmetric import ipc_memory, self_test, signals
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.self_test import open_backend
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup

CPU = torch.device("cpu")
WORLD = 3


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "TEST_TOKENS", 8)


def _closed(ends: Callable[[FakeGroup, Callable[[], bool]], Callable[[], bool] | None]) -> Ranks:
    """Ranks whose backends, after their self-test, have closed; ends(group, meet) is what a rank
    closes with, and meet() lets all ranks meet."""
    ranks = Ranks(WORLD)
    barrier = threading.Barrier(WORLD, timeout=20.0)

    def run(group: FakeGroup) -> None:
        backend = open_backend(group, CPU)
        assert isinstance(backend, SymmetricBackend)

        def meet() -> bool:
            assert len(ranks.cuda.memory) == WORLD  # no rank has freed what peers may read
            barrier.wait()
            assert not ranks.cuda.attached
            barrier.wait()
            return True

        backend.close(ends(group, meet))
        assert not backend._watchdog.is_alive()

    ranks.run(run)
    return ranks


def test_memory_is_freed_after_all_ranks_have_unmapped_it() -> None:
    words, pinned = len(signals._registered), len(ipc_memory._pinned)
    ranks = _closed(lambda _, meet: meet)
    assert not ranks.cuda.memory
    assert not ranks.cuda.torn
    assert (len(signals._registered), len(ipc_memory._pinned)) == (words, pinned)


@pytest.mark.parametrize("lost", ["a peer does not come", "a rank has given up"])
def test_memory_stays_where_a_peer_may_use_it(lost: str) -> None:
    comes = None if lost == "a rank has given up" else lambda: False
    ranks = _closed(lambda _, __: comes)
    assert len(ranks.cuda.memory) == WORLD
