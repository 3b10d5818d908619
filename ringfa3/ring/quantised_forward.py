"""The forward of a ring in 8 bits, by messages: ranks quantise their keys once and pass them on.

Rings of CPUs; a world of one rank may be a GPU.

Means and the scale of V are those of all ranks' K/V, so that the partial outputs of all hops have
one scale. Ranks exchange whole tiles of KEY_TILE keys, each with its scales: a byte for each number
of K and, in "fp8", of V.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ringfa3.kernels.dispatch import select_quantised
from ringfa3.kernels.quantise import KeyTiles
from ringfa3.kernels.quantised_reference import attend
from ringfa3.kernels.reference import TILE_M, statistics_dtype
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.sharding import Segments
from ringfa3.planning.tiling import concat_ranges
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.operands import KEY_TILE, QuantisedKV, quantise_kv, quantise_q
from ringfa3.ring.p2p import Message, Transport
from ringfa3.ring.p2p_pass import Blocks

STATISTICS = 1  # message tag; K/V have 0


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    scale: float,
    precision: str,
    transport: Transport | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's tokens.

    Args:
        q: (t, h, d); k, v: (t, hk, d): the rank's tokens.
        precision: "fp8" or "int8".
        transport: None for a world of one rank.

    Raises:
        RingError: a peer died or stopped, naming hop and peer.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=statistics_dtype(q.dtype))
    if plan.world == 1:
        kernel = select_quantised(q, precision)
        tiling = plan.hops.forward(kernel.tile_m)[0]
        kernel.attend(*kernel.quantise(q, k, v, plan.hops), tiling, scale, out, out[:0], lse)
        return out, lse
    formats = FORMATS[precision]
    parts = gather_statistics(ChannelStatistics.of(k, v), plan, transport)
    centres = KVCentres.of(ChannelStatistics.combine(parts), formats)
    queries = quantise_q(q, centres, formats)
    keys = plan.shards[plan.rank]
    tiles = TileRecords.of(quantise_kv(k, v, keys, centres, formats), keys)
    hops, exchange = plan.on_grid(KEY_TILE)
    blocks = Blocks(
        exchange, plan.rank, "forward", tiles.records.new_empty(tiles.records.shape[1:])
    )
    mine = torch.from_numpy(exchange.published).to(k.device)
    torch.index_select(tiles.records, 0, mine, out=blocks.published)
    tilings = hops.forward(TILE_M)
    running = out[:0] if hops.single_hop(TILE_M) else out.new_empty(out.shape, dtype=torch.float32)
    for hop, tiling in enumerate(tilings):
        sends, receives = ([m for m in part if len(m.tensor)] for part in blocks.messages(hop))
        moving = None
        if sends or receives:
            assert transport is not None
            moving = transport.exchange(sends, receives)
        kv = tiles if hop == 0 else tiles.like(blocks.received(hop))
        attend(
            q=queries,
            kv=kv.operands(centres),
            p_format=formats.v,
            tiling=tiling,
            scale=scale,
            out=out,
            partial_out=running,
            lse=lse,
        )
        if moving is not None:
            moving.wait()
    return out, lse


def gather_statistics(
    mine: ChannelStatistics, plan: ContextPlan, transport: Transport | None
) -> list[ChannelStatistics]:
    """The statistics of all ranks, in rank order."""
    parts = [
        mine if rank == plan.rank else ChannelStatistics(torch.empty_like(mine.values), tokens)
        for rank, tokens in enumerate(plan.tokens_per_rank)
    ]
    others = [rank for rank in range(plan.world) if rank != plan.rank]
    if others:
        assert transport is not None
        what = "forward: statistics of K and V"
        transport.exchange(
            [Message(mine.values, rank, what, STATISTICS) for rank in others],
            [Message(parts[rank].values, rank, what, STATISTICS) for rank in others],
        ).wait()
    return parts


class TileRecords:
    """Tiles of quantised keys as records of bytes: K, V, then K's scales.

    records  (tiles, bytes) uint8; K (KEY_TILE, hk, d), V (KEY_TILE, hk, d) and scales (hk,) float32
             of a tile. Rows behind a segment's last key hold 0
    """

    def __init__(self, records: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: tensors of the dtypes of K and V in the records, (n, hk, d)."""
        self.records, self._k, self._v = records, k, v

    @classmethod
    def of(cls, kv: QuantisedKV, keys: Segments) -> TileRecords:
        """The keys of segments, each cut into tiles from its first key on."""
        table = KeyTiles(keys).table
        count, used = len(table), table["rows"].astype(np.int64)
        first = np.arange(count, dtype=np.int64) * KEY_TILE
        at = torch.from_numpy(concat_ranges(first, used)).to(kv.k.device)
        row0 = table["row0"].astype(np.int64)
        rows = torch.from_numpy(concat_ranges(row0, used)).to(kv.k.device)

        def padded(x: torch.Tensor) -> torch.Tensor:
            """The bytes of x (n, ...) as (tiles, KEY_TILE, bytes of a row)."""
            row = math.prod(x.shape[1:]) * x.itemsize
            to = torch.zeros((count * KEY_TILE, row), dtype=torch.uint8, device=x.device)
            to[at] = x[rows].view(torch.uint8).view(-1, row)
            return to.view(count, KEY_TILE, row)

        k, v, scales = (padded(x) for x in (kv.k, kv.v, kv.k_scale))
        records = torch.cat((k.flatten(1), v.flatten(1), scales[:, 0]), 1)  # equal in a tile
        return cls(records, kv.k, kv.v)

    def like(self, records: torch.Tensor) -> TileRecords:
        return TileRecords(records, self._k, self._v)

    def operands(self, centres: KVCentres) -> QuantisedKV:
        """K and V of all tiles, KEY_TILE rows each."""
        tiles = len(self.records)
        _, heads, head_dim = self._k.shape
        numbers = KEY_TILE * heads * head_dim
        sizes = [numbers * self._k.itemsize, numbers * self._v.itemsize, heads * 4]
        k, v, scales = torch.split(self.records, sizes, 1)
        shape = (tiles * KEY_TILE, heads, head_dim)
        return QuantisedKV(
            k.contiguous().view(self._k.dtype).view(shape),
            scales.contiguous().view(torch.float32).repeat_interleave(KEY_TILE, 0),
            v.contiguous().view(self._v.dtype).view(shape),
            centres,
        )
