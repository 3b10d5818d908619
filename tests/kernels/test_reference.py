"""If this fails, attention on the CPU, and all tests against it, are wrong. The reference against
float64 attention with its whole score matrix."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3.kernels import reference
from ringfa3.kernels.reference import accum_dtype, attend, attend_backward, merge, preprocess
from ringfa3.planning.context_plan import plan_context
from ringfa3.planning.tiling import plan_local
from tests.support.dense import attention, cumulative, gradients, mask, tensors, worst
from tests.support.strategies import Case, cases, key_tokens, tiles, windows

HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])
BLOCKS = st.sampled_from([3, 8, 256])
EXACT = 1e-12  # float64; sums of up to 720 terms of size 1


def poisoned(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output full of NaN: rows that no tile writes show."""
    return torch.full(shape, torch.nan, dtype=dtype or like.dtype)


def run(case: Case, inputs: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor, m: int,
        n: int, deterministic: bool = False) -> list[torch.Tensor]:  # fmt: skip
    """[out, lse, dq, dk, dv] of all tokens: all ranks and hops of a ring, without communication.

    What the hops store of the dK and dV of each rank's keys is added up in their order.
    """
    q, k, v = inputs
    total, h, d = q.shape
    statistics = accum_dtype(q.dtype)
    scale = d**-0.5
    out, lse = poisoned(q, total, h, d), poisoned(q, h, total, dtype=statistics)
    grads = [poisoned(x, *x.shape, dtype=statistics) for x in inputs]
    plans = case.plans()
    home = [poisoned(k, 2, *k[p.token_index].shape, dtype=statistics) for p in plans]
    backward = []
    for plan in plans:
        mine = plan.token_index
        o, o_running = poisoned(q, len(mine), h, d), poisoned(q, len(mine), h, d, dtype=statistics)
        s = poisoned(q, h, len(mine), dtype=statistics)
        for hop, tiling in enumerate(plan.hops.forward(m)):
            keys = key_tokens(plans, plan.rank, hop)
            attend(q[mine], k[keys], v[keys], tiling, scale, o, o_running, s)
        out[mine], lse[:, mine] = o, s
        backward.append((plan, *preprocess(dout[mine], o, s, dlse[:, mine].to(s.dtype))))
        grads[0][mine] = 0
    for hop in range(case.world):
        for plan, s, delta in backward:
            mine, owner = plan.token_index, (plan.rank - hop) % case.world
            keys = key_tokens(plans, plan.rank, hop)
            dkv = home[owner] if hop == 0 else poisoned(k, 2, *k[keys].shape, dtype=statistics)
            dq = grads[0][mine]
            tiling = plan.hops.backward(n, m, deterministic)[hop]
            qkv = q[mine], k[keys], v[keys]
            attend_backward(dout[mine], *qkv, s, delta, tiling, scale, dq, *dkv)
            grads[0][mine] = dq
            if hop:
                seen = slice(*plan.kv_exchange.visible[owner, hop])
                own = torch.from_numpy(plans[owner].kv_exchange.published)[seen]
                home[owner].index_add_(1, own, dkv[:, seen])
    for plan, mine in zip(plans, home, strict=True):
        grads[1][plan.token_index], grads[2][plan.token_index] = mine
    return [out, lse, *(g.to(q.dtype) for g in grads)]


def expected(case: Case, inputs: list[torch.Tensor], dout: torch.Tensor,
             dlse: torch.Tensor) -> list[torch.Tensor]:  # fmt: skip
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = attention(*leaves, mask(case.lengths, case.lengths, *case.band))
    return [*(x.detach() for x in outputs), *gradients(leaves, outputs, dout, dlse)]


@settings(max_examples=60)
@given(case=cases, heads=HEADS, m=tiles, n=tiles, block=BLOCKS, deterministic=st.booleans())
def test_all_hops_together_equal_dense_attention(
    case: Case, heads: tuple[int, int], m: int, n: int, block: int, deterministic: bool
) -> None:
    """Float64, out, lse, dq, dk, dv to 1e-12, from poisoned outputs: every row is written."""
    inputs, dout, dlse = tensors(len(case.lengths), sum(case.lengths), heads, 4)
    with mock.patch.object(reference, "BLOCK", block):
        got = run(case, inputs, dout, dlse, m, n, deterministic)
    assert worst(list(zip(got, expected(case, inputs, dout, dlse), strict=True))) < EXACT


