"""Trains with outliers planted in K, as trained models have them; settings as of train/pretrain.py.

    python benchmarks/train_outliers.py model=125m model.attention_precision=fp8

It sets model.qk_norm=false, model.qkv_bias=true, engine=ddp and parallel.cp=1, and changes the
initial weights of every layer. Channel 0 of the first KV head has 30 times its weights. The last
channel of every KV head, which RoPE rotates least, has a bias of 100, as K of Qwen2 has. All of it
is trained as usual.

`--native-scores` takes the backward of 16 bits with the LSE of 8 bits: exp of the difference is
unbounded. RingFA3 had it before its present backward. config.json does not have this option.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.train_per_tensor import native_backward  # noqa: E402
from ringfa3.ring import op  # noqa: E402
from train.model import transformer  # noqa: E402

WEIGHTS, BIAS = 30.0, 100.0
initialise = transformer.initialise


@torch.no_grad()
def with_outliers(module: transformer.Transformer, *settings: Any) -> None:
    """The weights of `initialise`, with outliers."""
    initialise(module, *settings)
    for layer in module.modules():
        if isinstance(layer, transformer.Attention):
            layer.wk.weight[0] *= WEIGHTS
            layer.wk.bias.view(-1, layer.head_dim)[:, -1] = BIAS


if __name__ == "__main__":
    transformer.initialise = with_outliers
    if "--native-scores" in sys.argv:
        sys.argv.remove("--native-scores")
        op.straight_through = native_backward
    sys.argv[0] = str(ROOT / "train" / "pretrain.py")
    sys.argv += ["model.qk_norm=false", "model.qkv_bias=true", "engine=ddp", "parallel.cp=1"]
    runpy.run_path(sys.argv[0], run_name="__main__")
