"""PyTorch's scaled_dot_product_attention, cuDNN's kernels among its backends."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringfa3.bench.common.cases import FORWARD, Case
from ringfa3.bench.common.implementations import Attend, SingleDevice
from ringfa3.bench.common.problem import (
    PreparedRun,
    Problem,
    check_sdpa_mask,
    prepare_forward,
)


class Sdpa(SingleDevice):
    """scaled_dot_product_attention with one backend."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def attend(self, case: Case, device: torch.device) -> Attend:
        check_sdpa_mask(case)
        grouped = case.heads != case.kv_heads

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(self.backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return attend

    def prepare(self, problem: Problem) -> PreparedRun:
        if problem.direction != FORWARD:
            return super().prepare(problem)
        # Inputs that require gradients make it write the LSE too, as the other implementations do.
        q, k, v = (x.detach().requires_grad_() for x in problem.inputs)
        return prepare_forward(
            replace(problem, q=q, k=k, v=v), self.attend(problem.case, problem.q.device)
        )
