"""Ways to quantise Q, K and V: RingFA3's two precisions, each without one of its parts, and the
usual one, a scale for each tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ringfa3.kernels.quantised_reference import attend
from ringfa3.kernels.reference import TILE_M
from ringfa3.planning.sharding import whole_sequences
from ringfa3.planning.tiling import plan_local
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.operands import (
    QuantisedKV,
    QuantisedQ,
    k_offset,
    round_rows,
    round_tiles,
)
from ringfa3.quantisation.rotation import rotate


@dataclass(frozen=True)
class Design:
    """What a design does before it rounds.

    rotates  Q and K by random signs and a Hadamard matrix
    scales   "tile": a scale for each row of Q, 128 keys and channel of V; "head": for each head of
             Q and K, and channel of V; "tensor": for each tensor
    centres  subtracts the means of K and V
    """

    precision: str
    rotates: bool = True
    scales: str = "tile"
    centres: bool = True


DESIGNS = {
    "per tensor": Design("fp8", rotates=False, scales="tensor", centres=False),
    "fp8": Design("fp8"),
    "fp8 without tile scales": Design("fp8", scales="head"),
    "fp8 without Hadamard": Design("fp8", rotates=False),
    "fp8 without centring": Design("fp8", centres=False),
    "int8": Design("int8"),
    "int8 without tile scales": Design("int8", scales="head"),
    "int8 without Hadamard": Design("int8", rotates=False),
    "int8 without centring": Design("int8", centres=False),
}
FIRST = "per tensor"  # the others are compared with it


def attention(
    design: Design, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (t, h, d) float32, lse (h, t)) of q (t, h, d) and k, v (t, hk, d), by the PyTorch
    fallback."""
    t, h, d = q.shape
    operands = quantised(design, q, k, v)
    lengths = np.array([t], np.int64)
    (tiling,) = plan_local(lengths, lengths, -1, 0 if causal else -1).forward(TILE_M)
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = out.new_empty(h, t)
    v_format = FORMATS[design.precision].v
    attend(*operands, tiling, d**-0.5, out, out[:0], lse, p_format=v_format)
    return out, lse


def quantised(
    design: Design, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[QuantisedQ, QuantisedKV]:
    """The operands of a design; shapes as in `attention`."""
    formats = FORMATS[design.precision]
    qk = formats.qk
    statistics = ChannelStatistics.of(k, v)
    if not design.centres:
        statistics.values[:2] = 0  # sums, and so means
    centres = KVCentres.of(statistics, formats)
    if design.scales == "tensor":
        centres = centres._replace(v_scale=centres.v_scale.amax().expand_as(centres.v_scale))
    x, y = (rotate(q), rotate(k, centres.k_mean)) if design.rotates else (q.float(), k.float())
    if not design.rotates:
        y = y - centres.k_mean
    if design.scales == "tile":
        keys = whole_sequences(np.array([len(k)], np.int64))
        q_values, q_scale = round_rows(x, qk)
        k_values, k_scale = round_tiles(y, keys, qk)
    else:
        per_tensor = design.scales == "tensor"
        over = (0, 1, 2) if per_tensor else (0, 2)
        q_most, k_most = (z.abs().amax(over, keepdim=True) for z in (x, y))
        of_q, of_k = (qk.scale, qk.scale) if per_tensor else (qk.row_scale, qk.tile_scale)
        q_scale, k_scale = of_q(q_most), of_k(k_most)
        q_values, k_values = qk.round_row(x / q_scale, q_scale), qk.round(y / k_scale)
        q_scale, k_scale = (
            scale.squeeze(-1).expand(z.shape[:2]) for scale, z in ((q_scale, x), (k_scale, y))
        )
    if formats.v is not None:
        v = formats.v.round((v.float() - centres.v_mean) / centres.v_scale)
    queries = QuantisedQ(q_values, q_scale, k_offset(q, centres))
    return queries, QuantisedKV(k_values, k_scale, v, centres)
