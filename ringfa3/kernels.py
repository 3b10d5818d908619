"""The compiled kernels, called: device tables of a plan, and the arguments that cross into C.

The structures mirror csrc/params.h field by field.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from ringfa3.plan import Table, Tiling

if TYPE_CHECKING:  # imported where it is used, so that `python -m ringfa3.build` can be run
    from ringfa3.build import Unit

L2_BYTES = 32 << 20  # of K/V that heads which run together may share
WORDS = 32  # arrival words of a launch, number 0 among them


class _Tensor3(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class _ForwardArgs(ctypes.Structure):
    _fields_ = (
        ("q", _Tensor3),
        ("k", _Tensor3),
        ("v", _Tensor3),
        ("out", _Tensor3),
        ("running", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("lse_head_stride", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("head_section", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


def forward_unit(q: torch.Tensor) -> Unit | None:
    """The forward unit for queries like `q` (t, h, d), None where there is no kernel for them."""
    from ringfa3.build import UNITS

    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return None
    dtype = str(q.dtype).removeprefix("torch.")
    wanted = ("forward", dtype, q.shape[-1])
    return next((u for u in UNITS if (u.direction, u.dtype, u.head_dim) == wanted), None)


@lru_cache(None)
def _entry(unit: Unit) -> Callable[..., int]:
    from ringfa3.build import library

    entry = ctypes.CDLL(str(library(unit))).ringfa3_forward
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return cast(Callable[..., int], entry)


def attend(
    unit: Unit,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiling: Tiling,
    scale: float,
    out: torch.Tensor,
    running: torch.Tensor,
    lse: torch.Tensor,
    arrivals: torch.Tensor | None = None,
    sm_margin: int = 0,
) -> None:
    """`reference.attend` on the GPU: one hop, tiles of `unit.tile_m` rows; shapes as there.

    Heads and tokens may have any stride of whole 16 bytes; q, k and v of others are copied. Calls
    may run on any number of streams at once, and in CUDA graphs that replay beside them.

    Args:
        arrivals: (words,) int32, at most 32, on the device. Keys of a span with arrival n > 0 are
            first read once arrivals[n] is not 0, so a copy that writes them and then the word may
            run beside the kernel; but no kernel may, which could find no SM free. A negative word
            calls the span off: the kernel ends without reading its keys, and where a row of a tile
            would have seen them, out (or running) and lse of the whole tile are NaN. K and V that
            wait must not need a copy.
        sm_margin: SMs left free, for kernels that run beside this one.

    Raises ValueError: spans wait, and `arrivals` is missing or does not fit; `sm_margin` leaves no
    SM; `out` has another stride.
    """
    num_ctas = ctas(q.device, sm_margin)
    if not len(tiling.tiles):
        return
    if not len(tiling.spans):  # nothing is seen, here or at another hop
        out.zero_()
        lse.fill_(-torch.inf)
        return
    tables = _on_device(tiling, q.device)
    if tables.last_word:
        _check_arrivals(arrivals, tables.last_word, k, v)
    if not _aligned(out):
        raise ValueError(f"out has strides {out.stride()}: all but the last must be whole 16 bytes")
    q, k, v = (x if _aligned(x) else x.contiguous() for x in (q, k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    with torch.cuda.device(q.device):  # the launch goes to the current one
        stream = torch.cuda.current_stream().cuda_stream
        args = _ForwardArgs(
            *(_tensor3(x) for x in (q, k, v, out)),
            running.data_ptr(),
            lse.data_ptr(),
            lse.stride(0),
            tables.tiles.data_ptr(),
            tables.spans.data_ptr(),
            arrivals.data_ptr() if arrivals is not None else None,
            _counter(q.device, stream).data_ptr(),
            len(tiling.tiles),
            _section(k, kv_heads) * (heads // kv_heads),
            num_ctas,
            scale,
        )
        status = _entry(unit)(ctypes.byref(args), stream)
    if status:
        raise RuntimeError(f"{unit.name} could not be launched: CUDA error {status}")


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counter(device: torch.device, stream: int) -> torch.Tensor:
    """(1,) int32, zero whenever a launch on the stream begins.

    A kernel leaves it zero, so the launches of a stream, which run one after the other, share one.
    A captured launch has its own, zeroed within the graph: graphs may replay on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    known = _counters.get((device, stream))
    if known is None:
        known = torch.zeros(1, dtype=torch.int32, device=device)
        known = _counters.setdefault((device, stream), known)
    return known


def _check_arrivals(
    arrivals: torch.Tensor | None, last: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Raises ValueError unless words up to number `last` can be waited for."""
    if arrivals is None:
        raise ValueError(f"spans wait for words up to {last}: arrivals is missing")
    given = f"arrivals is {arrivals.dtype} {tuple(arrivals.shape)} on {arrivals.device}"
    whole = arrivals.dtype == torch.int32 and arrivals.dim() == 1 and arrivals.is_contiguous()
    if not whole or arrivals.device != k.device:
        raise ValueError(f"{given}: it must be contiguous int32 (words,) on {k.device}")
    if not last < len(arrivals) <= WORDS:
        raise ValueError(f"{given}: {last + 1} to {WORDS} words are allowed")
    if not (_aligned(k) and _aligned(v)):
        raise ValueError("k and v that wait for arrival words need strides of whole 16 bytes")


def _aligned(x: torch.Tensor) -> bool:
    """Whether the bulk copies of the GPU can address it, (tokens, heads, d)."""
    tokens, heads, _ = x.stride()
    return (tokens | heads) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _section(k: torch.Tensor, kv_heads: int) -> int:
    """KV heads whose tiles run together: sections of equal size whose K/V fit the L2 cache."""
    per_head = 2 * k.shape[0] * k.shape[2] * k.element_size()
    sections = max(1, min(kv_heads, round(per_head * kv_heads / L2_BYTES)))
    return -(-kv_heads // sections)


def ctas(device: torch.device, sm_margin: int) -> int:
    """CTAs of a launch, one per SM. Raises ValueError: a margin that leaves none."""
    processors = _processors(device.index)
    if not 0 <= sm_margin < processors:
        raise ValueError(f"sm_margin={sm_margin}: 0 to {processors - 1} are allowed on {device}")
    return processors - sm_margin


@lru_cache(None)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tensor3(x: torch.Tensor) -> _Tensor3:
    return _Tensor3(x.data_ptr(), *x.shape[:2], *x.stride()[:2])


class _Tables(NamedTuple):
    """A tiling in device memory, and the highest arrival word of its spans."""

    tiles: torch.Tensor
    spans: torch.Tensor
    last_word: int


_tables: weakref.WeakKeyDictionary[Tiling, dict[torch.device, _Tables]]
_tables = weakref.WeakKeyDictionary()


def _on_device(tiling: Tiling, device: torch.device) -> _Tables:
    """The tables of a tiling that has spans, uploaded once."""
    known = _tables.setdefault(tiling, {})
    if device not in known:
        tiles, spans = (_upload(table, device) for table in (tiling.tiles, tiling.spans))
        known[device] = _Tables(tiles, spans, int(tiling.spans["arrival"].max()))
    return known[device]


def _upload(table: Table, device: torch.device) -> torch.Tensor:
    words = np.frombuffer(table.tobytes(), np.int32).copy()
    return torch.from_numpy(words).to(device, non_blocking=True)
