"""The operands of an 8-bit attention: Q with a scale for each row, K/V with a scale for each tile.

Letters in shapes: t query rows, n key rows; h heads, hk KV heads; d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringfa3.planning.sharding import Segments
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import Format, Formats
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.rotation import rotate


@dataclass(frozen=True)
class QuantisedQ:
    """Rotated queries.

    values    (t, h, d) in the format of Q and K
    scale     (t, h) float32
    k_offset  (t, h) float32: q times the mean of K, which centring takes off the row's scores
    """

    values: torch.Tensor
    scale: torch.Tensor
    k_offset: torch.Tensor


@dataclass(frozen=True)
class QuantisedKV:
    """Centred keys, rotated, and centred values.

    k        (n, hk, d) in the format of Q and K
    k_scale  (n, hk) float32, equal in the keys of a tile, and in all rows of no segment
    v        (n, hk, d) in the format of V; in the inputs' dtype, not centred, if it has none
    centres  of K and V
    """

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    centres: KVCentres


def quantise(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: Segments, formats: Formats
) -> tuple[QuantisedQ, QuantisedKV]:
    """The operands of a call on one device: q (t, h, d); k, v (n, hk, d) of segments `keys`."""
    centres = KVCentres.of(ChannelStatistics.of(k, v), formats)
    return quantise_q(q, centres, formats), quantise_kv(k, v, keys, centres, formats)


def quantise_q(q: torch.Tensor, centres: KVCentres, formats: Formats) -> QuantisedQ:
    """q (t, h, d). A row with an infinity or NaN has a scale and an offset of NaN."""
    values, scale = round_rows(rotate(q), formats.qk)
    return QuantisedQ(values, scale, k_offset(q, centres).where(~scale.isnan(), torch.nan))


def k_offset(q: torch.Tensor, centres: KVCentres) -> torch.Tensor:
    """(t, h): q (t, h, d) times the mean of K."""
    t, h, d = q.shape
    hk = len(centres.k_mean)
    return (q.float().view(t, hk, h // hk, d) @ centres.k_mean.unsqueeze(-1)).reshape(t, h)


def round_rows(x: torch.Tensor, qk: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """x (t, h, d) rounded with a scale (t, h) for each row, NaN for a row with NaN."""
    scale = qk.row_scale(x.abs().amax(-1))
    across = scale.unsqueeze(-1)
    return qk.round_row(x / across, across), scale


def quantise_kv(
    k: torch.Tensor, v: torch.Tensor, keys: Segments, centres: KVCentres, formats: Formats
) -> QuantisedKV:
    """k, v (n, hk, d), of which `keys` are the segments.

    An infinity or NaN in K is NaN in that key (E4M3) or in its tile's scale (int8); in V it is NaN
    in its channel of that key. It raises no scale.
    """
    values, k_scale = round_tiles(rotate(k, centres.k_mean), keys, formats.qk)
    if formats.v is not None:
        v = formats.v.round((v.float() - centres.v_mean) / centres.v_scale)
    return QuantisedKV(values, k_scale, v, centres)


def round_tiles(x: torch.Tensor, keys: Segments, qk: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """x (n, hk, d) rounded with a scale for each tile of the segments `keys`, as (n, hk).

    A row with NaN counts in no scale; int8, which has no NaN, makes its tile's scale NaN.
    """
    amax = x.abs().amax(-1)
    lost = amax.isnan()
    tiles = KeyTiles(keys)
    row, padded = tiles.rows(x.device)
    tile = torch.zeros(len(x), dtype=torch.int64, device=x.device)  # rows of no segment share 0
    tile[row.rows] = 1 + padded // KEY_TILE
    index = tile.unsqueeze(-1).expand_as(amax)
    most = amax.new_zeros(1 + len(tiles), amax.shape[1]).scatter_reduce(
        0, index, amax.where(~lost, 0), "amax"
    )
    scale = qk.tile_scale(most)
    if qk.dtype == torch.int8:
        spoilt = torch.zeros_like(most).scatter_reduce(0, index, lost.float(), "amax") > 0
        scale = scale.masked_fill(spoilt, torch.nan)
    scale = scale.gather(0, index)
    return qk.round(x / scale.unsqueeze(-1)), scale
