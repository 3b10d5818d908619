"""RingFA3's attention kernel for 8-bit operands alone, without their quantisation; and its variants
of the ablation."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.implementations import RINGFA3, RMS, require_kernel
from ringfa3.bench.common.problem import PreparedRun, Problem, UnsupportedCaseError
from ringfa3.build.units import IN_KERNEL_TRANSPOSE
from ringfa3.kernels.dispatch import QuantisedForward, select_quantised, unit_for
from ringfa3.kernels.quantise import TiledKV
from ringfa3.kernels.quantised import QuantisedKernel
from ringfa3.kernels.reference import accum_dtype
from ringfa3.planning.tiling import Plan, plan_local
from ringfa3.quantisation.channels import KVCentres
from ringfa3.quantisation.formats import E4M3

QKV: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (n, h or hk, d)


class QuantisedRingFA3:
    """The forward of "fp8" or "int8" on operands that `prepare` quantises, once.

    `prepare` raises UnsupportedCaseError for a backward.
    """

    def __init__(self, precision: str) -> None:
        self.name, self.precision = f"{RINGFA3} {precision}", precision

    def prepare(self, problem: Problem) -> PreparedRun:
        if problem.direction != FORWARD:
            raise UnsupportedCaseError(
                "only the forward has operands that are quantised in advance"
            )
        require_kernel(problem, self.precision)
        case = problem.case
        q, k, v = (x.flatten(0, -3) for x in problem.inputs)
        kernel = self._kernel(q)
        plan = plan_local(np.array(case.lengths), np.array(case.key_lengths), *case.window)
        operands = self._operands(kernel, (q, k, v), plan)
        tiling, scale = plan.forward(kernel.tile_m)[0], case.head_dim**-0.5
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=accum_dtype(q.dtype))

        def run() -> torch.Tensor:
            kernel.attend(*operands, tiling, scale, out, out[:0], lse)
            return out

        return PreparedRun(run, lambda out: {"out": out.clone()}, rms=RMS[self.precision])

    def _kernel(self, q: torch.Tensor) -> QuantisedForward:
        return select_quantised(q, self.precision)

    def _operands(self, kernel: QuantisedForward, qkv: QKV, plan: Plan) -> tuple[Any, Any]:
        return kernel.quantise(*qkv, plan)


class Fp8Variant(QuantisedRingFA3):
    """The same of "fp8" as one of `build.units.FP8_VARIANTS`."""

    def __init__(self, variant: str) -> None:
        super().__init__("fp8")
        self.name, self.variant = f"{self.name} {variant}", variant

    def _kernel(self, q: torch.Tensor) -> QuantisedForward:
        kernel, unit = select_quantised(q, self.precision), unit_for(FORWARD, q, self.precision)
        if unit is None or not isinstance(kernel, QuantisedKernel):
            raise UnsupportedCaseError("a kernel of the ablation, which needs a GPU")
        return QuantisedKernel(unit.as_variant(self.variant), kernel.quantiser, kernel.formats)

    def _operands(self, kernel: QuantisedForward, qkv: QKV, plan: Plan) -> tuple[Any, Any]:
        queries, kv = super()._operands(kernel, qkv, plan)
        if self.variant == IN_KERNEL_TRANSPOSE:
            kv = TiledKV(kv.k, kv.k_scale, e4m3_rows(qkv[2], kv.centres), kv.centres, kv.tiles)
        return queries, kv


def e4m3_rows(v: torch.Tensor, centres: KVCentres) -> torch.Tensor:
    """(n, hk, d) e4m3: v (n, hk, d) in row order, as `quantisation.operands` defines it."""
    return E4M3.round((v.float() - centres.v_mean) / centres.v_scale)
