"""RingFA3's forward with 8-bit operands: the attention kernel alone, or with quantisation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.implementations import RINGFA3, tensor
from ringfa3.bench.common.problem import (
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    prepare_forward,
)
from ringfa3.kernels.dispatch import executor_reason, select_quantised
from ringfa3.kernels.reference import statistics_dtype
from ringfa3.planning.tiling import plan_local

RMS = {"fp8": 0.2, "int8": 0.05}  # of errors, over that of O; about twice that of sigma 4


class QuantisedRingFA3:
    """precision: "fp8" or "int8". whole: quantise in every call, by the public functions."""

    def __init__(self, precision: str, whole: bool = False) -> None:
        self.name = f"{RINGFA3} {precision}" + " with quantisation" * whole
        self.precision, self.whole = precision, whole

    def prepare(self, problem: Problem) -> PreparedRun:
        q = problem.q.flatten(0, -3)
        if problem.direction != FORWARD:
            raise UnsupportedCaseError("8 bits are of the forward: its backward is that of bf16")
        if q.is_cuda:
            of_kernels = executor_reason("quantise", q), executor_reason(FORWARD, q, self.precision)
            if reason := next(filter(None, of_kernels), None):
                raise UnsupportedCaseError(reason)
        prepared = self._call(problem) if self.whole else self._kernel(problem)
        return replace(prepared, rms=RMS[self.precision])

    def _call(self, problem: Problem) -> PreparedRun:
        case, precision = problem.case, self.precision
        if not case.packed:
            return prepare_forward(
                problem,
                lambda q, k, v: tensor(
                    flash_attn_func(q, k, v, window_size=case.window, precision=precision)
                ),
            )
        cu = torch.tensor(case.cumulative, dtype=torch.int32)  # on the CPU: the plan reads it there
        return prepare_forward(
            problem,
            lambda q, k, v: tensor(
                flash_attn_varlen_func(
                    q, k, v, cu, cu, window_size=case.window, precision=precision
                )
            ),
        )

    def _kernel(self, problem: Problem) -> PreparedRun:
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

        return PreparedRun(run, lambda out: {"out": out.clone()})
