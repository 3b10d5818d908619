"""Checks of what callers pass: every function raises a TypeError or ValueError that names the
argument, its value and what is allowed."""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import SupportsFloat, SupportsIndex, cast

import torch

CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GPU_DTYPES = (torch.bfloat16, torch.float16)
PRECISIONS = ("native", "fp8", "int8")
QUANTISED_HEAD_DIMS = (64, 128, 256)
HEAD_DIM_STEP = 8  # kernels take head dims that are multiples of it: 16 bytes
INT64_END = 1 << 63
LAYOUTS = ("zigzag", "contiguous")
TRANSPORTS = ("auto", "symmetric", "nccl", "gloo")
TRANSPORTS_OF = {"cuda": ("nccl", "symmetric"), "cpu": ("gloo",)}  # by type of device


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


def check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: give a {kind.__name__}")


def check_precision(precision: str) -> None:
    check_choice("precision", precision, PRECISIONS)


def check_quantisable(precision: str, q: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError unless attention on one device takes tensors like these in `precision`."""
    if precision == "native":
        return
    if q.dtype == torch.float64:
        raise ValueError(f"precision={precision!r} computes in float32, q is torch.float64: cast q")
    if q.shape[-1] not in QUANTISED_HEAD_DIMS:
        raise ValueError(
            f"precision={precision!r} has no kernel for head_dim {q.shape[-1]}: allowed are "
            f"{', '.join(map(str, QUANTISED_HEAD_DIMS))}"
        )
    if v.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"precision={precision!r}: v has head_dim {v.shape[-1]}, q has {q.shape[-1]}: add "
            "columns of zeros to v"
        )


def check_ring_precision(
    precision: str, q: torch.Tensor, v: torch.Tensor, world: int, transport: str
) -> None:
    """Raises ValueError unless `world` ranks take tensors like these in `precision`."""
    check_precision(precision)
    if precision != "native" and world > 1 and transport == "symmetric":
        raise ValueError(
            f"precision={precision!r} moves K/V by messages: use transport='auto' or 'nccl', not "
            "'symmetric'"
        )
    check_quantisable(precision, q, v)


def check_transport(transport: str, device: torch.device) -> None:
    """Whether `transport` exists and can move tensors on `device`."""
    check_choice("transport", transport, TRANSPORTS)
    fitting = TRANSPORTS_OF.get(device.type, ("gloo",))
    if transport not in ("auto", *fitting):
        raise ValueError(
            f"transport={transport!r} cannot move {device.type} tensors: use "
            f"{' or '.join(map(repr, fitting))}"
        )


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    given = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, value in given.items():
        if not isinstance(value, SupportsIndex):
            raise TypeError(f"{name}={value!r}: give a whole number")
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}, both > 0"
        )
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim} must be > 0")


def whole_numbers(name: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """The values as ints, which fit int64."""
    try:
        given = tuple(values)
        plain = set(map(type, given)) <= {int}
        numbers = cast(tuple[int, ...], given) if plain else tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name}={values!r}: give a sequence of whole numbers") from None
    if numbers and not -INT64_END <= min(numbers) <= max(numbers) < INT64_END:
        raise ValueError(f"{name} has the number {max(numbers, key=abs)}: allowed are 64 bits")
    return numbers


def int64_bytes(name: str, values: Iterable[SupportsIndex]) -> bytes:
    """The values as int64, one behind the other: they hash and compare faster than a tuple."""
    given = tuple(values) if isinstance(values, Iterable) else whole_numbers(name, values)
    try:
        return struct.pack(f"{len(given)}q", *given)
    except (struct.error, TypeError):
        return struct.pack(f"{len(given)}q", *whole_numbers(name, given))  # names what is wrong


def check_window(window_size: Sequence[int]) -> tuple[int, int]:
    """`window_size` as a pair of ints >= -1."""
    window = whole_numbers("window_size", window_size)
    if len(window) != 2 or min(window) < -1:
        raise ValueError(
            f"window_size={window!r}: give (left, right), numbers of keys, -1 for unlimited"
        )
    return window[0], window[1]


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor) -> None:
    dtype = cu_seqlens.dtype
    if cu_seqlens.dim() != 1 or dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"{name} must be one-dimensional and integer, got {dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )


def sequence_lengths(name: str, cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """Sequence lengths from cumulative ones."""
    cu = tuple(cu_seqlens)
    if not cu or cu[0] != 0:
        raise ValueError(f"{name} must start with 0 and hold at least one number, got {cu[:3]}")
    lengths = tuple(b - a for a, b in itertools.pairwise(cu))
    if lengths and min(lengths) < 0:
        i = next(i for i, n in enumerate(lengths) if n < 0)
        raise ValueError(f"{name} must never fall, but {name}[{i}:{i + 2}] = {cu[i : i + 2]}")
    return lengths


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int) -> None:
    """Device, dtype, strides and shapes; numbers of tokens are not compared.

    dims: 4 for (batch, tokens, heads, head_dim), 3 for (tokens, heads, head_dim).
    """
    check_tensors(q, k, v)
    shape = "(batch, tokens, heads, head_dim)" if dims == 4 else "(tokens, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout is not torch.strided:
            raise ValueError(f"{name} has layout {x.layout}: give a dense tensor, torch.strided")
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
    d, d_k, d_v = (x.shape[-1] for x in (q, k, v))
    if d == 0 or d_k != d:
        raise ValueError(f"k has head_dim {d_k}, q has {d}: they must be equal, > 0")
    if d_v != d and not (0 < d_v < d and d_v % HEAD_DIM_STEP == 0):
        raise ValueError(
            f"v has head_dim {d_v}, q has {d}: give {d}, or a smaller multiple of {HEAD_DIM_STEP}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k has {kv_heads}: give a multiple of k's heads")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}: all but the last dim must be "
            "equal"
        )


def check_batch(q: torch.Tensor, k: torch.Tensor) -> None:
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]}, q has {q.shape[0]}: they must be equal")


def check_sink(sink: torch.Tensor | None, q: torch.Tensor) -> None:
    """Whether `sink` is None or one logit for each head of q (..., h, d)."""
    if sink is None:
        return
    if not isinstance(sink, torch.Tensor):
        raise TypeError(f"sink must be a tensor or None, got {type(sink).__name__}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if sink.dtype != wanted:
        raise TypeError(f"sink is {sink.dtype}: with q of {q.dtype} give {wanted}")
    if sink.shape != q.shape[-2:-1] or sink.device != q.device:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)} on {sink.device}: give ({q.shape[-2]},), a logit "
            f"for each head of q, on {q.device}"
        )


def check_local_tokens(
    q: torch.Tensor, k: torch.Tensor, local_tokens: int, total_tokens: int
) -> None:
    """Whether packed q and k hold a rank's tokens of a plan."""
    for name, x in (("q", q), ("k", k)):
        if x.shape[0] != local_tokens:
            raise ValueError(
                f"{name} has {x.shape[0]} tokens; the plan gives this rank {local_tokens} of "
                f"{total_tokens}"
            )


def check_layer_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Whether q, k and v are ([b,] t, h, d) with a layer's heads, and of equal batch and tokens.

    The attention that follows checks the head dim of v.
    """
    for name, x, expected in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        d = x.shape[-1] if x.dim() and name == "v" else head_dim
        if x.dim() not in (3, 4) or x.shape[-2:] != (expected, d):
            last = f"at most {head_dim}" if name == "v" else head_dim
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: give ([batch,] tokens, {expected}, {last})"
            )
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, q has {tuple(q.shape)}: batch and tokens "
                "must be equal"
            )


def is_deterministic(deterministic: bool) -> bool:
    """Whether gradients must have equal bits from run to run: a call's `deterministic`, or
    `torch.use_deterministic_algorithms`, its warn-only mode included, when the call runs.

    Every backward has a deterministic order of additions. So nothing is left to refuse, or to warn
    of.
    """
    return deterministic or torch.are_deterministic_algorithms_enabled()


LEAST_SCALE = 2.0**-64  # the backward divides LSE by the scale


def resolve_scale(softmax_scale: float | None, q: torch.Tensor) -> float:
    """`softmax_scale`, or d ** -0.5 for None."""
    if softmax_scale is None:
        return q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0  # `check_qkv` rejects d = 0
    return check_scale(softmax_scale)


def check_scale(softmax_scale: float) -> float:
    """`softmax_scale` as a float. Positive: a mask is -inf before the scale."""
    if isinstance(softmax_scale, str) or not isinstance(softmax_scale, SupportsFloat):
        raise TypeError(f"softmax_scale={softmax_scale!r}: give a number or None")
    scale = float(softmax_scale)
    if not LEAST_SCALE <= scale <= 1 / LEAST_SCALE:
        raise ValueError(
            f"softmax_scale={softmax_scale!r}: it must be positive and finite, "
            f"from {LEAST_SCALE:.1e} to {1 / LEAST_SCALE:.1e}"
        )
    return scale
