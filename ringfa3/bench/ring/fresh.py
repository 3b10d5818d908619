"""A step of packed training: ring calls on a packing never seen before, and on the same one again.

Both count the host. A loader makes the plan, so its time is a figure of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict

import torch

from ringfa3 import KernelSpec, ring_attn_func
from ringfa3.bench.common.accuracy import WrongResultError
from ringfa3.bench.common.cases import BACKWARD
from ringfa3.bench.common.comparison import (
    comparison_of,
    raising_on_all_ranks,
    recording_stop,
    release_memory,
)
from ringfa3.bench.common.implementations import tensor
from ringfa3.bench.common.results import RingRow
from ringfa3.bench.common.timing import Paired, Stopwatch, median
from ringfa3.bench.ring.cases import RingCase, packing
from ringfa3.bench.ring.implementations import Ring
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.schedules.link import schedules_built

# The calls on a plan that has run before, on one that has not, and on one that has not and was
# prepared by a `KernelSpec`.
AGAIN, FRESH, PREPARED = MODES = ("the same plan again", "a fresh plan", "a prepared plan")
FIRST = MODES[1:]  # calls on a plan of their own
LAYERS, SMOKE_LAYERS = 16, 2  # forwards of a step, then as many backwards; on a GPU and on a CPU
WARM_UP_STEPS = 2


class Step:
    """The ring calls of a step: q (t, h, d), k, v (t, h_kv, d) and dout of t local tokens."""

    def __init__(self, case: RingCase, ring: Ring, dtype: torch.dtype, device: torch.device):
        self._transport, self._device = ring.transport, device
        self._layers = LAYERS if device.type == "cuda" else SMOKE_LAYERS
        generator = torch.Generator(device).manual_seed(1 + ring.comm.rank)
        # Ranks of a plan may have a few tokens more than the mean.
        tokens = case.tokens // case.world + case.tokens % case.world + 1

        def normal(heads: int) -> torch.Tensor:
            shape = (tokens, heads, case.head_dim)
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        self._qkv = [normal(n) for n in (case.heads, case.kv_heads, case.kv_heads)]
        self._dout = normal(case.heads)
        sms = KernelSpec.num_sms
        if device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernels = dtype if device.type == "cuda" else torch.bfloat16  # the CPU has none
        self.spec = KernelSpec(case.heads, case.kv_heads, case.head_dim, kernels, num_sms=sms)

    def run(self, plan: ContextPlan) -> tuple[torch.Tensor, list[float]]:
        """The first output, and seconds: of the host to start the forwards, to start the backwards,
        and of all until the device has finished."""
        q, k, v = (x[: plan.local_tokens].detach().requires_grad_() for x in self._qkv)
        dout = self._dout[: plan.local_tokens]
        times = [time.perf_counter()]
        outs = [
            tensor(ring_attn_func(q, k, v, plan, transport=self._transport))
            for _ in range(self._layers)
        ]
        times.append(time.perf_counter())
        for out in outs:
            torch.autograd.grad(out, (q, k, v), dout)
        times.append(time.perf_counter())
        self.wait()
        forward, backward, all_calls = (t - times[0] for t in (*times[1:], time.perf_counter()))
        calls = self._layers
        return outs[0].detach(), [forward / calls, (backward - forward) / calls, all_calls]

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_fresh(
    case: RingCase,
    ring: Ring,
    dtype: torch.dtype,
    device: torch.device,
    pairs: int,
    stopwatch: Stopwatch,
) -> RingRow:
    """The row of a case: steps on a packing of their own, each followed by steps on the same one.

    The ratio is the time of a plan's first step over that of its third step. Timed only where both
    give equal bits, and calls on a prepared plan build no schedule.
    """
    row = RingRow.of(case, BACKWARD, str(dtype).removeprefix("torch."), MODES)
    comm = stopwatch.comm
    with recording_stop(row, comm):
        release_memory(device)
        with raising_on_all_ranks(device, comm):
            step = Step(case, ring, dtype, device)
            seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
            host: dict[str, list[float]] = defaultdict(list)
            wrong: str | None = None
            for number in range(WARM_UP_STEPS + pairs):
                for first in FIRST:
                    lengths = packing(case, f"{first} {number}")
                    cu_seqlens = [0, *itertools.accumulate(lengths)]
                    begin = time.perf_counter()
                    plan = ring.plan_of(cu_seqlens)
                    _ = plan.digest  # made where the plan is
                    host["plan"].append(time.perf_counter() - begin)
                    if first == PREPARED:
                        begin = time.perf_counter()
                        step.spec.prepare(plan)
                        host["preparing a plan"].append(time.perf_counter() - begin)
                    outs = []
                    for mode in (first, None, AGAIN):  # between them a step that nobody times
                        comm.barrier()
                        step.wait()  # for the barrier, which runs on the device
                        before = schedules_built()
                        out, (forward, backward, all_calls) = step.run(plan)
                        built = schedules_built() - before
                        if wrong is None and first == PREPARED and built:
                            wrong = f"step {number}: calls on {first} built {built} schedules"
                        if mode is None:
                            continue
                        outs.append(out)
                        host[f"{mode}, forward"].append(forward)
                        host[f"{mode}, backward"].append(backward)
                        seconds[mode, first].append(all_calls)
                    if wrong is None and not torch.equal(*outs):
                        wrong = f"step {number}: {first} and {AGAIN} differ in out"
            if wrong is not None:  # after the loop, whose barriers the other ranks wait in
                raise WrongResultError(wrong)
        with raising_on_all_ranks(device, comm):
            for first in FIRST:
                again, fresh = (
                    comm.maximum(seconds[mode, first][WARM_UP_STEPS:]) for mode in (AGAIN, first)
                )
                row.comparisons[first] = comparison_of(Paired(again, fresh, 1, (0.0, 0.0)))
            for name, values in host.items():
                row.host[name] = comm.all_gather_object(median(values[WARM_UP_STEPS:]))
    return row
