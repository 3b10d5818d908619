"""`python -m ringfa3.bench ring`: loads implementations, measures every row on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch

from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import BACKWARD, FORWARD
from ringfa3.bench.common.communicator import (
    Communicator,
    RankFailedError,
    job_ranks,
    join_job,
    under_torchrun,
)
from ringfa3.bench.common.comparison import (
    DeviceLostError,
    StoppedError,
    measure_row,
    raising_on_all_ranks,
    recording_stop,
)
from ringfa3.bench.common.fa3 import MODULE, flash_attention_3
from ringfa3.bench.common.implementations import FA3, RINGFA3, LoadError, RingFA3, SingleDevice
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.problem import Implementation, make_problem
from ringfa3.bench.common.report import Presentation, Report
from ringfa3.bench.common.results import Results, RingRow, Row
from ringfa3.bench.common.timing import CudaStopwatch, OneByOne, Stopwatch, WallClock, protocol
from ringfa3.bench.ring.cases import (
    ERROR,
    FRESH,
    HOST,
    LENGTHS,
    MEMORY,
    SEEDED,
    SPANS,
    STEPS,
    UNTIMED,
    RingCase,
    ring_case,
)
from ringfa3.bench.ring.checkpoint import measure_checkpointed
from ringfa3.bench.ring.fresh import measure_fresh
from ringfa3.bench.ring.host_time import host_seconds
from ringfa3.bench.ring.implementations import (
    Distributed,
    Ring,
    SingleGpu,
    dense_ring,
    single_gpu_same_mask,
)
from ringfa3.bench.ring.load_balance import LoadBalance, plan_of_rank
from ringfa3.bench.ring.memory import MemoryMeter, MemoryUse
from ringfa3.bench.ring.peers import (
    ZIGZAG,
    ZIGZAG_FUNCTION,
    TorchRing,
    Ulysses,
    Zigzag,
    ring_flash_attn_functions,
)
from ringfa3.bench.ring.plot import ring_figures
from ringfa3.bench.ring.run_plan import Options, planned_rows, query, world_sizes
from ringfa3.bench.ring.summary import ring_lines, ring_row_line
from ringfa3.bench.ring.table import ring_tables, ring_title
from ringfa3.kernels.dispatch import fallback_reason, select_forward
from ringfa3.numa import bind_to_numa_node
from ringfa3.symmetric.forward_mode import FORWARD_MODES, gathered_bytes, select_forward_mode

PRESENTATION = Presentation(ring_tables, ring_lines, ring_figures, ring_row_line, ring_title)
WARM_UP_TOKENS = 64  # of each rank, before memory is measured
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """The implementations that could be loaded; notes: a line for each that could not."""

    single: SingleDevice  # RingFA3 on one device
    fa3: SingleDevice | None
    zigzag: Callable[..., Any] | None
    notes: list[str]


def run(options: Options) -> int:
    """Measure, print on rank 0, write. Returns the exit code of this rank.

    Raises BenchError, on every rank, where nothing can be measured.
    """
    settings = _settings(options)
    rank, world, local = job_ranks()
    device = machine.find_device(options.device, local)
    node = bind_to_numa_node(device)  # torchrun does not bind processes to cores
    store = join_job(device, options.timeout)
    everyone = Communicator(rank, world, store, device, options.timeout)
    worlds = world_sizes(options.worlds, world)
    loaded = _on_all_ranks(everyone, lambda: _load(options.fa3, device))
    rows, left_out = _on_all_ranks(everyone, lambda: planned_rows(options, worlds, device))
    if not rows:
        raise BenchError("nothing to measure: " + "; ".join(left_out or ["no such case"]))
    comms = {w: everyone if w == world else everyone.first(w) for w in worlds if rank < w}
    job = Job(options, loaded, device, comms, worlds)
    report = None
    nodes = everyone.all_gather_object(node)
    if rank == 0:
        case, direction = rows[0]
        shown = job.implementations(replace(case, world=world), direction, everyone)
        results = Results(
            settings=settings | {"worlds": worlds, "numa_nodes": nodes},
            machine=machine.describe(device, [*shown, *filter(None, [loaded.fa3])])
            | {"ranks": world, "nccl": _nccl(device)},
            smoke=device.type == "cpu",
            left_out=left_out + loaded.notes,
            benchmark="ring",
        )

    def make_report() -> Report | None:
        if rank:
            return None
        return Report(results, PRESENTATION, options.out, f"-{options.dtype}", options.quiet)

    report = _on_all_ranks(everyone, make_report)
    return job.run([(c, d) for c, d in rows if rank < c.world], report)


class Job:
    """One rank's part of a run."""

    def __init__(
        self,
        options: Options,
        loaded: Loaded,
        device: torch.device,
        comms: dict[int, Communicator],
        worlds: list[int],
    ) -> None:
        """worlds: all world sizes of the job; comms: those that include this rank."""
        self.options, self.loaded, self.device, self.comms = options, loaded, device, comms
        self.worlds, self.dtype = worlds, DTYPES[options.dtype]
        self.memory: dict[RingCase, dict[str, MemoryUse | str]] = {}

    def run(self, rows: list[tuple[RingCase, str]], report: Report | None) -> int:
        """Measure all rows of this rank; report: on the rank that prints."""
        lost: str | None = None
        with report.progress(len(rows)) if report else nullcontext():
            try:
                for world, group in groupby(rows, lambda row: row[0].world):
                    here = list(group)
                    self._measure_memory(world, [case for case, _ in here])
                    for case, direction in here:
                        row = self._row(case, direction)
                        if report:
                            report.add(row)
            except DeviceLostError as error:
                lost = str(error)
                if report and error.row is not None:
                    report.add(error.row)
        if report is None:
            return 1 if lost else 0
        return report.close(lost, machine.clocks(self.device))

    def rings(self, case: RingCase, direction: str, comm: Communicator) -> list[Ring]:
        """RingFA3's ring over each transport; over `symmetric` also with a fixed forward mode.

        Timed forwards add the mode "hops"; `memory` adds every mode.
        """
        rings = [Ring(comm, transport) for transport in self.options.transports]
        modes = FORWARD_MODES if case.set == MEMORY else ("hops",) if direction == FORWARD else ()
        masked = case.set not in (LENGTHS, *UNTIMED)
        gpus = self.device.type != "cpu" and comm.world > 1
        if masked or not gpus or not rings[0].may_use_symmetric:
            return rings
        fixed = [Ring(comm, rings[0].transport, mode) for mode in modes]
        return [rings[0], *fixed, *rings[1:]]

    def implementations(
        self, case: RingCase, direction: str, comm: Communicator
    ) -> list[Implementation]:
        """RingFA3's ring first. Below the largest world, only it and its baseline on one GPU."""
        loaded, rings = self.loaded, self.rings(case, direction, comm)
        if case.set in (ERROR, HOST, *STEPS):
            return [*rings]
        if case.set in (*SEEDED, SPANS):
            return [*rings, single_gpu_same_mask(loaded.single)]
        found: list[Implementation] = [*rings]
        if case.set != MEMORY:
            if case.world < max(self.worlds):
                return [rings[0], SingleGpu(loaded.single)]
            found += [SingleGpu(one) for one in (loaded.single, loaded.fa3) if one]
            if case.set != LENGTHS:
                found.append(dense_ring(rings[0]))
            if not case.causal:
                found.append(single_gpu_same_mask(loaded.single))
        if comm.world == 1:
            return found
        if loaded.zigzag:
            found.append(Zigzag(comm, loaded.zigzag))
        if self.device.type == "cpu":
            found.append(Ulysses(comm, loaded.single))
        else:
            found += [Ulysses(comm, loaded.fa3)] if loaded.fa3 else []
            found.append(TorchRing(comm))
        return found

    def _row(self, case: RingCase, direction: str) -> Row:
        comm = self.comms[case.world]
        implementations = self.implementations(case, direction, comm)
        smoke = self.device.type == "cpu"
        on_gpu = OneByOne if self.options.one_by_one else CudaStopwatch
        stopwatch: Stopwatch = WallClock(comm) if smoke else on_gpu(comm)
        arguments = (case, direction, self.dtype, self.device, implementations)
        pairs = 0 if case.set == ERROR else self.options.pairs
        row: Row
        try:
            if case.set in STEPS:
                ring = self.rings(case, direction, comm)[0]
                measure = measure_fresh if case.set == FRESH else measure_checkpointed
                row = measure(case, ring, self.dtype, self.device, pairs, stopwatch)
            elif case.set in (MEMORY, HOST):
                row = self._untimed(case, direction, implementations, comm)
            else:
                row = measure_row(*arguments, pairs, stopwatch, self.loaded.single)
        except DeviceLostError as error:
            if error.row is not None:
                self._describe(error.row, case, implementations)
            raise
        self._describe(row, case, implementations)
        row.clocks = machine.clocks(self.device)
        return row

    def _untimed(
        self,
        case: RingCase,
        direction: str,
        implementations: list[Implementation],
        comm: Communicator,
    ) -> Row:
        """A row without speed: of `memory`, or of `host` with the host's times."""
        dtype = str(self.dtype).removeprefix("torch.")
        row = RingRow.of(case, direction, dtype, [i.name for i in implementations])
        if case.set != HOST:
            return row
        with recording_stop(row, comm), raising_on_all_ranks(self.device, comm):
            problem = make_problem(case, direction, self.dtype, self.device)
            for implementation in implementations:
                assert isinstance(implementation, Distributed)
                row.host |= host_seconds(implementation, problem, comm)
        return row

    def _describe(self, row: Row, case: RingCase, implementations: list[Implementation]) -> None:
        """Fill in everything but times: what ran the row, its load balance, its memory."""
        ring = implementations[0]
        assert isinstance(row, RingRow)
        assert isinstance(ring, Ring)
        q = query(self.dtype, self.device)
        row.baselines = [i.name for i in implementations if isinstance(i, SingleGpu)]
        row.engine = "executor" if fallback_reason(row.direction, q) else "kernels"
        row.transport = ring.moved_by
        row.gathered = self._gathered(ring, case)
        kernel = select_forward(q, plan_of_rank(case, 0).hops)
        balance = LoadBalance.of(case, kernel.tile_m)
        row.imbalance, row.tile_occupancy = balance.imbalance, balance.tile_occupancy
        row.kv_bytes = balance.kv_rows * 2 * case.kv_heads * case.head_dim * q.element_size()
        row.kv_share = balance.kv_share
        if case.set == MEMORY:
            for name, use in self.memory.get(case, {}).items():
                row.memory[name] = use if isinstance(use, str) else use.peak
                if isinstance(use, MemoryUse):
                    row.retained[name] = use.retained

    def _gathered(self, ring: Ring, case: RingCase) -> int | None:
        """Bytes of K/V that the forward of a case gathers; None: it runs hop by hop."""
        plan = ring.plan(case)
        q, k = (
            torch.empty(1, h, case.head_dim, dtype=self.dtype, device="meta")
            for h in (case.heads, case.kv_heads)
        )
        gathers = ring.moved_by == "symmetric" and select_forward_mode(plan, q, k) == "gathered"
        return gathered_bytes(plan, k) if gathers else None

    def _measure_memory(self, world: int, cases: list[RingCase]) -> None:
        """Measure the cases of `memory` of a world, shorter ones first.

        Runs before everything else on that world, whose calls would grow the IPC memory.
        """
        cases = sorted((c for c in cases if c.set == MEMORY), key=lambda c: c.tokens)
        if not cases or self.device.type == "cpu":
            return
        comm, meter = self.comms[world], MemoryMeter(self.device)
        tokens = WARM_UP_TOKENS * world  # creates communicators, loads kernels
        tiny = ring_case(MEMORY, "warm-up", (tokens,), world)
        for case in (tiny, *cases):
            self.memory[case] = {}
            for implementation in self.implementations(case, BACKWARD, comm):
                if isinstance(implementation, Distributed):
                    use = self._memory_use(case, implementation, meter, comm)
                    self.memory[case][implementation.name] = use
                    if case is tiny:
                        meter.reset(implementation.name)

    def _memory_use(
        self, case: RingCase, implementation: Distributed, meter: MemoryMeter, comm: Communicator
    ) -> MemoryUse | str:
        """On the rank with most; or why there is no figure."""
        try:
            with raising_on_all_ranks(self.device, comm):
                problem = make_problem(case, BACKWARD, self.dtype, self.device)
                call = implementation.forward_and_backward(problem)
                del problem
                use = meter.measure(implementation.name, call)
                peak, retained = comm.maximum([use.peak, use.retained])
        except StoppedError as stopped:
            if not str(stopped).startswith("refused"):
                comm.renew_process_groups()
            return str(stopped)
        return MemoryUse(int(peak), int(retained))


