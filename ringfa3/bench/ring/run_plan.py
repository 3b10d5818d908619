"""The options of a ring run, and the rows that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ringfa3.bench.common.cases import BACKWARD, DIRECTIONS, FORWARD
from ringfa3.bench.common.communicator import under_torchrun
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.ring.cases import (
    LENGTHS,
    MEMORY,
    RING_SETS,
    RING_TOKENS,
    STEPS,
    RingCase,
)
from ringfa3.kernels.dispatch import fallback_reason

CPU_SHRINK = 1024  # divides the lengths of a run on the CPU


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
    one_by_one: bool = False


def world_sizes(requested: list[int] | None, world: int) -> list[int]:
    """World sizes to measure, the largest first: then ranks that are finished may exit."""
    if requested is None:
        requested = [world, *(1 << i for i in range(10) if 1 << i < world)]
    if min(requested) < 1:
        raise BenchError(f"--worlds {min(requested)}: from 1 to {world} are possible")
    if max(requested) > world:
        start = "" if under_torchrun() else "; start it under torchrun"
        raise BenchError(f"--worlds {max(requested)}: there are {world} ranks{start}")
    return sorted(set(requested), reverse=True)


def planned_rows(
    options: Options, worlds: list[int], device: torch.device
) -> tuple[list[tuple[RingCase, str]], list[str]]:
    """The rows to measure, in order, and a line for everything that cannot be measured."""
    smoke = device.type == "cpu"
    shrink = CPU_SHRINK if smoke else 1
    cases = [
        case
        for world in worlds
        for name in options.sets
        for case in RING_SETS[name](world, shrink)
        if options.shortest <= case.tokens * shrink <= options.longest
        and _runs_on_its_world(case, worlds, shrink)
    ]
    rows: list[tuple[RingCase, str]] = []
    left_out = ["memory: only a GPU counts it"] if smoke and MEMORY in options.sets else []
    q = query(DTYPES[options.dtype], device)
    directions = []
    for direction in DIRECTIONS[options.direction]:
        if not smoke and (reason := fallback_reason(direction, q)):
            left_out.append(f"{direction}: {reason}, and the PyTorch fallback is not timed instead")
        else:
            directions.append(direction)
    for name in (MEMORY, *STEPS):
        if name in options.sets and BACKWARD not in directions and not (smoke and name == MEMORY):
            reason = f"there is no {BACKWARD} in this run"
            left_out.append(f"{name} of a {FORWARD} and {BACKWARD}: {reason}")
    for world in worlds:
        here = [case for case in cases if case.world == world]
        rows += [
            (case, direction)
            for direction in directions
            for case in here
            if case.set not in (MEMORY, *STEPS) or direction == BACKWARD
            if case.set != MEMORY or not smoke
        ]
    return rows, left_out


def _runs_on_its_world(case: RingCase, worlds: list[int], shrink: int) -> bool:
    """Below the largest world: `memory`, `checkpoint`, and `lengths` of no more tokens a rank."""
    largest = max(worlds)
    if case.set == LENGTHS:
        return case.world == largest or case.tokens * largest * shrink <= RING_TOKENS * case.world
    return case.world == largest or case.set in (MEMORY, *STEPS)


def query(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A q of head dim 128, to ask what runs it."""
    return torch.empty(1, 1, 128, dtype=dtype, device=device)
