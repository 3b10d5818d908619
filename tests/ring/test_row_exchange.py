"""Remaps, shifts and halos over processes, against the same operation on all tokens: equal bits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringfa3 import ContextPlan, Mask, plan_context
from tests.support.ranks import Ranks

CU = [0, 5, 5, 6, 23, 40]  # an empty document, one of one token, two longer than a rank's share
Group = dist.ProcessGroup


def whole(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(CU[-1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.to(dtype)


def shifted(x: torch.Tensor, n: int, fill: float = 0) -> torch.Tensor:
    """Each document by itself, moved by n rows."""
    parts = []
    for begin, end in itertools.pairwise(CU):
        part = torch.full_like(x[begin:end], fill)
        for row in range(end - begin):
            if 0 <= row - n < end - begin:
                part[row] = x[begin + row - n]
        parts.append(part)
    return torch.cat(parts)


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A causal depthwise convolution of each document: x (t, c), weight (c, 1, k)."""
    reach = weight.shape[-1] - 1
    parts = [x[begin:end] for begin, end in itertools.pairwise(CU) if end > begin]
    padded = [F.pad(part.t(), (reach, 0))[None] for part in parts]
    return torch.cat([F.conv1d(p, weight, groups=len(weight))[0].t() for p in padded])


Operation = Callable[[torch.Tensor], torch.Tensor]


def compare(plan: ContextPlan, ours: Operation, theirs: Operation) -> None:
    """Results and gradients. `theirs` is of all tokens; the gradient of each result is random."""
    everything = whole().requires_grad_()
    expected = theirs(everything)
    grad = torch.randn(expected.shape, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(1))  # fmt: skip
    expected.backward(grad)
    mine = plan.shard(whole()).requires_grad_()
    found = ours(mine)
    torch.testing.assert_close(found, plan.shard(expected.detach()), rtol=0, atol=0)
    found.backward(plan.shard(grad))
    torch.testing.assert_close(mine.grad, plan.shard(everything.grad), rtol=1e-15, atol=1e-15)


def _operations(group: Group | None, layout: str) -> None:
    plan = plan_context(CU, group, layout)
    for n in (0, 1, -1, 3, -16, 17, 50):
        compare(plan, lambda x, n=n: plan.shift(x, n), lambda x, n=n: shifted(x, n) + 0 * x)
    weight = torch.randn(3, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def of_halo(x: torch.Tensor) -> torch.Tensor:
        rows, own = plan.halo(x, 3)
        return F.conv1d(F.pad(rows.t(), (3, 0))[None], weight, groups=3)[0].t()[own]

    compare(plan, of_halo, lambda x: convolved(x, weight))
    scale = plan.contiguous.positions[:, None] + 1.0
    order = torch.cat([torch.arange(end - begin) for begin, end in itertools.pairwise(CU)])
    compare(
        plan,
        lambda x: plan.from_contiguous(plan.to_contiguous(x) * scale),
        lambda x: x * (order[:, None] + 1.0),
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_and_gradients_are_those_of_all_tokens(
    ranks: Ranks, world: int, layout: str
) -> None:
    """Results are equal, gradients to 1e-15: a token's gradient is a sum over the ranks."""
    ranks.run(world, _operations, layout)


def test_one_rank() -> None:
    """Results as over processes; second derivatives against finite differences."""
    _operations(None, "zigzag")
    plan = plan_context([0, 2, 5])
    x = torch.randn(5, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: plan.halo(x**2, 2)[0], (x,))


def _forms(group: Group) -> None:
    """Dtypes, other dimensions, fills, the tokens of each rank in order."""
    plan = plan_context(CU, group)
    everything = torch.arange(CU[-1])
    of_rank = torch.tensor_split(everything, _ends(plan.contiguous.tokens_per_rank))
    assert torch.equal(plan.to_contiguous(plan.shard(everything)), of_rank[plan.rank])
    labels = plan.shift(plan.shard(everything), -1, fill=-100)
    assert torch.equal(labels, plan.shard(shifted(everything, -1, -100)))
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex128):
        x = (whole() > 0).to(dtype)
        assert torch.equal(plan.shift(plan.shard(x), 2), plan.shard(shifted(x, 2)))
        assert torch.equal(plan.shift(plan.shard(x).t(), 2, dim=-1).t(), plan.shard(shifted(x, 2)))
    again = plan.with_window((3, 0))
    assert torch.equal(again.from_contiguous(of_rank[plan.rank]), plan.shard(everything))
    with torch.inference_mode():
        plan.shift(plan.shard(whole()), 7)
    x = plan.shard(whole()).requires_grad_()
    plan.shift(x, 7).sum().backward()
    assert x.grad is not None


def _ends(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))[:-1]


def test_dtypes_and_dimensions(ranks: Ranks) -> None:
    ranks.run(3, _forms)


def _few(group: Group) -> None:
    """Ranks without tokens take part."""
    plan = plan_context([0, 2], group)
    x = plan.shard(torch.tensor([[1.0], [2.0]])).requires_grad_()
    moved = plan.shift(x, 1)
    assert torch.equal(moved, plan.shard(torch.tensor([[0.0], [1.0]])))
    moved.sum().backward()
    assert torch.equal(x.grad, plan.shard(torch.tensor([[1.0], [0.0]])))


def test_more_ranks_than_tokens(ranks: Ranks) -> None:
    ranks.run(4, _few)


WRONG: dict[str, tuple[Callable[[ContextPlan, torch.Tensor], object], str]] = {
    "tokens": (lambda plan, x: plan.shift(x[1:], 1), "rank 1: x_local has"),
    "width": (lambda plan, x: plan.shift(x[:, :2], 1), "x_local differs"),
    "distance": (lambda plan, x: plan.shift(x, 2), r"call differs.*shift\(n=1\).*shift\(n=2\)"),
    "call": (lambda plan, x: plan.to_contiguous(x), "call differs"),
    "number": (lambda plan, x: plan.shift(x, 1.5), "rank 1: n"),  # type: ignore[arg-type]
    "tensor": (lambda plan, x: plan.shift(None, 1), "rank 1: x must be a tensor"),  # type: ignore[arg-type]
    "negative": (lambda plan, x: plan.halo(x, -1), "rank 1: n=-1: a halo has 0 or more tokens"),
    "mask": (
        lambda plan, x: plan.with_mask(Mask.documents(CU)).shift(x, 1),
        "rank 1: the documents of a plan with .* are not known",
    ),
}


def _wrong(group: Group, wrong: str) -> str:
    """What a call raises where rank 1 makes another one; the next call is right."""
    plan = plan_context(CU, group)
    x = plan.shard(whole())
    message = "no error"
    try:
        WRONG[wrong][0](plan, x) if plan.rank == 1 else plan.shift(x, 1)
    except (TypeError, ValueError) as raised:
        message = str(raised)
    assert torch.equal(plan.shift(x, 1), plan.shard(shifted(whole(), 1)))
    return message


@pytest.mark.parametrize("wrong", WRONG)
def test_all_ranks_raise_where_one_calls_otherwise(ranks: Ranks, wrong: str) -> None:
    for message in ranks.run(2, _wrong, wrong):
        assert re.search(WRONG[wrong][1], message), message


def test_what_a_plan_cannot_exchange() -> None:
    with pytest.raises(ValueError, match=r"plan\.shift\(n=1\): this plan was made from \(rank, w"):
        plan_context(CU, (0, 2)).shift(torch.zeros(20), 1)
    plan = plan_context(4)
    compiled = torch.compile(lambda x: plan.shift(x, 1), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="inside a compiled function: call it between graphs"):
        compiled(torch.zeros(4))
