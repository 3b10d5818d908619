"""RingFA3's forward kernel with and without some of its optimisations."""

from __future__ import annotations

import numpy as np
import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.implementations import RINGFA3
from ringfa3.bench.common.problem import (
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    prepare_forward,
)
from ringfa3.kernels import dispatch, forward
from ringfa3.kernels.dispatch import fallback_reason
from ringfa3.planning.tiling import plan_local


class ForwardVariant:
    """The forward kernel as one of `build.units.VARIANTS`, or unchanged (""); same host path."""

    def __init__(self, variant: str = "") -> None:
        self.name, self.variant = variant or RINGFA3, variant

    def prepare(self, problem: Problem) -> PreparedRun:
        case, q = problem.case, problem.q.flatten(0, -3)
        if problem.direction != FORWARD:
            raise UnsupportedCaseError("an ablation of the forward alone")
        unit = dispatch.unit_for(FORWARD, q)
        if reason := fallback_reason(FORWARD, q):
            raise UnsupportedCaseError(reason)
        assert unit is not None
        unit = unit.as_variant(self.variant)
        rows, keys = np.array(case.lengths), np.array(case.key_lengths)
        tiling = plan_local(rows, keys, *case.window).forward(unit.tile_m)[0]
        scale = case.head_dim**-0.5

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
            out = torch.empty_like(q)
            lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
            forward.attend(unit, q, k, v, tiling, scale, out, lse[:0], lse)
            return out

        return prepare_forward(problem, attend)
