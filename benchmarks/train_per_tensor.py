"""Trains with per-tensor FP8 attention, one scale for each of Q, K and V: a baseline for RingFA3's.

    python benchmarks/train_per_tensor.py model=125m data.seq_len=8192

It accepts the settings of train/pretrain.py, and always sets model.attention_precision=fp8 and
parallel.cp=1. The kernel is that of `precision="fp8"`; its operands are neither rotated nor
centred. Its backward is that of bfloat16, with its LSE. It needs one Hopper GPU. CUDA starts before
the trainer blocks signals, so a stop may not save a checkpoint.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ringfa3.bench.fp8 import designs, kernels  # noqa: E402
from ringfa3.functional import flash_attn_func  # noqa: E402
from ringfa3.kernels.quantised import QuantisedKernel  # noqa: E402
from ringfa3.ring import op  # noqa: E402


def native_backward(
    backward: partial[tuple[torch.Tensor, ...]], *inputs: Any
) -> tuple[torch.Tensor, ...]:
    """In place of `straight_through`, whose operands are those of RingFA3's own forward."""
    settings = backward.keywords
    call = settings["call"]._replace(precision="native")
    sink: torch.Tensor | None = inputs[7]
    return backward.func(*inputs[:7], **settings | {"call": call, "sink": sink})


def check() -> None:
    """Compare with the PyTorch reference; a relative rms difference above 2% ends the run."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 600, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ours = flash_attn_func(q, k, v, causal=True, precision="fp8")[0].float()
    design = designs.DESIGNS[designs.FIRST]
    expected, _ = designs.attention(design, q[0], k[0], v[0], causal=True)
    difference = ((ours - expected).square().mean() / expected.square().mean()).sqrt().item()
    print(f"per-tensor FP8: rms difference from its reference {difference:.2%}", flush=True)
    if not difference < 0.02:
        raise SystemExit("the kernel and the reference of per-tensor FP8 differ")


if __name__ == "__main__":
    QuantisedKernel.quantise = kernels.per_tensor
    op.straight_through = native_backward
    check()
    sys.argv[0] = str(ROOT / "train" / "pretrain.py")
    sys.argv += ["model.attention_precision=fp8", "parallel.cp=1"]
    runpy.run_path(sys.argv[0], run_name="__main__")
