"""Checks of the arguments that all attention functions share."""

from __future__ import annotations

import math
from typing import SupportsFloat

import torch

CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GPU_DTYPES = (torch.bfloat16, torch.float16)
PRECISIONS = ("native", "fp8")


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: allowed are {', '.join(map(repr, PRECISIONS))}")
    if precision == "fp8":
        raise ValueError("precision='fp8' has no kernel in this version: use precision='native'")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises a TypeError unless all three are tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int) -> None:
    """Raises a TypeError or ValueError unless q, k, v can be attended; tokens are not compared."""
    check_tensors(q, k, v)
    shape = "(batch, tokens, heads, head_dim)" if dims == 4 else "(tokens, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: give {shape}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}: use one device")
        allowed = GPU_DTYPES if x.device.type == "cuda" else CPU_DTYPES
        if x.dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise TypeError(f"{name} is {x.dtype}: allowed on {x.device.type} are {names}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype}, q is {q.dtype}: use one dtype")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {x.stride(-1)} in its last dim: call .contiguous() on it"
            )
        if x.shape[-1] == 0 or x.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"{name} has head_dim {x.shape[-1]}, q has {q.shape[-1]}: they must be equal, > 0"
            )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k has {kv_heads}: give a multiple of k's heads")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}: must be equal")


def default_scale(softmax_scale: float | None, q: torch.Tensor) -> float:
    """`softmax_scale`, or d ** -0.5 for None. A mask is -inf before the scale."""
    if softmax_scale is None:
        return q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0  # 0: `check_qkv` refuses it
    if isinstance(softmax_scale, str) or not isinstance(softmax_scale, SupportsFloat):
        raise TypeError(f"softmax_scale={softmax_scale!r}: give a number or None")
    scale = float(softmax_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale={softmax_scale!r}: it must be positive and finite")
    return scale


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast the inputs in its dtype, float64 left alone, as PyTorch's attention does."""
    q = tensors[0]
    if not torch.is_autocast_enabled(q.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )
