"""Checks of what callers pass: every function raises a TypeError or ValueError that names the
argument, its value and what is allowed."""

from __future__ import annotations

import itertools
import numbers
import operator
import reprlib
import struct
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, SupportsIndex, TypeAlias, TypeGuard, cast

import numpy as np
import torch

Window: TypeAlias = tuple[int | None, int | None]  # (left, right), -1 or None for unlimited

CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GPU_DTYPES = (torch.bfloat16, torch.float16)
PRECISIONS = ("native", "fp8", "int8")
QUANTISED_HEAD_DIMS = (64, 128, 256)
HEAD_DIM_STEP = 8  # kernels take head dims that are multiples of it: 16 bytes
INT64_END = 1 << 63
LAYOUTS = ("zigzag", "contiguous")
TRANSPORTS = ("auto", "symmetric", "nccl", "gloo")
TRANSPORTS_OF = {"cuda": ("nccl", "symmetric"), "cpu": ("gloo",)}  # by type of device


def shown(value: object) -> str:
    """A value in an error: short, and without the data of a tensor, which may be on a GPU."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"<{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}>"
    return reprlib.repr(value)


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if isinstance(value, str) and value in allowed:
        return
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{name}={shown(value)}: allowed are {', '.join(map(repr, allowed))}")


def is_bool(value: object) -> TypeGuard[bool]:
    """Whether `value` is a bool of Python, NumPy or a tracer."""
    return isinstance(value, (bool, np.bool_, torch.SymBool))


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number, of a tracer too. A bool, a text and a tensor are none."""
    real = isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt))
    return real and not is_bool(value)


def check_bool(name: str, value: object) -> bool:
    """`value` as a bool of Python. Numbers and texts have a truth of their own: "no" is true."""
    if not is_bool(value):
        raise TypeError(f"{name}={shown(value)}: give True or False")
    return bool(value)


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


def check_unpadded(precision: str) -> None:
    """Raises ValueError: a call in 8 bits with padding, which would count in means and scales."""
    if precision != "native":
        raise ValueError(
            f"precision={precision!r} with seqused or padded cu_seqlens: means and scales are of "
            "all keys, padding included: use precision='native', or pass the tokens in use alone"
        )


def check_ring_precision(
    precision: str, q: torch.Tensor, v: torch.Tensor, world: int, transport: str
) -> None:
    """Raises ValueError unless `world` ranks take tensors like these in `precision`."""
    check_precision(precision)
    if precision != "native" and world > 1 and transport == "symmetric":
        raise ValueError(
            f"precision={precision!r} does not support transport='symmetric': use 'auto' or 'nccl'"
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
        whole_number(name, value)
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}, both > 0"
        )
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim} must be > 0")


def _whole(value: SupportsIndex) -> int:
    """Raises TypeError: it is no whole number. A bool has an index, and is none."""
    if is_bool(value):
        raise TypeError
    return operator.index(value)


def _in_order(name: str, values: object) -> tuple[Any, ...]:
    """The members of a sequence. Sets and mappings have no order, and bytes would be numbers.

    What has items and is not iterable, as FlexAttention's BlockMask, may have no last one.
    """
    try:
        unordered = isinstance(values, (str, bytes, bytearray, Set, Mapping))
        if unordered or not isinstance(values, Iterable):
            raise TypeError
        return tuple(cast(Iterable[object], values))
    except TypeError:
        raise _no_sequence(name, values) from None


def _no_sequence(name: str, values: object) -> TypeError:
    return TypeError(f"{name}={shown(values)}: give a sequence of whole numbers")


