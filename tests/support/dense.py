"""The reference: attention with its whole score matrix, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Window = tuple[int, int]


def band(causal: bool, window: Window) -> Window:
    """The window (left, right) with `causal` folded in; -1 is unlimited."""
    return window[0], 0 if causal else window[1]


def mask(
    q_lengths: Sequence[int], k_lengths: Sequence[int], left: int, right: int
) -> npt.NDArray[np.bool_]:
    """The mask (t, n) of packed sequences, bool, True where a query attends to a key.

    Each sequence's last query is aligned with its last key.
    """
    allowed = np.zeros((sum(q_lengths), sum(k_lengths)), bool)
    q0 = k0 = 0
    for nq, nk in zip(q_lengths, k_lengths, strict=True):
        distance = np.arange(nk)[None] - np.arange(nq)[:, None] - (nk - nq)
        ok = np.ones((nq, nk), bool)
        if left >= 0:
            ok &= distance >= -left
        if right >= 0:
            ok &= distance <= right
        allowed[q0 : q0 + nq, k0 : k0 + nk] = ok
        q0, k0 = q0 + nq, k0 + nk
    return allowed


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: npt.NDArray[np.bool_] | torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (t, h, d) to k and v (n, hk, d) where `allowed` (t, n) is True.

    Returns out (t, h, d) and lse (h, t) in the dtype of q. A row without keys has 0 and -inf.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    hidden = ~torch.as_tensor(allowed)
    blind = hidden.all(1)  # rows without keys
    s = torch.einsum("thd,nhd->htn", q * scale, k).masked_fill(hidden, -torch.inf)
    s = s.masked_fill(blind[:, None], 0)  # NaN here would reach the gradient; masked again below
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_zeros(s.shape[:2])
    p = torch.exp(s - lse[..., None]).masked_fill(hidden, 0)
    return torch.einsum("htn,nhd->thd", p, v), lse.masked_fill(blind, -torch.inf)


def attention_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (t, h, d) and lse (h, t) of a softmax whose last column is the sink, without a value."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("thd,nhd->htn", q * q.shape[-1] ** -0.5, k)
    s = s.masked_fill(~allowed, -torch.inf)
    s = torch.cat((s, sink[:, None, None].expand(*s.shape[:2], 1)), -1)
    p = s.softmax(-1)[..., :-1]
    return torch.einsum("htn,nhd->thd", p, v), s.logsumexp(-1)


def gradients(
    inputs: Sequence[torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of `inputs` for dout and dlse. dlse is ignored where lse is -inf."""
    out, lse = outputs
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0, lse * dlse).sum()
    return list(torch.autograd.grad(loss, inputs))


def tensors(
    seed: int, tokens: int, heads: tuple[int, int], d: int, dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Random [q, k, v], dout and dlse of packed self-attention; `heads` is (h, hk)."""
    g = torch.Generator().manual_seed(seed)
    h, hk = heads
    qkv = [torch.randn(tokens, n, d, generator=g, dtype=torch.float64) for n in (h, hk, hk)]
    dout = torch.randn(tokens, h, d, generator=g, dtype=torch.float64)
    dlse = torch.randn(h, tokens, generator=g, dtype=torch.float64)
    return [x.to(dtype) for x in qkv], dout.to(dtype), dlse


def cumulative(lengths: Sequence[int]) -> list[int]:
    """cu_seqlens of sequences."""
    return np.cumsum([0, *lengths]).tolist()


def worst(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference of any pair. Equal infinities differ by 0, NaN by inf."""
    error = 0.0
    for x, y in pairs:
        a, b = x.detach(), y.detach()
        assert a.shape == b.shape, (a.shape, b.shape)
        difference = torch.where(a == b, 0, (a.double() - b.double()).abs())
        error = max(error, float(difference.nan_to_num(nan=torch.inf).max()) if a.numel() else 0.0)
    return error
