"""The straight-through gradient of an 8-bit attention, dense and in float64, and inputs for it.

Shapes: t tokens; h heads, hk KV heads; d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ringfa3 import flash_attn_func
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import whole_sequences
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.operands import QuantisedKV, QuantisedQ, quantise
from ringfa3.quantisation.rotation import rotate_back


def normal(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
    del q, k, generator


def scores(rms: float) -> Callable[..., None]:
    """Scores of this rms, in nats, at the default softmax scale."""

    def change(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
        del generator
        q *= rms**0.5
        k *= rms**0.5

    return change


def large_key(factor: float) -> Callable[..., None]:
    def change(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
        del q, generator
        k[len(k) // 3] *= factor

    return change


def outliers(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
    """N(0,1) + N(0,100) * Bernoulli(0.001), FlashAttention-3's section 4.3."""
    for x in (q, k):
        seldom = torch.rand(x.shape, generator=generator) < 1e-3
        x += 10 * torch.randn(x.shape, generator=generator) * seldom


def means(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
    """Channels of K with means of 100, as models with biases have."""
    del q
    k += 100 * torch.randn(k.shape[1:], generator=generator)


INPUTS = {
    "normal": normal,
    "rms 4": scores(4),
    "rms 9": scores(9),
    "rms 25": scores(25),
    "key x10": large_key(10),
    "key x100": large_key(100),
    "key x1000": large_key(1000),
    "outliers": outliers,
    "means": means,
}


# The bound of dq and dk: rms error over rms, the median of some draws. Other inputs have .006.
MOST = {"key x10": 0.03, "key x100": 0.03, "key x1000": 0.25, "rms 9": 0.015, "rms 25": 0.015}


def hostile(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """bfloat16 (t, h, d) of any magnitude from 1e-20 to 1e20, or about 1; normal, with a large row,
    with a large channel, constant, or with zeros."""
    x = torch.randn(*shape, generator=generator)
    choice = torch.randint(6, (1,), generator=generator).item()
    if choice == 1:
        x[torch.randint(len(x), (1,), generator=generator)] *= 1e3
    elif choice == 2:
        x[..., 3] = 50
    elif choice == 3:
        x[:] = 1
    elif choice == 4:
        x[len(x) // 2 :] = 0
    power = 20 * (2 * torch.rand(1, generator=generator) - 1) * (choice != 5)
    return (x * 10**power).bfloat16()


def inputs(
    name: str, tokens: int, heads: tuple[int, int], d: int, seed: int
) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout (t, h or hk, d) bfloat16 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    h, hk = heads
    q, dout = (torch.randn(tokens, h, d, generator=generator) for _ in range(2))
    k, v = (torch.randn(tokens, hk, d, generator=generator) for _ in range(2))
    INPUTS[name](q, k, generator)
    return tuple(x.bfloat16() for x in (q, k, v, dout))


class Rounded(NamedTuple):
    """float64: q (t, h, d) and k (n, hk, d), rotated, k without its mean (hk, d); v (n, hk, d)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_mean: torch.Tensor

    @classmethod
    def of(cls, queries: QuantisedQ, kv: QuantisedKV) -> Rounded:
        v = kv.v.double() * kv.centres.v_scale.double() + kv.centres.v_mean.double()
        return cls(
            queries.values.double() * queries.scale.double().unsqueeze(-1),
            kv.k.double() * kv.k_scale.double().unsqueeze(-1),
            v,
            kv.centres.k_mean.double(),
        )

    @classmethod
    def of_call(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: str, lengths: Ints
    ) -> Rounded:
        """The operands of a call on one device; lengths: those of the documents of k."""
        return cls.of(*quantise(q, k, v, whole_sequences(lengths), FORMATS[precision]))


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    allowed: torch.Tensor,
    given: Rounded,
    sink: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), and dsink for a sink, float64, by autograd of the rounded function.

    The output is (round(p) V) / sum(p). Its derivative by p, where rounding counts as the identity,
    is (V - output) / sum(p): so the rounding of P shows in the output alone.

    Args:
        out: (t, h, d) of the forward, of float32 inputs with the values of q, k and v.
        allowed: (t, n) bool, the pairs that count. Rows without one, and without a sink, have no
            gradient.
        sink: (h,); dlse: (h, t).
    """
    seen = allowed.any(1) if sink is None else torch.ones_like(allowed[:, 0])
    allowed = allowed | ~seen[:, None]  # -inf in all of a row would be NaN
    # Rounding happens to q R and (k - mean) R: their gradients by q and k follow by R^T.
    rounded = rotate_back(given.q), rotate_back(given.k), given.v
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    qr, kr, vr = (x + (y - x).detach() for x, y in zip(leaves, rounded, strict=True))
    group = q.shape[1] // k.shape[1]
    kr, vr, mean = (x.repeat_interleave(group, -2) for x in (kr, vr, given.k_mean))
    scale = q.shape[-1] ** -0.5
    offset = scale * torch.einsum("thd,hd->ht", leaves[0], mean)  # which centring took off
    s = scale * torch.einsum("thd,nhd->htn", qr, kr)
    s = s.masked_fill(~allowed, -torch.inf)
    logits = None if sink is None else sink.detach().double().requires_grad_()
    if logits is not None:
        s = torch.cat((s, (logits[:, None] - offset)[..., None]), -1)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.detach()[..., None])
    weighted = torch.einsum("htn,nhd->thd", p[..., : len(k)], vr)
    weights = dout.double() * seen[:, None, None]
    total = ((weighted - out.double() * p.sum(-1).t()[..., None]) * weights).sum()
    if dlse is not None:
        total = total + ((lse + offset) * dlse.double() * seen).sum()
    return torch.autograd.grad(total, leaves if logits is None else [*leaves, logits])


def hold_bounds(
    count: int, shape: tuple[int, int, int], precision: str, device: str, seed: int, most_nats: int
) -> None:
    """Inputs over 40 orders of magnitude, with outliers, constants and zeros, of `shape` (t, h, d).

    No gradient is inf or NaN where that of "native" is finite, and so are its output and LSE. Its
    norm is at most 10 times the reference's, plus what the rounding of the output to bfloat16 adds
    to D, also in "native". Norms are compared in draws whose LSE is below `most_nats`, a third at
    least. In "fp8" on a GPU other draws are left out: sums of 13 bits are further from large scores
    than P can show, and gradients may pass the range of float32.
    """
    generator = torch.Generator().manual_seed(seed)
    counted = 0
    for number in range(count):
        q, k, v, dout = inputs = [hostile(generator, *shape).to(device) for _ in range(4)]
        leaves = [x[None].requires_grad_() for x in inputs[:3]]
        out, lse = flash_attn_func(*leaves, return_lse=True)
        assert isinstance(out, torch.Tensor)
        bounded = bool(lse.abs().max() < most_nats)
        exact_sums = (device, precision) != ("cuda", "fp8")
        if not (out.isfinite().all() and lse.isfinite().all() and (bounded or exact_sums)):
            continue
        native = torch.autograd.grad(out, leaves, dout[None])
        rounded = flash_attn_func(*leaves, precision=precision)
        assert isinstance(rounded, torch.Tensor)
        got = torch.autograd.grad(rounded, leaves, dout[None])
        if device == "cpu":  # the reference takes the output before it is rounded to bfloat16
            rounded = flash_attn_func(*(x[None].float() for x in inputs[:3]), precision=precision)
        given = Rounded.of_call(q, k, v, precision, np.array([len(k)]))
        allowed = torch.ones(len(q), len(k), dtype=torch.bool, device=device)
        expected = gradients(q, k, v, dout, rounded[0].detach(), allowed, given)
        rounding = shape[2] ** -0.5 * 2.0**-8 * dout.double().norm() * v.double().norm()
        floors = rounding * k.double().norm(), rounding * q.double().norm(), 0
        what = f"draw {number}, inputs up to {[float(x.abs().max()) for x in inputs]}"
        for name, x, y, z, floor in zip("qkv", got, native, expected, floors, strict=True):
            if y.isfinite().all():
                assert x.isfinite().all(), f"d{name} of {what}"
                most = 10 * z.norm() + floor + 1e-36 if bounded else torch.inf
                assert x.double().norm() <= most, f"d{name} of {what}: norm {x.double().norm()}"
        counted += bounded and all(x.isfinite().all() for x in native)
    assert counted > count / 3


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Rms of the difference over that of `expected`."""
    return float((x.double() - expected).norm() / expected.norm())
