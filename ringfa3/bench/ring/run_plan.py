"""What a run of rings is asked for, and the rows that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ringfa3.bench.common.cases import (
    BACKWARD,
    CHECKPOINT,
    DIRECTIONS,
    FORWARD,
    LENGTHS,
    MEMORY,
    RING_SETS,
    RING_TOKENS,
    RingCase,
)
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.ranks import under_torchrun
from ringfa3.kernels.dispatch import executor_reason

CPU_SHRINK = 1024  # sequences of a run without a GPU are this much shorter


@dataclass(frozen=True)
class Options:
    """The command line."""

    sets: list[str]
    dtype: str
    worlds: list[int] | None
    shortest: int
    longest: int
    direction: str
    transports: list[str]
    pairs: int
    timeout: float
    fa3: Path | None
    device: str
    out: Path | None
    quiet: bool


def worlds_of(wanted: list[int] | None, world: int) -> list[int]:
    """Numbers of ranks to measure on, the largest first: ranks that have done theirs may go."""
    if wanted is None:
        wanted = [world, *(1 << i for i in range(10) if 1 << i < world)]
    if min(wanted) < 1:
        raise BenchError(f"--worlds {min(wanted)}: from 1 to {world} are possible")
    if max(wanted) > world:
        start = "" if under_torchrun() else "; start it under torchrun"
        raise BenchError(f"--worlds {max(wanted)}: there are {world} ranks{start}")
    return sorted(set(wanted), reverse=True)


def todo_of(
    options: Options, worlds: list[int], device: torch.device
) -> tuple[list[tuple[RingCase, str]], list[str]]:
    """The rows to measure, in order, and in words what has no kernel to measure."""
    smoke = device.type == "cpu"
    shrink = CPU_SHRINK if smoke else 1
    found = [
        case
        for world in worlds
        for name in options.sets
        for case in RING_SETS[name](world, shrink)
        if options.shortest <= case.tokens * shrink <= options.longest
        and _wanted(case, worlds, shrink)
    ]
    todo: list[tuple[RingCase, str]] = []
    left_out = ["memory: only a GPU counts it"] if smoke and MEMORY in options.sets else []
    q = query(DTYPES[options.dtype], device)
    directions = []
    for direction in DIRECTIONS[options.direction]:
        if not smoke and (reason := executor_reason(direction, q)):
            left_out.append(f"{direction}: {reason}, and the executor is not timed in its place")
        else:
            directions.append(direction)
    for name in (MEMORY, CHECKPOINT):
        if name in options.sets and BACKWARD not in directions and not (smoke and name == MEMORY):
            there = f"there is no {BACKWARD} in this run"
            left_out.append(f"{name} of a {FORWARD} and {BACKWARD}: {there}")
    for world in worlds:
        here = [case for case in found if case.world == world]
        todo += [
            (case, direction)
            for direction in directions
            for case in here
            if case.set not in (MEMORY, CHECKPOINT) or direction == BACKWARD
            if case.set != MEMORY or not smoke
        ]
    return todo, left_out


def _wanted(case: RingCase, worlds: list[int], shrink: int) -> bool:
    """Fewer ranks than most have only lengths, no more a rank than those, shards and blocks."""
    most = max(worlds)
    if case.set == LENGTHS:
        return case.world == most or case.tokens * most * shrink <= RING_TOKENS * case.world
    return case.world == most or case.set in (MEMORY, CHECKPOINT)


def query(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, 1, 128, dtype=dtype, device=device)
