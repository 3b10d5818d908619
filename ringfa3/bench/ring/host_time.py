"""Seconds that the host needs to start a ring call on an idle GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.problem import Problem
from ringfa3.bench.common.timing import median
from ringfa3.bench.ring.implementations import Distributed

RUNS, SMOKE_RUNS = 20, 3  # on a GPU and on a CPU
CALLS = 10  # of a run; the launch queue has room for all of them
WARM_UP_RUNS = 3


def host_seconds(
    implementation: Distributed, problem: Problem, comm: Communicator
) -> dict[str, list[float]]:
    """By type of call: each rank's median over runs that all ranks begin together."""
    local = implementation.local(problem)
    attend = implementation.attend(problem.case, problem.q.device)
    q, k, v = (x.detach().requires_grad_() for x in local.inputs)

    def without_gradients() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    if problem.direction == FORWARD:
        calls = {"without gradients": without_gradients, "with": lambda: attend(q, k, v)}
    else:
        out = attend(q, k, v)
        calls = {
            "": lambda: torch.autograd.grad(out, (q, k, v), local.dout, retain_graph=True),
        }
    with implementation.context(problem.q.device):
        return {
            f"{implementation.name} {call_type}".strip(): comm.all_gather_object(
                _seconds(call, comm, problem.q.device)
            )
            for call_type, call in calls.items()
        }


def _seconds(call: Callable[[], object], comm: Communicator, device: torch.device) -> float:
    seconds = []
    runs = RUNS if device.type == "cuda" else SMOKE_RUNS
    for _ in range(WARM_UP_RUNS + runs):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        comm.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds.append((time.perf_counter() - begin) / CALLS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return median(seconds[WARM_UP_RUNS:])