@settings(max_examples=100)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    window=windows,
    heads=HEADS,
    block=BLOCKS,
)
def test_unequal_lengths_equal_dense_attention(
    lengths: list[tuple[int, int]], window: tuple[int, int], heads: tuple[int, int], block: int
) -> None:
    """Float64, bottom-right alignment, 1e-12; rows without keys: 0, -inf and gradient 0."""
    nq, nk = ([x[i] for x in lengths] for i in range(2))
    h, hk = heads
    g = torch.Generator().manual_seed(sum(nq))
    q, dout = (torch.randn(sum(nq), h, 4, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(sum(nk), hk, 4, generator=g, dtype=torch.float64) for _ in range(2))
    dlse = torch.randn(h, sum(nq), generator=g, dtype=torch.float64)
    plan = plan_local(torch.tensor(nq).numpy(), torch.tensor(nk).numpy(), *window)
    out, lse = poisoned(q, *q.shape), poisoned(q, h, len(q))
    dq, dk, dv = torch.zeros_like(q), poisoned(k, *k.shape), poisoned(v, *v.shape)
    allowed = mask(nq, nk, *window)
    no_keys = torch.from_numpy(~allowed.any(1))
    with mock.patch.object(reference, "BLOCK", block):
        attend(q, k, v, plan.forward(8)[0], 0.5, out, out[:0], lse)
        prepared, delta = preprocess(dout, out, lse, dlse)
        attend_backward(dout, q, k, v, prepared, delta, plan.backward(8, 8)[0], 0.5, dq, dk, dv)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    outputs = attention(*leaves, allowed, 0.5)
    wanted = [*outputs, *gradients(leaves, outputs, dout, dlse)]
    assert worst(list(zip([out, lse, dq, dk, dv], wanted, strict=True))) < EXACT
    assert (out[no_keys] == 0).all()
    assert (lse[:, no_keys] == -torch.inf).all()
    assert (dq[no_keys] == 0).all()


def test_a_row_without_keys_has_gradient_zero_whatever_its_dlse() -> None:
    """A function of an LSE of -inf often has a NaN gradient, which must not reach dq, dk, dv."""
    plan = plan_local(torch.tensor([5]).numpy(), torch.tensor([3]).numpy(), -1, 0)
    (q, k, v), dout, dlse = tensors(0, 5, (2, 1), 4)
    k, v = k[:3], v[:3]
    out, lse = torch.empty_like(q), torch.empty(2, 5, dtype=torch.float64)
    attend(q, k, v, plan.forward(8)[0], 0.5, out, out[:0], lse)
    assert (lse[:, :2] == -torch.inf).all()
    dlse[:, :2] = torch.nan
    grads = [torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)]
    attend_backward(
        dout, q, k, v, *preprocess(dout, out, lse, dlse), plan.backward(8, 8)[0], 0.5, *grads
    )
    assert all(g.isfinite().all() for g in grads)


def test_preprocess_neutralises_rows_without_keys() -> None:
    """LSE -inf becomes +inf, so that exp(S - LSE) is 0, and D is 0 whatever dLSE is. For other rows
    D = rowsum(dO * O) - dLSE, 1e-6."""
    out, dout = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0)).unbind()
    lse, dlse = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).unbind()
    lse[0, 2] = lse[1, 4] = -torch.inf
    dlse[0, 2] = torch.nan
    prepared, delta = preprocess(dout, out, lse, dlse)
    expected = torch.einsum("thd,thd->ht", dout, out) - dlse
    expected[0, 2] = expected[1, 4] = 0
    assert prepared[0, 2] == prepared[1, 4] == torch.inf
    assert torch.equal(prepared[lse > -torch.inf], lse[lse > -torch.inf])
    assert worst([(delta, expected)]) < 1e-6


def test_merge_is_attention_over_both_key_sets() -> None:
    """Against dense attention, 1e-14, for rows with keys in one part, the other, both or none."""
    (q, k, v), _, _ = tensors(1, 12, (4, 2), 8)
    allowed = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[0, :6] = allowed[1, 6:] = allowed[2] = False
    allowed[0, 7] = allowed[1, 3] = True
    parts = [attention(q, k[s], v[s], allowed[:, s]) for s in (slice(0, 6), slice(6, 12))]
    got = merge(*parts[0], *parts[1])
    assert worst(list(zip(got, attention(q, k, v, allowed), strict=True))) < 1e-14
    assert (got[0][2] == 0).all()
    assert (got[1][:, 2] == -torch.inf).all()


