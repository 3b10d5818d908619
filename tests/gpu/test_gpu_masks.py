"""Random masks on one GPU and on several, against float64 on the GPU: `pytest -m gpu`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from ringfa3 import flash_attn_mask_func, plan_context, ring_attn_func
from ringfa3.kernels import dispatch
from tests.support.dense import attention, attention_with_sink, gradients
from tests.support.gpus import spawn, worlds
from tests.support.masks import Union, random_union

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
Given = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def case_of(rng: random.Random, number: int) -> tuple[Union, Given]:
    """A mask; q, k, v and, in each third case, a sink; dout; dlse. Every fourth is of cross-
    attention."""
    union = random_union(rng, rng.choice((200, 1500)), cross=number % 4 == 3)
    torch.manual_seed(number)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    h, hk, d = rng.choice(((8, 2, 64), (4, 4, 128), (4, 1, 256), (4, 2, 96)))
    tokens = union.q_tokens, union.k_tokens, union.k_tokens, union.q_tokens
    q, k, v, dout = (
        torch.randn(n, heads, d, device="cuda").to(dtype)
        for n, heads in zip(tokens, (h, hk, hk, h), strict=True)
    )
    sink = [torch.randn(h, device="cuda")] if number % 3 == 0 else []
    return union, ([q, k, v, *sink], dout, torch.randn(h, len(q), device="cuda"))


def dense_results(union: Union, given: Given, dtype: torch.dtype) -> list[torch.Tensor]:
    """`NAMES` by PyTorch, with the whole mask."""
    inputs, dout, dlse = given
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    allowed = torch.from_numpy(union.dense()).cuda()
    reference = attention if len(leaves) == 3 else attention_with_sink
    outputs = reference(*leaves, allowed)  # type: ignore[arg-type]
    return [*outputs, *gradients(leaves, outputs, dout.to(dtype), dlse.to(dtype))]


def hold_gate(
    ours: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    dsink_size: float,
    what: str,
) -> None:
    """max|x - ref| <= 2 max|x_pt - ref| + 1e-5, where infinities of LSE are equal.

    What dsink sums has both signs, so its error is not that of PyTorch's sum: it is held to 2^-7 of
    the sum of their sizes, since `out` is rounded.
    """
    for name, x, y, exactly in zip(NAMES, ours, plain, exact, strict=False):
        z = exactly.detach()
        if not z.numel():
            continue
        error, bound = (
            float(torch.where(a == z, 0, (a.double() - z).abs()).nan_to_num(torch.inf).max())
            for a in (x.detach(), y.detach())
        )
        allowed = (2**-7 * dsink_size if name == "dsink" else 2 * bound) + 1e-5
        assert error <= allowed, f"{what}: {name} is off by {error:.2e}, PyTorch {bound}"


def dsink_size(exact: Sequence[torch.Tensor], given: Given) -> float:
    """The largest of all heads: the sum over rows of the sink's P (|dO| |O| + |dLSE|)."""
    (*_, sink), dout, dlse = given
    if len(given[0]) == 3:
        return 0.0
    out, lse = exact[0].detach(), exact[1].detach()
    summed = (dout.double() * out).abs().sum(-1).t() + dlse.double().abs()
    return float(((sink.double()[:, None] - lse).exp() * summed).sum(1).max())


def test_random_masks_hold_the_gate() -> None:
    """300 masks; every second one is deterministic, and repeats its gradients bit for bit."""
    rng = random.Random(43)
    for number in range(300):
        union, given = case_of(rng, number)
        (q, k, v, *sink), dout, dlse = given
        if len(q) and len(k):
            assert dispatch.unit_for("forward", q) is not None
        deterministic, results = bool(number % 2), []
        for _ in range(1 + deterministic):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, *sink)]
            outputs = flash_attn_mask_func(
                *leaves[:3],
                union.mask(),
                sink=leaves[3] if sink else None,
                return_lse=True,
                deterministic=deterministic,
            )
            assert isinstance(outputs, tuple)
            results.append([*outputs, *gradients(leaves, outputs, dout, dlse)])
        plain, exact = (dense_results(union, given, x) for x in (q.dtype, torch.float64))
        what = f"case {number}: {union}, {q.dtype}, d {q.shape[2]}"
        hold_gate(results[0], plain, exact, dsink_size(exact, given), what)
        for x, y in zip(results[0], results[-1], strict=True):
            assert torch.equal(x, y), f"{what}: two runs differ"


def _worker(rank: int, world: int) -> None:
    rng = random.Random(world)
    for number in range(50):
        union, given = case_of(rng, number)
        (q, k, v, *sink), dout, dlse = given
        plan = plan_context(union.mask(), layout=rng.choice(("zigzag", "contiguous")))
        leaves = [plan.shard(q), plan.shard_keys(k), plan.shard_keys(v), *sink]
        leaves = [x.clone().requires_grad_() for x in leaves]
        outputs = ring_attn_func(
            *leaves[:3],
            plan,
            sink=leaves[3] if sink else None,
            return_lse=True,
            deterministic=bool(number % 2),
            transport=("nccl", "symmetric")[number // 2 % 2],
        )
        assert isinstance(outputs, tuple)
        got = [*outputs, *gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))]
        if sink:
            dist.all_reduce(got[5])
        results = [dense_results(union, given, x) for x in (q.dtype, torch.float64)]
        size = dsink_size(results[1], given)
        for whole in results:
            for i, x in enumerate(whole[:5]):
                cut = plan.shard_keys if NAMES[i] in ("dk", "dv") else plan.shard
                whole[i] = cut(x, 1 if NAMES[i] == "lse" else 0)
        hold_gate(got, *results, size, f"rank {rank}, case {number}: {union}, {q.dtype}")


@worlds(2, 4, soak=(3,))
def test_rings_hold_the_gate(world: int) -> None:
    """50 masks, over NCCL and `symmetric`."""
    spawn(_worker, world)
