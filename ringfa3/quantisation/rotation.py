"""Incoherent processing: random signs and a Hadamard transform over the head dim.

(FlashAttention-3, section 3.3.) Q and K are rotated by the same orthogonal matrix, so Q K^T stays.
An outlier in one channel spreads over all of them, and one scale serves a row.
"""

from __future__ import annotations

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


def _saturated(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-LARGEST_INPUT, LARGEST_INPUT)
