"""Measures mixes on the GPUs of a job, fits the rates of the time model, compares its predictions.

The rates follow from the first batch of each mix, in the ring and on each GPU alone. Predictions
are compared with the times of the further batches. As in training, a call starts while the one
before it runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringfa3 import flash_attn_varlen_func, plan_context, ring_attn_func
from ringfa3.bench.cluster.mixes import Mix
from ringfa3.bench.cluster.options import Options
from ringfa3.bench.cluster.rates import Overhead, Rates
from ringfa3.bench.cluster.strategies import Batch, direct, symmetric, two_levels
from ringfa3.bench.cluster.time_model import (
    COMPUTE,
    HOST,
    NIC,
    NVLINK,
    Heads,
    Load,
    milliseconds,
    overlapped,
)
from ringfa3.bench.common import machine
from ringfa3.bench.common.communicator import Communicator, job_ranks, join_job
from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.report import new_folder
from ringfa3.bench.common.timing import Call, CudaStopwatch, Stopwatch, WallClock, median
from ringfa3.numa import bind_to_numa_node
from ringfa3.ring.group import RingGroup

FILE = "calibration.json"
TIMEOUT = 60.0  # seconds, of a wait for another rank
SAMPLES, SAMPLE_SECONDS = 5, 0.01  # of each time, and the least length of a sample
FEWEST_CALLS, MOST_CALLS = 2, 64  # of a sample
WARM_UP_CALLS = 3
LINK_BYTES = {"cuda": 1 << 26, "cpu": 1 << 20}  # of a message that measures a link
SMALL_BYTES, SMALL_MESSAGES = 4096, 8
BOUND = 0.8  # a call that its host or a link needs so much of gives no rate of the GPU
NAMES = "forward", "backward"


@dataclass(frozen=True)
class Measured:
    """A batch in the ring, or of each GPU alone. Seconds of the slowest rank, of a forward and a
    backward.

    step  of a call among others
    host  of the host to start a call
    """

    mix: str
    seed: int
    load: Load
    step: tuple[float, float]
    host: tuple[float, float]

    @property
    def alone(self) -> bool:
        return len(self.load.tokens) == 1

    def describe(self, heads: Heads, rates: Rates) -> dict[str, Any]:
        """For the file, with what the rates predict; times in milliseconds."""
        parts = milliseconds(self.load, heads, rates)
        return {
            "mix": self.mix,
            "seed": self.seed,
            "alone": self.alone,
            "fitted": self.seed == 0,
            "launches": [x.number for x in self.load.launches],
            "measured_ms": [1e3 * x for x in self.step],
            "host_ms": [1e3 * x for x in self.host],
            "predicted_ms": overlapped(parts),
            "parts": parts,
        }


def run(options: Options) -> int:
    """Measure, print on rank 0, write; the exit code. Raises BenchError on all ranks."""
    folder = new_folder(options.out, Path("runs/bench/calibration"), FILE)
    rank, world, local = job_ranks()
    device = machine.find_device(options.device, local)
    bind_to_numa_node(device)
    comm = Communicator(rank, world, join_job(device, TIMEOUT), device, TIMEOUT)
    job = _Job(options, comm, device)
    first = [x for mix in options.mixes for x in (job.in_ring(mix, 0), job.alone(mix, 0))]
    rates = fit(first, options.heads, job.with_links(options.rates))
    further = [job.in_ring(mix, 1 + n) for mix in options.mixes for n in range(options.seeds)]
    if rank:
        return 0
    rows = [x.describe(options.heads, rates) for x in (*first, *further)]
    settings = {"world": world, "hosts": job.hosts, "transport": job.moved_by}
    content = {
        "settings": settings | {"window": options.window, "seeds": options.seeds},
        "heads": asdict(options.heads),
        "machine": machine.describe(device, []),
        "rates": asdict(rates),
        "rows": rows,
    }
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
    lines = summary([row for row in rows if not row["fitted"]])
    print("\n".join([*lines, f"wrote {folder / FILE}"]), flush=True)
    return 0


class _Job:
    """This rank's part of a calibration."""

    def __init__(self, options: Options, comm: Communicator, device: torch.device) -> None:
        group = comm.process_group("calibration")
        assert group is not None
        self.options, self.comm, self.device, self.group = options, comm, device, group
        self.hosts = plan_context(comm.world, group).hosts
        count = max(self.hosts) + 1
        self.per_host = comm.world // count
        if self.hosts != tuple(np.arange(comm.world) // max(self.per_host, 1)):
            raise BenchError(
                f"--calibrate on hosts {self.hosts}: give each host equally many ranks, in order"
            )
        on_gpu = device.type == "cuda"
        self.watch: Stopwatch = CudaStopwatch(comm) if on_gpu else WallClock(comm)
        heads, most = options.heads, max(mix.tokens for mix in options.mixes)
        self.tensors = [
            torch.randn(most, h, heads.head_dim, device=device).bfloat16()
            for h in (heads.heads, heads.kv_heads, heads.kv_heads, heads.heads)
        ]

    @property
    def moved_by(self) -> str | None:
        return RingGroup.of(self.group).connections.last_transport

    def in_ring(self, mix: Mix, seed: int) -> Measured:
        world, window = self.comm.world, self.options.window
        batch = Batch(mix.draw(seed, world), world, self.per_host, self.options.heads, window)
        plan = plan_context(batch.cumulative, self.group, window_size=(window, -1))
        transport = self.options.transport
        times = self._times(
            mix.tokens, lambda q, k, v: ring_attn_func(q, k, v, plan, transport=transport)
        )
        if self.moved_by == "symmetric":
            load = symmetric(batch)
        else:
            load = two_levels(batch) if 1 < self.per_host < world else direct(batch)
        return Measured(mix.name, seed, load, *times)

    def alone(self, mix: Mix, seed: int) -> Measured:
        """The same documents on each GPU."""
        window = self.options.window
        batch = Batch(mix.draw(seed, 1), 1, 1, self.options.heads, window)
        cu, window_size = batch.cumulative, (window, -1)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            return flash_attn_varlen_func(q, k, v, cu, cu, causal=True, window_size=window_size)

        return Measured(mix.name, seed, direct(batch), *self._times(mix.tokens, attend))

    def with_links(self, rates: Rates) -> Rates:
        """Rates of messages, where the ring sends any, in place of those that were given."""
        if self.moved_by == "symmetric":
            return rates
        rank, world, of_host = self.comm.rank, self.comm.world, self.per_host
        host = rank // of_host * of_host
        if of_host > 1:
            near = host + (rank + 1) % of_host, host + (rank - 1) % of_host
            speed, message = self._link(*near)
            rates = replace(rates, nvlink=speed, message=message)
        if of_host < world:
            speed, message = self._link((rank + of_host) % world, (rank - of_host) % world)
            rates = replace(rates, nic=speed, message=message)
        return rates

    def _link(self, to: int, source: int) -> tuple[float, float]:
        """Bytes a second to and from a rank at once, and seconds of each further message."""

        def seconds(size: int, count: int) -> float:
            sent, received = (
                torch.zeros(count, size, dtype=torch.uint8, device=self.device) for _ in range(2)
            )

            def exchange() -> None:
                ops = [
                    dist.P2POp(function, tensor, peer, self.group)
                    for i in range(count)
                    for function, tensor, peer in (
                        (dist.isend, sent[i], to),
                        (dist.irecv, received[i], source),
                    )
                ]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

            return self._time(exchange)[0]

        size = LINK_BYTES[self.device.type]
        one, many = seconds(SMALL_BYTES, 1), seconds(SMALL_BYTES, 1 + SMALL_MESSAGES)
        return size / seconds(size, 1), max(0.0, many - one) / SMALL_MESSAGES

    def _times(
        self,
        tokens: int,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """`Measured.step` and `.host`."""
        q, k, v = (x[:tokens].detach().requires_grad_() for x in self.tensors[:3])
        dout, out = self.tensors[3][:tokens], attend(q, k, v)
        assert isinstance(out, torch.Tensor)
        forward = self._time(lambda: attend(q, k, v))
        backward = self._time(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        return (forward[0], backward[0]), (forward[1], backward[1])

    def _time(self, call: Call) -> tuple[float, float]:
        """Seconds of a call among others, and of the host to start it; of the slowest rank."""
        watch = self.watch
        for _ in range(WARM_UP_CALLS):
            call()
        watch.wait()
        reading = watch.sample(call, FEWEST_CALLS, 0.0)
        watch.wait()
        (estimate,) = self.comm.maximum([reading()])  # all ranks make as many calls
        calls = int(np.clip(SAMPLE_SECONDS / estimate, FEWEST_CALLS, MOST_CALLS))
        steps, hosts = [], []
        for _ in range(SAMPLES):
            begin = time.perf_counter()
            reading = watch.sample(call, calls, 0.0)
            hosts.append((time.perf_counter() - begin) / calls if watch.asynchronous else 0.0)
            watch.wait()
            steps.append(reading())
        step, host = self.comm.maximum([median(steps), median(hosts)])
        return step, host


def fit(measured: Sequence[Measured], heads: Heads, rates: Rates) -> Rates:
    """`rates` with the speeds and overheads that fit best; those of links stay.

    Raises BenchError: hosts or links bind all calls.
    """
    speeds, overheads = [], []
    for i, name in enumerate(NAMES):
        by_gpu = [x for x in measured if _bound_by_gpu(x, heads, rates, i)]
        if not by_gpu:
            raise BenchError(
                f"no {name} takes longer on the GPU than on its host: give larger --mix"
            )
        tried = np.array([x.load.on_gpu(heads, i) for x in by_gpu])
        call, launch, tile, flop = least_squares(tried, np.array([x.step[i] for x in by_gpu]), 3)
        ring = [x for x in measured if not x.alone and x.host[i] > 0]
        started = np.array([x.load.on_host(i) for x in ring]).reshape(-1, 3)
        host = least_squares(started, np.array([x.host[i] for x in ring]), 0)
        speeds.append(1 / flop)
        overheads.append(Overhead(call, launch, tile, *host))
    forward, backward = overheads
    return replace(rates, forward=speeds[0], backward=speeds[1], overheads=(forward, backward))


def _bound_by_gpu(x: Measured, heads: Heads, rates: Rates, direction: int) -> bool:
    parts = milliseconds(x.load, heads, rates)
    other = max(1e3 * x.host[direction], parts[NVLINK][direction], parts[NIC][direction])
    return other < BOUND * 1e3 * x.step[direction]


def least_squares(counts: np.ndarray, seconds: np.ndarray, above: int) -> list[float]:
    """(n,) costs with counts @ costs near seconds, by least squares of relative errors.

    counts: (measurements, n); column `above` has only positive counts, and gets a positive cost.
    No cost is negative: the most negative one becomes 0 until none is.
    """
    size = counts.max(0, initial=0.0)
    columns = np.flatnonzero(size).tolist()
    costs = np.zeros(len(size))
    while columns:
        scaled = (counts / np.where(size > 0, size, 1) / seconds[:, None])[:, columns]
        found = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
        by_column = dict(zip(columns, found.tolist(), strict=True))
        if min(by_column.values()) >= 0 and by_column[above] > 0:
            costs[columns] = found
            break
        others = {c: x for c, x in by_column.items() if c != above}
        lowest = min(others, key=lambda c: others[c])
        largest = max(others, key=lambda c: others[c])  # it has taken the cost of `above`
        columns.remove(lowest if others[lowest] < 0 else largest)
    return [float(x) for x in costs / np.where(size > 0, size, 1)]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each mix, medians over its batches; then the mix that is farthest off."""
    lines, worst = [], (1.0, "")
    for mix in dict.fromkeys(row["mix"] for row in rows):
        of_mix = [row for row in rows if row["mix"] == mix]
        found = []
        for i, name in enumerate(NAMES):
            ratio = median([row["measured_ms"][i] / row["predicted_ms"][i] for row in of_mix])
            measured = median([row["measured_ms"][i] for row in of_mix])
            parts = of_mix[0]["parts"]
            limit = max((COMPUTE, HOST, NVLINK, NIC), key=lambda part: parts[part][i])
            found.append(f"{name} {measured:.3f} ms, {ratio:.3f} of predicted ({limit})")
            worst = max(worst, (max(ratio, 1 / ratio), f"{mix} {name}"))
        steps = [sum(row["measured_ms"]) / sum(row["predicted_ms"]) for row in of_mix]
        lines.append(f"{mix}: {'; '.join(found)}; step {median(steps):.3f}")
    return [*lines, f"farthest off: {worst[1]}, by a factor of {worst[0]:.3f}"]
