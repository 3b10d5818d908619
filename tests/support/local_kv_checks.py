"""Checks of the kernels for a rank's local K/V, on a GPU or in emulation: equal numbers with
the reference, and memory beside the rows untouched.

Each check takes a unit and a device, makes its own inputs and asserts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ringfa3.build.units import Unit
from ringfa3.kernels.local_kv import LocalKVKernels, LocalKVReference, Returns, Run
from ringfa3.planning.context_plan import ContextPlan, plan_context
from tests.support.placements import by_hand

CHUNKS = [  # rank, document, position, length
    *((0, 1, 10, 10), (0, 2, 0, 6), (0, 3, 0, 17), (0, 3, 86, 17)),
    *((1, 0, 2, 5), (1, 1, 0, 5), (1, 1, 25, 6), (1, 3, 17, 17), (1, 3, 69, 17)),
    *((2, 0, 0, 2), (2, 0, 7, 3), (2, 1, 5, 5), (2, 1, 20, 5), (2, 3, 34, 35)),
]
GUARD = 3  # rows behind those of a buffer
NAN, INF = torch.nan, torch.inf


def plans() -> Iterator[ContextPlan]:
    """Published rows that follow each other, all or some; in another order, with gaps; none."""
    yield plan_context(96, (1, 2), causal=False)
    yield plan_context(96, (0, 2), "contiguous", window_size=(9, 0))
    documents = by_hand([10, 31, 6, 103], 3, CHUNKS).plans[1]
    assert (documents.kv_exchange.published[1:] < documents.kv_exchange.published[:-1]).any()
    yield documents
    yield plan_context([0, 48, 96], (0, 2), "contiguous")


def _shapes(unit: Unit) -> tuple[tuple[int, int], ...]:
    """(KV heads, head dim)."""
    return (2, unit.head_dim), (3, unit.head_dim - 24), (1, 8)


def _room(rows: int, *shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """(rows + GUARD, ...) NaN."""
    return torch.full((rows + GUARD, *shape), NAN, dtype=dtype, device=device)


def rows_are_published(unit: Unit, device: str) -> None:
    """From contiguous K and V, from parts of one tensor, and from memory that begins anywhere."""
    dtype = getattr(torch, unit.dtype)
    for plan in plans():
        count, t = len(plan.kv_exchange.published), plan.local_tokens
        kernels, reference = (
            LocalKVKernels(unit, plan),
            LocalKVReference(plan, torch.device(device)),
        )
        for heads, d in _shapes(unit):
            torch.manual_seed(d)
            fused = torch.randn(t, 3 * heads, d).to(dtype).to(device)
            beside = torch.randn(t * heads * d + 1).to(dtype).to(device)[1:].view(t, heads, d)
            k, v = fused[:, :heads], fused[:, 2 * heads :]
            for x, y in ((k, v), (k.contiguous(), v), (beside, k.contiguous())):
                for whole in (False, True):
                    made = [
                        (_room(count, 2, heads, d, dtype=dtype, device=device),
                         _room(t, 2, heads, d, dtype=dtype, device=device))
                        for _ in range(2)
                    ]  # fmt: skip
                    for rows, (published, gathered) in zip((kernels, reference), made, strict=True):
                        rows.publish(x, y, published[:count], gathered[:t] if whole else None)
                    for got, wanted in zip(*made, strict=True):
                        assert torch.equal(got.nan_to_num(nan=9.0), wanted.nan_to_num(nan=9.0))
                    assert not made[0][0][:count].isnan().any()
                    assert made[0][1].isnan().all() != whole


def _returns(plan: ContextPlan, heads: int, d: int, device: str) -> Iterator[Returns]:
    """With no run, with one, with several of one row and more."""
    count = len(plan.kv_exchange.published)
    some: tuple[Run, ...] = ((0, 1), (count // 2, count // 2 + 2), (count - 1, count))
    for runs in ((), ((0, count),), ((1, count - 1),), some):
        total = _room(count, 2, heads, d, dtype=torch.float32, device=device)
        returned = _room(count, 2, heads, d, dtype=torch.float32, device=device)
        total[:count] = torch.randn(count, 2, heads, d)
        for begin, end in runs:
            returned[begin:end] = torch.randn(end - begin, 2, heads, d)
        yield Returns(total[:count], returned[:count], runs)


def returns_are_added(unit: Unit, device: str) -> None:
    for plan in plans():
        if not len(plan.kv_exchange.published):
            continue
        kernels, reference = (
            LocalKVKernels(unit, plan),
            LocalKVReference(plan, torch.device(device)),
        )
        for heads, d in _shapes(unit):
            for returns in _returns(plan, heads, d, device):
                wanted = returns._replace(sum=returns.sum.clone())
                before = returns.sum.clone()
                reference.add_returns(wanted)
                kernels.add_returns(returns)
                assert torch.equal(returns.sum, wanted.sum)
                assert torch.equal(returns.sum, before) == (not returns.runs)


def gradients_are_rounded(unit: Unit, device: str) -> None:
    """The rank's own sums, then the peers', in the order of the reference: equal bits. What is not
    finite stays in its number."""
    dtype = getattr(torch, unit.dtype)
    for plan in plans():
        t, count = plan.local_tokens, len(plan.kv_exchange.published)
        kernels, reference = (
            LocalKVKernels(unit, plan),
            LocalKVReference(plan, torch.device(device)),
        )
        for heads, d in _shapes(unit):
            own = torch.randn(t, 2, heads, d, device=device)
            own[1, 0, 0, :2] = torch.tensor([NAN, INF])
            for returns in (None, *(_returns(plan, heads, d, device) if count else ())):
                got = kernels.round_gradients(own, returns, dtype)
                wanted = reference.round_gradients(own.clone(), returns, dtype)
                for x, y in zip(got, wanted, strict=True):
                    assert x.shape == (t, heads, d)
                    assert x.dtype == dtype
                    assert x.is_contiguous()
                    assert torch.equal(x.nan_to_num(nan=9.0), y.nan_to_num(nan=9.0))
                assert int(got[0].isnan().sum()) == 1
                assert not got[1].isnan().any()


CHECKS = (rows_are_published, returns_are_added, gradients_are_rounded)
