"""If this fails, 8-bit attention is wrong for large, small or uneven channels. 8-bit operands of
numbers of every magnitude, which differ by channel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3 import flash_attn_func
from ringfa3.planning.sharding import whole_sequences
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import FORMATS, LEAST_V_SCALE
from ringfa3.quantisation.operands import quantise_kv
from tests.support.dense import attention
from tests.support.quantise_checks import extreme_channels

D = 64
LEAST_EXPONENT = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}
DTYPES = sorted(LEAST_EXPONENT, key=str)


def hold_v(v: torch.Tensor) -> None:
    """E4M3 V is v (n, 1, D) within half a step of v less its mean, or half of the least step.

    Below LEAST_V_SCALE the least step is 2^-135. Bound: of the definition, in float64.
    """
    centres = KVCentres.of(ChannelStatistics.of(v, v), FORMATS["fp8"])
    kv = quantise_kv(v, v, whole_sequences(np.array([len(v)])), centres, FORMATS["fp8"])
    mean, scale = centres.v_mean.double(), centres.v_scale.double()
    assert mean.isfinite().all()
    assert scale.isfinite().all()
    centred = v.double() - mean
    reach = centred.abs().amax(0) / 448
    largest = torch.maximum(reach * (1 + 2**-20), mean.abs() * 2.0**-60).clamp(min=LEAST_V_SCALE)
    assert (scale <= largest).all()  # no coarser than the numbers need
    error = (kv.v.double() * scale - centred).abs()
    bound = 2.0**-4 * centred.abs() + 2.0**-10 * scale
    assert (error <= 1.001 * bound + 2.0**-24 * mean.abs()).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_v_is_exact_to_a_step_at_every_magnitude(dtype: torch.dtype, n: int, seed: int) -> None:
    """Each channel draws a magnitude of the dtype and a mean of 0 to 1,000 of it."""
    torch.manual_seed(seed)
    largest = torch.finfo(dtype).max
    exponent = torch.randint(LEAST_EXPONENT[dtype], int(torch.tensor(largest).log2()) + 1, (D,))
    mean = torch.randn(D) * torch.tensor([0, 1, 30, 1000])[torch.randint(4, (D,))]
    v = torch.ldexp(torch.randn(n, 1, D, dtype=torch.float64) + mean, exponent)
    hold_v(v.clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_channels_are_exact_to_a_step(dtype: torch.dtype) -> None:
    for n in (1, 2, 3, 4, 300):
        hold_v(extreme_channels(n, dtype, D))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_of_extreme_channels_is_finite(dtype: torch.dtype) -> None:
    """Against float64: within 2^-3 of the mean magnitude of V less its mean; never infinite."""
    torch.manual_seed(0)
    for n in (1, 3, 4, 300):
        q, k = (torch.randn(1, n, 1, D).to(dtype) for _ in range(2))
        v = extreme_channels(n, dtype, D)
        out = flash_attn_func(q, k, v[None], precision="fp8")[0]
        assert out.isfinite().all()
        seen = torch.ones(n, n, dtype=torch.bool)
        ref, _ = attention(*(x.double()[0] for x in (q, k)), v.double(), seen)
        mean = KVCentres.of(ChannelStatistics.of(v, v), FORMATS["fp8"]).v_mean.double()
        size = (v.double() - mean).abs().amax(0)
        bound = 0.125 * size + torch.finfo(dtype).eps * ref.abs() + LEAST_V_SCALE
        assert ((out.double() - ref).abs() <= bound + torch.finfo(dtype).smallest_normal).all()


def test_powers_of_two_of_channels_change_no_bit() -> None:
    """Scores of 1, V times 2^-109 to 2^115 by channel: the output times the same, equal."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 200, 2, D)
    by = torch.ldexp(torch.ones(2, D), torch.randint(-109, 116, (2, D)))
    got, expected = (flash_attn_func(q, k, x, precision="fp8") for x in (v * by, v))
    assert torch.equal(got, expected * by)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_powers_of_two_of_q_and_k_change_no_bit(precision: str) -> None:
    """Q and K up to 2^110, at least 2^-50; a softmax scale that makes up for them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 200, 2, D)
    expected = flash_attn_func(q, k, v, softmax_scale=0.125, precision=precision, return_lse=True)
    for of_q, of_k in ((50, -50), (-50, 50), (110, -50), (-50, 110), (100, -45), (30, 30)):
        scaled = torch.ldexp(q, torch.tensor(of_q)), torch.ldexp(k, torch.tensor(of_k))
        scale = 0.125 * 2.0 ** -(of_q + of_k)
        got = flash_attn_func(*scaled, v, softmax_scale=scale, precision=precision, return_lse=True)
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, y), (of_q, of_k)
