"""cuDNN's FP8 forward, by its Python frontend, on operands with one scale a tensor."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.implementations import RMS
from ringfa3.bench.common.problem import (
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    check_sdpa_mask,
)
from ringfa3.quantisation.formats import E4M3

MODULE = "cudnn"
NAME = "cuDNN fp8"
P_SCALE = 256.0  # of P, which is at most 1
ONE = [1, 1, 1, 1]


class CudnnFp8:
    """`sdpa_fp8` of the module: e4m3 Q, K, V and O. `prepare` quantises Q, K and V, once."""

    name = NAME

    def __init__(self, module: ModuleType) -> None:
        self.module, self._handle = module, None
        self.identity = {"module": MODULE, "version": str(module.__version__)}

    def prepare(self, problem: Problem) -> PreparedRun:
        case = problem.case
        if problem.direction != FORWARD:
            raise UnsupportedCaseError("8 bits are of the forward")
        check_sdpa_mask(case)
        scales = [E4M3.scale(x.abs().amax()) for x in problem.inputs]
        tensors = [E4M3.round(x.float() / s) for x, s in zip(problem.inputs, scales, strict=True)]
        out = torch.empty_like(tensors[0])
        try:
            run = self._built(tensors, scales, out, case.head_dim**-0.5, case.causal)
        except (RuntimeError, ValueError, self.module.cudnnGraphNotSupportedError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UnsupportedCaseError(lines[0]) from error

        def outputs(stored: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": (stored.float() * scales[2]).to(problem.q.dtype).flatten(0, 1)}

        return PreparedRun(run, outputs, rms=RMS["fp8"])

    def _built(
        self,
        tensors: list[torch.Tensor],
        scales: list[torch.Tensor],
        out: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> Any:
        """A call that computes `out` (b, s, h, d) of q, k and v (b, s, h, d) and returns it.

        O has the scale of V: no weighted mean of V exceeds its largest magnitude.
        """
        cudnn, (q, k, v) = self.module, tensors
        if self._handle is None:
            self._handle = cudnn.create_handle()
        stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else 0
        cudnn.set_stream(handle=self._handle, stream=stream)
        e4m3, float32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=e4m3,
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
        )
        pack: dict[Any, torch.Tensor] = {}

        def heads_second(x: torch.Tensor) -> dict[str, list[int]]:
            y = x.transpose(1, 2)
            return {"dim": list(y.shape), "stride": list(y.stride())}

        def given(name: str, x: torch.Tensor) -> Any:
            made = graph.tensor(name=name, data_type=e4m3, **heads_second(x))
            pack[made] = x.view(torch.uint8)
            return made

        def number(name: str, x: torch.Tensor | float) -> Any:
            made = graph.tensor(name=name, dim=ONE, stride=ONE, data_type=float32)
            pack[made] = torch.as_tensor(x, dtype=torch.float32, device=q.device).view(1, 1, 1, 1)
            return made

        o, lse, *amax = graph.sdpa_fp8(
            q=given("q", q),
            k=given("k", k),
            v=given("v", v),
            descale_q=number("descale_q", scales[0]),
            descale_k=number("descale_k", scales[1]),
            descale_v=number("descale_v", scales[2]),
            descale_s=number("descale_s", 1 / P_SCALE),
            scale_s=number("scale_s", P_SCALE),
            scale_o=number("scale_o", 1 / scales[2]),
            attn_scale=softmax_scale,
            use_causal_mask=causal,
            generate_stats=True,  # the other implementations write the LSE, too
        )
        place = heads_second(out)
        o.set_output(True).set_dim(place["dim"]).set_stride(place["stride"]).set_data_type(e4m3)
        pack[o] = out.view(torch.uint8)
        b, s, h, _ = q.shape
        lse.set_output(True).set_dim([b, h, s, 1]).set_stride([h * s, s, 1, 1])
        lse.set_data_type(float32)
        pack[lse] = torch.empty(b, h, s, 1, device=q.device)
        for largest in amax:  # of P and of O
            largest.set_output(True).set_dim(ONE).set_stride(ONE).set_data_type(float32)
            pack[largest] = torch.empty(1, 1, 1, 1, device=q.device)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)

        def run() -> torch.Tensor:
            graph.execute(pack, workspace, handle=self._handle)
            return out

        return run


def cudnn_fp8() -> CudnnFp8 | str:
    """cuDNN's FP8 forward, or why it cannot be imported."""
    try:
        return CudnnFp8(importlib.import_module(MODULE))
    except (ImportError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{MODULE} of nvidia-cudnn-frontend cannot be imported ({reason})"
