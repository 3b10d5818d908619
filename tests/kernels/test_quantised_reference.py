"""If this fails, 8-bit attention on the CPU, and all tests against it, are wrong. The reference of
8-bit attention, against float64 attention of the dequantised operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.kernels.quantised_reference import attend
from ringfa3.planning.sharding import Segments
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.operands import quantise_kv, quantise_q
from tests.support.dense import attention, mask
from tests.support.strategies import Case, cases, key_tokens

D = 16
HALF_STEP = {"fp8": 2.0**-4, "int8": 2.0**-8}  # of P in E4M3 and in bfloat16
LEAST_P = 2.0**-13  # half a step of the smallest E4M3 P over the largest P of a row, 8


@settings(max_examples=40)
@given(
    cases,
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from([0.5, 6.0, 60.0]),
    st.integers(0, 2**32 - 1),
)
def test_rounding_of_p_is_the_only_error(
    case: Case, heads: tuple[int, int], precision: str, sigma: float, seed: int
) -> None:
    """All ranks and hops of a ring, without communication; K with means of 2, V with means of 3.

    Reference: float64 attention of the dequantised operands. out: to half a step of P, and of the
    smallest P; LSE to 2e-4.
    """
    torch.manual_seed(seed)
    formats, (h, hk), total = FORMATS[precision], heads, sum(case.lengths)
    q = (torch.randn(total, h, D) * sigma).bfloat16()
    k, v = (torch.randn(total, hk, D) + mean for mean in (2, 3))
    k, v = k.bfloat16(), v.bfloat16()
    centres = KVCentres.of(ChannelStatistics.of(k, v), formats)
    allowed = torch.from_numpy(mask(case.lengths, case.lengths, *case.band))
    plans = case.plans()
    for plan in plans:
        mine = plan.token_index
        queries = quantise_q(q[mine], centres, formats)
        out = torch.full((len(mine), h, D), torch.nan)
        running, lse = torch.full_like(out, torch.nan), torch.full((h, len(mine)), torch.nan)
        keys, values, tokens = [], [], []
        hops = plan.hops
        for hop, tiling in enumerate(hops.forward(12)):
            at, here = key_tokens(plans, plan.rank, hop), hops.key_hop == hop
            of_hop = (x[here] for x in (hops.keys.row, hops.keys.length))
            rest = (x[here] for x in (hops.keys.sequence, hops.keys.position))
            kv = quantise_kv(k[at], v[at], Segments(*of_hop, *rest), centres, formats)
            attend(queries, kv, tiling, D**-0.5, out, running, lse, p_format=formats.v)
            keys.append(kv.k.double() * kv.k_scale.double().unsqueeze(-1))
            values.append(kv.v.double() * centres.v_scale.double())
            tokens.append(torch.from_numpy(at))
        seen = allowed[mine][:, torch.cat(tokens)]
        dense = queries.values.double() * queries.scale.double().unsqueeze(-1), torch.cat(keys)
        centred, expected_lse = attention(*dense, torch.cat(values), seen)
        expected_lse += (queries.k_offset.double() * D**-0.5).t()
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-4, rtol=1e-5)
        sees = seen.any(1)[:, None, None]
        expected = torch.where(sees, centred + _by_head(centres.v_mean.double(), h), 0)
        size = torch.cat(values).abs()
        weighted, _ = attention(*dense, size, seen)
        underflow = torch.einsum("tn,nhd->thd", seen.double(), size.repeat_interleave(h // hk, 1))
        limit = HALF_STEP[precision] * weighted + 1e-4
        if precision == "fp8":
            limit = limit + LEAST_P * underflow
        assert ((out - expected).abs() <= limit).all()


def _by_head(x: torch.Tensor, h: int) -> torch.Tensor:
    return x.repeat_interleave(h // len(x), 0)


def outliers(*shape: int) -> torch.Tensor:
    """N(0,1) + N(0,100) * Bernoulli(0.001), FlashAttention-3's section 4.3."""
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 1e-3)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


# d: relative error at most, fp8 and int8. Measured: .061 .0130, .049 .0092
@pytest.mark.parametrize(("d", "most"), [(64, (0.070, 0.0140)), (128, (0.053, 0.0100))])
def test_error_on_outliers(d: int, most: tuple[float, float]) -> None:
    """Rms errors against float64 attention: of out over its rms, of LSE .045 and .01 nats."""
    torch.manual_seed(0)
    q, k, v = (outliers(2048, 4, d).bfloat16() for _ in range(3))
    expected, expected_lse = attention(
        q.double(), k.double(), v.double(), torch.ones(2048, 2048, dtype=torch.bool)
    )
    for precision, limit in zip(("fp8", "int8"), most, strict=True):
        out, lse = flash_attn_func(
            *(x[None] for x in (q, k, v)), precision=precision, return_lse=True
        )
        assert rms(out[0] - expected) <= limit * rms(expected)
        assert rms(lse[0] - expected_lse) <= (0.045 if precision == "fp8" else 0.01)