def whole_numbers(name: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """The values as ints, which fit int64."""
    given = _in_order(name, values)
    try:
        plain = set(map(type, given)) <= {int}
        found = cast(tuple[int, ...], given) if plain else tuple(map(_whole, given))
    except TypeError:
        raise _no_sequence(name, given) from None
    if found and not -INT64_END <= min(found) <= max(found) < INT64_END:
        raise ValueError(f"{name} has the number {max(found, key=abs)}: it must fit in int64")
    return found


def whole_number(name: str, value: SupportsIndex) -> int:
    """The value as an int, which fits int64."""
    try:
        return whole_numbers(name, (value,))[0]
    except TypeError:
        raise TypeError(f"{name}={shown(value)}: give a whole number") from None


def cumulative_bytes(name: str, cu_seqlens: Iterable[int] | torch.Tensor | int) -> bytes:
    """Cumulative lengths as int64, one after the other: they hash and compare faster than a tuple.

    cu_seqlens: an int is the length of one sequence.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        check_cu_seqlens(name, cu_seqlens)
        cu_seqlens = cu_seqlens.tolist()
    elif isinstance(cu_seqlens, (int, np.integer)):
        cu_seqlens = 0, cu_seqlens
    given = _in_order(name, cu_seqlens)
    try:
        packed = struct.pack(f"{len(given)}q", *given)
    except (struct.error, TypeError):
        return struct.pack(f"{len(given)}q", *whole_numbers(name, given))  # names what is wrong
    if any(map(is_bool, given[: bisect_right(given, 1)])):  # they ascend, or are refused later
        raise _no_sequence(name, given)
    return packed


def check_window(window_size: Sequence[int | None]) -> tuple[int, int]:
    """`window_size` as a pair of ints >= -1; None, FlashAttention 4's word for unlimited, is -1."""
    given = _in_order("window_size", window_size)
    window = whole_numbers("window_size", tuple(-1 if x is None else x for x in given))
    if len(window) != 2 or min(window) < -1:
        raise ValueError(
            f"window_size={window!r}: give (left, right), numbers of keys, -1 for unlimited"
        )
    return window[0], window[1]


def check_max_seqlen(name: str, value: object) -> None:
    """Whether `value` may be a length: what has no use here may still be another argument."""
    if value is None or (type(value) is int and value >= 0):
        return
    if isinstance(value, torch.Tensor):  # not read: that would wait for the GPU
        dtype = value.dtype
        whole = value.numel() == 1 and not (dtype.is_floating_point or dtype.is_complex)
        if whole and dtype != torch.bool:
            return
    else:
        try:
            if _whole(cast(SupportsIndex, value)) >= 0:
                return
        except TypeError:
            pass
    raise TypeError(f"{name}={shown(value)}: give the longest length, a whole number, or None")


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
        raise ValueError(f"{name} must start with 0, got {cu[:3]}: give cumulative lengths")
    lengths = tuple(b - a for a, b in itertools.pairwise(cu))
    if lengths and min(lengths) < 0:
        i = next(i for i, n in enumerate(lengths) if n < 0)
        raise ValueError(f"{name} must not decrease, but {name}[{i}:{i + 2}] = {cu[i : i + 2]}")
    return lengths


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_plain(name, x)


def check_plain(name: str, x: object) -> None:
    """Raises TypeError: `x` is no tensor, or a DTensor, whose ranks hold parts of one tensor."""
    if type(x) is torch.Tensor:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    if module is not None and isinstance(x, module.DTensor):
        raise TypeError(f"{name} is a DTensor: pass {name}.to_local(), the tokens of this rank")


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
    check_plain("sink", sink)
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if sink.dtype != wanted:
        raise TypeError(f"sink is {sink.dtype}: with q of {q.dtype} give {wanted}")
    if sink.shape != q.shape[-2:-1] or sink.device != q.device:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)} on {sink.device}: give ({q.shape[-2]},), a logit "
            f"for each head of q, on {q.device}"
        )


def check_local_tokens(
    q: torch.Tensor, k: torch.Tensor, local_tokens: int, local_keys: int, total_tokens: int
) -> None:
    """Whether packed q and k hold a rank's tokens of a plan."""
    if q.shape[0] != local_tokens or (local_keys == local_tokens != k.shape[0]):
        name, x = ("q", q) if q.shape[0] != local_tokens else ("k", k)
        raise ValueError(
            f"{name} has {x.shape[0]} tokens; the plan gives this rank {local_tokens} of "
            f"{total_tokens}: pass the tokens of plan.shard"
        )
    if k.shape[0] != local_keys:
        raise ValueError(
            f"k has {k.shape[0]} tokens; the plan gives this rank {local_keys} keys: pass the "
            "tokens of plan.shard_keys"
        )


def check_layer_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Whether q, k and v are ([b,] t, h, d) with a layer's heads, and of equal batch and tokens.

    The attention that follows checks the head dim of v.
    """
    for name, x, expected in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        check_plain(name, x)
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
    if isinstance(softmax_scale, torch.Tensor):
        raise TypeError(
            f"softmax_scale={shown(softmax_scale)}: give a float, which has no gradient; to learn "
            "a scale, multiply q by it"
        )
    if not is_number(softmax_scale):
        raise TypeError(f"softmax_scale={shown(softmax_scale)}: give a number or None")
    if not LEAST_SCALE <= softmax_scale <= 1 / LEAST_SCALE:  # before float(), which may overflow
        raise ValueError(
            f"softmax_scale={shown(softmax_scale)}: it must be positive and finite, "
            f"from {LEAST_SCALE:.1e} to {1 / LEAST_SCALE:.1e}"
        )
    return float(softmax_scale)
