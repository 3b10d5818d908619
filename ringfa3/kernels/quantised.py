"""The forward kernel with 8-bit operands: `quantised_reference.attend` on the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.kernels import forward, quantise
from ringfa3.kernels.launch import Fields, launch, num_ctas, packer, tensor3, tma_addressable
from ringfa3.kernels.quantise import TiledKV
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.uploads import Packed, Uploaded, Uploads
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.planning.tiling import Plan
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.dequantised import DequantisedInputs
from ringfa3.quantisation.formats import Formats
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.operands import QuantisedQ
from ringfa3.quantisation.tile_records import TileRecords

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit


class OperandScales(ctypes.Structure):
    _fields_ = (
        ("q_scale", ctypes.c_void_p),
        ("k_offset", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_mean", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("first_tile", ctypes.c_void_p),
        ("key_tiles", ctypes.c_int32),
    )


class QuantisedForwardArgs(ctypes.Structure):
    _fields_ = (("forward", forward.ForwardArgs), ("scales", OperandScales))


_pack = packer(QuantisedForwardArgs)


class QuantisedKernel:
    """`dispatch.QuantisedForward` on a Hopper GPU."""

    def __init__(self, unit: Unit, quantiser: Unit, formats: Formats) -> None:
        """unit: a forward of precision "fp8" or "int8". quantiser: a unit that quantises."""
        self.quantiser, self.formats = quantiser, formats
        self.tile_m = unit.tile_m
        self.attend = partial(attend, unit)
        self.new_partial_out = partial(forward.new_partial_out, unit)
        self.keys = TiledKV.of_records

    def quantise(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
    ) -> tuple[QuantisedQ, TiledKV]:
        return quantise.quantise(self.quantiser, q, k, v, plan, self.formats)

    def statistics(self, k: torch.Tensor, v: torch.Tensor) -> ChannelStatistics:
        return quantise.channel_statistics(self.quantiser, k, v, self.formats)[0]

    def centres(self, parts: Sequence[ChannelStatistics]) -> KVCentres:
        values, tokens = torch.stack([p.values for p in parts]), sum(p.tokens for p in parts)
        return quantise.combine_statistics(self.quantiser, values, tokens, self.formats)[1]

    def quantise_q(self, q: torch.Tensor, centres: KVCentres) -> QuantisedQ:
        return quantise.quantise_q(self.quantiser, q, centres, self.formats)

    def quantise_kv(
        self, k: torch.Tensor, v: torch.Tensor, tiles: KeyTiles, centres: KVCentres
    ) -> TileRecords:
        return quantise.quantise_kv(self.quantiser, k, v, tiles, centres, self.formats).records()

    def dequantise(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: KeyTiles,
        centres: KVCentres,
        lse: torch.Tensor,
        scale: float,
    ) -> DequantisedInputs:
        operands = q, k, v, tiles, centres
        return quantise.dequantise(self.quantiser, *operands, self.formats, lse, scale)


def attend(
    unit: Unit,
    q: QuantisedQ,
    kv: TiledKV,
    tiling: Tiling,
    scale: float,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """`quantised_reference.attend` on the GPU, of operands that `quantise` has made.

    Args:
        unit: a forward of precision "fp8" if V has 8 bits, else of "int8".
        tiling: tiles of `unit.tile_m` rows. Every span begins with a tile of `kv.tiles`.
        out: in the dtype of `unit`. partial_out: as in `forward.attend`.

    Raises:
        ValueError: a span begins inside a tile of keys; as `forward.attend`.
        RuntimeError: the first call with a tiling is captured in a CUDA graph.
    """
    if forward.store_if_fully_masked(tiling, out, lse):
        return
    tokens, kv_heads, head_dim = kv.k.shape
    stream = CurrentStream.of(q.values.device)
    uploaded = forward.tables(tiling, stream)
    tables = uploaded.hops[tiling.hop]
    if tables.last_flag:
        raise ValueError("spans of 8-bit keys cannot wait for arrival flags")
    first_tile = _first_tiles.get(
        tiling, stream, (kv.tiles,), lambda: Packed(_first_tile(tiling, kv.tiles))
    )
    v, v_fields = _value_fields(kv.v)
    counter = forward.counter(stream)
    args = _pack(
        *tensor3(q.values),
        *tensor3(kv.k),
        *v_fields,
        *forward.output_values(out, partial_out, lse),
        tables.tiles,
        tables.spans,
        0,
        counter.data_ptr(),
        len(tiling.tiles),
        forward.head_section(
            q.values, kv_heads, tokens * head_dim * (kv.k.itemsize + kv.v.itemsize)
        ),
        num_ctas(stream.device),
        scale,
        q.scale.data_ptr(),
        q.k_offset.data_ptr(),
        kv.k_scale.data_ptr(),
        kv.centres.v_mean.data_ptr(),
        kv.centres.v_scale.data_ptr(),
        first_tile.addresses[0],
        kv.k_scale.shape[1],
    )
    launch(unit, "forward", args, stream)
    del v  # until the launch is enqueued


def _value_fields(v: torch.Tensor) -> tuple[torch.Tensor, Fields]:
    """V, or a copy that TMA can address, and its Tensor3: see `QuantisedForwardArgs`."""
    if v.dim() == 3:
        return tma_addressable(v)
    tiles, heads, head_dim, keys = v.shape
    return v, (v.data_ptr(), head_dim, tiles * heads, keys, keys, head_dim * keys)


def _first_tile(tiling: Tiling, tiles: KeyTiles) -> npt.NDArray[np.int32]:
    """(spans,) the number of the tile of keys with which each span begins."""
    row0, k0 = tiles.table["row0"], tiling.spans["k0"]
    order = np.argsort(row0, kind="stable")
    at = order[np.minimum(np.searchsorted(row0, k0, sorter=order), len(row0) - 1)]
    if (row0[at] != k0).any():
        span = int(np.flatnonzero(row0[at] != k0)[0])
        raise ValueError(
            f"span {span} begins with key {int(k0[span])}, inside a tile of {KEY_TILE} keys: spans "
            "of 8-bit keys must begin with a tile"
        )
    return at.astype(np.int32)


_first_tiles: Uploads[Uploaded] = Uploads("first tiles")