def test_means_of_channels_cost_nothing() -> None:
    """Rms errors of out and LSE, over those without means: at most 1.6."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1024, 2, 64)
    shifted = k + 4 * torch.randn(2, 64), v + 50 * torch.randn(2, 64)
    got, expected = (
        [flash_attn_func(q, *x, precision=precision, return_lse=True) for x in ((k, v), shifted)]
        for precision in ("fp8", "native")
    )
    for i in range(2):
        before, after = (rms(a[i] - b[i]) for a, b in zip(got, expected, strict=True))
        assert after <= 1.6 * before


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_documents_keep_their_bits_beside_numbers_that_are_not_finite(precision: str) -> None:
    torch.manual_seed(0)
    cu = [0, 200, 400]
    q, k, v = torch.randn(3, 400, 1, 64)
    spoilt = [x.clone() for x in (q, k, v)]
    spoilt[0][10, 0, 0], spoilt[1][150, 0, 3], spoilt[2][20, 0, 5] = torch.nan, torch.inf, torch.nan
    for x, y in zip((q, k, v), spoilt, strict=True):  # so that means and scales stay
        x[~y.isfinite()] = 0
    out = flash_attn_varlen_func(*spoilt, cu, cu, causal=True, precision=precision)
    clean = flash_attn_varlen_func(q, k, v, cu, cu, causal=True, precision=precision)
    assert isinstance(out, torch.Tensor)
    assert isinstance(clean, torch.Tensor)
    lost = out.isnan()[:, 0]
    assert not lost[200:].any()
    assert torch.equal(out[200:], clean[200:])
    assert lost[10].all()
    first = 150 if precision == "fp8" else 128  # int8: the tile of the key
    assert lost[first:200].all()
    assert lost[:first, 5].all()  # P = 0 of a masked key times NaN
    assert lost[:first].sum() == 64 + first - 1


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_absurd_numbers_give_no_nan(precision: str) -> None:
    torch.manual_seed(0)
    zeros = torch.zeros(1, 300, 2, 64)
    assert not flash_attn_func(zeros, zeros, zeros, precision=precision).any()
    tiny = torch.randn(1, 300, 2, 64) * 2.0**-130
    out = flash_attn_func(tiny, tiny, tiny, precision=precision)
    assert out.isfinite().all()
    v = torch.randn(1, 300, 2, 64) * 1e35
    out = flash_attn_func(zeros, zeros, v, precision=precision)
    assert out.isfinite().all()


@pytest.mark.parametrize("last", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("end", [65504, -65504])
def test_values_at_the_ends_of_float16_give_finite_outputs(last: int, end: int) -> None:
    """fp8: V's mean lies near one end; rounding may carry mean + V's number past it. NaN stays."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 128, 2, 64).half()
    v = torch.full_like(q, -end)
    v[:, -last:] = end
    out = flash_attn_func(q, k, v, causal=True, precision="fp8")
    assert torch.isfinite(out).all()
    q[:, 7] = torch.nan
    out = flash_attn_func(q, k, v, causal=True, precision="fp8")
    assert torch.equal(out.isnan().all(-1).any(-1)[0].nonzero(), torch.tensor([[7]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_infinity_of_v_stays_under_int8(dtype: torch.dtype) -> None:
    """V keeps its dtype there, so outputs of rows that attend to it are infinite, as in 16 bits."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 2, 64).to(dtype)
    v[0, 5, 1, 3] = torch.inf
    out = flash_attn_func(q, k, v, causal=True, precision="int8")
    assert torch.equal(out.isinf().nonzero()[:, 1], torch.arange(5, 40))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("said", "shape", "dtype"),
    [("head_dim 32", (1, 4, 1, 32), torch.float32), ("float64", (1, 4, 1, 64), torch.float64)],
)
def test_what_has_no_kernel_is_an_error(
    precision: str, said: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=f"precision='{precision}' .*{said}"):
        flash_attn_func(q, q, q, precision=precision)


def test_a_recent_key_that_leads_leaves_the_others_their_weight() -> None:
    """fp8: each query's own key leads by 6 nats, and 16k keys far below it weigh as much together.

    Reference: float64 attention. Relative rms error of out at most 3%: with shifts 5 log2 units
    higher the other keys fall under the least P, and it is 14%.
    """
    torch.manual_seed(0)
    n, rows, d = 16384, 64, 128
    side = torch.cat((torch.ones(n // 2), -torch.ones(n // 2)))
    k, v = torch.randn(n, 1, d), torch.randn(n, 1, d) + side[:, None, None]
    k[:, 0, 0] = side
    q = k[-rows:] * (6 / d**0.5)
    q[:, 0, 0] = 0.5 * d**0.5
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out = flash_attn_varlen_func(q, k, v, [0, rows], [0, n], causal=True, precision="fp8")
    seen = torch.arange(n) <= torch.arange(n - rows, n)[:, None]
    exact, _ = attention(q.double(), k.double(), v.double(), seen)
    assert (out - exact).norm() <= 0.03 * exact.norm()
