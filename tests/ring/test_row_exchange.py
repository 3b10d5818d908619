"""If this fails, shifted labels, halos and recurrent layers get other ranks' rows wrongly. Remaps,
shifts and halos over processes, against the same operation on all tokens: equal bits."""

from __future__ import annotations

import itertools
import pickle
import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringfa3 import ContextPlan, Mask, RingError, plan_context, ring_attn_func
from ringfa3.ring.group import RingGroup
from tests.support.ranks import Ranks, group_of, sacrifice

CU = [0, 5, 5, 6, 23, 40]  # an empty document, one of one token, two longer than a rank's share
Group = dist.ProcessGroup
SOON_S = 5.0  # less than any timeout here
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex128,
]  # fmt: skip


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
    for dtype in DTYPES:
        row = torch.arange(CU[-1]).to(dtype)
        assert torch.equal(plan.unshard(plan.shard(row)).view(torch.uint8), row.view(torch.uint8))
        x, moved = (y.to(dtype) for y in (whole() > 0, shifted((whole() > 0).double(), 2)))
        for found in (
            plan.shift(plan.shard(x), 2),
            plan.shift(plan.shard(x).t(), 2, dim=-1).t().contiguous(),
        ):
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), plan.shard(moved).view(torch.uint8))
        again = plan.unshard(plan.from_contiguous(plan.to_contiguous(plan.shard(x))))
        assert torch.equal(again.view(torch.uint8), x.view(torch.uint8))
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


def _contiguous(group: Group) -> None:
    plan = plan_context(CU, group, window_size=(9, -1))
    inner, expected = plan.contiguous, plan_context(CU, group, "contiguous", window_size=(9, -1))
    assert inner.digest == expected.digest
    assert ContextPlan.from_handle(inner.handle) is inner
    x = torch.randn(CU[-1], 2, 8, generator=torch.Generator().manual_seed(4))
    assert torch.equal(inner.unshard(inner.shard(x)), x)
    assert torch.equal(inner.shift(inner.shard(x), 1), inner.shard(shifted(x, 1)))
    for ours, theirs in (
        (inner, expected),
        (inner.with_window((3, 0)), expected.with_window((3, 0))),
        (inner.with_mask(Mask.documents(CU)), expected.with_mask(Mask.documents(CU))),
    ):
        results = []
        for made in (ours, theirs):
            local = made.shard(x).requires_grad_()
            out = ring_attn_func(local, local, local, made)
            assert isinstance(out, torch.Tensor)
            out.square().sum().backward()
            results.append((out, local.grad))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    in_loader = plan_context(CU, (plan.rank, plan.world)).contiguous
    copy = pickle.loads(pickle.dumps(in_loader))
    assert copy.digest == in_loader.digest
    assert copy.handle != in_loader.handle
    assert torch.equal(copy.bound_to(group).unshard(copy.shard(x)), x)


def test_the_contiguous_plan_is_a_plan(ranks: Ranks) -> None:
    """`plan.contiguous` does what `plan_context(..., layout="contiguous")` does, to the bit."""
    ranks.run(3, _contiguous)


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


Call = Callable[[ContextPlan, torch.Tensor], object]
# Other calls that are right if all ranks make them, and calls that are wrong.
OTHER: dict[str, tuple[Call, str]] = {
    "width": (lambda plan, x: plan.shift(x[:, :2], 1), "x_local differs"),
    "dtype": (lambda plan, x: plan.shift(x.float(), 1), "x_local differs"),
    "distance": (lambda plan, x: plan.shift(x, 2), r"call differs.*shift\(n=1\).*shift\(n=2\)"),
    "call": (lambda plan, x: plan.to_contiguous(x), "call differs"),
    "fill": (lambda plan, x: plan.shift(x, 1, fill=2), "fill differs"),
    "gradient": (
        lambda plan, x: plan.shift(x.requires_grad_(), 1),
        r"x.requires_grad differs .* rank 0: False; rank 1: True",
    ),
    "attention": (
        lambda plan, x: ring_attn_func(*[x.float().view(-1, 1, 3)] * 3, plan),
        "(call differs .*; rank 1: missing|progress differs .*plan.shift.* forward hop)",
    ),
}
WRONG: dict[str, tuple[Call, str]] = {
    "tokens": (lambda plan, x: plan.shift(x[1:], 1), "rank 1: x_local has"),
    "number": (lambda plan, x: plan.shift(x, 1.5), "rank 1: n=1.5: give a whole number"),  # type: ignore[arg-type]
    "text": (lambda plan, x: plan.shift(x, "1"), "rank 1: n='1': give a whole number"),  # type: ignore[arg-type]
    "tensor": (lambda plan, x: plan.shift(None, 1), "rank 1: x must be a tensor"),  # type: ignore[arg-type]
    "dim": (lambda plan, x: plan.shift(x, 1, dim=2), "rank 1: IndexError"),
    "negative": (lambda plan, x: plan.halo(x, -1), "rank 1: n=-1: a halo has 0 or more tokens"),
    "held": (lambda plan, x: plan.shift(x.int(), 1, fill=0.5), r"rank 1: fill=0.5: .*int32, which"),
    "mask": (
        lambda plan, x: plan.with_mask(Mask.documents(CU)).shift(x, 1),
        "rank 1: the documents of a plan with .* are not known",
    ),
}


