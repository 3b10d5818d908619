"""RingFA3 on one device, and the base class of every single-device implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.bench.common.cases import FORWARD, Case
from ringfa3.bench.common.problem import (
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    prepare_backward,
    prepare_forward,
)
from ringfa3.kernels.dispatch import executor_reason

RINGFA3, FA3, FA4 = "RingFA3", "FA3", "FA4"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LoadError(RuntimeError):
    """A library that was requested cannot be loaded."""


class SingleDevice(ABC):
    """An implementation on one device, as a differentiable function."""

    name: str

    @abstractmethod
    def attend(self, case: Case, device: torch.device) -> Attend:
        """Attention under the mask of a case, for any number of heads.

        Raises UnsupportedCaseError.
        """

    def prepare(self, problem: Problem) -> PreparedRun:
        attend = self.attend(problem.case, problem.q.device)
        if problem.direction == FORWARD:
            return prepare_forward(problem, attend)
        return prepare_backward(problem, attend)


class RingFA3(SingleDevice):
    """RingFA3's public functions. On a GPU only where a kernel runs them, never the executor."""

    def __init__(self, name: str = RINGFA3, deterministic: bool = False) -> None:
        self.name, self.deterministic = name, deterministic

    def attend(self, case: Case, device: torch.device) -> Attend:
        # Causal is the window (-1, 0).
        options: Any = {"window_size": case.window, "deterministic": self.deterministic}
        options["softmax_scale"] = case.head_dim**-0.5  # q may have columns of zeros beyond it
        if not case.packed:
            return lambda q, k, v: tensor(flash_attn_func(q, k, v, **options))
        cu = torch.tensor(case.cumulative, dtype=torch.int32)  # on the CPU: the plan reads it there
        return lambda q, k, v: tensor(flash_attn_varlen_func(q, k, v, cu, cu, **options))

    def prepare(self, problem: Problem) -> PreparedRun:
        require_kernel(problem)
        return super().prepare(problem)


def name_of(library: str, deterministic: bool) -> str:
    return f"{library} deterministic" if deterministic else library


def require_kernel(problem: Problem) -> None:
    """Raises UnsupportedCaseError for a problem on a GPU that only the executor can run."""
    q = problem.q
    if q.is_cuda and (reason := executor_reason(problem.direction, q.flatten(0, -3))):
        raise UnsupportedCaseError(reason)


def tensor(x: Any) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x
