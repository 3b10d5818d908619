"""The backward kernels: preprocess, the hops, postprocess, with their workspace and tables.

The structures mirror csrc/params.h field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.kernels.forward import check_clips
from ringfa3.kernels.launch import (
    Tensor3,
    heads_per_section,
    launch,
    num_ctas,
    packer,
    tensor3,
    tma_addressable,
)
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.uploads import Packed, Uploads
from ringfa3.planning.tile_schedule import TileSchedule, Tiling, concat_ranges
from ringfa3.planning.tiling import Plan
from ringfa3.planning.work_split import SHARED, split_work

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit

WORD = 4  # bytes
# of LSE or D of a row, by head dim: `BackwardShapes::Statistic`
STATISTIC_WORDS = {64: 4, 128: 4, 192: 1, 256: 1}


class PaddedRows(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
    )


class PreprocessArgs(ctypes.Structure):
    _fields_ = (
        ("out", Tensor3),
        ("dout", Tensor3),
        ("lse", ctypes.c_void_p),
        ("dlse", ctypes.c_void_p),
        ("lse_head_stride", ctypes.c_int64),
        ("dlse_head_stride", ctypes.c_int64),
        ("sink", ctypes.c_void_p),
        ("dsink", ctypes.c_void_p),
        ("padded", PaddedRows),
        ("words", ctypes.c_void_p),
        ("num_words", ctypes.c_int64),
        ("softmax_scale", ctypes.c_float),
    )


class BackwardArgs(ctypes.Structure):
    _fields_ = (
        ("q", Tensor3),
        ("dout", Tensor3),
        ("k", Tensor3),
        ("v", Tensor3),
        ("dk", Tensor3),
        ("dv", Tensor3),
        ("padded", PaddedRows),
        ("work_units", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("earlier", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("dq_semaphore", ctypes.c_void_p),
        ("num_work_units", ctypes.c_int32),
        ("head_section", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("float32_grads", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


class PostprocessArgs(ctypes.Structure):
    _fields_ = (("dq", Tensor3), ("padded", PaddedRows), ("softmax_scale", ctypes.c_float))


_pack_preprocess = packer(PreprocessArgs)
_pack_backward = packer(BackwardArgs)
_pack_postprocess = packer(PostprocessArgs)


class BackwardPass:
    """`reference.BackwardPass` on the GPU: preprocesses at once, then takes hops in any order.

    Head dims are multiples of 8 up to those of `unit`. V may have more columns than dout and out,
    which must be zeros; dV beyond `unit.v_dim` is not written. LSE, D and float32 dQ live in the
    plan's padded rows, in workspace of O(tokens); dQ has the head dim of `unit` there. Kernels add
    to dQ in place, in one order if `deterministic`. All run on one stream: that which is current
    when the pass is made must be current at each hop, too.
    """

    def __init__(
        self,
        unit: Unit,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        plan: Plan,
        scale: float,
        deterministic: bool,
        kv_heads: int,
        first_heads: int = 0,
        sink: torch.Tensor | None = None,
    ) -> None:
        check_clips(plan.clips, unit.clips)
        self.unit, self.scale, self.deterministic = unit, scale, deterministic
        (self.q, q_fields), (self.dout, dout_fields) = tma_addressable(q), tma_addressable(dout)
        out, out_fields = tma_addressable(out)
        self._row_fields = q_fields, dout_fields
        lse = _contiguous_rows(lse)
        dlse = None if dlse is None else _contiguous_rows(dlse)
        sink = None if sink is None else sink.contiguous()
        (tokens, heads, head_dim), width, device = q.shape, unit.head_dim, q.device
        self.num_ctas = num_ctas(device)
        self.stream = stream = CurrentStream.of(device)  # of all hops
        self._schedule = schedule = _schedule(plan, unit, deterministic)
        split = Split(heads // kv_heads, kv_heads, first_heads)
        self._tables = _tables.get(
            schedule,
            stream,
            (unit, split, self.num_ctas),
            lambda: HostTables.of(plan, unit, deterministic, split, self.num_ctas),
        )
        count = self._tables.num_blocks
        rows = heads * count * unit.tile_m
        # The words of each call of `hop`, of which the rank's own keys may take two: its work
        # counter, then its semaphores of dQ. The preprocess kernel sets them to 0.
        self._words_per_call = 1 + (rows * width // dq_tile(unit) if deterministic else 0)
        self._calls, self._hop = plan.num_hops + 1, 0
        num_words = self._calls * self._words_per_call
        # statistics (heads, num_blocks, 2, M), dQ (heads, num_blocks, M * D), words
        statistics = 2 * STATISTIC_WORDS[width]  # words of a row
        size = rows * (statistics + width) + num_words
        self._workspace = q.new_empty(size, dtype=torch.float32)
        begin = self._workspace.data_ptr()
        dq_grid = begin + rows * statistics * WORD
        self._words = dq_grid + rows * width * WORD
        # of Q, dO and dQ, which all work units of a KV head use
        columns = head_dim + dout.shape[2]
        self._bytes_per_head = 2 * columns * tokens + 4 * width * count * unit.tile_m
        self.padded = self._tables.blocks, begin, dq_grid, count  # as in PaddedRows
        # of each block of padded rows
        self._dsink = None
        if sink is not None:
            self._dsink = q.new_empty((heads, count), dtype=torch.float32)
        if count:
            args = _pack_preprocess(
                *out_fields,
                *dout_fields,
                lse.data_ptr(),
                0 if dlse is None else dlse.data_ptr(),
                lse.stride(0),
                0 if dlse is None else dlse.stride(0),
                0 if sink is None else sink.data_ptr(),
                0 if self._dsink is None else self._dsink.data_ptr(),
                *self.padded,
                self._words,
                num_words,
                scale,
            )
            launch(unit, "preprocess", args, stream)

    def hop(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        tiling: Tiling,
        dk: torch.Tensor,
        dv: torch.Tensor,
        first_head: int = 0,
        num_heads: int | None = None,
    ) -> None:
        """One hop, or a part of its heads; arguments as `reference.BackwardPass.hop`.

        Raises ValueError: the tiling is not of the pass's plan, or its order of tiles not of the
        pass; there are more calls than hops of the plan, plus one.
        """
        if tiling.schedule is not self._schedule:
            raise ValueError(
                "the pass needs a tiling of its plan: plan.backward(tile_n, tile_m, deterministic="
                f"{self.deterministic}), with the tile_n and tile_m of {self.unit.name}"
            )
        hop = self._hop
        if hop == self._calls:
            raise ValueError(
                f"{hop + 1} calls of `hop`: the plan has {hop - 1} hops, and one may have two parts"
            )
        self._hop += 1
        if not len(tiling.tiles):
            return
        d, d_v = self.unit.head_dim, self.unit.v_dim
        if max(k.shape[2] - d, v.shape[2] - d_v) > 0:  # the factors of K, a ring's zeros of V
            k, v, dk, dv = k[..., :d], v[..., :d_v], dk[..., :d], dv[..., :d_v]
        (k, k_fields), (v, v_fields) = tma_addressable(k), tma_addressable(v)
        kv_heads, heads = k.shape[1], self.q.shape[1] if num_heads is None else num_heads
        tables = self._tables.hops[tiling.hop, kv_heads]
        sums: tuple[torch.Tensor, ...] = (dk, dv)
        if tables.shared:  # several units add into zeroed float32
            if dk.dtype != torch.float32:
                sums = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in sums)
            _clear(*sums)
        elif tables.without_work:
            _clear(dk, dv)
        if not tables.num_work_units:
            return
        words = self._words + hop * self._words_per_call * WORD
        args = _pack_backward(
            *self._of_heads(first_head, heads),
            *k_fields,
            *v_fields,
            *tensor3(sums[0]),
            *tensor3(sums[1]),
            *self._grid_from(first_head),
            *tables.addresses,
            words,
            words + WORD if self.deterministic else 0,
            tables.num_work_units,
            heads_per_section(self._bytes_per_head * heads // kv_heads, kv_heads),
            self.num_ctas,
            sums[0].dtype == torch.float32,
            self.scale,
        )
        launch(self.unit, "backward", args, self.stream)
        if sums[0] is not dk:
            dk.copy_(sums[0]), dv.copy_(sums[1])

    def _of_heads(self, first: int, count: int) -> Iterator[int]:
        """The fields of Q and dO for heads [first, first + count)."""
        for begin, tokens, _, head_dim, token_stride, head_stride in self._row_fields:
            yield from (begin + first * head_stride * self.q.element_size(), tokens, count)
            yield from (head_dim, token_stride, head_stride)

    def _grid_from(self, head: int) -> tuple[int, ...]:
        """The fields of the PaddedRows for heads from `head` on."""
        blocks, statistics, dq, count = self.padded
        rows, width = head * count * self.unit.tile_m * WORD, self.unit.head_dim
        statistics += rows * 2 * STATISTIC_WORDS[width]
        return blocks, statistics, dq + rows * width, count

    def dq(self) -> torch.Tensor:
        """As `reference.BackwardPass.dq`."""
        dq = self.q.new_empty(self.q.shape)
        if self._tables.num_blocks:
            args = _pack_postprocess(*tensor3(dq), *self.padded, self.scale)
            launch(self.unit, "postprocess", args, self.stream)
        return dq

    def dsink(self) -> torch.Tensor:
        """As `reference.BackwardPass.dsink`, float32."""
        if self._dsink is None:
            return self.q.new_empty(0, dtype=torch.float32)
        return self._dsink.sum(1)


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x (h, t), or a copy in which the rows of a head are contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _clear(dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Fills dk and dv, (rows, hk, d) each, with zeros.

    In a ring they are the halves of one (rows, 2, hk, d) tensor, filled by one launch.
    """
    rows, heads, d = dk.shape
    row = heads * d
    interleaved = dk.stride() == dv.stride() == (2 * row, d, 1)
    if interleaved and rows > 1 and dv.data_ptr() - dk.data_ptr() == row * dk.element_size():
        dk.as_strided((rows, 2 * row), (2 * row, 1)).zero_()
    else:
        dk.zero_(), dv.zero_()