def _wrong(_: Group, wrong: str, before: int) -> tuple[str, float, bool]:
    """What a call raises where rank 1 makes another one, and when; whether later calls are right.

    before: 0 for a first call; 1 after ranks have made that of rank 0; 2 also that of rank 1.
    """
    group = group_of(2, 10.0)
    if dist.get_rank() >= 2:
        return "", 0.0, True
    plan = plan_context(CU, group)
    of_rank_1, _ = (OTHER | WRONG)[wrong]
    for _ in range(2 if before else 0):
        plan.shift(plan.shard(whole()), 1)
        if before == 2:
            of_rank_1(plan, plan.shard(whole()))
    message, start = "no error", time.monotonic()
    x = plan.shard(whole())
    try:
        of_rank_1(plan, x) if plan.rank == 1 else plan.shift(x, 1)
    except (TypeError, ValueError) as raised:
        message = str(raised)
    seconds = time.monotonic() - start
    moved = [plan.shift(plan.shard(whole()), 1) for _ in range(2)]
    return message, seconds, all(torch.equal(m, plan.shard(shifted(whole(), 1))) for m in moved)


@pytest.mark.parametrize(
    ("wrong", "before"),
    [(w, b) for w in OTHER for b in (0, 1, 2)] + [(w, b) for w in WRONG for b in (0, 1)],
)
def test_all_ranks_raise_where_one_calls_otherwise(ranks: Ranks, wrong: str, before: int) -> None:
    """Soon, whether or not they have agreed on these calls before. The next calls are right."""
    for message, seconds, right in ranks.run(4, _wrong, wrong, before)[:2]:
        assert re.search((OTHER | WRONG)[wrong][1], message), message
        assert seconds < SOON_S
        assert right


def _backwards(_: Group, wrong: str) -> tuple[str, float]:
    """What ranks raise where rank 1 runs other backwards than rank 0."""
    group = group_of(2, 10.0)
    if dist.get_rank() >= 2:
        return "", 0.0
    plan, second = plan_context(CU, group), dist.get_rank() == 1
    x = plan.shard(whole()).requires_grad_()
    plan.shift(x, 1).sum().backward()
    outs = [plan.shift(x, 1) for _ in range(2)]
    message, start = "no error", time.monotonic()
    try:
        if wrong == "order":
            for out in reversed(outs) if second else outs:
                out.sum().backward()
        else:
            grad = torch.ones_like(outs[0]).requires_grad_()
            torch.autograd.grad(outs[0], x, grad, create_graph=second)
    except (RuntimeError, ValueError) as raised:
        message = f"{type(raised).__name__}: {raised}"
    return message, time.monotonic() - start


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("order", "ValueError: forward of this backward differs between the ranks"),
        ("create_graph", "ValueError: x.requires_grad differs between the ranks"),
    ],
)
def test_all_ranks_raise_where_one_runs_another_backward(
    ranks: Ranks, wrong: str, expected: str
) -> None:
    for message, seconds in ranks.run(4, _backwards, wrong)[:2]:
        assert expected in message
        assert seconds < SOON_S


def _no_backward(group: Group) -> str:
    plan = plan_context(CU, group)
    x = plan.shard(whole()).requires_grad_()
    plan.shift(x, 1).sum().backward()
    out = plan.shift(x, 1)
    if plan.rank == 0:
        try:
            out.sum().backward()
        except RingError as raised:
            return str(raised)
    return ""


def test_a_backward_that_one_rank_does_not_run_ends_at_the_timeout() -> None:
    """It names the call and the rank."""
    message, _ = sacrifice(2, 2.0, _no_backward, limit=20.0)
    assert re.search(r"rows of plan.shift\(n=1\), .* rank 1: .*2 s", message), message


def _twice(group: Group) -> None:
    """Gradients of a function of gradients, of all ranks together."""
    plan = plan_context(CU, group)
    weight = torch.randn(CU[-1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def penalty(
        x: torch.Tensor, w: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The gradient of a cubic function of moved rows, cubed."""
        (grad,) = torch.autograd.grad((move(x) ** 3 * w).sum(), x, create_graph=True)
        return (move(grad) ** 2 * w).sum()

    everything = whole().requires_grad_()
    penalty(everything, weight, lambda x: shifted(x, 1) + 0 * x).backward()
    mine = plan.shard(whole()).requires_grad_()
    penalty(mine, plan.shard(weight), lambda x: plan.shift(x, 1)).backward()
    torch.testing.assert_close(mine.grad, plan.shard(everything.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_second_derivatives(ranks: Ranks, world: int) -> None:
    """Reference: the same rows by an index of all tokens, to 1e-12."""
    ranks.run(world, _twice)


def _repeated(_: Group) -> list[int]:
    group = group_of(2, 20.0)
    if dist.get_rank() >= 2:
        return []
    plan = plan_context(CU, group)
    x = plan.shard(whole()).requires_grad_()

    def step() -> None:
        rows, own = plan.halo(plan.from_contiguous(plan.to_contiguous(plan.shift(x, 1))), 2)
        rows[own].sum().backward()

    step()
    dist.barrier(group)
    ring = RingGroup.of(group)
    ring.agreements.store = None  # type: ignore[assignment]  # any use of it fails
    for _ in range(5):
        step()
    return [ring.calls.latest.number]


def test_a_repeated_exchange_asks_no_store(ranks: Ranks) -> None:
    """Ranks agree at the first call alone, forward and backward."""
    assert ranks.run(4, _repeated)[:2] == [[6 * 8]] * 2


def test_what_a_plan_cannot_exchange() -> None:
    with pytest.raises(ValueError, match=r"plan\.shift\(n=1\): this plan was made from \(rank, w"):
        plan_context(CU, (0, 2)).shift(torch.zeros(20), 1)
    plan = plan_context(4)
    compiled = torch.compile(lambda x: plan.shift(x, 1), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="inside a compiled function: call it between graphs"):
        compiled(torch.zeros(4))
