"""What a plan that was never seen before costs its first call: no request to the store.

If this failed, packed training would wait for an agreement of all ranks at each step.
"""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import plan_context, ring_attn_func
from ringfa3.agreement import agreements as agreements_module
from ringfa3.agreement.agreements import Agreements
from ringfa3.agreement.barriers import Barriers
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.group import RingGroup
from tests.support.ranks import Ranks, group_of

Group = dist.ProcessGroup
TOKENS = 150


def unexpected(*_: object) -> None:
    raise AssertionError("a new plan asks the store at its first call")


def _made(group: Group, first: int, how: str) -> ContextPlan:
    """A plan by each way in which one comes to have a process group."""
    cu = [0, first, TOKENS]
    if how == "from a data loader":
        return plan_context(cu, (dist.get_rank(group), dist.get_world_size(group))).bound_to(group)
    if how == "another window":
        return plan_context(cu, group).with_window((first, -1))
    return plan_context(cu, group)


def _step(plan: ContextPlan, scale: float = 0.5) -> None:
    x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)
    out = ring_attn_func(x, x, x, plan, softmax_scale=scale)
    out.sum().backward()  # type: ignore[union-attr]


def _until_agreed(group: Group) -> None:
    """A rank's second connection to the store takes 5 s where names of hosts have no server."""
    early = RingGroup.of(group).agreements._barriers._open.values()
    deadline = time.monotonic() + 15.0
    while not all(a.decided.is_set() for a in list(early)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(early) >= 3
    assert all(a.passed for a in early)


def _first_calls(_: Group, world: int, how: str) -> int:
    """Steps with a plan of their own each, of which the later ones may not ask the store."""
    group = group_of(world, 20.0)
    if dist.get_rank() >= world:
        return 0
    _step(_made(group, 10, how))
    plans = [_made(group, first, how) for first in (20, 30, 40)]
    _until_agreed(group)  # data are read, other layers run
    with (
        mock.patch.object(Agreements, "exchange", unexpected),
        mock.patch.object(Barriers, "_ask", unexpected),
    ):
        for plan in plans:
            _step(plan)
    return RingGroup.of(group).latest.number


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("how", ["made", "from a data loader", "another window"])
def test_the_first_call_of_a_new_plan_asks_no_store(ranks: Ranks, world: int, how: str) -> None:
    """Ranks have agreed since the plan was made."""
    assert ranks.run(4, _first_calls, world, how)[:world] == [8] * world


def _keys(_: Group, plans: int) -> list[int]:
    """Keys in the store after steps with new plans, of which some are never called, and refused
    calls."""
    group = group_of(2, 20.0)
    if dist.get_rank() >= 2:
        return []
    counts = []
    for number in range(plans):
        plan = _made(group, 3 + number, "made")
        _made(group, 100 + number, "never called")
        if number % 3 == 2:
            with pytest.raises(ValueError, match="softmax_scale"):
                _step(plan, 0.25 + dist.get_rank())
        else:
            _step(plan)
        dist.barrier(group)
        if number % 6 == 5:
            time.sleep(0.3)
            dist.barrier(group)
            counts.append(RingGroup.of(group).store.num_keys())
            dist.barrier(group)
    return counts


def test_agreements_leave_no_keys(ranks: Ranks) -> None:
    """As many after 30 plans as after 12; entries of the latest two refusals stay."""
    for counts in ranks.run(4, _keys, 30)[:2]:
        assert counts[1] == counts[-1], counts


def _late(_: Group) -> list[float]:
    """Seconds of a call of settings of its own, for which rank 1 comes late."""
    group = group_of(3, 20.0)
    if dist.get_rank() >= 3:
        return []
    _step(_made(group, 10, "made"))
    seconds = []
    for scale in (0.3, 0.4):
        dist.barrier(group)
        if dist.get_rank() == 1:
            time.sleep(5 * agreements_module.ASK_S)
        plan = _made(group, int(100 * scale), "made")
        start = time.monotonic()
        _step(plan, scale)
        seconds.append(time.monotonic() - start)
    return seconds


def test_a_late_rank_is_waited_for(ranks: Ranks) -> None:
    """A compiler takes minutes. The late rank itself waits for nobody."""
    on_time, late, _ = ranks.run(4, _late)[:3]
    assert min(on_time) > 4 * agreements_module.ASK_S
    assert max(late) < 2.0
