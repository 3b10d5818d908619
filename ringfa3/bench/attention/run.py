"""`python -m ringfa3.bench attention`: selects cases and implementations, measures every row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ringfa3.bench.attention.ablation import ForwardVariant
from ringfa3.bench.attention.cases import ABLATION, DETERMINISTIC, SELF_COMPARISONS, select
from ringfa3.bench.attention.merge import EPILOGUES, Epilogue
from ringfa3.bench.attention.plot import attention_figures
from ringfa3.bench.attention.sdpa import Sdpa
from ringfa3.bench.attention.table import attention_lines, attention_tables
from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import DIRECTIONS, Case
from ringfa3.bench.common.comparison import DeviceLostError, measure_row
from ringfa3.bench.common.fa3 import FA3, MODULE, flash_attention_3
from ringfa3.bench.common.implementations import RINGFA3, LoadError, RingFA3
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.problem import Implementation
from ringfa3.bench.common.report import Presentation, Report
from ringfa3.bench.common.results import Results
from ringfa3.bench.common.timing import CudaStopwatch, Stopwatch, WallClock, protocol
from ringfa3.build.compile import ablation_folder
from ringfa3.build.units import VARIANTS
from ringfa3.kernels.dispatch import executor_reason

CPU_SHRINK = 256  # divides the lengths of a run on the CPU
PRESENTATION = Presentation(attention_tables, attention_lines, attention_figures)


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

    Raises BenchError where the run cannot start.
    """
    settings = _settings(options)
    device = machine.find_device(options.device)
    implementations, notes = _implementations(device, options)
    planned, left_out = planned_rows(options, device)
    if not planned:
        raise BenchError("nothing to measure: " + "; ".join(left_out or ["no such case"]))
    results = Results(
        settings=settings,
        machine=machine.describe(device, implementations),
        smoke=device.type == "cpu",
        left_out=left_out + notes,
    )
    report = Report(results, PRESENTATION, options.out, f"-{options.dtype}", options.quiet)
    stopwatch: Stopwatch = WallClock() if results.smoke else CudaStopwatch()
    lost: DeviceLostError | None = None
    with report.progress(len(planned)):
        for case, direction in planned:
            arguments = (case, direction, DTYPES[options.dtype], device)
            try:
                row = measure_row(*arguments, implementations, options.pairs, stopwatch)
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


def _implementations(
    device: torch.device, options: Options
) -> tuple[list[Implementation], list[str]]:
    """RingFA3 first; and a line for each implementation that is missing."""
    library = options.fa3
    if own := [name for name in options.sets if name in SELF_COMPARISONS]:
        if len(options.sets) > 1:
            raise BenchError(f"--set {own[0]} measures RingFA3 against itself: it stands alone")
        return _of_self_comparison(own[0], device, library)
    if device.type == "cpu":
        if library is not None:
            raise BenchError("--fa3 needs a GPU; leave it out with --device cpu")
        math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
        return [
            RingFA3(f"{RINGFA3} executor"), Sdpa("SDPA math", math), Sdpa("SDPA flash", flash)
        ], []  # fmt: skip
    fa3, missing = _fa3(library)
    return [RingFA3(), *fa3, Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION)], missing


def _fa3(
    library: Path | None, deterministic: bool = False
) -> tuple[list[Implementation], list[str]]:
    """FlashAttention-3, or a line that says why it is missing."""
    try:
        found = flash_attention_3(library, deterministic)
    except LoadError as error:
        raise BenchError(str(error)) from None
    if found is None:
        return [], [f"{FA3}: {MODULE} is not installed and no --fa3 PATH was given"]
    return [found], []


def _of_self_comparison(
    name: str, device: torch.device, library: Path | None
) -> tuple[list[Implementation], list[str]]:
    """As `_implementations`, for a set of `SELF_COMPARISONS`."""
    smoke = device.type == "cpu"
    if library is not None and (smoke or name != DETERMINISTIC):
        raise BenchError(f"--fa3 has no part in --set {name}{' on the CPU' if smoke else ''}")
    if name == DETERMINISTIC:
        turns = RingFA3(f"{RINGFA3} deterministic", deterministic=True)
        fa3, missing = ([], []) if smoke else _fa3(library, deterministic=True)
        missing.append("cuDNN: PyTorch has no deterministic backward of it")
        return [turns, RingFA3(), *fa3], missing
    if name == ABLATION:
        if not ablation_folder().is_dir():
            raise BenchError(
                f"--set {ABLATION} compiles {ablation_folder()}, which does not exist: run it "
                "from a checkout of the repository"
            )
        if smoke:
            raise BenchError(f"--set {ABLATION} compiles kernels: it needs a GPU")
        return [ForwardVariant(), *(ForwardVariant(variant) for variant in VARIANTS)], []
    return [Epilogue(kind) for kind in EPILOGUES], []


def planned_rows(
    options: Options, device: torch.device
) -> tuple[list[tuple[Case, str]], list[str]]:
    """The rows to measure, in order, and a line for each group of cases without a kernel."""
    smoke = device.type == "cpu"
    shrink = CPU_SHRINK if smoke else 1
    cases = [
        case
        for case in select(options.sets, options.head_dims, shrink)
        if case.set == "masks" or max(case.lengths) * shrink >= options.shortest
    ]
    planned: list[tuple[Case, str]] = []
    missing: dict[tuple[str, str], list[int]] = {}
    for direction in DIRECTIONS[options.direction]:
        without = set()
        for d in dict.fromkeys(case.head_dim for case in cases):
            q = torch.empty(1, 1, d, dtype=DTYPES[options.dtype], device=device)
            if not smoke and (reason := executor_reason(direction, q)):
                missing.setdefault((direction, reason), []).append(d)
                without.add(d)
        planned += [
            (case, direction)
            for case in cases
            if case.head_dim not in without
            and SELF_COMPARISONS.get(case.set, direction) == direction
        ]
    left_out = [
        f"{direction} at head dim {', '.join(map(str, dims))}: {reason}, "
        "and the executor is not timed in its place"
        for (direction, reason), dims in missing.items()
    ]
    return planned, left_out


def _settings(options: Options) -> dict[str, Any]:
    own = {"sets": options.sets, "dtype": options.dtype, "direction": options.direction}
    return own | protocol(options.pairs)
