"""Incoherent processing: random signs and a Hadamard transform over the head dim.

(FlashAttention-3, section 3.3.) Q and K are rotated by the same orthogonal matrix, so Q K^T stays.
An outlier in one channel spreads over all of them, and one scale serves a row.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

SIGN_WORD = 0x9E3779B97F4A7C15  # the seed of the signs: fixed, so all ranks and calls share them
LARGEST_INPUT = 2.0**118  # larger inputs saturate: 256 differences of two sum to less than 2^128


@lru_cache(None)
def signs(head_dim: int) -> tuple[int, ...]:
    """(head_dim,) signs, 1 or -1, from SplitMix64."""
    state = SIGN_WORD
    bits: list[int] = []
    while len(bits) < head_dim:
        state = (state + SIGN_WORD) % 2**64
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        bits += [z >> i & 1 for i in range(64)]
    return tuple(1 - 2 * bit for bit in bits[:head_dim])


def rotate(x: torch.Tensor, centre: torch.Tensor | None = None) -> torch.Tensor:
    """(x - centre) diag(signs) H / sqrt(d) in float32, x (..., d), d a power of two.

    A row of x with an infinity or NaN becomes NaN in every channel.
    """
    d = x.shape[-1]
    finite = x.isfinite().all(-1, keepdim=True)
    y = _saturated(x)
    if centre is not None:
        y = y - _saturated(centre)
    y = y * y.new_tensor(signs(d))
    step = 1
    while step < d:  # butterflies of distance `step`
        a, b = y.view(*x.shape[:-1], d // (2 * step), 2, step).unbind(-2)
        y = torch.stack((a + b, a - b), -2).view(x.shape)
        step *= 2
    return torch.where(finite, y * d**-0.5, torch.nan)


@lru_cache(None)
def _inverse(d: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, float]:
    """(d, d) of one power of two and its negative, and by what to multiply: R^T in two parts.

    Every dtype holds the first part exactly. Sums of products with it stay near the result.
    """
    power = 2.0 ** -math.ceil(math.log2(d) / 2)
    rotation = rotate(torch.eye(d, dtype=torch.float32, device="cpu"))
    return (rotation.sign() * power).t().contiguous().to(device, dtype), d**-0.5 / power


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate` without a centre, in the dtype of x (..., d): x R^T, contiguous."""
    d = x.shape[-1]
    with torch.inference_mode(False):
        inverse, scale = _inverse(d, x.dtype, x.device)
    rows = x.reshape(-1, d)
    return torch.addmm(rows.new_empty((d,)), rows, inverse, beta=0, alpha=scale).view(x.shape)


def _saturated(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-LARGEST_INPUT, LARGEST_INPUT)
