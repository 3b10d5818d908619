"""RingFA3's attention kernel for 8-bit operands alone, without their quantisation."""

from __future__ import annotations

import numpy as np
import torch

from ringfa3.bench.common.implementations import RINGFA3, RMS, require_kernel
from ringfa3.bench.common.problem import PreparedRun, Problem
from ringfa3.kernels.dispatch import select_quantised
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.tiling import plan_local


class QuantisedRingFA3:
    """The forward of "fp8" or "int8" on operands that `prepare` quantises, once."""

    def __init__(self, precision: str) -> None:
        self.name, self.precision = f"{RINGFA3} {precision}", precision

    def prepare(self, problem: Problem) -> PreparedRun:
        require_kernel(problem, self.precision)
        case = problem.case
        q, k, v = (x.flatten(0, -3) for x in problem.inputs)
        kernel = select_quantised(q, self.precision)
        plan = plan_local(np.array(case.lengths), np.array(case.key_lengths), *case.window)
        operands = kernel.quantise(q, k, v, plan)
        tiling, scale = plan.forward(kernel.tile_m)[0], case.head_dim**-0.5
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=statistics_dtype(q.dtype))

        def run() -> torch.Tensor:
            kernel.attend(*operands, tiling, scale, out, out[:0], lse)
            return out

        return PreparedRun(run, lambda out: {"out": out.clone()}, rms=RMS[self.precision])
