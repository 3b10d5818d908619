"""``train.deterministic``: what PyTorch, cuBLAS and NCCL need for bit-equal training steps.

Two runs of the same config on the same GPUs then compute the same bits, also if one of them was
killed and resumed. The rest needs no switch: RingFA3's forward, its backward with
``deterministic=True``, the fused AdamW, and the order in which DDP reduces its buckets. DDP
rebuilds the buckets after its first backward; ``prime`` of ``train.tasks.gradients`` runs one
before the first step.
"""

from __future__ import annotations

import os

import torch

# Both libraries read these at their first use.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # workspaces of fixed size: split-K sums in one order
    "NCCL_ALGO": "Ring",  # a fixed order of summation; NCCL otherwise tunes by size and topology
    "NCCL_PROTO": "Simple",  # a fixed cut into chunks, which decides where each sum begins
}


def make_deterministic(device: torch.device) -> str:
    """Choose deterministic algorithms for this process; returns a line that lists the settings.

    Call it before the first matrix product and before any process group exists. Environment
    variables that the user has set stay as they are. PyTorch then raises ``RuntimeError`` for any
    operation without a deterministic algorithm.
    """
    torch.use_deterministic_algorithms(True)
    # The flag would also fill every new tensor, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    settings = ["torch.use_deterministic_algorithms", "torch.backends.cudnn.deterministic"]
    if device.type == "cuda":
        for name, value in ENVIRONMENT.items():
            kept = name in os.environ
            os.environ.setdefault(name, value)
            settings.append(f"{name}={os.environ[name]}" + (" (from the environment)" * kept))
    return f"deterministic: {', '.join(settings)}, RingFA3Attention(deterministic=True)"
