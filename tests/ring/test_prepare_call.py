"""If this fails, a wrong argument on one rank hangs the others. One rank enters a call with other
arguments: all ranks soon raise and name rank and argument."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from ringfa3 import RingError, plan_context, ring_attn_func
from ringfa3.ring.group import RingGroup
from ringfa3.ring.prepare_call import bind_to_group
from tests.support.dense import cumulative
from tests.support.ranks import Ranks, group_of

Group = dist.ProcessGroup
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, object, dict[str, object]]
SOON_S = 5.0
CU = [0, 4, 5, 150]  # the last document has tokens on every rank: all exchange K and V


def right(group: Group, cu: Sequence[int] = CU, layout: str = "zigzag") -> Call:
    plan = plan_context(cu, group, layout)
    q, k = torch.ones(plan.local_tokens, 4, 16), torch.ones(plan.local_tokens, 2, 16)
    return q, k, k.clone(), plan, {}


def wrong_tokens(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q[1:], k[1:], v[1:], plan, options


def wrong_key_tokens(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q, k[1:], v[1:], plan, options


def wrong_dtype(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q.double(), k.double(), v.double(), plan, options


def mixed_dtypes(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q, k.bfloat16(), v, plan, options


def integers(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q.int(), k.int(), v.int(), plan, options


def wrong_head_dim(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q[..., :4], k[..., :4], v[..., :4], plan, options


def narrow_values(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q, k, v[..., :8], plan, options


def no_head_dim(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q[..., :0], k[..., :0], v[..., :0], plan, options


def wrong_heads(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q[:, :2], k, v, plan, options


def wrong_kv_heads(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q, k[:, :1], v[:, :1], plan, options


def wrong_ratio(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q[:, :3], k, v, plan, options


def batched(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q[None], k[None], v[None], plan, options


def strided(call: Call, group: Group) -> Call:
    q, k, v, plan, options = call
    return q.mT.contiguous().mT, k, v, plan, options


def no_tensor(call: Call, group: Group) -> Call:
    return (None, *call[1:])  # type: ignore[return-value]


def other_documents(call: Call, group: Group) -> Call:
    q, k, v, _, options = call
    return q, k, v, plan_context([0, 5, 150], group), options


def other_layout(call: Call, group: Group) -> Call:
    q, k, v, _, options = call
    return q, k, v, plan_context(CU, group, "contiguous"), options


def other_window(call: Call, group: Group) -> Call:
    q, k, v, _, options = call
    return q, k, v, plan_context(CU, group, window_size=(7, -1)), options


def other_budget(call: Call, group: Group) -> Call:
    q, k, v, _, options = call
    return q, k, v, plan_context(CU, group, kv_budget=1000), options


def not_causal(call: Call, group: Group) -> Call:
    q, k, v, _, options = call
    return q, k, v, plan_context(CU, group, causal=False), options


def other_scale(call: Call, group: Group) -> Call:
    return (*call[:4], {"softmax_scale": 0.5})


def scale_is_text(call: Call, group: Group) -> Call:
    return (*call[:4], {"softmax_scale": "large"})


def deterministic(call: Call, group: Group) -> Call:
    return (*call[:4], {"deterministic": True})


def other_transport(call: Call, group: Group) -> Call:
    return (*call[:4], {"transport": "nccl"})


def device_transport(call: Call, group: Group) -> Call:
    return (*call[:4], {"transport": "symmetric"})


def unknown_transport(call: Call, group: Group) -> Call:
    return (*call[:4], {"transport": "pigeon"})


def precision_of_other_head_dims(call: Call, group: Group) -> Call:
    return (*call[:4], {"precision": "fp8"})


# a rank's mistake, the error of all ranks, and whether it is a TypeError
WRONG: list[tuple[Callable[[Call, Group], Call], str, bool]] = [
    (wrong_tokens, "q has", False),
    (wrong_key_tokens, "k has", False),
    (wrong_dtype, "q differs .* torch.float64", False),
    (mixed_dtypes, "k is torch.bfloat16", True),
    (integers, "q is torch.int32", True),
    (wrong_head_dim, "q differs .* head_dim 4", False),
    (narrow_values, "v differs .* head_dim 8", False),
    (no_head_dim, "head_dim 0", False),
    (wrong_heads, "q differs .* 2 heads", False),
    (wrong_kv_heads, "k differs .* 1 heads", False),
    (wrong_ratio, "q has 3 heads", False),
    (batched, "q has shape", False),
    (strided, "q has stride", False),
    (no_tensor, "q must be a tensor", True),
    (other_documents, "plan.cu_seqlens differs", False),
    (other_layout, "plan.layout differs .* contiguous", False),
    (other_window, "plan.window differs .*7, 0", False),
    (other_budget, "plan.kv_budget differs .* 1000", False),
    (not_causal, "plan.window differs .*-1, -1", False),
    (other_scale, "softmax_scale differs .* 0.5", False),
    (scale_is_text, "softmax_scale='large'", True),
    (deterministic, "deterministic differs .* True", False),
    (other_transport, "transport='nccl'", False),
    (device_transport, "transport='symmetric' cannot move cpu tensors: use 'gloo'", False),
    (unknown_transport, "transport='pigeon'", False),
    (precision_of_other_head_dims, "precision='fp8'", False),
]
IDS = [w[0].__name__ for w in WRONG]


def outcome_of(call: Call) -> tuple[str, str, float]:
    """(kind of error or "", its message, seconds) of a ring call."""
    start = time.monotonic()
    try:
        ring_attn_func(*call[:4], **call[4])  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _once_wrong(
    _: Group, world: int, rank: int, wrong: Callable[[Call, Group], Call], before: int, after: int
) -> tuple[list[str], tuple[str, str, float], list[str]]:
    """Outcomes of `before` right calls, one that is wrong on `rank`, and `after` right ones."""
    group = group_of(world, 8.0)
    if dist.get_rank() >= world:
        return [], ("", "", 0.0), []
    earlier = [outcome_of(right(group))[0] for _ in range(before)]
    call = right(group)
    outcome = outcome_of(wrong(call, group) if dist.get_rank() == rank else call)
    dist.barrier(group)
    return earlier, outcome, ["".join(outcome_of(right(group))[:2]) for _ in range(after)]


def check(results: list[object], world: int, rank: int, expected: str, type_error: bool) -> None:
    for _, (kind, message, seconds), _ in results[:world]:  # type: ignore[misc]
        assert kind == ("TypeError" if type_error else "ValueError"), message
        assert f"rank {rank}" in message
        assert seconds < SOON_S
        assert re.search(expected, message), message


@pytest.mark.parametrize(("wrong", "expected", "type_error"), WRONG, ids=IDS)
def test_all_raise_at_the_first_call(
    ranks: Ranks, wrong: Callable[[Call, Group], Call], expected: str, type_error: bool
) -> None:
    """The group can be used again afterwards."""
    results = ranks.run(4, _once_wrong, 3, 1, wrong, 0, 2)
    check(results, 3, 1, expected, type_error)
    assert all(later == ["", ""] for _, _, later in results[:3])


@pytest.mark.parametrize(("wrong", "expected", "type_error"), WRONG, ids=IDS)
def test_all_raise_where_the_others_have_agreed_before(
    ranks: Ranks, wrong: Callable[[Call, Group], Call], expected: str, type_error: bool
) -> None:
    """The other ranks have agreed on their settings, so only one rank enters the agreement."""
    results = ranks.run(4, _once_wrong, 3, 2, wrong, 1, 0)
    assert all(earlier == [""] for earlier, _, _ in results[:3])
    check(results, 3, 2, expected, type_error)


@pytest.mark.parametrize("number", [IDS.index("wrong_tokens"), IDS.index("other_scale")])
def test_all_raise_after_several_calls(ranks: Ranks, number: int) -> None:
    """An error of one rank's own check, and a difference, after two calls of one agreement."""
    wrong, expected, type_error = WRONG[number]
    results = ranks.run(4, _once_wrong, 3, 2, wrong, 2, 0)
    assert all(earlier == ["", ""] for earlier, _, _ in results[:3])
    check(results, 3, 2, expected, type_error)


