"""Trains with the usual FP8 attention, one scale for each of Q, K and V, beside RingFA3's own.

    python benchmarks/train_per_tensor.py model=125m model.attention_precision=fp8 data.seq_len=8192

Takes the settings of train/pretrain.py. The kernel is that of `precision="fp8"`; its operands are
neither rotated nor centred. One Hopper GPU, parallel.cp=1.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ringfa3.bench.fp8.designs import DESIGNS, attention  # noqa: E402
from ringfa3.functional import flash_attn_func  # noqa: E402
from ringfa3.kernels import quantise  # noqa: E402
from ringfa3.kernels.quantise import TiledKV  # noqa: E402
from ringfa3.kernels.quantised import QuantisedKernel  # noqa: E402
from ringfa3.planning.tiling import Plan  # noqa: E402
from ringfa3.quantisation.channels import KVCentres  # noqa: E402
from ringfa3.quantisation.formats import E4M3  # noqa: E402
from ringfa3.quantisation.key_tiles import KeyTiles  # noqa: E402
from ringfa3.quantisation.operands import QuantisedQ  # noqa: E402


def per_tensor(
    self: QuantisedKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
) -> tuple[QuantisedQ, TiledKV]:
    """`QuantisedKernel.quantise` with one scale for each tensor: q (t, h, d), k, v (n, hk, d)."""
    q_scale, k_scale, v_scale = (E4M3.scale(x.abs().amax()) for x in (q, k, v))
    none = torch.zeros(k.shape[1:], device=k.device)
    centres = KVCentres(none, none, v_scale.expand_as(none).contiguous())
    tiles = KeyTiles.of(plan, plan.keys)
    tiled = quantise.quantise_kv(self._quantiser, k, v, tiles, centres, self._formats)
    scales = k_scale.expand_as(tiled.k_scale).contiguous()
    kv = TiledKV(E4M3.round(k.float() / k_scale), scales, tiled.v, centres, tiles)
    rows = q.new_zeros((2, q.shape[1], q.shape[0]), dtype=torch.float32)  # (h, t) in memory
    rows[0] = q_scale
    return QuantisedQ(E4M3.round(q.float() / q_scale), rows[0].t(), rows[1].t()), kv


def check() -> None:
    """Compare with the executor of the design; a relative rms difference above 2% ends the run."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 600, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ours = flash_attn_func(q, k, v, causal=True, precision="fp8")[0].float()
    expected, _ = attention(DESIGNS["per tensor"], q[0], k[0], v[0], causal=True)
    difference = ((ours - expected).square().mean() / expected.square().mean()).sqrt().item()
    print(f"per-tensor FP8: rms difference from its executor {difference:.2%}", flush=True)
    if not difference < 0.02:
        raise SystemExit("the kernel and the executor of per-tensor FP8 differ")


if __name__ == "__main__":
    QuantisedKernel.quantise = per_tensor
    check()
    sys.argv[0] = str(ROOT / "train" / "pretrain.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
