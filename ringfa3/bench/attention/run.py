"""The benchmark of attention on one device: who and what takes part, row by row, to the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ringfa3.bench.attention.merge import EPILOGUES, Epilogue
from ringfa3.bench.common import cases as case_sets
from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import ABLATION, DETERMINISTIC, DIRECTIONS, ITSELF, Case
from ringfa3.bench.common.comparison import DeviceLostError, hold
from ringfa3.bench.common.implementations import (
    FA3,
    MODULE,
    OURS,
    Ours,
    PeerError,
    Sdpa,
    Variant,
    flash_attention_3,
)
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.problem import Contestant
from ringfa3.bench.common.report import Report
from ringfa3.bench.common.results import Results
from ringfa3.bench.common.timing import CudaStopwatch, Stopwatch, WallClock, protocol
from ringfa3.build.compile import ablation_folder
from ringfa3.build.units import VARIANTS
from ringfa3.kernels.dispatch import executor_reason

CPU_SHRINK = 256  # sequences of a run without a GPU are this much shorter


@dataclass(frozen=True)
class Options:
    """The command line."""

    sets: list[str]
    dtype: str
    head_dims: list[int]
    shortest: int
    direction: str
    pairs: int
    fa3: Path | None
    device: str
    out: Path | None
    quiet: bool


def run(options: Options) -> int:
    """Measure, print, write. Returns the exit code: 1 if a result was wrong or a call failed.

    Raises BenchError where nothing can be measured.
    """
    settings = _settings(options)
    device = machine.find_device(options.device)
    contestants, notes = _contestants(device, options)
    todo, left_out = _todo(options, device)
    if not todo:
        raise BenchError("nothing to measure: " + "; ".join(left_out or ["no such case"]))
    results = Results(
        settings=settings,
        machine=machine.describe(device, contestants),
        smoke=device.type == "cpu",
        left_out=left_out + notes,
    )
    report = Report(results, options.out, f"-{options.dtype}", options.quiet)
    stopwatch: Stopwatch = WallClock() if results.smoke else CudaStopwatch()
    lost: DeviceLostError | None = None
    with report.progress(len(todo)):
        for case, direction in todo:
            arguments = (case, direction, DTYPES[options.dtype], device)
            try:
                row = hold(*arguments, contestants, options.pairs, stopwatch)
            except DeviceLostError as error:
                lost = error
                if error.row is None:
                    break
                row = error.row
            row.clocks = machine.clocks(device)
            report.add(row)
            if lost:
                break
    return report.close(str(lost) if lost else None, machine.clocks(device))


def _contestants(device: torch.device, options: Options) -> tuple[list[Contestant], list[str]]:
    """Ours first; and what is missing, in a line."""
    library = options.fa3
    if alone := [name for name in options.sets if name in ITSELF]:
        if len(options.sets) > 1:
            raise BenchError(f"--set {alone[0]} measures RingFA3 against itself: it stands alone")
        return _itself(alone[0], device, library)
    if device.type == "cpu":
        if library is not None:
            raise BenchError("--fa3 needs a GPU; leave it out with --device cpu")
        math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
        return [
            Ours(f"{OURS} executor"), Sdpa("SDPA math", math), Sdpa("SDPA flash", flash)
        ], []  # fmt: skip
    fa3, missing = _fa3(library)
    return [Ours(), *fa3, Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION)], missing


def _fa3(library: Path | None, deterministic: bool = False) -> tuple[list[Contestant], list[str]]:
    """FlashAttention-3, or why it is missing."""
    try:
        found = flash_attention_3(library, deterministic)
    except PeerError as error:
        raise BenchError(str(error)) from None
    if found is None:
        return [], [f"{FA3}: {MODULE} is not installed and no --fa3 PATH was given"]
    return [found], []


def _itself(
    name: str, device: torch.device, library: Path | None
) -> tuple[list[Contestant], list[str]]:
    """As `_contestants`, of a set of `ITSELF`."""
    smoke = device.type == "cpu"
    if library is not None and (smoke or name != DETERMINISTIC):
        raise BenchError(f"--fa3 has no part in --set {name}{' on the CPU' if smoke else ''}")
    if name == DETERMINISTIC:
        turns = Ours(f"{OURS} deterministic", deterministic=True)
        fa3, missing = ([], []) if smoke else _fa3(library, deterministic=True)
        missing.append("cuDNN: PyTorch has no deterministic backward of it")
        return [turns, Ours(), *fa3], missing
    if name == ABLATION:
        if not ablation_folder().is_dir():
            raise BenchError(
                f"--set {ABLATION} compiles {ablation_folder()}, which does not exist: run it "
                "from a checkout of the repository"
            )
        if smoke:
            raise BenchError(f"--set {ABLATION} compiles kernels: it needs a GPU")
        return [Variant(), *(Variant(variant) for variant in VARIANTS)], []
    return [Epilogue(kind) for kind in EPILOGUES], []


def _todo(options: Options, device: torch.device) -> tuple[list[tuple[Case, str]], list[str]]:
    """The rows to measure, in order, and in words what has no kernel to measure."""
    smoke = device.type == "cpu"
    shrink = CPU_SHRINK if smoke else 1
    found = [
        case
        for case in case_sets.select(options.sets, options.head_dims, shrink)
        if case.set == "masks" or max(case.lengths) * shrink >= options.shortest
    ]
    todo: list[tuple[Case, str]] = []
    missing: dict[tuple[str, str], list[int]] = {}
    for direction in DIRECTIONS[options.direction]:
        without = set()
        for d in dict.fromkeys(case.head_dim for case in found):
            q = torch.empty(1, 1, d, dtype=DTYPES[options.dtype], device=device)
            if not smoke and (reason := executor_reason(direction, q)):
                missing.setdefault((direction, reason), []).append(d)
                without.add(d)
        todo += [
            (case, direction)
            for case in found
            if case.head_dim not in without and ITSELF.get(case.set, direction) == direction
        ]
    left_out = [
        f"{direction} at head dim {', '.join(map(str, dims))}: {reason}, "
        "and the executor is not timed in its place"
        for (direction, reason), dims in missing.items()
    ]
    return todo, left_out


def _settings(options: Options) -> dict[str, Any]:
    own = {"sets": options.sets, "dtype": options.dtype, "direction": options.direction}
    return own | protocol(options.pairs)
