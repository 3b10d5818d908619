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
from ringfa3.kernels.uploads import Uploads, upload
from ringfa3.planning.tiling import Plan, Tiling, concat_ranges
from ringfa3.planning.work_split import SHARED, split_work

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit

DQ_TILE = 64 * 64  # floats of a dQ tile, which a warpgroup adds to dQ at once
WORD = 4  # bytes
# of LSE or D of a row, by head dim: `BackwardShapes::Statistic`
STATISTIC_WORDS = {64: 4, 128: 4, 256: 1}


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

    Head dims are multiples of 8 up to that of `unit`. V may have more columns than dout and out, if
    these are zeros. LSE, D and the float32 dQ live in the plan's padded rows, in workspace of
    O(tokens); dQ has the head dim of `unit` there. Kernels add to
    dQ in place, in one order if `deterministic`. All run on one stream: the stream that is current
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
        sink: torch.Tensor | None = None,
    ) -> None:
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
        self.blocks = _grid_blocks(plan, unit.tile_m, stream)  # (num_blocks, 2)
        count = self.blocks.shape[0]
        rows = heads * count * unit.tile_m
        # The words of each call of `hop`, of which the rank's own keys may take two: its work
        # counter, then its semaphores of dQ. The preprocess kernel sets them to 0.
        self._words_per_call = 1 + (rows * width // DQ_TILE if deterministic else 0)
        self._calls, self._hop = plan.num_hops + 1, 0
        num_words = self._calls * self._words_per_call
        # statistics (heads, num_blocks, 2, M), dQ (heads, num_blocks, M * D), words
        statistics = 2 * STATISTIC_WORDS[width]  # words of a row
        size = rows * (statistics + width) + num_words
        self._workspace = torch.empty(size, dtype=torch.float32, device=device)
        begin = self._workspace.data_ptr()
        dq_grid = begin + rows * statistics * WORD
        self._words = dq_grid + rows * width * WORD
        # of Q, dO and dQ, which all work units of a KV head use
        columns = head_dim + dout.shape[2]
        self._bytes_per_head = 2 * columns * tokens + 4 * width * count * unit.tile_m
        self.padded = self.blocks.data_ptr(), begin, dq_grid, count  # as in PaddedRows
        # of each block of padded rows
        self._dsink = None
        if sink is not None:
            self._dsink = torch.empty((heads, count), dtype=torch.float32, device=device)
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

        Raises ValueError: the pass is deterministic and the tiling is not; there are more calls
        than hops of the plan, plus one.
        """
        if self.deterministic and len(tiling.earlier) != len(tiling.spans):
            raise ValueError(
                "a deterministic pass needs a tiling of plan.backward(deterministic=True)"
            )
        hop = self._hop
        if hop == self._calls:
            raise ValueError(
                f"{hop + 1} calls of `hop`: the plan has {hop - 1} hops, and one may have two parts"
            )
        self._hop += 1
        if not len(tiling.tiles):
            return
        if self.unit.precision == "dequantised":  # the factors follow these columns of K
            k, v, dk, dv = (x[..., : self.unit.head_dim] for x in (k, v, dk, dv))
        (k, k_fields), (v, v_fields) = tma_addressable(k), tma_addressable(v)
        kv_heads, heads = k.shape[1], self.q.shape[1] if num_heads is None else num_heads
        tables = _on_device(
            tiling, self.stream, self.unit.tile_m, heads // kv_heads, kv_heads,
            max(1, self.num_ctas // self.unit.cluster), self.unit.head_dim, self.deterministic,
        )  # fmt: skip
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
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        if self.blocks.shape[0]:
            args = _pack_postprocess(*tensor3(dq), *self.padded, self.scale)
            launch(self.unit, "postprocess", args, self.stream)
        return dq

    def dsink(self) -> torch.Tensor:
        """As `reference.BackwardPass.dsink`, float32."""
        if self._dsink is None:
            return torch.empty(0, dtype=torch.float32, device=self.q.device)
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


class _Tables(NamedTuple):
    tensors: tuple[torch.Tensor, ...]  # that own the memory at `addresses`
    addresses: tuple[int, ...]  # work_units, spans and earlier of BackwardArgs
    num_work_units: int
    shared: bool  # whether tiles are split
    without_work: bool  # whether some tiles have no work unit


_tables: Uploads[_Tables] = Uploads()


def _on_device(
    tiling: Tiling,
    stream: CurrentStream,
    tile_m: int,
    group: int,
    kv_heads: int,
    num_clusters: int,
    head_dim: int,
    whole: bool,
) -> _Tables:
    """A tiling's work units and spans in device memory."""

    def make() -> _Tables:
        table = split_work(tiling, tile_m, group, kv_heads, num_clusters, head_dim, whole)
        tensors = tuple(upload(x, stream.device) for x in (table, tiling.spans, tiling.earlier))
        return _Tables(
            tensors,
            tuple(x.data_ptr() for x in tensors),
            len(table),
            bool((table["flags"] & SHARED).any()),
            len(np.unique(table["row0"])) < len(tiling.tiles),
        )

    return _tables.get(tiling, stream, (group, kv_heads, num_clusters, head_dim, whole), make)


_grids: Uploads[torch.Tensor] = Uploads()


def _grid_blocks(plan: Plan, tile_m: int, stream: CurrentStream) -> torch.Tensor:
    """`grid_blocks` in device memory."""

    def make() -> torch.Tensor:
        return upload(grid_blocks(plan, tile_m), stream.device).view(-1, 2)

    return _grids.get(plan, stream, (tile_m,), make)


def grid_blocks(plan: Plan, tile_m: int) -> npt.NDArray[np.int32]:
    """(num_blocks, 2): first token and number of tokens of each block of `Plan.padded_rows`."""
    length = plan.queries.length
    count = -(-length // tile_m)
    segment = np.repeat(np.arange(len(count)), count)
    start = concat_ranges(np.zeros(len(count), np.int64), count) * tile_m
    rows = np.minimum(tile_m, length[segment] - start)
    return np.stack([plan.queries.row[segment] + start, rows], axis=1).astype(np.int32)
