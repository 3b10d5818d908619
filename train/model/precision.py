"""The dtypes of matrix products, from the config or from autocast, and of sums over chunks."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The compute dtype of ``train.precision`` on ``device``."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, precision)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of ``x``: autocast's if it is enabled, else that of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of ``dtype`` are summed over chunks: at least float32."""
    return torch.promote_types(dtype, torch.float32)