@pytest.mark.parametrize("rank", [0, 3])
def test_all_of_four_raise_whichever_rank_is_wrong(ranks: Ranks, rank: int) -> None:
    for before in (0, 1):
        results = ranks.run(4, _once_wrong, 4, rank, other_scale, before, 0)
        check(results, 4, rank, "softmax_scale differs", False)


def _plan_for_another_world(_: Group, before: int) -> tuple[str, str, float]:
    group = group_of(2, 8.0)
    rank = dist.get_rank()
    if rank >= 2:
        return "", "", 0.0
    for _ in range(before):
        assert outcome_of(right(group))[0] == ""
    call = right(group)
    if rank == 1:
        start = time.monotonic()
        try:
            bind_to_group(plan_context(CU, (1, 3)), group)
        except ValueError as error:
            return "ValueError", str(error), time.monotonic() - start
    return outcome_of(call)


@pytest.mark.parametrize("before", [0, 1])
def test_a_plan_for_another_world(ranks: Ranks, before: int) -> None:
    results = [([], r, []) for r in ranks.run(4, _plan_for_another_world, before)]
    check(results, 2, 1, "plan is for rank 1 of 3", False)


def _no_plan(group: Group, before: int) -> tuple[str, str, float]:
    """In the default group: without a plan no other is known."""
    for _ in range(before):
        assert outcome_of(right(group))[0] == ""
    call = right(group)
    outcome = outcome_of((*call[:3], "plan", {}) if dist.get_rank() == 1 else call)
    dist.barrier(group)
    return outcome


def test_a_plan_of_a_wrong_type(ranks: Ranks) -> None:
    results = [([], r, []) for r in ranks.run(4, _no_plan, 0)]
    check(results, 4, 1, "plan must come from plan_context, got str", True)


