"""If this fails, attention under a mask is wrong. Attention under random masks, on one device and
in rings, against dense float64 attention."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringfa3 import ContextPlan, Mask, flash_attn_mask_func, plan_context, ring_attn_func
from tests.ring.test_ring_op import EXACT, tile_sizes
from tests.support.dense import attention, attention_with_sink, cumulative, gradients, worst
from tests.support.masks import Dense, random_union
from tests.support.ranks import Ranks, sacrifice

HEADS = [(4, 2), (3, 3), (4, 1)]
Tensors = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def inputs_of(seed: int, q_tokens: int, k_tokens: int, sink: bool) -> Tensors:
    """[q, k, v] and a sink, dout, dlse in float64."""
    g = torch.Generator().manual_seed(seed)
    h, hk = HEADS[seed % len(HEADS)]
    shapes = [(q_tokens, h, 4), (k_tokens, hk, 4), (k_tokens, hk, 4), *([(h,)] if sink else [])]
    leaves = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    dout, dlse = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((q_tokens, h, 4), (h, q_tokens))
    )
    return leaves, dout, dlse


def dense_results(allowed: Dense, given: Tensors) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] and dsink, of all tokens."""
    leaves = [x.clone().requires_grad_() for x in given[0]]
    visible = torch.from_numpy(allowed)
    reference = attention if len(leaves) == 3 else attention_with_sink
    outputs = reference(*leaves, visible)  # type: ignore[arg-type]
    return [*(x.detach() for x in outputs), *gradients(leaves, outputs, *given[1:])]


def ring_results(plan: ContextPlan, given: Tensors, deterministic: bool) -> list[torch.Tensor]:
    """The same of this rank's tokens."""
    (q, k, v, *sink), dout, dlse = given
    shards = [plan.shard(q), plan.shard_keys(k), plan.shard_keys(v), *(x.clone() for x in sink)]
    leaves = [x.requires_grad_() for x in shards]
    outputs = ring_attn_func(
        *leaves[:3],
        plan,
        sink=leaves[3] if sink else None,
        return_lse=True,
        deterministic=deterministic,
    )
    grads = gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))  # type: ignore[arg-type]
    return [*(x.detach() for x in outputs), *grads]


def ring_error(group: dist.ProcessGroup, plan: ContextPlan, allowed: Dense, seed: int) -> float:
    """Largest error of out, LSE and all gradients; gradients of a sink are summed over ranks."""
    given = inputs_of(seed, *allowed.shape, sink=bool(seed % 3 == 0))
    got = ring_results(plan, given, deterministic=bool(seed % 2))
    out, lse, dq, dk, dv, *dsink = dense_results(allowed, given)
    mine = [plan.shard(out), plan.shard(lse, 1), plan.shard(dq)]
    mine += [plan.shard_keys(dk), plan.shard_keys(dv), *dsink]
    if dsink:
        dist.all_reduce(got[5], group=group)
    return worst(list(zip(got, mine, strict=True)))


def _padded(group: dist.ProcessGroup) -> None:
    """Documents with padding: its NaN reaches nothing, its rows have 0, -inf and gradient 0."""
    cu, used = [0, 40, 47, 90], [25, 0, 43]
    plan = plan_context(Mask.documents(cu, seqused_q=used), group)
    padding = torch.ones(90, dtype=torch.bool)
    for begin, n in zip(cu, used, strict=False):
        padding[begin : begin + n] = False
    (q, k, v), dout, dlse = inputs_of(2, 90, 90, sink=False)
    allowed = Mask.documents(cu, seqused_q=used).dense()
    expected = dense_results(allowed, ([q, k, v], dout, dlse))
    for x in (q, k, v):
        x[padding] = torch.nan
    got = ring_results(plan, ([q, k, v], dout, dlse), deterministic=False)
    shards = [plan.shard(x, 1 if i == 1 else 0) for i, x in enumerate(expected)]
    assert worst(list(zip(got, shards, strict=True))) < EXACT
    mine = plan.shard(padding)
    for x in (got[0], *got[2:]):
        assert (x[mine] == 0).all()
    assert (got[1][:, mine] == -torch.inf).all()


@pytest.mark.parametrize("world", [1, 3])
def test_padding_of_documents_in_a_ring(ranks: Ranks, world: int) -> None:
    """Float64 reference, 1e-12, of padding without NaN."""
    ranks.run(world, _padded)


