"""The kernels of RingFA3's two precisions, and of the usual FP8, a scale for each tensor."""

from __future__ import annotations

import numpy as np
import torch

from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.fp8.designs import FIRST
from ringfa3.kernels import quantise
from ringfa3.kernels.dispatch import select_quantised
from ringfa3.kernels.quantise import TiledKV
from ringfa3.kernels.quantised import QuantisedKernel
from ringfa3.planning.tiling import Plan, plan_local
from ringfa3.quantisation.channels import KVCentres
from ringfa3.quantisation.formats import E4M3
from ringfa3.quantisation.key_tiles import KeyTiles
from ringfa3.quantisation.operands import QuantisedQ

MEASURED = (FIRST, "fp8", "int8")  # of `designs.DESIGNS`


def attention(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (t, h, d) in the dtype of q, lse (h, t)) of one of `MEASURED`, as `designs.attention`.

    Raises BenchError: there is no kernel for these tensors.
    """
    t, h, d = q.shape
    kernel = select_quantised(q, "fp8" if name == FIRST else name)
    if not isinstance(kernel, QuantisedKernel):
        raise BenchError(f"no kernel attends in 8 bits at head_dim {d} on {q.device}")
    lengths = np.array([t], np.int64)
    plan = plan_local(lengths, lengths, -1, 0 if causal else -1)
    operands = (per_tensor if name == FIRST else QuantisedKernel.quantise)(kernel, q, k, v, plan)
    out, lse = torch.empty_like(q), q.new_empty((h, t), dtype=torch.float32)
    kernel.attend(*operands, plan.forward(kernel.tile_m)[0], d**-0.5, out, out[:0], lse)
    return out, lse


def per_tensor(
    kernel: QuantisedKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
) -> tuple[QuantisedQ, TiledKV]:
    """`QuantisedKernel.quantise` with one scale for each tensor, neither rotated nor centred.

    kernel: of "fp8". q (t, h, d); k, v (n, hk, d).
    """
    q_scale, k_scale, v_scale = (E4M3.scale(x.abs().amax()) for x in (q, k, v))
    none = torch.zeros(k.shape[1:], device=k.device)
    centres = KVCentres(none, none, v_scale.expand_as(none).contiguous())
    tiles = KeyTiles.of(plan, plan.keys)
    tiled = quantise.quantise_kv(kernel.quantiser, k, v, tiles, centres, kernel.formats)
    scales = k_scale.expand_as(tiled.k_scale).contiguous()
    kv = TiledKV(E4M3.round(k.float() / k_scale), scales, tiled.v, centres, tiles)
    scale, offset = q.new_zeros((2, q.shape[1], len(q)), dtype=torch.float32)  # (h, t) in memory
    scale += q_scale
    return QuantisedQ(E4M3.round(q.float() / q_scale), scale.t(), offset.t()), kv