def _new_at_each_step(group: Group) -> None:
    """New lengths, windows and dtypes at each step, forward and backward."""
    for i in range(30):
        lengths = [10 + i, i % 3, 5 * (i % 7)]
        plan = plan_context(cumulative(lengths), group, window_size=(i % 5 * 9 - 1, -1))
        dtype = (torch.float32, torch.float64)[i // 2 % 2]
        x = torch.ones(plan.local_tokens, 2, 4, dtype=dtype, requires_grad=True)
        if dist.get_rank(group) == i % 4:
            time.sleep(0.02)  # ranks enter at different times
        ring_attn_func(x, x, x, plan).sum().backward()


def test_new_settings_on_all_ranks_never_raise(ranks: Ranks) -> None:
    ranks.run(4, _new_at_each_step)


def _useful_again(everyone: Group, wrong_at: int) -> float:
    """Error of right calls after one that was wrong on rank 1 at its n-th call."""
    group = group_of(3, 8.0)
    if dist.get_rank() >= 3:
        return 0.0
    plan = plan_context(150, group)
    x = plan.shard(torch.randn(150, 2, 8, generator=torch.Generator().manual_seed(0)))
    wanted = None
    for _ in range(wrong_at):
        wanted = ring_attn_func(x, x, x, plan)
    bad = x * 100  # rows left over from the wrong call would show
    scale = 7.0 if dist.get_rank() == 1 else None
    with pytest.raises(ValueError, match="softmax_scale"):
        ring_attn_func(bad, bad, bad, plan, softmax_scale=scale)
    dist.barrier(group)
    again = [ring_attn_func(x, x, x, plan) for _ in range(3)]
    wanted = again[-1] if wanted is None else wanted
    return max(float((a - wanted).abs().max()) for a in again)


@pytest.mark.parametrize("wrong_at", [0, 1, 2])
def test_the_group_can_be_used_after_an_error(ranks: Ranks, wrong_at: int) -> None:
    """Bit for bit the earlier result."""
    assert max(ranks.run(4, _useful_again, wrong_at)) == 0


def test_ring_error_is_a_runtime_error() -> None:
    assert issubclass(RingError, RuntimeError)


def _swapped(_: Group) -> list[tuple[str, str, float]]:
    """Calls with plans A, B, then A on rank 0 and B on rank 1, then A, all agreed on."""
    group = group_of(2, 8.0)
    if dist.get_rank() >= 2:
        return []
    plans = [plan_context(cu, group) for cu in ([0, 40, 41, 150], [0, 70, 71, 150])]
    outcomes = []
    for i in (0, 1, dist.get_rank(), 0):
        q, k, v = (torch.randn(plans[i].local_tokens, 2, 8) for _ in range(3))
        outcomes.append(outcome_of((q, k, v, plans[i], {})))
        dist.barrier(group)
    return outcomes


def test_two_known_plans_are_not_mixed(ranks: Ranks) -> None:
    """Both ranks raise that cu_seqlens differs; the group can be used afterwards."""
    for outcomes in ranks.run(4, _swapped)[:2]:
        assert [kind for kind, _, _ in outcomes] == ["", "", "ValueError", ""]
        assert "plan.cu_seqlens differs" in outcomes[2][1]
        assert outcomes[2][2] < SOON_S


def _quiet(_: Group) -> list[tuple[str, str, float]]:
    """A window, contiguous: rank 0 only sends, to rank 1, and ends a call that rank 2 rejects."""
    group = group_of(3, 8.0)
    if dist.get_rank() >= 3:
        return []
    plan = plan_context(96, group, layout="contiguous", window_size=(8, 0))
    q, k, v = (torch.randn(plan.local_tokens, 2, 8) for _ in range(3))
    outcomes = [outcome_of((q, k, v, plan, {}))]
    wrong = {"softmax_scale": 0.5} if dist.get_rank() == 2 else {}
    outcomes.append(outcome_of((q, k, v, plan, wrong)))
    if dist.get_rank() == 0:
        time.sleep(1.0)  # the next layer
        outcomes.append(outcome_of((q, k, v, plan, {})))
    return outcomes


def test_a_rank_that_receives_nothing_raises_at_its_next_call(ranks: Ranks) -> None:
    first, *others = ranks.run(4, _quiet)[:3]
    assert [kind for kind, _, _ in first[:2]] == ["", ""]
    for kind, message, seconds in (first[2], others[0][1], others[1][1]):
        assert kind == "ValueError", message
        assert "softmax_scale differs" in message
        assert seconds < SOON_S


def _agreements_of_a_step(_: Group, sink: bool) -> int:
    group = group_of(2)
    if dist.get_rank() >= 2:
        return 1
    ring, (q, k, v, plan, _) = RingGroup.of(group), right(group)
    before = ring.agreement_id
    sinks = torch.zeros(4, requires_grad=True) if sink else None
    out = ring_attn_func(q.requires_grad_(), k, v, plan, softmax_scale=0.5 + sink, sink=sinks)
    out.sum().backward()
    return ring.agreement_id - before


@pytest.mark.parametrize("sink", [False, True])
def test_a_backward_needs_no_agreement_of_its_own(ranks: Ranks, sink: bool) -> None:
    assert ranks.run(4, _agreements_of_a_step, sink) == [1] * 4
