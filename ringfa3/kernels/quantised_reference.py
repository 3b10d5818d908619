"""The reference of 8-bit attention: its operands come rounded, it rounds P, the rest is float32.

A block is a tile of keys with one scale, or a part of one; a span's last block comes first. With P
in E4M3 a row's shift comes from its first block and rises only where P would leave the range: a
lane of a quad holds a fourth of the block's columns, and its sum of P stays at most 432, below the
largest value, 448. The shift lies a whole number below the row's maximum, so that P of the maximum
is a power of two: where one key dominates, the rounding of P costs nothing.

Shapes: t query rows, n key rows of a hop; h heads, hk KV heads, g = h // hk; d head dim; m = g *
rows of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ringfa3.kernels.reference import (
    TILE_M,
    Span,
    apply_mask,
    by_kv_head,
    new_partial_out,
    spans_of,
    store_tile,
)
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.planning.tiling import Plan
from ringfa3.quantisation import operands
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.dequantised import DequantisedInputs
from ringfa3.quantisation.formats import Format, Formats
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.operands import QuantisedKV, QuantisedQ
from ringfa3.quantisation.tile_records import TileRecords

LARGEST_SUM = 432.0  # of a lane's P over a block
# A shift this far below a row's maximum, in log2: KEY_TILE / 4 elements of P fit LARGEST_SUM.
BELOW_MAXIMUM = math.floor(math.log2(LARGEST_SUM / (KEY_TILE / 4)))


class QuantisedReference:
    """`dispatch.QuantisedForward` in PyTorch."""

    tile_m = TILE_M

    def __init__(self, formats: Formats) -> None:
        self._formats = formats

    def quantise(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
    ) -> tuple[QuantisedQ, QuantisedKV]:
        return operands.quantise(q, k, v, plan.keys, self._formats)

    def statistics(self, k: torch.Tensor, v: torch.Tensor) -> ChannelStatistics:
        return ChannelStatistics.of(k, v)

    def centres(self, parts: Sequence[ChannelStatistics]) -> KVCentres:
        return KVCentres.of(ChannelStatistics.combine(parts), self._formats)

    def quantise_q(self, q: torch.Tensor, centres: KVCentres) -> QuantisedQ:
        return operands.quantise_q(q, centres, self._formats)

    def quantise_kv(
        self, k: torch.Tensor, v: torch.Tensor, tiles: KeyTiles, centres: KVCentres
    ) -> TileRecords:
        kv = operands.quantise_kv(k, v, tiles.keys, centres, self._formats)
        scale = tiles.spread(kv.k_scale.unsqueeze(-1))[:, 0, :, 0]
        return TileRecords(tiles.spread(kv.k), tiles.spread(kv.v), scale)

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
        rounded_q = operands.quantise_q(q, centres, self._formats)
        kv = operands.quantise_kv(k, v, tiles.keys, centres, self._formats)
        return DequantisedInputs.of(rounded_q, kv, lse, scale, q.dtype)

    def keys(self, records: TileRecords, centres: KVCentres) -> QuantisedKV:
        scale = records.k_scale.repeat_interleave(KEY_TILE, 0)
        return QuantisedKV(records.k.flatten(0, 1), scale, records.v.flatten(0, 1), centres)

    def new_partial_out(self, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        return new_partial_out(q, plan)

    def attend(
        self,
        q: QuantisedQ,
        kv: QuantisedKV,
        tiling: Tiling,
        scale: float,
        out: torch.Tensor,
        partial_out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        attend(q, kv, tiling, scale, out, partial_out, lse, p_format=self._formats.v)


def attend(
    q: QuantisedQ,
    kv: QuantisedKV,
    tiling: Tiling,
    scale: float,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    *,
    p_format: Format | None,
    block: int = KEY_TILE,
) -> None:
    """One hop of the forward pass: `reference.attend` of 8-bit operands.

    Args:
        p_format: of P and V; None: P is rounded to the dtype of V.
        block: keys of a block, a divisor of `KEY_TILE`. It decides the shifts of P in `p_format`.
        out, partial_out, lse: as in `reference.attend`. LSE is that of the scores of Q and K before
            centring. A fully masked row has output 0, without V's mean.
    """
    hk = kv.k.shape[1]
    for row0, rows, first_span, num_spans, flags, _ in tiling.tiles.tolist():
        here = slice(row0, row0 + rows)
        values = by_kv_head(q.values[here], hk)
        row_scale = _heads_first(q.scale[here], hk) * (scale * math.log2(math.e))
        tile = _Tile(values, row_scale, rows, p_format, block)
        for span in spans_of(tiling.spans, first_span, num_spans):
            tile.visit(span, row0, kv)
        offset = _heads_first(q.k_offset[here], hk) * scale
        o, tile_lse = tile.finish(kv, offset, torch.finfo(out.dtype).max)
        store_tile(o, tile_lse, here, flags, out, partial_out, lse)


class _Tile:
    """Running softmax of a tile: q (hk, m, d) float32 values, row_scale (hk, m) to log2 units."""

    def __init__(
        self,
        q: torch.Tensor,
        row_scale: torch.Tensor,
        rows: int,
        p_format: Format | None,
        block: int,
    ) -> None:
        self._q, self._row_scale, self._rows, self._p_format = q, row_scale, rows, p_format
        self._block = block
        self._shift = torch.zeros_like(row_scale)  # log2 units
        self._fresh = torch.ones_like(row_scale, dtype=torch.bool)  # the row has seen no key
        self._total = torch.zeros_like(row_scale)  # of P before it is rounded
        self._o = torch.zeros_like(q)

    def visit(self, span: Span, row0: int, kv: QuantisedKV) -> None:
        """Adds the keys of a span, block by block."""
        q0, _, k0, k1, lo, hi = span
        i = row0 - q0
        hk = kv.k.shape[1]
        first, last = max(0, i + lo), min(k1 - k0, i + self._rows + hi)
        for j in _blocks(first, last, self._block):
            end = min(j + self._block, k1 - k0)
            keys = slice(k0 + j, k0 + end)
            s = self._q @ by_kv_head(kv.k[keys], hk).mT  # (hk, m, end - j)
            s *= self._row_scale.unsqueeze(-1) * kv.k_scale[k0 + j].view(hk, 1, 1)
            apply_mask(s, span, i, i + self._rows, j, end)
            v = by_kv_head(kv.v[keys], hk)
            p = self._probabilities(s)
            self._total += p.sum(-1)
            rounded = p.to(kv.v.dtype) if self._p_format is None else self._p_format.round(p)
            self._o = self._o.baddbmm_(rounded.float(), v)

    def _probabilities(self, s: torch.Tensor) -> torch.Tensor:
        """P of a block (hk, m, keys), with the shifts raised where they must be."""
        high = s.amax(-1)
        seen = high != -torch.inf
        if self._p_format is None:
            target = torch.maximum(high, self._shift.masked_fill(self._fresh, -torch.inf))
            raised = seen
        else:
            target = high - BELOW_MAXIMUM
            raised = seen & (self._fresh | (self._lane_sums(s) > LARGEST_SUM).any(-1))
        decay = torch.exp2(self._shift - target).masked_fill(self._fresh, 0)
        decay = decay.where(raised, 1)
        self._shift = target.where(raised, self._shift)
        self._fresh &= ~seen
        self._total *= decay
        self._o *= decay.unsqueeze(-1)
        return torch.exp2(s - self._shift.unsqueeze(-1))

    def _lane_sums(self, s: torch.Tensor) -> torch.Tensor:
        """(hk, m, 4) sums of P with the present shifts, of the lanes that share a row."""
        p = torch.exp2(s - self._shift.unsqueeze(-1))
        p = torch.nn.functional.pad(p, (0, self._block - p.shape[-1]))
        return p.view(*p.shape[:-1], -1, 4, 2).sum((-3, -1))

    def finish(
        self, kv: QuantisedKV, offset: torch.Tensor, largest: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """O (hk, m, d), normalised, and LSE (hk, m).

        Args:
            offset: (hk, m) nats of every score.
            largest: the largest finite number of the output's dtype. Rounded E4M3 V may pass it
                where the mean is added; exact O does not.
        """
        empty = self._fresh
        lse = (self._shift + self._total.log2()) * math.log(2) + offset
        o = self._o / self._total.unsqueeze(-1)
        if self._p_format is not None:  # rounded P may sum to more than P; O lies in V's range
            o = o.clamp(-self._p_format.largest, self._p_format.largest)
        o = o * kv.centres.v_scale.unsqueeze(1) + kv.centres.v_mean.unsqueeze(1)
        if self._p_format is not None:
            o = o.clamp(-largest, largest)  # NaN stays
        return o.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, -torch.inf)


def _blocks(begin: int, end: int, size: int) -> Iterator[int]:
    """The first key of every block that holds some of [begin, end), the last block first."""
    if begin < end:
        yield from range((end - 1) // size * size, begin - size, -size)


def _heads_first(x: torch.Tensor, hk: int) -> torch.Tensor:
    """(rows, h) as (hk, g * rows)."""
    return x.t().reshape(hk, -1)