class Split(NamedTuple):
    """Heads of a backward.

    group        query heads of a KV head
    kv_heads     of K and V
    first_heads  KV heads of hop 0 that run in a call of their own, as the others do; 0: one call
    """

    group: int
    kv_heads: int
    first_heads: int

    def calls(self, num_hops: int) -> Iterator[tuple[int, int]]:
        """(hop, KV heads) of calls of `BackwardPass.hop`, those with equal ones once."""
        if self.first_heads:
            yield from ((0, n) for n in {self.first_heads, self.kv_heads - self.first_heads})
        yield from ((hop, self.kv_heads) for hop in range(bool(self.first_heads), num_hops))


class HopTables(NamedTuple):
    """A hop's tables for a number of KV heads.

    addresses     work_units, spans and earlier of BackwardArgs
    shared        whether tiles are split
    without_work  whether some tiles have no work unit
    """

    addresses: tuple[int, ...]
    num_work_units: int
    shared: bool
    without_work: bool


class Tables(NamedTuple):
    """The tables of a backward in device memory.

    blocks  the address of `grid_blocks`, of which there are `num_blocks`
    hops    by hop and number of KV heads
    """

    memory: torch.Tensor | None
    blocks: int
    num_blocks: int
    hops: dict[tuple[int, int], HopTables]


