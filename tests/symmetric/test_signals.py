"""If this fails, a rank that cannot start a call hangs the others. Steps of all ranks before a
call: they succeed on all, or all ranks raise and name the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from ringfa3.symmetric.shared_words import BYTES
from ringfa3.symmetric.signals import COUNTERS, Signals, step_on_all_ranks
from ringfa3.symmetric.stream_ops import Purpose, Signal, Stream
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup

WORLD = 3


def among(*others: tuple[str, str, float]) -> Callable[[str], Sequence[str]]:
    """A gather in which this rank is 0 and the others pass (result, problem, time)."""
    return lambda own: [own, *(json.dumps(line) for line in others)]


def test_all_ranks_get_all_results() -> None:
    gather = among(("b", "", 1.0), ("c", "", 2.0))
    assert step_on_all_ranks(gather, "a step", lambda: "a") == ["a", "b", "c"]


def test_the_rank_that_failed_first_is_named() -> None:
    """Rank 0 fails now, long after rank 2, for which it may have waited."""

    def late() -> None:
        raise RuntimeError("wait timeout")

    gather = among(("b", "", 1.0), ("", "no room", 2.0))
    with pytest.raises(RuntimeError, match="a step failed on rank 2 of the group: no room"):
        step_on_all_ranks(gather, "a step", late)
    with pytest.raises(RuntimeError, match="a step failed on rank 0 of the group: wait timeout"):
        step_on_all_ranks(among(("b", "", 1.0)), "a step", late)


def test_agreements_and_signals_are_words_of_their_own() -> None:
    """All ranks see what one writes, and no signal or counter begins there."""

    def run(group: FakeGroup) -> tuple[list[int], set[int]]:
        signals = Signals(group.rank, WORLD, group.gather)  # type: ignore[arg-type]
        words = signals.agreements
        assert not any(words)
        group.gather("")
        for parity in range(2):
            words[parity * WORLD + group.rank] = -1 - group.rank - parity * WORLD
        signals.set_all()
        group.gather("")
        every = product(range(WORLD), range(WORLD), Purpose, range(2))
        used = {signals.address(Signal(*names)) for names in every}
        used |= {signals.counter(x, i) for x, i in product(Stream, range(COUNTERS))}
        begin = signals._address + BYTES * signals._signals
        return words.tolist(), used & set(range(begin, begin + words.nbytes))

    assert Ranks(WORLD).run(run) == [(list(range(-1, -1 - 2 * WORLD, -1)), set())] * WORLD
