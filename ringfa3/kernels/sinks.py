"""Attention sinks: a logit a head that takes part in the softmax and has no value.

The reference and the 8-bit forwards count sinks by these functions; kernels of the native precision
do it themselves, in the forward's epilogue and the backward's preprocess.

With LSE' = log(exp(LSE) + exp(sink)) the output is out * exp(LSE - LSE'). The backward from out and
LSE' is that of attention: P = exp(S - LSE') and D = rowsum(dO * O) - dLSE' are right as they are.
"""

from __future__ import annotations

import torch


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Scales out (t, h, d) in place and returns LSE' (h, t), for lse (h, t) and sink (h,).

    A row without keys has output 0 and LSE' = sink.
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    share = torch.where(lse == -torch.inf, 0, torch.exp(lse - with_sink))
    out.mul_(share.t()[..., None])
    return with_sink


def sink_gradient(lse: torch.Tensor, delta: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """dsink = -sum exp(sink - LSE') D over rows, (h,) in the dtype of sink.

    lse, delta: (h, t), LSE' and D of `reference.preprocess`, which hide rows without keys.
    """
    return -(torch.exp(sink.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sink.dtype)
