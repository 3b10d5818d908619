"""The kernels that make the operands of 8-bit attention, as `ringfa3.quantisation` defines them.

Letters in shapes: t query rows, n key rows; h heads, hk KV heads; d head dim. The structures mirror
csrc/params.h field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from ringfa3.kernels.launch import Tensor3, launch, packer, tma_addressable
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.uploads import Packed, Uploaded, Uploads
from ringfa3.planning.sharding import whole_sequences
from ringfa3.planning.tiling import Plan
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.dequantised import (
    FACTOR_COLUMNS,
    DequantisedInputs,
    operand_dtype,
)
from ringfa3.quantisation.formats import Formats
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.operands import QuantisedQ
from ringfa3.quantisation.tile_records import TileRecords

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit

# Parts of the tokens, over all KV heads: CTAs that 132 SMs run at once. One number for every GPU,
# so that all GPUs add in the same order and compute equal bits.
SPLITS = 396
SPLIT_ROWS = 64  # tokens of a split, at least


class CentresArgs(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("centres", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("num_parts", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("int8", ctypes.c_int32),
    )


class StatisticsArgs(ctypes.Structure):
    _fields_ = (
        ("k", Tensor3),
        ("v", Tensor3),
        ("splits", ctypes.c_void_p),
        ("centres", CentresArgs),
        ("rows", ctypes.c_int32),
    )


class QuantiseQArgs(ctypes.Structure):
    _fields_ = (
        ("q", Tensor3),
        ("k_mean", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("k_offset", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("centred_lse", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int32),
        ("int8", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


class QuantiseKVArgs(ctypes.Structure):
    _fields_ = (
        ("k", Tensor3),
        ("v", Tensor3),
        ("tiles", ctypes.c_void_p),
        ("k_mean", ctypes.c_void_p),
        ("v_mean", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("k_values", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_values", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("int8", ctypes.c_int32),
    )


_pack_statistics = packer(StatisticsArgs)
_pack_centres = packer(CentresArgs)
_pack_quantise_q = packer(QuantiseQArgs)
_pack_quantise_kv = packer(QuantiseKVArgs)


@dataclass(frozen=True)
class TiledKV:
    """`QuantisedKV` as the kernels make it. Rows of no tile are uninitialised.

    k        (n, hk, d) in the format of Q and K
    k_scale  (hk, tiles) float32
    v        (tiles, hk, d, 128) in the format of V: keys of a tile in the order of
             csrc/quantise/values.cuh, 0 past its rows. In 16 bits: (n, hk, d), the tensor given
    centres  of K and V
    tiles    of the keys
    """

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    centres: KVCentres
    tiles: KeyTiles

    def records(self) -> TileRecords:
        """All tiles, to be sent to other ranks."""
        v = self.v if self.v.dim() == 4 else self.tiles.spread(self.v)
        return TileRecords(self.tiles.spread(self.k), v, self.k_scale.t())

    @classmethod
    def of_records(cls, records: TileRecords, centres: KVCentres) -> TiledKV:
        """Tiles `KEY_TILE` rows apart."""
        k, v, scale = records.k, records.v, records.k_scale
        v = v if v.itemsize == 1 else v.flatten(0, 1)
        return cls(
            k.flatten(0, 1), scale.t().contiguous(), v, centres, _tiles_in_a_row(len(records.k))
        )


@lru_cache(64)  # counts depend on the documents of a batch
def _tiles_in_a_row(count: int) -> KeyTiles:
    return KeyTiles(whole_sequences(np.array([count * KEY_TILE], np.int64)))


def quantise(
    unit: Unit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, formats: Formats
) -> tuple[QuantisedQ, TiledKV]:
    """`operands.quantise` on the GPU, of the keys of a plan with one hop."""
    tiles = KeyTiles.of(plan, plan.keys)
    _, centres = channel_statistics(unit, k, v, formats)
    kv = quantise_kv(unit, k, v, tiles, centres, formats)
    return quantise_q(unit, q, centres, formats), kv


def channel_statistics(
    unit: Unit, k: torch.Tensor, v: torch.Tensor, formats: Formats
) -> tuple[ChannelStatistics, KVCentres]:
    """`ChannelStatistics.of` and `KVCentres.of` on the GPU. Equal inputs give equal bits."""
    (tokens, heads, head_dim), stream = k.shape, CurrentStream.of(k.device)
    splits = max(1, min(SPLITS // heads, -(-tokens // SPLIT_ROWS)))
    rows = -(-tokens // splits)
    parts = torch.empty((splits, 4, heads, head_dim), dtype=torch.float32, device=k.device)
    statistics, centres, fields = _centres(parts, tokens, formats)
    (k, k_fields), (v, v_fields) = tma_addressable(k), tma_addressable(v)
    args = _pack_statistics(*k_fields, *v_fields, parts.data_ptr(), *fields, rows)
    launch(unit, "statistics", args, stream)
    return statistics, centres


def combine_statistics(
    unit: Unit, parts: torch.Tensor, tokens: int, formats: Formats
) -> tuple[ChannelStatistics, KVCentres]:
    """`ChannelStatistics.combine` and `KVCentres.of` on the GPU.

    Args:
        parts: (ranks, 4, hk, d), contiguous: `ChannelStatistics.values` of each rank.
        tokens: of all ranks.
    """
    statistics, centres, fields = _centres(parts, tokens, formats)
    launch(unit, "centres", _pack_centres(*fields), CurrentStream.of(parts.device))
    return statistics, centres


def _centres(
    parts: torch.Tensor, tokens: int, formats: Formats
) -> tuple[ChannelStatistics, KVCentres, tuple[int, ...]]:
    """New memory for the results, and the fields of `CentresArgs`."""
    count, _, heads, head_dim = parts.shape
    memory = torch.empty((7, heads, head_dim), dtype=torch.float32, device=parts.device)
    values, centres = memory[:4], memory[4:]
    fields = (
        *(x.data_ptr() for x in (parts, values, centres)),
        *(tokens, count, heads, formats.v is None),
    )
    return ChannelStatistics(values, tokens), KVCentres(*centres.unbind()), fields


def quantise_q(unit: Unit, q: torch.Tensor, centres: KVCentres, formats: Formats) -> QuantisedQ:
    """`operands.quantise_q` on the GPU. In memory scale and k_offset are (h, t)."""
    tokens, heads, _ = q.shape
    values = torch.empty(q.shape, dtype=formats.qk.dtype, device=q.device)
    scale, k_offset = torch.empty((2, heads, tokens), dtype=torch.float32, device=q.device)
    _launch_q(unit, q, centres, formats, values, scale, k_offset)
    return QuantisedQ(values, scale.t(), k_offset.t())


def quantise_kv(
    unit: Unit,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: KeyTiles,
    centres: KVCentres,
    formats: Formats,
) -> TiledKV:
    """`operands.quantise_kv` on the GPU. `tiles` is uploaded once for each stream: keep it."""
    (_, heads, head_dim), count = k.shape, len(tiles.table)
    values = torch.empty(k.shape, dtype=formats.qk.dtype, device=k.device)
    k_scale = torch.empty((heads, count), dtype=torch.float32, device=k.device)
    tiled_v = v
    if formats.v is not None:
        shape = (count, heads, head_dim, KEY_TILE)
        tiled_v = torch.empty(shape, dtype=formats.v.dtype, device=v.device)
    _launch_kv(unit, k, v, tiles, centres, formats, values, k_scale, tiled_v)
    return TiledKV(values, k_scale, tiled_v, centres, tiles)


def dequantise(
    unit: Unit,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: KeyTiles,
    centres: KVCentres,
    formats: Formats,
    lse: torch.Tensor,
    scale: float,
) -> DequantisedInputs:
    """`DequantisedInputs.of` those operands, which no memory holds. K of no tile is uninitialised.

    Args: as of `quantise_q` and `quantise_kv`; lse (h, t) and scale as of `DequantisedInputs.of`.
    """

    def new(shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=operand_dtype(q.dtype), device=q.device)

    rounded_q, rounded_k = new(q.shape), new((*k.shape[:2], k.shape[2] + FACTOR_COLUMNS))
    rounded_v = v.to(rounded_q.dtype) if formats.v is None else new(v.shape)
    lse = lse.contiguous()
    centred_lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    _launch_q(
        unit, q, centres, formats, rounded_q, lse=lse, centred_lse=centred_lse, softmax_scale=scale
    )
    _launch_kv(unit, k, v, tiles, centres, formats, rounded_k, None, rounded_v)
    return DequantisedInputs(rounded_q, rounded_k, rounded_v, centred_lse)


def _launch_q(
    unit: Unit,
    q: torch.Tensor,
    centres: KVCentres,
    formats: Formats,
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    k_offset: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    centred_lse: torch.Tensor | None = None,
    softmax_scale: float = 0,
) -> None:
    """Fills the tensors of a `QuantiseQArgs`."""
    if not len(q):
        return
    q, q_fields = tma_addressable(q)
    args = _pack_quantise_q(
        *q_fields,
        centres.k_mean.data_ptr(),
        *(0 if x is None else x.data_ptr() for x in (values, scale, k_offset, lse, centred_lse)),
        len(centres.k_mean),
        formats.qk.dtype == torch.int8,
        softmax_scale,
    )
    launch(unit, "quantise_q", args, CurrentStream.of(q.device))


def _launch_kv(
    unit: Unit,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: KeyTiles,
    centres: KVCentres,
    formats: Formats,
    k_values: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_values: torch.Tensor,
) -> None:
    """Fills the tensors of a `QuantiseKVArgs`, but V in 16 bits."""
    count, stream = len(tiles.table), CurrentStream.of(k.device)
    if not count:
        return
    table = _tables.get(tiles, stream, (), lambda: Packed(tiles.table))
    (k, k_fields), (v, v_fields) = tma_addressable(k), tma_addressable(v)
    args = _pack_quantise_kv(
        *k_fields,
        *v_fields,
        table.addresses[0],
        *(x.data_ptr() for x in centres),
        k_values.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if formats.v is None else v_values.data_ptr(),
        count,
        formats.v is None,
    )
    launch(unit, "quantise_kv", args, stream)


_tables: Uploads[Uploaded] = Uploads("key tiles")
