"""Checks of kernels under masks, on a GPU or in emulation: against float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from tests.support.dense import attention, attention_with_sink, gradients
from tests.support.masks import Union, random_union

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
Given = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def case_of(rng: random.Random, number: int, device: str = "cuda") -> tuple[Union, Given]:
    """A mask, and `given_of` it. Every fourth is of cross-attention."""
    union = random_union(rng, rng.choice((200, 1500)), cross=number % 4 == 3)
    torch.manual_seed(number)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    heads = rng.choice(((8, 2, 64), (4, 4, 128), (4, 1, 256), (4, 2, 96)))
    return union, given_of(union, *heads, dtype, number % 3 == 0, device)


def given_of(
    union: Union, h: int, hk: int, d: int, dtype: torch.dtype, with_sink: bool, device: str
) -> Given:
    """q, k, v and perhaps a sink; dout; dlse."""
    tokens = union.q_tokens, union.k_tokens, union.k_tokens, union.q_tokens
    q, k, v, dout = (
        torch.randn(n, heads, d, device=device).to(dtype)
        for n, heads in zip(tokens, (h, hk, hk, h), strict=True)
    )
    sink = [torch.randn(h, device=device)] if with_sink else []
    return [q, k, v, *sink], dout, torch.randn(h, len(q), device=device)


def dense_results(union: Union, given: Given, dtype: torch.dtype) -> list[torch.Tensor]:
    """`NAMES` by PyTorch, with the whole mask."""
    inputs, dout, dlse = given
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    allowed = torch.from_numpy(union.dense()).to(dout.device)
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
