"""The gradient of an attention in 8 bits, by a backward in 16 bits: see `quantisation.dequantised`.

It rounds q, k and v again, as the forward did: autograd saves what it saves in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringfa3.kernels.dispatch import QuantisedForward
from ringfa3.kernels.reference import preprocess
from ringfa3.kernels.sinks import sink_gradient
from ringfa3.quantisation.channels import KVCentres
from ringfa3.quantisation.dequantised import add_mean_term
from ringfa3.quantisation.key_tiles import KeyTiles
from ringfa3.tensor_cache import MemoryCache

# Of forward calls of one rank, by the LSE that they returned. Where a call of several ranks found
# them on one rank alone, the others would wait for its statistics.
forward_centres: MemoryCache[KVCentres] = MemoryCache()


def straight_through(
    backward: Callable[..., tuple[torch.Tensor, ...]],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    kernel: QuantisedForward,
    tiles: KeyTiles,
    centres: KVCentres,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), and dsink for a sink, in the dtypes of q and lse.

    Args:
        backward: backward(dout, dlse, q, k, v, out, lse) gives (dq, dk, dv, ...) without a sink,
            for the tensors of `DequantisedInputs` in place of q, k, v and lse. It rotates dq and dk
            back; dk has the columns of q, or those of k.
        dout, q, out: (t, h, d); k, v: (n, hk, d); lse, dlse: (h, t); sink: (h,).
        kernel: of the forward. tiles: of k and v. centres: those of the forward.
    """
    rounded = kernel.dequantise(q, k, v, tiles, centres, lse, scale)
    rounded_dout, rounded_out = (x.to(rounded.q.dtype) for x in (dout, out))
    dq, dk, dv, *_ = backward(
        rounded_dout, dlse, rounded.q, rounded.k, rounded.v, rounded_out, rounded.lse
    )
    del rounded
    dsink = None
    if dlse is not None or sink is not None:
        shown, delta = preprocess(dout, out, lse, dlse)
        weight = torch.zeros_like(delta)
        if dlse is not None:
            weight += dlse.masked_fill(shown == torch.inf, 0)
        if sink is not None:
            weight += torch.exp(sink[:, None] - shown) * delta
            dsink = sink_gradient(shown, delta, sink)
        dq = add_mean_term(dq, centres.k_mean, weight.mul_(scale))
    given = tuple(x.to(q.dtype).contiguous() for x in (dq, dk[..., : q.shape[-1]], dv))
    return given if dsink is None else (*given, dsink)
