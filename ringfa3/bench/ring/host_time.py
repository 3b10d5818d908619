"""What the host takes to start a ring call, while nothing holds it up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.problem import Problem
from ringfa3.bench.common.ranks import Team
from ringfa3.bench.common.timing import median
from ringfa3.bench.ring.implementations import ManyDevices

RUNS = 20
CALLS = 10  # of a run, which a queue holds at once
WARM_UP_RUNS = 3


def host_seconds(contestant: ManyDevices, problem: Problem, team: Team) -> dict[str, list[float]]:
    """Of a call, on each rank: medians of runs that all ranks begin together, by kind of call."""
    local = contestant.local(problem)
    attend = contestant.attend(problem.case, problem.q.device)
    q, k, v = (x.detach().requires_grad_() for x in local.inputs)

    def without() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    if problem.direction == FORWARD:
        kinds = {"without gradients": without, "with": lambda: attend(q, k, v)}
    else:
        out = attend(q, k, v)
        kinds = {
            "": lambda: torch.autograd.grad(out, (q, k, v), local.dout, retain_graph=True),
        }
    with contestant.on(problem.q.device):
        return {
            f"{contestant.name} {kind}".strip(): team.meet(_seconds(call, team, problem.q.device))
            for kind, call in kinds.items()
        }


def _seconds(call: Callable[[], object], team: Team, device: torch.device) -> float:
    found = []
    for _ in range(WARM_UP_RUNS + RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        team.start()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return median(found[WARM_UP_RUNS:])