def test_merge_with_a_far_larger_part() -> None:
    """LSEs 2,000 apart: exactly the larger part, without overflow."""
    o1, o2 = torch.full((1, 1, 2), 3.0), torch.full((1, 1, 2), 5.0)
    for a, b, o in ((1000.0, -1000.0, o1), (-1000.0, 1000.0, o2)):
        out, lse = merge(o1, torch.tensor([[a]]), o2, torch.tensor([[b]]))
        assert torch.equal(out, o)
        assert lse.item() == 1000.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tensor", ["q", "k", "v", "dout"])
def test_nan_and_inf_stay_in_their_document(tensor: str, bad: float) -> None:
    """Two documents around one of NaN or Inf have the same bits as without it."""
    case = Case([37, 20, 41], 2, "contiguous", False, (-1, -1))
    inputs, dout, dlse = tensors(3, 98, (4, 2), 8)
    clean = run(case, inputs, dout, dlse, 16, 16)
    named = dict(zip("qkv", inputs, strict=True), dout=dout)
    named[tensor][37:57] = bad
    dirty = run(case, inputs, dout, dlse, 16, 16)
    others = torch.cat((torch.arange(37), torch.arange(57, 98)))
    for a, b in zip(clean, dirty, strict=True):
        tokens = 1 if a.dim() == 2 else 0
        assert torch.equal(a.index_select(tokens, others), b.index_select(tokens, others))
    assert not all(x.isfinite().all() for x in dirty)  # it did reach its own


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(2))
def test_low_precision_passes_the_gate(
    dtype: torch.dtype, world: int, scale: float, seed: int
) -> None:
    """max|x - ref| <= 2 max|x_pt - ref| + 1e-5, x_pt plain PyTorch attention in the same dtype."""
    case = Case([70, 1, 150, 129], world, "zigzag", True, (-1, -1))
    inputs, dout, dlse = tensors(seed, 350, (2, 1), 32, dtype)
    inputs[0] = inputs[0] * scale
    dlse = torch.zeros_like(dlse)
    got = run(case, inputs, dout, dlse, 128, 128)
    exact = expected(case, [x.double() for x in inputs], dout.double(), dlse)
    plain = expected(case, inputs, dout, dlse)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    for name, x, ref, x_pt in zip(("out", "lse", "dq", "dk", "dv"), got, exact, plain, strict=True):
        assert worst([(x, ref)]) <= 2 * worst([(x_pt, ref)]) + 1e-5, name


def test_a_window_wider_than_the_document_changes_nothing() -> None:
    """The same bits: planning clips the band."""
    inputs, dout, dlse = tensors(0, 90, (2, 2), 8)
    wide = run(Case([90], 1, "zigzag", False, (1 << 20, 0)), inputs, dout, dlse, 16, 16)
    none = run(Case([90], 1, "zigzag", True, (-1, -1)), inputs, dout, dlse, 16, 16)
    assert all(torch.equal(a, b) for a, b in zip(wide, none, strict=True))


def test_large_scores_do_not_overflow() -> None:
    """Scores of 1e4 in float32, where exp() alone would be inf: the gate of float32."""
    case = Case([50], 2, "zigzag", True, (-1, -1))
    inputs, dout, dlse = tensors(0, 50, (1, 1), 16, torch.float32)
    inputs[0] = inputs[0] * 3000
    got = run(case, inputs, dout, torch.zeros_like(dlse), 16, 16)
    assert all(x.isfinite().all() for x in got)


def test_rows_that_are_first_and_last_at_once_need_no_partial_output() -> None:
    """A document on one rank makes no float32 round trip: `partial_out` may be empty."""
    plan = plan_context(cumulative([30] * 64), (0, 2))
    (q, k, v), _, _ = tensors(0, plan.local_tokens, (1, 1), 4)
    out, lse = poisoned(q, *q.shape), poisoned(q, 1, len(q))
    for hop, tiling in enumerate(plan.hops.forward(16)):
        kv = (k, v) if hop == 0 else (k[:0], v[:0])
        attend(q, *kv, tiling, 0.5, out, out[:0], lse)
    assert not out.isnan().any()
    assert not lse.isnan().any()
