"""A ring in 8 bits on one device, a rank after the other: the kernels against the reference.

What a rank receives at a hop are records of their owner, so a rank needs no other to run
concurrently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch

from ringfa3 import plan_context
from ringfa3.build.units import Unit
from ringfa3.kernels.dispatch import QuantisedForward, select_quantised
from ringfa3.kernels.quantise import TiledKV
from ringfa3.kernels.quantised_reference import QuantisedReference
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.exchange.launch_exchange import LaunchExchange
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.operands import QuantisedQ
from ringfa3.quantisation.tile_records import TileRecords
from ringfa3.ring import quantised_forward
from ringfa3.ring.p2p import Message
from tests.support.dense import cumulative
from tests.support.placements import by_hand
from tests.support.quantise_checks import in_rows
from tests.support.quantised_checks import hold, tolerance

CHUNKS = [  # rank, document, position, length
    *((0, 0, 0, 50), (0, 0, 149, 51), (0, 2, 0, 37), (0, 2, 112, 38)),
    *((1, 0, 50, 99), (1, 1, 0, 1), (1, 2, 37, 75)),
]
CASES = [  # lengths, layout, causal, window, ranks
    ([200, 1, 150], "by hand", True, (-1, -1), 2),
    ([130, 160, 61], "contiguous", False, (-1, -1), 3),
    ([300], "zigzag", True, (90, -1), 3),
]


class Arrived:
    def wait(self) -> None:
        """All messages have come."""


@dataclass
class OneDevice:
    """A `Transport` of one rank.

    exchanges            of all ranks
    statistics, records  of all ranks
    """

    plan: ContextPlan
    exchanges: list[LaunchExchange]
    statistics: list[ChannelStatistics]
    records: list[torch.Tensor]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Arrived:
        for m in receives:
            hop = re.fullmatch(r"forward hop (\d+): K/V", m.what)
            if hop is None:
                m.tensor.copy_(self.statistics[m.peer].values)
            else:
                there = self.exchanges[(self.plan.rank - int(hop[1])) % self.plan.world]
                (rows,) = (
                    sent[part.begin : part.end]
                    for sent, leaving in zip(there.direct.sent, there.direct.leaving, strict=True)
                    for part in leaving
                    if (part.hop, part.peer) == (int(hop[1]), self.plan.rank)
                )
                m.tensor.copy_(self.records[m.peer][rows])
        return Arrived()

    def close(self) -> None:
        """There is no thread."""


class ReferenceOfOperands(QuantisedReference):
    """The reference, of the operands that a kernel has made."""

    def __init__(self, kernel: QuantisedForward, precision: str) -> None:
        super().__init__(FORMATS[precision])
        self._kernel = kernel

    def statistics(self, k: torch.Tensor, v: torch.Tensor) -> ChannelStatistics:
        return self._kernel.statistics(k, v)

    def centres(self, parts: Sequence[ChannelStatistics]) -> KVCentres:
        return self._kernel.centres(parts)

    def quantise_q(self, q: torch.Tensor, centres: KVCentres) -> QuantisedQ:
        return self._kernel.quantise_q(q, centres)

    def quantise_kv(
        self, k: torch.Tensor, v: torch.Tensor, tiles: KeyTiles, centres: KVCentres
    ) -> TileRecords:
        records = self._kernel.quantise_kv(k, v, tiles, centres)
        v = in_rows(TiledKV.of_records(records, centres)).v
        return TileRecords(records.k, v.view(records.k.shape), records.k_scale)


def run_ring(
    kernel: QuantisedForward,
    plans: list[ContextPlan],
    qkv: list[torch.Tensor],
    precision: str,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of every rank; q, k, v are of all tokens. A launch has several hops."""
    shards = [[plan.shard(x) for x in qkv] for plan in plans]
    statistics = [kernel.statistics(k, v) for _, k, v in shards]
    centres = kernel.centres(statistics)
    packed, exchanges = [], []
    for plan, (_, k, v) in zip(plans, shards, strict=True):
        tiles = KeyTiles.of(plan, plan.shards[plan.rank])
        records = kernel.quantise_kv(k, v, tiles, centres)
        packed.append(k.new_empty((len(records.k), sum(records.words)), dtype=torch.int32))
        records.pack(packed[-1])
        with patch.object(quantised_forward, "ROWS_PER_HOP", 1):
            launch = quantised_forward.launches(plan, qkv[0].shape[1] // k.shape[1])
        exchanges.append(plan.by_messages(launch, KEY_TILE))
    scale = qkv[0].shape[-1] ** -0.5
    with (
        patch.object(quantised_forward, "select_quantised", lambda q, precision: kernel),
        patch.object(quantised_forward, "ROWS_PER_HOP", 1),
    ):
        return [
            quantised_forward.run_quantised_forward(
                *shard, plan, scale, precision, OneDevice(plan, exchanges, statistics, packed)
            )[:2]
            for plan, shard in zip(plans, shards, strict=True)
        ]


def ring_is_that_of_the_reference(unit: Unit, device: str) -> None:
    """`quantised_checks.tolerance` on every rank: packed documents, zigzag and contiguous shards,
    a window, GQA, K and V with means that differ between documents."""
    precision = unit.precision
    for case, (lengths, layout, causal, window, ranks) in enumerate(CASES):
        torch.manual_seed(case)
        cu, dtype = cumulative(lengths), getattr(torch, unit.dtype)
        q, k, v = (torch.randn(sum(lengths), h, unit.head_dim) for h in (2, 1, 1))
        k[: lengths[0]] += 2
        v += 3
        qkv = [x.to(dtype).to(device) for x in (q, k, v)]
        plans = (
            by_hand(lengths, ranks, CHUNKS).plans
            if layout == "by hand"
            else [plan_context(cu, (r, ranks), layout, causal, window) for r in range(ranks)]
        )
        kernel = select_quantised(qkv[0], precision)
        assert not isinstance(kernel, QuantisedReference), f"no kernel runs on {device}"
        got = run_ring(kernel, plans, qkv, precision)
        expected = run_ring(ReferenceOfOperands(kernel, precision), plans, qkv, precision)
        for rank, pair in enumerate(zip(got, expected, strict=True)):
            hold(*pair, tolerance(unit, device), f"case {case}, rank {rank} of {ranks}")