class HostTables(NamedTuple):
    """`uploads.HostTables` of a backward; its hops have places in `packed` for addresses."""

    packed: Packed
    num_blocks: int
    hops: dict[tuple[int, int], HopTables]

    @classmethod
    def of(
        cls, plan: Plan, unit: Unit, deterministic: bool, split: Split, num_ctas: int
    ) -> HostTables:
        """Splits the work of all hops."""
        tilings = plan.backward(unit.tile_n, unit.tile_m, deterministic)
        clusters, blocks = max(1, num_ctas // unit.cluster), grid_blocks(plan, unit.tile_m)
        settings = clusters, unit.head_dim, deterministic
        units = {
            (hop, heads): split_work(tilings[hop], unit.tile_m, split.group, heads, *settings)
            for hop, heads in split.calls(len(tilings))
        }
        both = (y for x in tilings for y in (x.spans, x.earlier))
        packed = Packed(blocks, *units.values(), *both)
        of_hops = 1 + len(units)
        hops = {
            (hop, heads): HopTables(
                (number, of_hops + 2 * hop, of_hops + 2 * hop + 1),
                len(table),
                bool((table["flags"] & SHARED).any()),
                len(np.unique(table["row0"])) < len(tilings[hop].tiles),
            )
            for number, ((hop, heads), table) in enumerate(units.items(), 1)
        }
        return cls(packed, len(blocks), hops)

    def at(self, memory: torch.Tensor | None, begin: int) -> Tables:
        found = self.packed.addresses(begin)
        hops = {
            key: x._replace(addresses=tuple(found[at] for at in x.addresses))
            for key, x in self.hops.items()
        }
        return Tables(memory, found[0], self.num_blocks, hops)


_tables: Uploads[Tables] = Uploads("backward")


def _schedule(plan: Plan, unit: Unit, deterministic: bool) -> TileSchedule:
    schedule = plan.backward(unit.tile_n, unit.tile_m, deterministic)[0].schedule
    assert schedule is not None
    return schedule


def dq_tile(unit: Unit) -> int:
    """Floats of a dQ tile, which a warpgroup adds to dQ at once: `BackwardShapes::kDqTile`."""
    return 64 * (unit.head_dim // 4 if unit.cluster > 1 else 64)


def grid_blocks(plan: Plan, tile_m: int) -> npt.NDArray[np.int32]:
    """(num_blocks, 2): first token and number of tokens of each block of `Plan.padded_rows`."""
    length = plan.queries.length
    count = -(-length // tile_m)
    segment = np.repeat(np.arange(len(count)), count)
    start = concat_ranges(np.zeros(len(count), np.int64), count) * tile_m
    rows = np.minimum(tile_m, length[segment] - start)
    return np.stack([plan.queries.row[segment] + start, rows], axis=1).astype(np.int32)
