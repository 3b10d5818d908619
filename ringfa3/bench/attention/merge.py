"""One hop of a ring with each epilogue that its forward kernel has: merge or store."""

from __future__ import annotations

import numpy as np
import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.implementations import require_kernel
from ringfa3.bench.common.problem import PreparedRun, Problem, UnsupportedCaseError
from ringfa3.kernels.dispatch import select_forward
from ringfa3.kernels.reference import accum_dtype
from ringfa3.planning.tile_schedule import FIRST, LAST, Tiling
from ringfa3.planning.tiling import plan_local

# The flags of all tiles, see `Tiling`. The first epilogue is compared with each of the others.
EPILOGUES = {
    "merge": 0,  # into the float32 output: a hop in the middle of a ring
    "store": FIRST | LAST,  # in the output dtype: the only hop
    "store in float32": FIRST,  # the first of several hops
    "merge and store": LAST,  # the last hop: reads float32, stores the output dtype
}


class Epilogue:
    """The forward kernel called directly; every call computes the same hop.

    Merging a hop with itself, any number of times, leaves its output unchanged.
    """

    def __init__(self, name: str) -> None:
        self.name, self.flags = name, EPILOGUES[name]

    def prepare(self, problem: Problem) -> PreparedRun:
        if problem.direction != FORWARD:
            raise UnsupportedCaseError("an epilogue of the forward")
        require_kernel(problem)
        case = problem.case
        q, k, v = (x.flatten(0, -3) for x in problem.inputs)
        rows, keys = np.array(case.lengths), np.array(case.key_lengths)
        plan = plan_local(rows, keys, *case.window)
        kernel = select_forward(q, plan)
        whole = plan.forward(kernel.tile_m)[0]
        out, running = torch.empty_like(q), kernel.new_partial_out(q, plan)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=accum_dtype(q.dtype))

        def attend(tiling: Tiling) -> None:
            kernel.attend(q, k, v, tiling, case.head_dim**-0.5, out, running, lse)

        def run() -> torch.Tensor:
            attend(hop)
            return out if self.flags & LAST else running

        hop = _with_flags(whole, self.flags)
        attend(_with_flags(whole, FIRST))  # initialises `running` and `lse`

        def results(result: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.flags & LAST:
                result = kernel.read_partial_out(result, whole)
            return {"out": result.to(q.dtype, copy=True)}

        return PreparedRun(run, results)


def _with_flags(tiling: Tiling, flags: int) -> Tiling:
    tiles = tiling.tiles.copy()
    tiles["flags"] = flags
    return Tiling(tiling.size, tiles, tiling.spans, tiling.earlier)
