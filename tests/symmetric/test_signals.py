"""What ranks do together before a call: on all of them it has succeeded, or all know who failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from ringfa3.symmetric.signals import together


def among(*others: tuple[str, str, float]) -> Callable[[str], Sequence[str]]:
    """A gather in which this rank is 0 and the others have said (given, wrong, time)."""
    return lambda mine: [mine, *(json.dumps(said) for said in others)]


def test_all_hear_what_each_has_given() -> None:
    gather = among(("b", "", 1.0), ("c", "", 2.0))
    assert together(gather, "a step", lambda: "a") == ["a", "b", "c"]


def test_the_rank_that_failed_first_is_named() -> None:
    """Here rank 0 fails now, long after rank 2, for which it may have waited."""

    def late() -> None:
        raise RuntimeError("wait timeout")

    gather = among(("b", "", 1.0), ("", "no room", 2.0))
    with pytest.raises(RuntimeError, match="a step on rank 2 of the group: no room"):
        together(gather, "a step", late)
    with pytest.raises(RuntimeError, match="a step on rank 0 of the group: wait timeout"):
        together(among(("b", "", 1.0)), "a step", late)
