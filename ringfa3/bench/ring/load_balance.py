"""How evenly a plan distributes a case over ranks, how full its tiles are, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringfa3.bench.ring.cases import RingCase
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.tile_schedule import Tiling


@dataclass(frozen=True)
class LoadBalance:
    """A case on its ranks.

    imbalance       visible pairs of the rank with most over the mean
    tile_occupancy  real rows of forward tiles over all, each weighted by the keys it visits
    kv_rows         rows of K/V, with all heads, sent between ranks in a forward
    kv_share        `kv_rows` over those of an all-gather
    """

    imbalance: float
    tile_occupancy: float
    kv_rows: int
    kv_share: float

    @classmethod
    def of(cls, case: RingCase, tile_m: int) -> LoadBalance:
        """tile_m: rows of a forward tile."""
        plans = [plan_of_rank(case, rank) for rank in range(case.world)]
        work = plans[0].work_per_rank
        visited = np.sum([_visited(t) for plan in plans for t in plan.hops.forward(tile_m)], 0)
        rows = int(np.diff(plans[0].kv_exchange.runs()[:, 2:]).sum())
        all_gather = case.tokens * (case.world - 1)
        return cls(
            imbalance=max(work) * case.world / sum(work),
            tile_occupancy=float(visited[0] / (visited[1] * tile_m)),
            kv_rows=rows,
            kv_share=rows / all_gather if all_gather else 0.0,
        )


def plan_of_rank(case: RingCase, rank: int) -> ContextPlan:
    ranks = rank, case.world
    if case.spans is not None:
        return plan_context(case.spans, ranks)
    return plan_context(case.cumulative, ranks, "zigzag", True, (case.window[0], -1))


def _visited(tiling: Tiling) -> tuple[int, int]:
    """Sums over forward tiles: keys visited times real rows, and keys visited."""
    real = keys = 0
    for tile in tiling.tiles:
        first, rows = int(tile["first_span"]), int(tile["rows"])
        spans = tiling.spans[first : first + int(tile["num_spans"])]
        i = int(tile["row0"]) - spans["q0"].astype(np.int64)
        end = np.minimum(spans["k1"] - spans["k0"], i + rows + spans["hi"])
        seen = int(np.maximum(0, end - np.maximum(0, i + spans["lo"])).sum())
        real, keys = real + rows * seen, keys + seen
    return real, keys
