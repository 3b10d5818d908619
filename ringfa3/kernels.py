"""The compiled kernels, called: device tables of a plan, and the arguments that cross into C.

The structures mirror csrc/params.h field by field.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.plan import Table, Tiling

if TYPE_CHECKING:  # imported where it is used, so that `python -m ringfa3.build` can be run
    from ringfa3.build import Unit

L2_BYTES = 32 << 20  # that heads which run together may share


class Tensor3(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: torch.Tensor) -> Tensor3:
        """Of (tokens, heads, head_dim)."""
        return cls(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), x.stride(1))


class ForwardArgs(ctypes.Structure):
    _fields_ = (
        ("q", Tensor3),
        ("k", Tensor3),
        ("v", Tensor3),
        ("out", Tensor3),
        ("running", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("lse_head_stride", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("head_section", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


def unit_for(direction: str, q: torch.Tensor) -> Unit | None:
    """The "forward" or "backward" unit for queries like `q` (t, h, d); None: there is no kernel."""
    from ringfa3.build import UNITS

    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return None
    dtype = str(q.dtype).removeprefix("torch.")
    wanted = (direction, dtype, q.shape[-1])
    return next((u for u in UNITS if (u.direction, u.dtype, u.head_dim) == wanted), None)


@lru_cache(None)
def _entry(unit: Unit, name: str) -> Callable[..., int]:
    from ringfa3.build import library

    entry = getattr(ctypes.CDLL(str(library(unit))), f"ringfa3_{name}")
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return cast(Callable[..., int], entry)


def launch(unit: Unit, name: str, args: ctypes.Structure, device: torch.device) -> None:
    """Calls ringfa3_NAME of a unit's library on the current stream of the device."""
    with torch.cuda.device(device):  # the launch goes to the current one
        stream = torch.cuda.current_stream().cuda_stream
        status = _entry(unit, name)(ctypes.byref(args), stream)
    if status:
        raise RuntimeError(f"{name} of {unit.name} could not be launched: CUDA error {status}")


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
) -> None:
    """`reference.attend` on the GPU: one hop, tiles of `unit.tile_m` rows; shapes as there.

    Heads and tokens may have any stride of whole 16 bytes; others are copied.
    """
    if not len(tiling.tiles):
        return
    if not len(tiling.spans):  # nothing is seen, here or at another hop
        out.zero_()
        lse.fill_(-torch.inf)
        return
    q, k, v = (x if aligned(x) else x.contiguous() for x in (q, k, v))
    tiles, spans = _on_device(tiling, q.device)
    heads, kv_heads = q.shape[1], k.shape[1]
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    args = ForwardArgs(
        *(Tensor3.of(x) for x in (q, k, v, out)),
        running.data_ptr(),
        lse.data_ptr(),
        lse.stride(0),
        tiles.data_ptr(),
        spans.data_ptr(),
        counter.data_ptr(),
        len(tiling.tiles),
        heads_together(2 * k[:, 0].nbytes, kv_heads) * (heads // kv_heads),
        processors(q.device.index),
        scale,
    )
    launch(unit, "forward", args, q.device)


def aligned(x: torch.Tensor) -> bool:
    """Whether the bulk copies of the GPU can address (tokens, heads, head_dim)."""
    strides = (n * x.element_size() for n in x.stride()[:2])
    return (
        x.stride(2) == 1 and x.data_ptr() % 16 == 0 and all(n > 0 and n % 16 == 0 for n in strides)
    )


def heads_together(bytes_per_head: int, kv_heads: int) -> int:
    """KV heads that run together: sections of equal size whose tensors fit the L2 cache."""
    sections = max(1, min(kv_heads, round(bytes_per_head * kv_heads / L2_BYTES)))
    return -(-kv_heads // sections)


@lru_cache(None)
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_tables: weakref.WeakKeyDictionary[Tiling, dict[torch.device, tuple[torch.Tensor, torch.Tensor]]]
_tables = weakref.WeakKeyDictionary()


def _on_device(tiling: Tiling, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A tiling's tiles and spans in device memory, uploaded once."""
    known = _tables.setdefault(tiling, {})
    if device not in known:
        known[device] = (upload(tiling.tiles, device), upload(tiling.spans, device))
    return known[device]


def upload(table: Table | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """The records of a table, as int32 words in device memory."""
    words = np.frombuffer(table.tobytes(), np.int32).copy()
    return torch.from_numpy(words).to(device, non_blocking=True)
