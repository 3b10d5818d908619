"""The forward kernel: one hop of attention on the GPU, as `reference.attend` defines it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ringfa3.kernels.launch import (
    Tensor3,
    heads_per_section,
    launch,
    num_ctas,
    packer,
    tma_addressable,
    tma_fields,
)
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import COUNTER, current_builder
from ringfa3.kernels.uploads import Counters, Packed, Uploads
from ringfa3.planning.tile_schedule import TileSchedule, Tiling, concat_ranges
from ringfa3.planning.tiling import Plan

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit

MAX_ARRIVAL_FLAGS = 32  # of a launch, flag 0 included: the kernel keeps a bit for each


class ForwardArgs(ctypes.Structure):
    _fields_ = (
        ("q", Tensor3),
        ("k", Tensor3),
        ("v", Tensor3),
        ("out", Tensor3),
        ("partial_out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("lse_head_stride", ctypes.c_int64),
        ("sink", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("head_section", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


_pack = packer(ForwardArgs)


def attend(
    unit: Unit,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiling: Tiling,
    scale: float,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    arrivals: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> None:
    """`reference.attend` on the GPU: one hop, tiles of `unit.tile_m` rows; shapes as there, but
    `partial_out` from `new_partial_out`.

    The head dims of q and k, and of out, are multiples of 8 up to those of `unit`; v may have more
    columns than out. Inputs that TMA cannot address are copied: their strides of tokens and
    heads, and their first byte, must be whole 16 bytes. Calls may run on any number of streams at
    once, and in CUDA graphs that replay concurrently.

    Args:
        arrivals: (flags,) int32, at most 32, on the device. The kernel reads the keys of a span
            with arrival n > 0 once arrivals[n] is not 0. So a copy that writes them and then the
            flag may run concurrently with the kernel; a kernel may not, for it might find no SM
            free. K and V that wait must be addressable as they are.

    Raises:
        ValueError: spans wait, and `arrivals` is missing or does not fit; a tile has spans and no
            key to visit; spans are clipped, and `unit` takes whole ones, or the reverse; TMA cannot
            address `out`.
        RuntimeError: the first call with a tiling is captured in a CUDA graph.
    """
    if store_if_fully_masked(tiling, out, lse, sink):
        return
    if v.shape[-1] > unit.v_dim:  # columns of zeros, as in a ring
        v = v[..., : unit.v_dim]
    tokens, kv_heads, head_dim = k.shape
    stream = CurrentStream.of(q.device)
    uploaded = tables(tiling, stream, unit.clips)
    table = uploaded.hops[tiling.hop]
    if table.last_flag:
        _check_arrivals(arrivals, table.last_flag, k, v)
    q, q_fields = tma_addressable(q)
    k, k_fields = tma_addressable(k)
    v, v_fields = tma_addressable(v)
    sink = None if sink is None else sink.contiguous()
    work = counter(stream)
    args = _pack(
        *q_fields,
        *k_fields,
        *v_fields,
        *output_values(out, partial_out, lse, sink),
        table.tiles,
        table.spans,
        0 if arrivals is None else arrivals.data_ptr(),
        work.data_ptr(),
        len(tiling.tiles),
        head_section(q, kv_heads, tokens * (head_dim + v.shape[-1]) * k.itemsize),
        num_ctas(q.device),
        scale,
    )
    launch(unit, "forward", args, stream)


def store_if_fully_masked(
    tiling: Tiling, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None = None
) -> bool:
    """Whether there is nothing to launch; stores O and LSE if all rows are fully masked."""
    if len(tiling.tiles) and not len(tiling.spans):
        out.zero_()
        if sink is None:
            lse.fill_(-torch.inf)
        else:
            lse.copy_(sink[:, None])
    return not len(tiling.tiles) or not len(tiling.spans)


def output_values(
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """The fields of `ForwardArgs` from `out` to `sink`.

    Raises ValueError: TMA cannot address `out`.
    """
    fields = tma_fields(out)
    if fields is None:
        raise ValueError(
            f"out has strides {out.stride()}: all but the last must be multiples of 16 bytes"
        )
    sinks = 0 if sink is None else sink.data_ptr()
    return *fields, partial_out.data_ptr(), lse.data_ptr(), lse.stride(0), sinks


def head_section(q: torch.Tensor, kv_heads: int, bytes_per_head: int) -> int:
    """Query heads that run together, whose K and V have that many bytes a KV head."""
    return heads_per_section(bytes_per_head, kv_heads) * (q.shape[1] // kv_heads)


def new_partial_out(unit: Unit, q: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The float32 O between hops for queries like q (t, h, d), uninitialised.

    It is (padded rows, h, `unit.v_dim`); `partial_out_index` tells its order.
    """
    rows = int(plan.padded_rows(unit.tile_m)[-1])
    return q.new_empty((rows, q.shape[1], unit.v_dim), dtype=torch.float32)


