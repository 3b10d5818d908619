"""The forward of a ring in 8 bits, by messages: ranks quantise their keys once and send them.

Means and the scale of V are those of all ranks' K/V, so that the partial outputs of all launches
have one scale. Ranks exchange whole tiles of KEY_TILE keys, each with its scales: a byte for each
number of K and, in "fp8", of V.

Tiles go from their owner to the ranks that attend to them, between hosts over a landing rank. A
multi-hop launch attends to those of several hops. Each launch after the first reads and writes
partial outputs in float32, four bytes for each number of O.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from ringfa3.kernels.dispatch import QuantisedForward, select_quantised
from ringfa3.kernels.reference import accum_dtype
from ringfa3.masks.spans import attended
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.exchange.landing import HostRanks
from ringfa3.planning.placement.costs import Ints
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.ring.levels.flow_messages import STATISTICS, sent_rows
from ringfa3.ring.p2p import Message, Transport
from ringfa3.ring.p2p_pass import ArrivingKV, start_exchange

# A launch attends to one hop for each so many query rows of a rank, times query heads per KV head:
# the messages of that many hops take less time than hop 0 of a causal document, even at 50 GB/s.
ROWS_PER_HOP = 16384
MAX_HOPS = 3  # of a launch: their K/V are in memory twice, as they came and as operands

# For each plan with a Mask and device: the rows of keys in no pair, int64, and the first other row.
_unattended: WeakKeyDictionary[ContextPlan, dict[torch.device, tuple[torch.Tensor, int | None]]] = (
    WeakKeyDictionary()
)


def run_quantised_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    scale: float,
    precision: str,
    transport: Transport | None,
) -> tuple[torch.Tensor, torch.Tensor, KVCentres]:
    """(out, lse) of this rank's tokens, and the centres of all ranks' K and V.

    Args:
        q: (t, h, d); k, v: (t, hk, d): the rank's tokens.
        precision: "fp8" or "int8".
        transport: None for a world of one rank.

    Raises:
        RingError: a peer died or stopped, naming hop and peer.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accum_dtype(q.dtype))
    kernel = select_quantised(q, precision)
    if plan.world == 1:
        tiling = plan.hops.forward(kernel.tile_m)[0]
        queries, kv = kernel.quantise(q, k, v, plan.hops)
        kernel.attend(queries, kv, tiling, scale, out, out[:0], lse)
        return out, lse, kv.centres
    assert transport is not None
    centres = gather_centres(kernel, k, v, plan, transport)
    records = kernel.quantise_kv(k, v, local_tiles(plan), centres)
    exchange = plan.by_messages(launches(plan, q.shape[1] // k.shape[1]), KEY_TILE)
    hops = exchange.hops
    local = k.new_empty((len(records.k), sum(records.words)), dtype=torch.int32)
    records.pack(local)
    # A launch unpacks its K/V before the next ones arrive, so one buffer is enough.
    sent = sent_rows(exchange, k.device)
    arriving = ArrivingKV(exchange, [local], "forward", sent, num_buffers=1)
    queries = kernel.quantise_q(q, centres)
    single = hops.single_hop(kernel.tile_m)
    partial_out = out[:0] if single else kernel.new_partial_out(q, hops)
    for number, tiling in enumerate(hops.forward(kernel.tile_m)):
        if number > 0:
            records = records.unpack(*arriving.received(number))
        keys = kernel.keys(records, centres)
        moving = start_exchange(transport, arriving.messages(number + 1))
        kernel.attend(queries, keys, tiling, scale, out, partial_out, lse)
        if moving is not None:
            moving.wait()
    return out, lse, centres


def repeat_attended(
    plan: ContextPlan, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v (n, hk, d), where keys in no pair of the mask repeat one that is in some.

    Their own values, of padding for example, would count in means and scales, and so in the error
    of all others. A repeated key moves a mean, but lies among the keys that count. A rank that has
    no key of any pair has zeros.
    """
    if plan.mask is None:
        return k, v
    kept = _unattended.setdefault(plan, {})
    if k.device not in kept:
        some = attended(plan.mask.diagonal_spans, plan.mask.k_tokens)[plan._key_index]
        first = int(some.argmax()) if some.any() else None
        kept[k.device] = torch.from_numpy(np.flatnonzero(~some)).to(k.device), first
    index, first = kept[k.device]
    if not len(index):
        return k, v
    if first is None:
        return torch.zeros_like(k), torch.zeros_like(v)
    source = index.new_full((len(index),), first)
    return tuple(x.index_copy(0, index, x.index_select(0, source)) for x in (k, v))  # type: ignore[return-value]


def local_tiles(plan: ContextPlan) -> KeyTiles:
    """The tiles of a rank's keys: of their segments in the plan, where a mask has cut them."""
    (mine,) = np.nonzero(plan.hops.key_hop == 0)
    by_row = mine[np.argsort(plan.hops.keys.row[mine], kind="stable")]
    return KeyTiles.of(plan, plan.hops.keys.take(by_row))


def gather_centres(
    kernel: QuantisedForward,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    transport: Transport | None,
) -> KVCentres:
    """The centres of all ranks' K and V. Arguments and errors as in `run_quantised_forward`."""
    parts = [kernel.statistics(k, v)]
    if transport is not None:
        parts = gather_statistics(parts[0], plan, transport)
    return kernel.centres(parts)


def launches(plan: ContextPlan, group_size: int) -> Ints:
    """(steps,) the launch that attends to each `HostRanks.step`: own keys alone, others evenly.

    Steps whose rows land together share no launch with others.

    group_size: query heads per KV head.
    """
    rows = plan.total_tokens // plan.world * group_size
    most = min(max(rows // ROWS_PER_HOP, 1), MAX_HOPS)
    ranks = HostRanks.of(plan.hosts)
    hosts, per_host = ranks.ranks.shape
    levels = [per_host - 1, *[per_host] * (hosts - 1)] if ranks.two_levels else [plan.world - 1]
    launch = [np.zeros(1, np.int64)]
    for steps in levels:
        count = -(-steps // most)
        launch.append(launch[-1][-1] + 1 + np.arange(steps) * count // steps)
    return np.concatenate(launch)


def gather_statistics(
    mine: ChannelStatistics, plan: ContextPlan, transport: Transport
) -> list[ChannelStatistics]:
    """The statistics of all ranks, in rank order."""
    parts = [
        mine if rank == plan.rank else ChannelStatistics(torch.empty_like(mine.values), keys.tokens)
        for rank, keys in enumerate(plan.key_shards)
    ]
    others = [rank for rank in range(plan.world) if rank != plan.rank]
    what = "statistics of K and V"
    transport.exchange(
        [Message(mine.values, rank, what, STATISTICS) for rank in others],
        [Message(parts[rank].values, rank, what, STATISTICS) for rank in others],
    ).wait()
    return parts
