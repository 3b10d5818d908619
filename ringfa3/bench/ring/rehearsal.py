"""The speed of a ring of many GPUs, measured on two that both execute the same rank of it.

Each GPU takes the place of all peers of the other: where the rank exchanges with the peer at
distance d, it exchanges with the other GPU, which serves distance -d. Copies, signals and kernels
are those of a ring whose GPUs run in step. The outputs are meaningless: all peers send the same
block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ringfa3 import flash_attn_func, plan_context
from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import BACKWARD, DIRECTIONS, FORWARD, MATMULS
from ringfa3.bench.common.communicator import Communicator, job_ranks, join_job
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.report import new_folder
from ringfa3.bench.common.timing import CudaStopwatch, compare, median, paired, protocol
from ringfa3.bench.ring.run_plan import query
from ringfa3.kernels.dispatch import fallback_reason
from ringfa3.numa import bind_to_numa_node
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.op import run_backward, run_forward
from ringfa3.ring.prepare_call import PreparedCall, pass_type_of
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.forward_mode import select_forward_mode
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.self_test import unsupported_reason
from ringfa3.symmetric.signals import Gather, Signals
from ringfa3.symmetric.stream_ops import Signal
from ringfa3.threads import Interruption

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
FILE = "rehearsal.json"
MIN_TOKENS = 64  # of a rank


@dataclass(frozen=True)
class Options:
    """ranks: of the ring; plays: the rank that both GPUs execute; tokens: of a rank, by case."""

    ranks: int
    plays: int
    tokens: Sequence[int]
    direction: str
    dtype: str
    pairs: int
    timeout: float
    out: Path | None


class RehearsalGroup:
    """The `ringfa3.symmetric.backend.Group` of a GPU that executes rank `rank` of `world`.

    side        0 or 1: which of the two GPUs this is
    all_gather  gathers a line from both GPUs
    """

    def __init__(
        self,
        side: int,
        rank: int,
        world: int,
        timeout_s: float,
        all_gather: Callable[[str], list[str]],
    ) -> None:
        self.side, self.rank, self.world, self.timeout_s = side, rank, world, timeout_s
        self.ranks, self.all_gather = list(range(world)), all_gather
        self.failure: str | None = None
        self.call = 0
        self._interruption = Interruption()

    def gather(self, line: str) -> list[str]:
        lines = self.all_gather(line)
        return [lines[self.side if r == self.rank else 1 - self.side] for r in self.ranks]

    def peer_failure(self) -> str | None:
        return None

    def lose(self, message: str) -> None:
        self.failure = message
        self._interruption.interrupt(RuntimeError(message))

    def agreement_snapshot(self) -> None:
        """Calls with one signature begin alike."""

    def begin_again(self, agreed: None, lse: torch.Tensor | None) -> bool:
        del agreed, lse
        return self.failure is None

    def returned(self, lse: torch.Tensor) -> None:
        """No call is named."""

    def report_failure(self, problem: Exception) -> None:
        self.failure = str(problem)

    def backend(self, device: torch.device) -> SymmetricBackend:
        signals = partial(MirroredSignals, self)
        return SymmetricBackend(self, device, self.timeout_s, self.lose, signals)


class MirroredSignals(Signals):
    """Signals of two GPUs: the peer at distance d is the other GPU, at distance -d.

    The other GPU awaits every signal that one GPU sets if both directions have the same active
    hops: the rank attends to keys at the hops at which other ranks attend to its own. One causal
    zigzag sequence of `MIN_TOKENS` a rank is such a case.
    """

    def __init__(self, group: RehearsalGroup, rank: int, world: int, _: Gather) -> None:
        self._plays, self._world = rank, world
        super().__init__(group.side, world, group.all_gather)

    def address(self, signal: Signal) -> int:
        sets = signal.sender == self._plays
        side = 1 - self.rank if sets else self.rank
        distance = self._plays - signal.receiver if sets else signal.sender - self._plays
        return super().address(signal._replace(receiver=side, sender=distance % self._world))


def rehearse(options: Options) -> int:
    """Time each case against one GPU without communication, print and write; the exit code.

    Raises BenchError, on both ranks, where the run cannot start.
    """
    rank, world, local = job_ranks()
    if world != 2 or not 0 <= options.plays < options.ranks or options.ranks < 2:
        raise BenchError(
            f"rank {options.plays} of {options.ranks} on {world} processes: give 2 processes "
            "(torchrun --nproc-per-node 2), --ranks 2 or more, and --plays below that"
        )
    if min(options.tokens) < MIN_TOKENS:
        raise BenchError(f"--tokens {min(options.tokens)}: {MIN_TOKENS} or more are possible")
    settings = protocol(options.pairs)
    device = machine.find_device("cuda", local)
    for direction in DIRECTIONS[options.direction]:
        if reason := fallback_reason(direction, query(DTYPES[options.dtype], device)):
            raise BenchError(
                f"{direction}: {reason}, and the PyTorch fallback is not timed instead"
            )
    if reason := unsupported_reason():
        raise BenchError(reason)
    folder = new_folder(options.out, Path("runs/bench/rehearsal"), FILE)
    bind_to_numa_node(device)
    store = join_job(device, options.timeout)
    comm = Communicator(rank, world, store, device, options.timeout)
    group = RehearsalGroup(
        rank, options.plays, options.ranks, options.timeout, comm.all_gather_object
    )
    backend = group.backend(device)
    rows = []
    for tokens in options.tokens:
        for direction in DIRECTIONS[options.direction]:
            row = _row(backend, tokens, direction, options, comm)
            rows.append(row)
            if rank == 0:
                line = "{tokens} a GPU, {direction}: {tflops:.0f} TFLOP/s, {share:.3f} of one alone"
                print(line.format(**row), flush=True)
    if rank == 0:
        case = {
            "ranks": options.ranks,
            "plays": options.plays,
            "dtype": options.dtype,
            "heads": (HEADS, KV_HEADS, HEAD_DIM),
            "transport": "symmetric",
            "yardstick": "RingFA3 on one GPU, full, as many keys as a query attends to on average",
        }
        content = {
            "settings": settings | case,
            "machine": machine.describe(device, []),
            "rows": rows,
        }
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _row(
    backend: SymmetricBackend, tokens: int, direction: str, options: Options, comm: Communicator
) -> dict[str, object]:
    """One causal sequence, against the baseline of `baselines.SingleGpu`."""
    ranks, whole = options.ranks, options.ranks * tokens
    plan = plan_context(whole, (options.plays, ranks))
    keys = round((whole + 1) / 2)
    dtype = DTYPES[options.dtype]
    ring = _ring(backend, plan, direction, dtype)
    single = _single_gpu(tokens, keys, direction, dtype, backend.device)
    times = paired(ring, single, options.pairs, CudaStopwatch(comm))
    ratio = compare(times.a, times.b)
    flops = MATMULS[direction] * whole * (whole + 1) // 2 // ranks * HEADS * HEAD_DIM
    return {
        "tokens": tokens,
        "direction": direction,
        "share": ratio.median,
        "interval": (ratio.low, ratio.high),
        "tflops": flops / median(times.a) / 1e12,
        "seconds": (times.a, times.b),
        "host_seconds": times.host,
        "calls": times.calls,
    }


def _ring(
    backend: SymmetricBackend, plan: ContextPlan, direction: str, dtype: torch.dtype
) -> Callable[[], object]:
    q, k, v, dout = (
        torch.randn(plan.local_tokens, h, HEAD_DIM, device=backend.device).to(dtype)
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    make_pass = partial(SymmetricRingPass, backend)
    forward = PreparedCall(plan, pass_type_of(FORWARD, select_forward_mode(plan, q, k)), make_pass)
    if direction == FORWARD:
        return lambda: run_forward(q, k, v, SCALE, forward)
    out, lse = run_forward(q, k, v, SCALE, forward)
    backward = PreparedCall(plan, BACKWARD, make_pass)
    return lambda: run_backward(dout, None, q, k, v, out, lse, SCALE, False, backward)


def _single_gpu(
    tokens: int, keys: int, direction: str, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    q, k, v = (
        torch.randn(1, n, h, HEAD_DIM, device=device)
        .to(dtype)
        .requires_grad_(direction == BACKWARD)
        for n, h in ((tokens, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    )
    if direction == FORWARD:
        return lambda: flash_attn_func(q, k, v)
    out = flash_attn_func(q, k, v)
    dout = torch.randn_like(q)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
