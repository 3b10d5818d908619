"""Inputs whose scores, softmax_scale * q k^T, are distributed otherwise than N(0,1).

Forward kernels (RingFA3's, FlashAttention-3's and 4's) visit key blocks from the last to the first:
where scores fall in the order of the keys, a row's maximum rises as blocks are visited.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

SIGMAS = (1, 2, 4, 8, 16)  # nats; powers of two scale q without rounding
NATS, KEYS = 6, 128  # of a slope: by how much scores change, and over how many keys
EVERY, STEEP = 16, 12  # one row in 16 has scores of 12 nats
SINK = 8  # nats by which the first key's score is above the others
OUTLIER, RATE = 10, 1e-3  # an outlier's standard deviation, and how often there is one
LARGE, TINY = 1e4, 1e-6

Shape = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], None]


def _sigma(
    nats: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> None:
    q.mul_(nats)


def _slope(
    nats: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> None:
    """Scores rise by `nats` with every 128 keys; below 0 they fall.

    The first two channels of k hold key // 128 and key % 128 / 128: exact in bfloat16 up to 32k
    keys. Those of q hold nats * sqrt(d), rounded: the slope is 6.01 nats at head dim 128.
    """
    key = torch.arange(k.shape[-3], device=k.device)[:, None]
    q[..., :2] = nats * q.shape[-1] ** 0.5
    k[..., 0] = key // KEYS
    k[..., 1] = key % KEYS / KEYS


def _steep_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> None:
    q[..., ::EVERY, :, :] *= STEEP


def _sink(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """The first channel of k is 0 but for the first key."""
    q[..., 0] = SINK
    k[..., 0] = 0
    k[..., 0, :, 0] = q.shape[-1] ** 0.5


def _equal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """All keys are the first one: on a k of zeros a GPU draws less power."""
    k.copy_(k[..., :1, :, :].clone().expand_as(k))


def _outliers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> None:
    """FlashAttention-3's distribution: N(0,1) + N(0,100) * Bernoulli(0.001)."""
    for x in (q, k, v):
        chosen = torch.rand(x.shape, generator=generator, device=x.device) < RATE
        x += chosen * OUTLIER * torch.empty_like(x).normal_(generator=generator)


def _large_v(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    v.mul_(LARGE)


def _tiny(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    for x in (q, k, v):
        x.mul_(TINY)


# Each changes standard normal q, k, v in place; (b, s, h, d) or (t, h, d).
TIMED: dict[str, Shape] = {
    **{f"sigma {nats}": partial(_sigma, nats) for nats in SIGMAS},
    "6 nats up": partial(_slope, NATS),
    "6 nats down": partial(_slope, -NATS),  # rises as blocks are visited
    "steep rows": _steep_rows,
    "sink": _sink,
    "equal": _equal,
}
# Only their errors are measured: a kernel's speed depends on the scores alone.
UNTIMED: dict[str, Shape] = {"outliers": _outliers, "large V": _large_v, "tiny": _tiny}
SCORES = TIMED | UNTIMED
