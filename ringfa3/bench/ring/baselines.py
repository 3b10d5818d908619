"""The baselines of a ring: one GPU without communication, and the ring on a dense sequence."""

from __future__ import annotations

from dataclasses import replace

from ringfa3.bench.common.cases import FULL, MATMULS, causal_of_equal_flops
from ringfa3.bench.common.implementations import SingleDevice
from ringfa3.bench.common.problem import PreparedRun, Problem, make_problem
from ringfa3.bench.ring.implementations import Ring, ring_case_of


class DenseRing:
    """A ring on one causal sequence of equal FLOPs."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.name = ring, f"{ring.name} dense"

    def prepare(self, problem: Problem) -> PreparedRun:
        case = replace(causal_of_equal_flops(problem.case), packed=True)
        dense = make_problem(case, problem.direction, problem.q.dtype, problem.q.device)
        flops = case.flops(problem.direction)
        return replace(self.ring.prepare(dense), outputs=None, rows=None, flops=flops)


class SingleGpu:
    """One GPU on a rank's FLOPs: its tokens on as many keys as a query attends to on average, no
    mask.

    All ranks run it at the same time, each on its own.
    """

    def __init__(self, implementation: SingleDevice) -> None:
        self.implementation, self.name = implementation, f"{implementation.name} alone"

    def prepare(self, problem: Problem) -> PreparedRun:
        case = ring_case_of(problem.case)
        tokens = -(-case.tokens // case.world)
        keys = max(1, round(case.pairs / case.world / tokens))
        full = replace(case, lengths=(tokens,), keys=(keys,), window=FULL, packed=False)
        local = make_problem(full, problem.direction, problem.q.dtype, problem.q.device)
        flops = MATMULS[problem.direction] * tokens * keys * case.head_dim * case.heads
        return replace(self.implementation.prepare(local), outputs=None, flops=flops)


class SingleGpuSameMask:
    """One GPU on a rank's number of tokens, under the same mask."""

    def __init__(self, implementation: SingleDevice) -> None:
        self.implementation, self.name = implementation, f"{implementation.name} alone, same mask"

    def prepare(self, problem: Problem) -> PreparedRun:
        case = ring_case_of(problem.case)
        shard = replace(case, lengths=(-(-case.tokens // case.world),), world=1)
        local = make_problem(shard, problem.direction, problem.q.dtype, problem.q.device)
        flops = shard.flops(problem.direction)
        return replace(self.implementation.prepare(local), outputs=None, flops=flops)
