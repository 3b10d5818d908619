"""If this fails, `plan.unshard` returns tokens in a wrong order, or hangs. `plan.unshard` over
processes: all tokens on every rank, or one error on all of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ringfa3 import plan_context
from tests.support.ranks import Ranks, group_of

Group = dist.ProcessGroup
CU = [0, 40, 41, 150]
SOON_S = 5.0


def _unshard(group: Group, layout: str) -> None:
    plan = plan_context([0, 5, 5, 23], group, layout)
    x = torch.arange(46.0, dtype=torch.float64).view(23, 2)
    local = plan.shard(x).requires_grad_()
    assert torch.equal(plan.unshard(local), x)
    assert torch.equal(plan.unshard(local.t(), dim=1), x.t())
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex128):
        assert torch.equal(plan.unshard((local > 0).to(dtype)), (x > 0).to(dtype))
    weights = torch.randn(23, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (plan.unshard(local) * weights).sum().backward()
    assert torch.equal(local.grad, plan.shard(weights))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_unshard_gathers_and_its_gradient_shards(ranks: Ranks, world: int, layout: str) -> None:
    ranks.run(world, _unshard, layout)


Gathered = tuple[torch.Tensor | None, int]
UNSHARD: dict[str, tuple[Callable[[torch.Tensor], Gathered], str]] = {
    "tokens": (
        lambda x: (x[1:], 0),
        "rank 1: x_local has 74 tokens along dim 0; the plan gives this rank",
    ),
    "width": (lambda x: (x[:, :2], 0), "x_local differs .* rank 0: .tokens, 3. of .*; rank 1: "),
    "dtype": (lambda x: (x.long(), 0), r"x_local differs .* rank 1: .* of torch.int64 on cpu"),
    "tensor": (lambda x: (None, 0), "rank 1: x_local must be a tensor, got NoneType"),
    "dim": (lambda x: (x, 5), "rank 1: IndexError: Dimension out of range|index out of range"),
}


def _unshard_once_wrong(everyone: Group, wrong: str, before: int) -> tuple[str, str, str, float]:
    group = group_of(2, 8.0)
    if dist.get_rank() >= 2:
        return "", "", "", 0.0
    plan = plan_context(CU, group, "contiguous")
    x = torch.ones(plan.local_tokens, 3)
    for _ in range(before):
        plan.unshard(x)
    start, kind, own, message = time.monotonic(), "", "", ""
    try:
        plan.unshard(*(UNSHARD[wrong][0](x) if dist.get_rank() == 1 else (x, 0)))
    except Exception as error:
        kind, message = type(error).__name__, str(error)
        own = type(error.__cause__).__name__ if error.__cause__ else ""
    seconds = time.monotonic() - start
    assert torch.equal(plan.unshard(x), torch.ones(CU[-1], 3))
    return kind, own, message, seconds


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("wrong", UNSHARD)
def test_all_raise_where_one_rank_gathers_something_else(
    ranks: Ranks, wrong: str, before: int
) -> None:
    """Soon, at the first call and after others; the next call is right. The rank with the error
    has it as the cause."""
    results = ranks.run(4, _unshard_once_wrong, wrong, before)[:2]
    causes = {"tokens": "ValueError", "tensor": "TypeError", "dim": "IndexError"}
    assert [own for _, own, _, _ in results] == ["", causes.get(wrong, "")]
    for kind, _, message, seconds in results:
        assert kind == ("TypeError" if wrong == "tensor" else "ValueError")
        assert re.search(UNSHARD[wrong][1], message), message
        assert seconds < SOON_S