def _compare(group: dist.ProcessGroup, seed: int, count: int, sizes: tuple[int, int, int]) -> float:
    """Random masks; every second one replaces another on the tokens of a plan of documents."""
    rng = random.Random(seed)
    error = 0.0
    with tile_sizes(*sizes):
        for i in range(count):
            union = random_union(rng, 60, cross=i % 4 == 3)
            mask, layout = union.mask(), rng.choice(["zigzag", "contiguous"])
            if i % 2 and not mask.cross:
                cut = union.q_tokens // 3
                documents = cumulative([cut, 0, union.q_tokens - cut])
                plan = plan_context(documents, group, layout).with_mask(mask)
            else:
                plan = plan_context(mask, group, layout)
            here = ring_error(group, plan, union.dense(), seed * count + i)
            assert here < EXACT, (here, union, layout)
            error = max(error, here)
    return error


@pytest.mark.parametrize("sizes", [(8, 64, 5), (128, 128, 256)], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_ring_equals_dense_attention(
    ranks: Ranks, world: int, sizes: tuple[int, int, int]
) -> None:
    """Float64 reference, 1e-12: 12 random masks with sinks, LSE, cross-attention."""
    ranks.run(world, _compare, 10 * world + sizes[0], 12, sizes)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rings_of_many_masks_equal_dense_attention(ranks: Ranks, world: int) -> None:
    """Float64 reference, 1e-12: 400 random masks a world, with the next test 2,000 in all."""
    for part in range(20):  # a call of the ranks has a time limit
        ranks.run(world, _compare, 900 + 20 * world + part, 20, (8, 64, 256))


@pytest.mark.soak
def test_rings_of_five_equal_dense_attention() -> None:
    """As above, on ranks of their own: the pool has four."""
    errors = sacrifice(5, 60.0, _compare, 999, 400, (8, 64, 256), limit=1200.0)
    assert len(errors) == 5
    assert max(errors) < EXACT


def test_one_device_equals_dense_attention() -> None:
    """Float64 reference, 1e-12: 40 random masks with sinks, LSE, cross-attention."""
    rng = random.Random(5)
    for i in range(40):
        union = random_union(rng, 50, cross=i % 2 == 1)
        given = inputs_of(i, union.q_tokens, union.k_tokens, sink=i % 3 == 0)
        leaves = [x.clone().requires_grad_() for x in given[0]]
        sink = leaves[3] if i % 3 == 0 else None
        outputs = flash_attn_mask_func(*leaves[:3], union.mask(), sink=sink, return_lse=True)
        assert isinstance(outputs, tuple)
        got = [*(x.detach() for x in outputs), *gradients(leaves, outputs, *given[1:])]
        error = worst(list(zip(got, dense_results(union.dense(), given), strict=True)))
        assert error < EXACT, (error, union)


def test_nan_of_tokens_that_a_document_does_not_see_stays_there() -> None:
    """A NaN in the keys of one tree reaches no query of another one."""
    mask = Mask.pack([Mask.tree([3, 2, 2], [-1, 0, 0])] * 2)
    (q, k, v), *_ = inputs_of(1, 14, 14, sink=False)
    k[7:] = v[7:] = torch.nan
    out = flash_attn_mask_func(q, k, v, mask)
    assert isinstance(out, torch.Tensor)
    assert torch.isfinite(out[:7]).all()
    assert torch.isnan(out[7:]).all()


def test_layers_of_two_masks_share_the_tokens_of_one_plan() -> None:
    """Gemma 3's two layer types on one placement; reference: their definition, 1e-12."""
    tokens, begin, end = 30, 8, 15
    full = Mask.documents([0, 20, tokens]).with_bidirectional([begin], [end])
    local = Mask.documents([0, 20, tokens], window_size=(3, 0)).with_bidirectional([begin], [end])
    plan = plan_context(full, (0, 1))
    r, c = np.arange(tokens)[:, None], np.arange(tokens)[None]
    image = (begin <= r) & (r < end) & (begin <= c) & (c < end)
    causal = (c <= r) & ((c < 20) == (r < 20))
    given = inputs_of(4, tokens, tokens, sink=False)
    for mask, allowed in ((full, causal | image), (local, causal & (r - c <= 3) | image)):
        got = ring_results(plan.with_mask(mask), given, deterministic=True)
        assert worst(list(zip(got, dense_results(allowed, given), strict=True))) < EXACT


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_keys_in_no_pair_change_no_bit_in_8_bits(precision: str) -> None:
    """Padding of any size: it counts neither in means nor in scales. Gradients too."""
    torch.manual_seed(0)
    mask, results = Mask.documents([0, 400, 700], seqused_q=[300, 200]), []
    q, k, v = (torch.randn(700, 2, 64).bfloat16() for _ in range(3))
    padding = ~torch.from_numpy(mask.dense().any(0))
    assert padding.any()
    for value in (1.0, 1000.0, torch.nan):
        k[padding] = v[padding] = value
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn_mask_func(*leaves, mask, precision=precision)
        assert isinstance(out, torch.Tensor)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
