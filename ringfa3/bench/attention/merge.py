"""One hop of a ring as its forward kernel stores or merges it."""

from __future__ import annotations

import numpy as np
import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.implementations import refuse_executor
from ringfa3.bench.common.problem import Attempt, Problem, RefusalError
from ringfa3.kernels.dispatch import select_forward
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.tiling import FIRST, LAST, Tiling, plan_local

# The flags of all tiles, see `Tiling`. The first is held against each of the others.
EPILOGUES = {
    "merge": 0,  # into the running float32 output, as in the middle of a ring
    "store": FIRST | LAST,  # in the output dtype, as where there is one hop
    "store in float32": FIRST,  # as at the first of several
    "merge and store": LAST,  # reads the float32, as at the last
}


class Epilogue:
    """Our forward, called directly; every call merges the same hop again, or stores it.

    The output of a hop that is merged with itself, however often, is that of the hop.
    """

    def __init__(self, name: str) -> None:
        self.name, self.flags = name, EPILOGUES[name]

    def prepare(self, problem: Problem) -> Attempt:
        if problem.direction != FORWARD:
            raise RefusalError("an epilogue of the forward")
        refuse_executor(problem)
        case = problem.case
        q, k, v = (x.flatten(0, -3) for x in problem.inputs)
        kernel = select_forward(q)
        rows, keys = np.array(case.lengths), np.array(case.key_lengths)
        whole = plan_local(rows, keys, *case.window).forward(kernel.tile_m)[0]
        exact = statistics_dtype(q.dtype)
        out, running = torch.empty_like(q), torch.empty_like(q, dtype=exact)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=exact)

        def attend(tiling: Tiling) -> None:
            kernel.attend(q, k, v, tiling, case.head_dim**-0.5, out, running, lse)

        def run() -> torch.Tensor:
            attend(hop)
            return out if self.flags & LAST else running

        hop = _flagged(whole, self.flags)
        attend(_flagged(whole, FIRST))  # what there is to merge with
        return Attempt(run, lambda found: {"out": found.to(q.dtype, copy=True)})


def _flagged(tiling: Tiling, flags: int) -> Tiling:
    tiles = tiling.tiles.copy()
    tiles["flags"] = flags
    return Tiling(tiling.size, tiles, tiling.spans, tiling.earlier)
