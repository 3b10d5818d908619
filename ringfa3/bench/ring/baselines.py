"""What a ring is measured by: one GPU without communication, and itself without gaps."""

from __future__ import annotations

from dataclasses import replace

from ringfa3.bench.common.cases import FULL, MATMULS, causal_of_equal_flops
from ringfa3.bench.common.implementations import OneDevice
from ringfa3.bench.common.problem import Attempt, Problem, make_problem
from ringfa3.bench.ring.implementations import Ring, ring_case_of


class Dense:
    """A ring on one causal sequence of as many FLOPs."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.name = ring, f"{ring.name} dense"

    def prepare(self, problem: Problem) -> Attempt:
        case = replace(causal_of_equal_flops(problem.case), packed=True)
        dense = make_problem(case, problem.direction, problem.q.dtype, problem.q.device)
        flops = case.flops(problem.direction)
        return replace(self.ring.prepare(dense), outputs=None, rows=None, flops=flops)


class Yardstick:
    """One device on a rank's FLOPs: its tokens against as many keys as a query sees on average.

    Every rank runs it, all at once, and none waits for another.
    """

    def __init__(self, contestant: OneDevice) -> None:
        self.contestant, self.name = contestant, f"{contestant.name} alone"

    def prepare(self, problem: Problem) -> Attempt:
        case = ring_case_of(problem.case)
        tokens = -(-case.tokens // case.world)
        keys = max(1, round(case.pairs / case.world / tokens))
        mask = replace(case, lengths=(tokens,), keys=(keys,), window=FULL, packed=False)
        alone = make_problem(mask, problem.direction, problem.q.dtype, problem.q.device)
        flops = MATMULS[problem.direction] * tokens * keys * case.head_dim * case.heads
        return replace(self.contestant.prepare(alone), outputs=None, flops=flops)


class Share:
    """One device on a rank's share of the tokens, under the same mask."""

    def __init__(self, contestant: OneDevice) -> None:
        self.contestant, self.name = contestant, f"{contestant.name} alone, same mask"

    def prepare(self, problem: Problem) -> Attempt:
        case = ring_case_of(problem.case)
        mine = replace(case, lengths=(-(-case.tokens // case.world),), world=1)
        alone = make_problem(mine, problem.direction, problem.q.dtype, problem.q.device)
        flops = mine.flops(problem.direction)
        return replace(self.contestant.prepare(alone), outputs=None, flops=flops)