def read_partial_out(head_dim: int, partial_out: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """O between hops as (t, h, head_dim), of a tiling with all rows."""
    index = partial_out_index(tiling, *partial_out.shape[1:])[..., :head_dim]
    return partial_out.view(-1)[index.to(partial_out.device)]


def partial_out_index(tiling: Tiling, heads: int, head_dim: int) -> torch.Tensor:
    """(t, heads, head_dim) int64: where each element lies in the flat `new_partial_out`.

    The kernel keeps O in the order of its accumulators: (padded rows / 64, heads, head_dim / 8, 128
    threads, 4). Tokens of no tile have index 0.
    """
    tiles = tiling.tiles
    tile = np.repeat(np.arange(len(tiles)), tiles["rows"])
    offset = concat_ranges(np.zeros(len(tiles), np.int64), tiles["rows"])
    padded = np.zeros(int((tiles["row0"] + tiles["rows"]).max(initial=0)), np.int64)
    padded[tiles["row0"][tile] + offset] = tiles["padded_row0"][tile] + offset
    row = torch.from_numpy(padded)[:, None, None]
    head, column = (torch.from_numpy(np.arange(n)) for n in (heads, head_dim))
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    eights = (row // 64 * heads + head[:, None]) * (head_dim // 8) + column // 8
    return (eights * 128 + thread) * 4 + row % 16 // 8 * 2 + column % 2


def _check_arrivals(
    arrivals: torch.Tensor | None, last: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Raises ValueError unless `arrivals` has flag `last` and the kernel can wait for k and v."""
    if arrivals is None:
        raise ValueError(f"spans wait for arrival flags up to {last}: arrivals is missing")
    given = f"arrivals is {arrivals.dtype} {tuple(arrivals.shape)} on {arrivals.device}"
    fits = arrivals.dtype == torch.int32 and arrivals.dim() == 1 and arrivals.is_contiguous()
    if not fits or arrivals.device != k.device:
        raise ValueError(f"{given}: it must be contiguous int32 (flags,) on {k.device}")
    if not last < len(arrivals) <= MAX_ARRIVAL_FLAGS:
        raise ValueError(f"{given}: {last + 1} to {MAX_ARRIVAL_FLAGS} flags are allowed")
    if tma_fields(k) is None or tma_fields(v) is None:
        raise ValueError(
            "k and v that wait for arrival flags need strides in multiples of 16 bytes"
        )


class HopTables(NamedTuple):
    """Addresses of a hop's tables in device memory, and the highest arrival flag of its spans."""

    tiles: int
    spans: int
    last_flag: int


class Tables(NamedTuple):
    """The tables of a tile schedule in device memory."""

    memory: torch.Tensor | None
    hops: tuple[HopTables, ...]


class HostTables(NamedTuple):
    """`uploads.HostTables` of a tile schedule. last_flags: of each hop, as in `HopTables`."""

    packed: Packed
    last_flags: tuple[int, ...]

    @classmethod
    def of(cls, schedule: TileSchedule | Tiling) -> HostTables:
        """The tables of all hops.

        Raises ValueError: a tile has spans, and no key to visit in any of them. Its consumers would
        wait for a block that never comes. Plans make no such tile: they give a fully masked
        tile no spans, at the one hop where it is stored. A tile of another hop must not be
        fetched at all, so the intended result is unknown.
        """
        tilings = schedule.tilings()
        for tiling in tilings:
            _check_visits(tiling)
        flags = tuple(int(x.spans["arrival"].max(initial=0)) for x in tilings)
        both = ((x.tiles, x.span_visits() if x.clips else x.spans) for x in tilings)
        return cls(Packed(*(table for tables in both for table in tables)), flags)

    def at(self, memory: torch.Tensor | None, begin: int) -> Tables:
        found = self.packed.addresses(begin)
        return Tables(memory, tuple(map(HopTables, found[::2], found[1::2], self.last_flags)))


def _check_visits(tiling: Tiling) -> None:
    """Raises ValueError as `HostTables.of`."""
    empty = (tiling.tiles["num_spans"] > 0) & (tiling.visited_columns() == 0)
    if empty.any():
        tile = int(np.flatnonzero(empty)[0])
        row0, rows = (int(tiling.tiles[name][tile]) for name in ("row0", "rows"))
        raise ValueError(
            f"tile {tile}, rows [{row0}, {row0 + rows}), has spans and no key to visit: leave out "
            "the tile, or give it no spans if its rows are fully masked at every hop"
        )


def tables(tiling: Tiling, stream: CurrentStream, clips: bool = False) -> Tables:
    """The tables of a tiling's schedule on a stream; hold them until the launch is enqueued.

    Raises ValueError: see `check_clips`.
    """
    check_clips(tiling.clips, clips)
    schedule = tiling.schedule or tiling
    return _tables.get(schedule, stream, (), lambda: HostTables.of(schedule))


def check_clips(plan: bool, unit: bool) -> None:
    """Raises ValueError unless `Plan.clips` and `Unit.clips` are equal: spans of two layouts."""
    if plan != unit:
        raise ValueError(
            f"the plan has {'clipped' if plan else 'whole'} spans, the kernel takes "
            f"{'clipped' if unit else 'whole'} ones: select the kernel for this plan"
        )


def counter(stream: CurrentStream) -> torch.Tensor:
    """The work counter of a launch on a stream; hold it until the launch is enqueued."""
    builder = current_builder()
    if builder is not None:
        made: torch.Tensor = builder.memory(COUNTER, (1,), torch.int32, stream.device)
        return made
    return counters.get(stream)


_tables: Uploads[Tables] = Uploads("forward")
counters = Counters()
