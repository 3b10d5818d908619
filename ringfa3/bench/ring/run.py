"""The benchmark of rings: who and what takes part on how many ranks, row by row, to the results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch

from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import (
    BACKWARD,
    CHECKPOINT,
    ERROR,
    FORWARD,
    HOST,
    LENGTHS,
    MEMORY,
    RingCase,
    ring_case,
)
from ringfa3.bench.common.comparison import DeviceLostError, StoppedError, explained, filling, hold
from ringfa3.bench.common.implementations import (
    FA3,
    MODULE,
    OURS,
    OneDevice,
    Ours,
    PeerError,
    flash_attention_3,
)
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.problem import Contestant, make_problem
from ringfa3.bench.common.ranks import Team, ToldError, join, place, under_torchrun
from ringfa3.bench.common.report import Report
from ringfa3.bench.common.results import Results, RingRow, Row
from ringfa3.bench.common.timing import CudaStopwatch, WallClock, protocol
from ringfa3.bench.ring.baselines import Dense, Share, Yardstick
from ringfa3.bench.ring.checkpoint import checkpointed
from ringfa3.bench.ring.host_time import host_seconds
from ringfa3.bench.ring.implementations import (
    ZIGZAG,
    ManyDevices,
    Ring,
    TorchRing,
    Ulysses,
    Zigzag,
    zigzag_function,
)
from ringfa3.bench.ring.load_balance import Spread
from ringfa3.bench.ring.memory import Held, Scales
from ringfa3.bench.ring.run_plan import Options, query, todo_of, worlds_of
from ringfa3.kernels.dispatch import executor_reason, select_forward
from ringfa3.numa import move_near
from ringfa3.symmetric.forward_mode import FORWARD_MODES, gathered_bytes, select_forward_mode

WARM_UP_TOKENS = 64  # of each rank, before anything is weighed
T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """What could be loaded."""

    alone: OneDevice  # RingFA3 on one device
    fa3: OneDevice | None
    zigzag: Callable[..., Any] | None
    notes: list[str]


def run(options: Options) -> int:
    """Measure, print on rank 0, write. Returns the exit code of this rank.

    Raises BenchError, on every rank, where nothing can be measured.
    """
    settings = _settings(options)
    rank, world, local = place()
    device = machine.find_device(options.device, local)
    node = move_near(device)  # torchrun leaves it to each process on which cores it runs
    everyone = Team(rank, world, join(device, options.timeout), device, options.timeout)
    worlds = worlds_of(options.worlds, world)
    peers = _together(everyone, lambda: _peers(options.fa3, device))
    todo, left_out = _together(everyone, lambda: todo_of(options, worlds, device))
    if not todo:
        raise BenchError("nothing to measure: " + "; ".join(left_out or ["no such case"]))
    teams = {w: everyone if w == world else everyone.first(w) for w in worlds if rank < w}
    job = Job(options, peers, device, teams, worlds)
    report = None
    nodes = everyone.meet(node)
    if rank == 0:
        shown = job.lineup(replace(todo[0][0], world=world), todo[0][1], everyone)
        results = Results(
            settings=settings | {"worlds": worlds, "numa_nodes": nodes},
            machine=machine.describe(device, [*shown, *filter(None, [peers.fa3])])
            | {"ranks": world, "nccl": _nccl(device)},
            smoke=device.type == "cpu",
            left_out=left_out + peers.notes,
            benchmark="ring",
        )
    report = _together(
        everyone,
        lambda: (
            Report(results, options.out, f"-{options.dtype}", options.quiet) if rank == 0 else None
        ),
    )
    return job.run([(c, d) for c, d in todo if rank < c.world], report)


class Job:
    """One rank's part of a run."""

    def __init__(
        self,
        options: Options,
        peers: Peers,
        device: torch.device,
        teams: dict[int, Team],
        worlds: list[int],
    ) -> None:
        """worlds: of all teams of the job; `teams` are those that this rank belongs to."""
        self.options, self.peers, self.device, self.teams = options, peers, device, teams
        self.worlds, self.dtype = worlds, DTYPES[options.dtype]
        self.memory: dict[RingCase, dict[str, Held | str]] = {}

    def run(self, todo: list[tuple[RingCase, str]], report: Report | None) -> int:
        """All rows of this rank; `report` on the one that speaks."""
        lost: str | None = None
        with report.progress(len(todo)) if report else nullcontext():
            try:
                for world, rows in groupby(todo, lambda row: row[0].world):
                    here = list(rows)
                    self._weigh(world, [case for case, _ in here])
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

    def rings(self, case: RingCase, direction: str, team: Team) -> list[Ring]:
        """RingFA3's: over each transport; over peers' memory also with the forward hop by hop, and
        to be weighed gathered, whichever it is by itself."""
        found = [Ring(team, transport) for transport in self.options.transports]
        kinds = FORWARD_MODES if case.set == MEMORY else ("hops",) if direction == FORWARD else ()
        masked = case.set not in (LENGTHS, MEMORY, ERROR, HOST)
        if masked or not found[0].may_pull or self.device.type == "cpu" or team.world == 1:
            return found
        return [found[0], *(Ring(team, found[0].transport, kind) for kind in kinds), *found[1:]]

    def lineup(self, case: RingCase, direction: str, team: Team) -> list[Contestant]:
        """RingFA3's ring first, then who it is held against: on fewer ranks itself alone."""
        peers, rings = self.peers, self.rings(case, direction, team)
        if case.set in (ERROR, HOST, CHECKPOINT):
            return [*rings]
        found: list[Contestant] = [*rings]
        if case.set != MEMORY:
            if case.world < max(self.worlds):
                return [rings[0], Yardstick(peers.alone)]
            found += [Yardstick(peer) for peer in (peers.alone, peers.fa3) if peer]
            if case.set != LENGTHS:
                found.append(Dense(rings[0]))
            if not case.causal:
                found.append(Share(peers.alone))
        if team.world == 1:
            return found
        if peers.zigzag:
            found.append(Zigzag(team, peers.zigzag))
        if self.device.type == "cpu":
            found.append(Ulysses(team, peers.alone))
        else:
            found += [Ulysses(team, peers.fa3)] if peers.fa3 else []
            found.append(TorchRing(team))
        return found

    def _row(self, case: RingCase, direction: str) -> Row:
        team = self.teams[case.world]
        contestants = self.lineup(case, direction, team)
        smoke = self.device.type == "cpu"
        stopwatch = WallClock(team) if smoke else CudaStopwatch(team)
        arguments = (case, direction, self.dtype, self.device, contestants)
        pairs = 0 if case.set == ERROR else self.options.pairs
        row: Row
        try:
            if case.set == CHECKPOINT:
                ring = self.rings(case, direction, team)[0]
                row = checkpointed(case, ring, self.dtype, self.device, pairs, stopwatch)
            elif case.set in (MEMORY, HOST):
                row = self._untimed(case, direction, contestants, team)
            else:
                row = hold(*arguments, pairs, stopwatch, self.peers.alone)
        except DeviceLostError as error:
            if error.row is not None:
                self._describe(error.row, case, contestants)
            raise
        self._describe(row, case, contestants)
        row.clocks = machine.clocks(self.device)
        return row

    def _untimed(
        self, case: RingCase, direction: str, contestants: list[Contestant], team: Team
    ) -> Row:
        """Without speed; with the host's times if they are asked for."""
        dtype = str(self.dtype).removeprefix("torch.")
        row = RingRow.of(case, direction, dtype, [c.name for c in contestants])
        assert isinstance(row, RingRow)
        if case.set != HOST:
            return row
        with filling(row, team), explained(self.device, team):
            problem = make_problem(case, direction, self.dtype, self.device)
            for contestant in contestants:
                assert isinstance(contestant, ManyDevices)
                row.host |= host_seconds(contestant, problem, team)
        return row

    def _describe(self, row: Row, case: RingCase, contestants: list[Contestant]) -> None:
        """What is known of a row beside its times."""
        ring = contestants[0]
        assert isinstance(row, RingRow)
        assert isinstance(ring, Ring)
        q = query(self.dtype, self.device)
        row.yardsticks = [c.name for c in contestants if isinstance(c, Yardstick)]
        row.engine = "executor" if executor_reason(row.direction, q) else "kernels"
        row.transport = ring.moved_by
        row.gathered = self._gathered(ring, case)
        spread = Spread.of(case, select_forward(q).tile_m)
        row.imbalance, row.fullness = spread.imbalance, spread.fullness
        row.kv_bytes = spread.kv_rows * 2 * case.kv_heads * case.head_dim * q.element_size()
        row.kv_share = spread.kv_share
        if case.set == MEMORY:
            for name, held in self.memory.get(case, {}).items():
                row.memory[name] = held if isinstance(held, str) else held.peak
                if isinstance(held, Held):
                    row.kept[name] = held.kept

    def _gathered(self, ring: Ring, case: RingCase) -> int | None:
        """Bytes of K/V that the forward of a case gathers; None: it goes hop by hop."""
        plan = ring.plan(case)
        q, k = (
            torch.empty(1, h, case.head_dim, dtype=self.dtype, device="meta")
            for h in (case.heads, case.kv_heads)
        )
        one = ring.moved_by == "symmetric" and select_forward_mode(plan, q, k) == "gathered"
        return gathered_bytes(plan, k) if one else None

    def _weigh(self, world: int, cases: list[RingCase]) -> None:
        """The memory of a world's cases of that set before anything else runs on it, shorter ones
        first."""
        cases = sorted((c for c in cases if c.set == MEMORY), key=lambda c: c.tokens)
        if not cases or self.device.type == "cpu":
            return
        team, scales = self.teams[world], Scales(self.device)
        tokens = WARM_UP_TOKENS * world  # connects, loads code
        tiny = ring_case(MEMORY, "warm-up", (tokens,), world)
        for case in (tiny, *cases):
            self.memory[case] = {}
            for contestant in self.lineup(case, BACKWARD, team):
                if isinstance(contestant, ManyDevices):
                    held = self._weighed(case, contestant, scales, team)
                    self.memory[case][contestant.name] = held
                    if case is tiny:
                        scales.tare(contestant.name)

    def _weighed(
        self, case: RingCase, contestant: ManyDevices, scales: Scales, team: Team
    ) -> Held | str:
        try:
            with explained(self.device, team):
                problem = make_problem(case, BACKWARD, self.dtype, self.device)
                call = contestant.passes(problem)
                del problem
                held = scales.weigh(contestant.name, call)
                peak, kept = team.largest([held.peak, held.kept])
        except StoppedError as stopped:
            if not str(stopped).startswith("refused"):
                team.renew()
            return str(stopped)
        return Held(int(peak), int(kept))


