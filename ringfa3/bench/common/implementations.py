"""RingFA3 on one device, and the base class of every single-device implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ringfa3 import flash_attn_func, flash_attn_mask_func, flash_attn_varlen_func
from ringfa3.bench.common.cases import BACKWARD, FORWARD, Case
from ringfa3.bench.common.problem import (
    Implementation,
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    make_problem,
    prepare_backward,
    prepare_forward,
)
from ringfa3.kernels.dispatch import fallback_reason
from ringfa3.kernels.reference import accum_dtype

RINGFA3, FA3, FA4 = "RingFA3", "FA3", "FA4"
# Most rms error of 8 bits, over the rms of the output or gradient; about twice that of sigma 4.
RMS = {"fp8": 0.2, "int8": 0.05}

# A sink, in nats, that changes no bit of a result: N(0, 1) is the distribution of scores. Kernels
# compute the same for it as for any other.
FAR_BELOW = -100.0

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
    """RingFA3's public functions. On a GPU only where a kernel runs them, never the PyTorch
    fallback.

    `precision` as theirs: "fp8" and "int8" quantise in every call. `sink` is that of every head, in
    nats; a backward computes its gradient, too. None: no sinks.
    """

    def __init__(
        self,
        name: str = RINGFA3,
        deterministic: bool = False,
        precision: str = "native",
        sink: float | None = None,
    ) -> None:
        self.name, self.deterministic, self.precision = name, deterministic, precision
        self.sink = sink

    def attend(self, case: Case, device: torch.device) -> Attend:
        sinks: dict[tuple[int, bool], torch.Tensor] = {}

        def sink_for(q: torch.Tensor) -> torch.Tensor | None:
            if self.sink is None:
                return None
            key = heads, differentiated = q.shape[-2], q.requires_grad
            if key not in sinks:
                made = torch.full((heads,), self.sink, dtype=accum_dtype(q.dtype))
                sinks[key] = made.to(device).requires_grad_(differentiated)
            return sinks[key]

        # Causal is the window (-1, 0).
        options: Any = {
            "window_size": case.window,
            "deterministic": self.deterministic,
            "precision": self.precision,
            "softmax_scale": case.head_dim**-0.5,  # q may have columns of zeros beyond it
        }
        if (spans := case.spans) is not None:
            del options["window_size"]
            return lambda q, k, v: tensor(
                flash_attn_mask_func(q, k, v, spans, sink=sink_for(q), **options)
            )
        if not case.packed:
            return lambda q, k, v: tensor(flash_attn_func(q, k, v, sink=sink_for(q), **options))
        cu = torch.tensor(case.cumulative, dtype=torch.int32)  # on the CPU: the plan reads it there
        return lambda q, k, v: tensor(
            flash_attn_varlen_func(q, k, v, cu, cu, sink=sink_for(q), **options)
        )

    def prepare(self, problem: Problem) -> PreparedRun:
        require_kernel(problem, self.precision)
        return replace(super().prepare(problem), rms=RMS.get(self.precision))


class OnAnotherCase:
    """An implementation on the case that `other` makes of the problem's. It is timed only.

    same_result: the other case has the same result, so times are compared, not FLOPs per second.
    """

    def __init__(
        self,
        name: str,
        implementation: Implementation,
        other: Callable[[Case], Case],
        same_result: bool = False,
    ) -> None:
        self.name, self.implementation = name, implementation
        self.other, self.same_result = other, same_result

    def prepare(self, problem: Problem) -> PreparedRun:
        case = self.other(problem.case)
        made = make_problem(case, problem.direction, problem.q.dtype, problem.q.device)
        flops = None if self.same_result else case.flops(problem.direction)
        return replace(self.implementation.prepare(made), outputs=None, rows=None, flops=flops)


def name_of(library: str, deterministic: bool) -> str:
    return f"{library} deterministic" if deterministic else library


def require_kernel(problem: Problem, precision: str = "native") -> None:
    """Raises UnsupportedCaseError for a problem on a GPU that only the PyTorch fallback can run.

    In 8 bits kernels must quantise and attend before a backward, too.
    """
    if not problem.q.is_cuda:
        return
    needed = [(problem.direction, precision)]
    if precision in RMS:
        needed = [("quantise", "native"), (FORWARD, precision)]
        if problem.direction == BACKWARD:
            needed.append((BACKWARD, "dequantised"))
    q, v_dim = problem.q.flatten(0, -3), problem.v.shape[-1]
    for direction, of in needed:
        if (reason := fallback_reason(direction, q, of, v_dim=v_dim)) is not None:
            raise UnsupportedCaseError(reason)


def tensor(x: Any) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x
