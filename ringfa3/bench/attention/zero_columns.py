"""A problem with columns of zeros up to the head dim of the kernel that runs it."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ringfa3.bench.attention.cases import kernel_head_dim
from ringfa3.bench.common.implementations import RINGFA3, RingFA3
from ringfa3.bench.common.problem import Outputs, PreparedRun, Problem


class ZeroColumns(RingFA3):
    """RingFA3 on q, k, v and dout that have the kernel's own head dim in memory.

    The zeros are there before the call and are not timed.
    """

    def __init__(self) -> None:
        super().__init__(f"{RINGFA3} at the kernel's head dim")

    def prepare(self, problem: Problem) -> PreparedRun:
        d = problem.case.head_dim
        wide = [self._widened(x, d) for x in (*problem.inputs, problem.dout)]
        prepared = super().prepare(Problem(problem.case, problem.direction, *wide))
        outputs = prepared.outputs
        assert outputs is not None

        def own_columns(result: object) -> Outputs:
            return {name: x[..., :d] for name, x in outputs(result).items()}

        return replace(prepared, outputs=own_columns)

    @staticmethod
    def _widened(x: torch.Tensor, d: int) -> torch.Tensor:
        return F.pad(x, (0, kernel_head_dim(d) - d)) if x.numel() else x