def _settings(options: Options) -> dict[str, Any]:
    own = {
        "sets": options.sets,
        "dtype": options.dtype,
        "direction": options.direction,
        "transports": options.transports,
        "timeout": options.timeout,
        "in_step": "every sample starts on all ranks together, and the slowest rank counts",
    }
    return own | protocol(options.pairs)


def _together(team: Team, make: Callable[[], T]) -> T:
    """What every rank makes, or its BenchError on all of them."""
    problem: str | None = None
    try:
        made = make()
    except BenchError as error:
        problem = str(error)
    try:
        team.meet(problem=problem)
    except ToldError as error:
        raise BenchError(str(error)) from None
    return made


def _peers(library: Path | None, device: torch.device) -> Peers:
    notes = [] if under_torchrun() else ["several ranks: this is one process without torchrun"]
    if device.type == "cpu":
        if library is not None:
            raise BenchError("--fa3 needs a GPU; leave it out with --device cpu")
        return Peers(Ours(f"{OURS} executor"), None, None, notes)
    zigzag = None
    try:
        fa3 = flash_attention_3(library)
        if fa3 is None:
            missing = f"{MODULE} is not installed and no --fa3 PATH was given"
            notes.append(f"{FA3}, and all that runs on it: {missing}")
        elif (zigzag := zigzag_function()) is None:
            notes.append(f"{ZIGZAG}: it is not installed")
    except PeerError as error:
        raise BenchError(str(error)) from None
    return Peers(Ours(), fa3, zigzag, notes)


def _nccl(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
