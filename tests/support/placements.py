"""Documents placed on ranks in any way, even one that no layout has, and ring calls on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.sharding import Segments, by_rank, partition
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.symmetric import schedule
from ringfa3.symmetric.stream_ops import Operation

TILE = 4  # rows and keys
Calls = list[tuple[str, list[list[Operation]]]]  # direction, operations by rank


@dataclass(frozen=True)
class Placement:
    """Self-attending documents. shards[r] is on rank r; band: (left, right), -1 for unlimited."""

    lengths: tuple[int, ...]
    shards: list[Segments]
    band: tuple[int, int]

    @property
    def world(self) -> int:
        return len(self.shards)

    @cached_property
    def plans(self) -> list[ContextPlan]:
        lengths = np.array(self.lengths, np.int64)
        hosts = (0,) * self.world
        return [
            ContextPlan(lengths, self.shards, rank, None, hosts, "by hand", False, self.band)
            for rank in range(self.world)
        ]

    def tilings(self, direction: str, rank: int) -> list[Tiling]:
        plan = self.plans[rank]
        if direction == "gathered":
            return plan.gathered.forward(TILE)
        return plan.hops.forward(TILE) if direction == "forward" else plan.hops.backward(TILE, TILE)

    def operations(self, direction: str, rank: int, parity: int) -> list[Operation]:
        made: list[Operation] = getattr(schedule, direction)(
            self.plans[rank].kv_exchange, rank, parity
        )
        return made


def by_hand(
    lengths: Sequence[int], world: int, chunks: Sequence[tuple[int, int, int, int]]
) -> Placement:
    """Causal documents; chunks: (rank, document, position, length) of each."""
    shards = by_rank(world, *np.array(chunks, np.int64).T)
    return Placement(tuple(lengths), shards, (-1, 0))


def laid_out(lengths: Sequence[int], world: int, layout: str = "zigzag",
             band: tuple[int, int] = (-1, 0)) -> Placement:  # fmt: skip
    shards = partition(np.array(lengths, np.int64), world, layout, *band)
    return Placement(tuple(lengths), shards, band)


def placed(pieces: Sequence[tuple[int, int, int]], world: int, band: tuple[int, int]) -> Placement:
    """Documents in pieces (document, tokens, rank); those of a document in token order."""
    position: dict[int, int] = {}
    by_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for document, tokens, rank in pieces:
        begin = position.get(document, 0)
        by_rank[rank].append((document, begin, tokens))
        position[document] = begin + tokens
    shards = []
    for held in by_rank:
        sequence, begin, length = np.array(sorted(held), np.int64).reshape(-1, 3).T
        shards.append(Segments(np.cumsum(length) - length, length, sequence, begin))
    return Placement(tuple(position[d] for d in sorted(position)), shards, band)


def scattered(rng: random.Random, world: int) -> Placement:
    """A few documents, each in a few pieces on ranks in random order."""
    pieces = [
        (document, rng.randint(1, 9), rank)
        for document in range(rng.randint(1, 4))
        for rank in rng.sample(range(world), rng.randint(1, world))
    ]
    return placed(pieces, world, rng.choice([(-1, 0), (-1, -1), (5, 0), (0, 6)]))


def directions(
    placements: Sequence[Placement], forwards: Sequence[str] = ("forward",)
) -> list[tuple[str, Placement]]:
    """A training step: a forward and a backward of each layer, each layer with its placement.

    forwards: "forward" or "gathered", for the layers in turn.
    """
    order = list(zip(itertools.cycle(forwards), placements, strict=False))
    return order + [("backward", p) for p in reversed(placements)]


def any_order(rng: random.Random, world: int) -> list[tuple[str, Placement]]:
    """Four calls of two layers, in no order of a training step."""
    both = [scattered(rng, world) for _ in range(2)]
    return [(rng.choice(("forward", "gathered", "backward")), rng.choice(both)) for _ in range(4)]


def layers(placements: Sequence[Placement], forwards: Sequence[str] = ("forward",)) -> Calls:
    """The operations of a step."""
    return in_order(directions(placements, forwards))


def in_order(order: Sequence[tuple[str, Placement]]) -> Calls:
    """The operations of calls, in parities 0 and 1 in turn."""
    calls: Calls = []
    for direction, placement in order:
        ranks = range(placement.world)
        parity = len(calls) % 2
        calls.append((direction, [placement.operations(direction, r, parity) for r in ranks]))
    return calls