def _settings(options: Options) -> dict[str, Any]:
    own = {
        "sets": options.sets,
        "dtype": options.dtype,
        "direction": options.direction,
        "transports": options.transports,
        "timeout": options.timeout,
        "one_by_one": options.one_by_one,
        "in_step": "every sample starts on all ranks together, and the slowest rank counts",
    }
    return own | protocol(options.pairs)


def _on_all_ranks(comm: Communicator, make: Callable[[], T]) -> T:
    """make(); a BenchError of one rank is raised on all."""
    failure: str | None = None
    try:
        made = make()
    except BenchError as error:
        failure = str(error)
    try:
        comm.all_gather_object(error=failure)
    except RankFailedError as error:
        raise BenchError(str(error)) from None
    return made


def _load(library: Path | None, device: torch.device) -> Loaded:
    notes = [] if under_torchrun() else ["several ranks: this is one process without torchrun"]
    if device.type == "cpu":
        if library is not None:
            raise BenchError("--fa3 needs a GPU; leave it out with --device cpu")
        return Loaded(RingFA3(f"{RINGFA3} fallback"), None, None, notes)
    zigzag = None
    try:
        fa3 = flash_attention_3(library)
        if fa3 is None:
            missing = f"{MODULE} is not installed and no --fa3 PATH was given"
            notes.append(f"{FA3}, and all that runs on it: {missing}")
        elif (found := ring_flash_attn_functions(*ZIGZAG_FUNCTION)) is None:
            notes.append(f"{ZIGZAG}: not installed")
        else:
            (zigzag,) = found
    except LoadError as error:
        raise BenchError(str(error)) from None
    return Loaded(RingFA3(), fa3, zigzag, notes)


def _nccl(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
