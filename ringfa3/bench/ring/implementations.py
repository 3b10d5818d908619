"""RingFA3's ring, its baselines, and the base class of every implementation over several ranks.

Baselines are one GPU without communication, and the ring on a dense sequence.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from ringfa3 import plan_context, ring_attn_func
from ringfa3.bench.common.cases import FORWARD, FULL, Case, causal_of_equal_flops
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.implementations import (
    RINGFA3,
    Attend,
    OnAnotherCase,
    SingleDevice,
    require_kernel,
    tensor,
)
from ringfa3.bench.common.problem import (
    PreparedRun,
    Problem,
    prepare_backward,
    prepare_forward,
)
from ringfa3.bench.ring.cases import RingCase
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.placement.costs import Ints
from ringfa3.ring.group import RingGroup
from ringfa3.symmetric import forward_mode


class Distributed(ABC):
    """An implementation over several ranks: each rank has a shard of a problem's tokens."""

    name: str

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @abstractmethod
    def rows(self, case: RingCase) -> torch.Tensor:
        """(t,) this rank's tokens, in order. Raises UnsupportedCaseError."""

    @abstractmethod
    def attend(self, case: Case, device: torch.device) -> Attend:
        """Attention of this rank's q (t, h, d), k and v (t, h_kv, d)."""

    def local(self, problem: Problem) -> Problem:
        """This rank's shard of a problem."""
        rows = self.rows(ring_case_of(problem.case)).to(problem.q.device)
        q, k, v = (x[rows] for x in problem.inputs)
        dout = problem.dout if problem.direction == FORWARD else problem.dout[rows]
        return replace(problem, q=q, k=k, v=v, dout=dout)

    @contextmanager
    def context(self, device: torch.device) -> Iterator[None]:
        """Active while anything is computed."""
        yield

    def prepare(self, problem: Problem) -> PreparedRun:
        local, device = self.local(problem), problem.q.device
        attend = self.attend(problem.case, device)
        make = prepare_forward if problem.direction == FORWARD else prepare_backward
        rows = self.rows(ring_case_of(problem.case)).to(device)
        with ExitStack() as stack:
            stack.enter_context(self.context(device))
            return replace(make(local, attend), rows=rows, close=stack.pop_all().close)

    def forward_and_backward(self, problem: Problem) -> Callable[[], object]:
        """Both passes on this rank's shard; its inputs are allocated here."""
        local, device = self.local(problem), problem.q.device
        attend = self.attend(problem.case, device)
        inputs = tuple(x.detach().requires_grad_() for x in local.inputs)

        def run() -> object:
            with self.context(device):
                return torch.autograd.grad(attend(*inputs), inputs, local.dout)

        return run


def ring_case_of(case: Case) -> RingCase:
    assert isinstance(case, RingCase)
    return case


class Ring(Distributed):
    """RingFA3's ring. On a GPU only where a kernel runs it, never the PyTorch fallback."""

    def __init__(
        self, comm: Communicator, transport: str = "auto", forward: str | None = None
    ) -> None:
        """forward: one of `forward_mode.FORWARD_MODES`; None: the default rule."""
        super().__init__(comm)
        self.transport, self.forward = transport, forward
        named = (RINGFA3, "" if transport == "auto" else transport, forward or "")
        self.name = " ".join(filter(None, named))

    @property
    def may_use_symmetric(self) -> bool:
        return self.transport in ("auto", "symmetric")

    def plan(self, case: Case) -> ContextPlan:
        if case.spans is not None:
            return plan_context(case.spans, self._group)
        return self.plan_of(case.cumulative, case.window[0])

    def plan_of(self, cu_seqlens: list[int], left: int = -1) -> ContextPlan:
        """The causal plan of packed documents, with a window of `left` keys before each query."""
        return plan_context(cu_seqlens, self._group, "zigzag", True, (left, -1))

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.comm.process_group(self.name)

    def rows(self, case: RingCase) -> torch.Tensor:
        return self.plan(case).token_index

    def attend(self, case: Case, device: torch.device) -> Attend:
        plan = self.plan(case)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if self.forward is None:
                return tensor(ring_attn_func(q, k, v, plan, transport=self.transport))
            before = os.environ.get(forward_mode.FORWARD_MODE_ENV)
            os.environ[forward_mode.FORWARD_MODE_ENV] = self.forward
            try:
                return tensor(ring_attn_func(q, k, v, plan, transport=self.transport))
            finally:
                os.environ.pop(forward_mode.FORWARD_MODE_ENV)
                if before is not None:
                    os.environ[forward_mode.FORWARD_MODE_ENV] = before

        return attend

    def prepare(self, problem: Problem) -> PreparedRun:
        require_kernel(problem)
        return super().prepare(problem)

    @property
    def moved_by(self) -> str | None:
        """The transport of the last call; None for one rank."""
        if self._group is None or self.comm.world == 1:
            return None
        return RingGroup.of(self._group).connections.last_transport


def dense_ring(ring: Ring) -> OnAnotherCase:
    """A ring on one causal sequence of equal FLOPs."""
    return OnAnotherCase(
        f"{ring.name} dense", ring, lambda case: replace(causal_of_equal_flops(case), packed=True)
    )


class SingleGpu(OnAnotherCase):
    """One GPU on a rank's FLOPs: its tokens on as many keys as a query attends to on average, no
    mask.

    All ranks run it at the same time, each on its own.
    """

    def __init__(self, implementation: SingleDevice) -> None:
        super().__init__(f"{implementation.name} alone", implementation, full_of_a_rank)


def full_of_a_rank(case: Case) -> RingCase:
    """The case of `SingleGpu`."""
    case = ring_case_of(case)
    tokens = -(-case.tokens // case.world)
    keys = max(1, round(case.pairs / case.world / tokens))
    return replace(case, lengths=(tokens,), keys=(keys,), window=FULL, packed=False, world=1)


def single_gpu_same_mask(implementation: SingleDevice) -> OnAnotherCase:
    """One GPU under the same mask, on a rank's number of tokens; under spans, on all."""
    return OnAnotherCase(f"{implementation.name} alone, same mask", implementation, of_one_rank)


def of_one_rank(case: Case) -> RingCase:
    """The case of `single_gpu_same_mask`."""
    case = ring_case_of(case)
    if case.spans is not None:
        return replace(case, world=1)
    return replace(case, lengths=documents_of_a_rank(case), world=1)


def documents_of_a_rank(case: RingCase) -> tuple[int, ...]:
    """Lengths of consecutive documents with a rank's number of tokens; the last one is cut to fit.

    Of all first documents, the one from which the causal pairs are nearest to a rank's mean.
    """
    tokens = -(-case.tokens // case.world)

    def pairs(lengths: Ints) -> int:
        return int((lengths * (lengths + 1) // 2).sum())

    def taken_from(first: int) -> Ints:
        ends = np.cumsum(np.roll(case.lengths, -first))
        taken: Ints = np.diff(np.minimum(ends, tokens), prepend=0)
        return taken

    mean = pairs(np.array(case.lengths, np.int64)) / case.world
    found = map(taken_from, range(len(case.lengths)))
    nearest = min(found, key=lambda lengths: abs(pairs(lengths) - mean))
    return tuple(nearest[nearest > 0].tolist())
