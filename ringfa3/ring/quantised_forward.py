"""The forward of a ring in 8 bits, by messages: ranks quantise their keys once and pass them on.

Means and the scale of V are those of all ranks' K/V, so that the partial outputs of all hops have
one scale. Ranks exchange whole tiles of KEY_TILE keys, each with its scales: a byte for each number
of K and, in "fp8", of V.
"""

from __future__ import annotations

import torch

from ringfa3.kernels.dispatch import select_quantised
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.quantisation.channels import ChannelStatistics
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
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
    kernel = select_quantised(q, precision)
    if plan.world == 1:
        tiling = plan.hops.forward(kernel.tile_m)[0]
        kernel.attend(*kernel.quantise(q, k, v, plan.hops), tiling, scale, out, out[:0], lse)
        return out, lse
    assert transport is not None
    centres = kernel.centres(gather_statistics(kernel.statistics(k, v), plan, transport))
    tiles = KeyTiles.of(plan, plan.shards[plan.rank])
    records = kernel.quantise_kv(k, v, tiles, centres)
    packed = records.pack().unsqueeze(1)  # (tiles, 1, words)
    hops, exchange = plan.on_grid(KEY_TILE)
    blocks = Blocks(exchange, plan.rank, "forward", packed.new_empty(packed.shape[1:]))
    plan.published_rows(k.device, KEY_TILE).gather(packed, blocks.published)
    queries = kernel.quantise_q(q, centres)
    single = hops.single_hop(kernel.tile_m)
    partial_out = out[:0] if single else kernel.new_partial_out(q, hops)
    for hop, tiling in enumerate(hops.forward(kernel.tile_m)):
        sends, receives = ([m for m in part if len(m.tensor)] for part in blocks.messages(hop))
        moving = transport.exchange(sends, receives) if sends or receives else None
        if hop > 0:
            records = records.unpack(blocks.received(hop).squeeze(1))
        keys = kernel.keys(records, centres)
        kernel.attend(queries, keys, tiling, scale, out, partial_out, lse)
        if moving is not None:
            moving.wait()
    return out, lse


def gather_statistics(
    mine: ChannelStatistics, plan: ContextPlan, transport: Transport
) -> list[ChannelStatistics]:
    """The statistics of all ranks, in rank order."""
    parts = [
        mine if rank == plan.rank else ChannelStatistics(torch.empty_like(mine.values), tokens)
        for rank, tokens in enumerate(plan.tokens_per_rank)
    ]
    others = [rank for rank in range(plan.world) if rank != plan.rank]
    what = "forward: statistics of K and V"
    transport.exchange(
        [Message(mine.values, rank, what, STATISTICS) for rank in others],
        [Message(parts[rank].values, rank, what, STATISTICS) for rank in others],
    ).wait()
    return parts
