"""Blocks of scores that a forward computes under a mask, and those that hold a pair.

    python -m benchmarks.masks.tiles

Refinement cuts query and key segments where spans begin and end, so tiles there are partial. With
clipped spans, tiles are whole.
"""

from __future__ import annotations

import numpy as np

from ringfa3 import Mask, plan_context
from ringfa3.bench.common.cases import span_masks
from ringfa3.planning.mask_shards import components
from ringfa3.planning.tiling import Plan

TILE_M, TILE_N = 128, 128


def block_counts(mask: Mask, m: int = TILE_M, n: int = TILE_N) -> tuple[int, int, int]:
    """(refined, computed, needed): (m, n) blocks of a head that a forward computes with refinement
    alone, that it computes, and that hold a pair.

    Rows and keys of the needed blocks count from the first token of their component.
    """
    hops = plan_context(mask, (0, 1)).hops
    refined, computed = (_computed(plan, m, n) for plan in (hops, hops.clipped))
    begins, tiles = components(mask), []
    for q0, q1, k0, k1, lo, hi in mask.diagonal_spans.tolist():
        origin = int(begins[np.searchsorted(begins, q0, side="right") - 1])
        first = np.arange((q0 - origin) // m, (q1 - 1 - origin) // m + 1)
        row0, row1 = np.maximum(origin + first * m, q0), np.minimum(origin + (first + 1) * m, q1)
        begin, end = np.maximum(k0, row0 + lo), np.minimum(k1, row1 + hi)
        some = begin < end
        low, high = (begin[some] - origin) // n, -((origin - end[some]) // n)
        for tile, a, b in zip(first[some].tolist(), low.tolist(), high.tolist(), strict=True):
            block = np.arange(a, b)
            tiles.append(np.stack((block * 0 + origin, block * 0 + tile, block)))
    needed = np.unique(np.concatenate(tiles, axis=1), axis=1).shape[1] if tiles else 0
    return refined, computed, needed


def _computed(plan: Plan, m: int, n: int) -> int:
    (tiling,) = plan.forward(m)
    _, columns = tiling.visit_columns()
    return int((-(-columns // n)).sum())  # blocks are of one span


def main() -> None:
    """Prints a line for each mask of `python -m ringfa3.bench attention --set spans`."""
    for label, mask in {**span_masks(1), "causal, 64k": Mask.documents(65536)}.items():
        refined, computed, needed = block_counts(mask)
        ideal = mask.pairs / (TILE_M * TILE_N)
        print(
            f"{label}: {computed} blocks computed, {refined} with refinement alone, {needed} hold "
            f"a pair ({computed / needed:.3f}), pairs fill {ideal / computed:.1%}"
        )


if __name__ == "__main__":
    main()
