"""`python -m ringfa3.bench attention`: selects cases and implementations, measures every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ringfa3.bench.attention.ablation import ForwardVariant
from ringfa3.bench.attention.cases import (
    ABLATION,
    BELOW,
    DETERMINISTIC,
    FP8,
    INT8,
    MLA,
    OWN_IMPLEMENTATIONS,
    PEERS,
    QUANTISED_BACKWARD,
    SCORES,
    SINKS,
    SPANS,
    TREE,
    select,
)
from ringfa3.bench.attention.cudnn_fp8 import NAME as CUDNN_FP8
from ringfa3.bench.attention.cudnn_fp8 import cudnn_fp8
from ringfa3.bench.attention.errors import add_errors
from ringfa3.bench.attention.fa4 import flash_attention_4
from ringfa3.bench.attention.flex_attention import FlexAttention
from ringfa3.bench.attention.plot import attention_figures
from ringfa3.bench.attention.quantised import Fp8Variant, QuantisedRingFA3
from ringfa3.bench.attention.sdpa import Sdpa
from ringfa3.bench.attention.table import attention_line, attention_lines, attention_tables
from ringfa3.bench.attention.zero_columns import ZeroColumns
from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import DIRECTIONS, Case, unfolded, without_spans
from ringfa3.bench.common.comparison import (
    DeviceLostError,
    measure_row,
    raising_on_all_ranks,
    recording_stop,
)
from ringfa3.bench.common.fa3 import MODULE, flash_attention_3
from ringfa3.bench.common.implementations import (
    FA3,
    FA4,
    FAR_BELOW,
    RINGFA3,
    LoadError,
    OnAnotherCase,
    RingFA3,
)
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.problem import Implementation
from ringfa3.bench.common.report import Presentation, Report
from ringfa3.bench.common.results import Results, Row
from ringfa3.bench.common.scores import UNTIMED
from ringfa3.bench.common.timing import (
    SAMPLE_MS,
    CudaStopwatch,
    OneByOne,
    Stopwatch,
    WallClock,
    protocol,
)
from ringfa3.build.compile import ablation_folder
from ringfa3.build.units import FP8_VARIANTS, VARIANTS
from ringfa3.kernels.dispatch import fallback_reason

CPU_SHRINK = 256  # divides the lengths of a run on the CPU
PRESENTATION = Presentation(attention_tables, attention_lines, attention_figures, attention_line)
SHAPED = "standard normal; --set scores: as its rows say"


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
    fa4: Path | None = None
    peers: Sequence[str] = PEERS
    sample_ms: float = SAMPLE_MS
    errors_only: bool = False
    one_by_one: bool = False


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
    on_gpu = OneByOne if options.one_by_one else CudaStopwatch
    stopwatch: Stopwatch = WallClock() if results.smoke else on_gpu(sample_ms=options.sample_ms)
    lost: DeviceLostError | None = None
    with report.progress(len(planned)):
        for case, direction in planned:
            try:
                row = _measured(case, direction, device, implementations, options, stopwatch)
            except DeviceLostError as error:
                lost = error
                if error.row is None:
                    break
                row = error.row
            row.clocks = {} if row.untimed else machine.clocks(device)
            report.add(row)
            if lost:
                break
    return report.close(str(lost) if lost else None, machine.clocks(device))


def _measured(
    case: Case,
    direction: str,
    device: torch.device,
    implementations: list[Implementation],
    options: Options,
    stopwatch: Stopwatch,
) -> Row:
    """A row with its timings, unless only errors are wanted; of `SCORES` with its rms errors."""
    dtype = DTYPES[options.dtype]
    if options.errors_only or case.scores in UNTIMED:
        names = [i.name for i in implementations]
        row = Row.of(case, direction, str(dtype).removeprefix("torch."), names)
    else:
        arguments = (case, direction, dtype, device, implementations, options.pairs, stopwatch)
        row = measure_row(*arguments)
    if case.set == SCORES and not row.stopped:
        comm = stopwatch.comm
        with recording_stop(row, comm), raising_on_all_ranks(device, comm):
            add_errors(row, case, dtype, device, implementations)
    return row


def _implementations(
    device: torch.device, options: Options
) -> tuple[list[Implementation], list[str]]:
    """RingFA3 first; and a line for each implementation that is missing."""
    for option, given in (("fa3", options.fa3), ("fa4", options.fa4)):
        if given is not None and option not in options.peers:
            raise BenchError(f"--{option} was given, but --peers leaves {option} out")
    if own := [name for name in options.sets if name in OWN_IMPLEMENTATIONS]:
        if len(options.sets) > 1:
            raise BenchError(
                f"--set {own[0]} has its own implementations: give no other --set with it"
            )
        return _with_own_implementations(own[0], device, options)
    if device.type == "cpu":
        for option, given in (("fa3", options.fa3), ("fa4", options.fa4)):
            if given is not None:
                raise BenchError(f"--{option} needs a GPU; leave it out with --device cpu")
        math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
        return [
            RingFA3(f"{RINGFA3} fallback"), Sdpa("SDPA math", math), Sdpa("SDPA flash", flash)
        ], []  # fmt: skip
    found, missing = _peers(options)
    return [RingFA3(), *found], missing


def _peers(options: Options) -> tuple[list[Implementation], list[str]]:
    """The other libraries, or a line for each that says why it is missing."""
    found, missing = _flash_attentions(options)
    if "cudnn" in options.peers:
        found.append(Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION))
    return found, missing


def _flash_attentions(
    options: Options, deterministic: bool = False
) -> tuple[list[Implementation], list[str]]:
    """FlashAttention-3 and 4, or a line for each that says why it is missing."""
    found: list[Implementation] = []
    missing = []
    try:
        if "fa3" in options.peers:
            fa3 = flash_attention_3(options.fa3, deterministic)
            if fa3 is None:
                missing.append(f"{FA3}: {MODULE} is not installed and no --fa3 PATH was given")
            else:
                found.append(fa3)
        if "fa4" in options.peers:
            fa4 = flash_attention_4(options.fa4, deterministic)
            if isinstance(fa4, str):
                missing.append(f"{FA4}: {fa4}")
            else:
                found.append(fa4)
    except LoadError as error:
        raise BenchError(str(error)) from None
    return found, missing


def _with_own_implementations(
    name: str, device: torch.device, options: Options
) -> tuple[list[Implementation], list[str]]:
    """As `_implementations`, for a set of `OWN_IMPLEMENTATIONS`."""
    smoke = device.type == "cpu"
    for option, given in (("fa3", options.fa3), ("fa4", options.fa4)):
        own = ABLATION, SINKS, SPANS, *QUANTISED_BACKWARD
        if given is not None and (smoke or name in own):
            where = " on the CPU" if smoke else ""
            raise BenchError(f"--{option} is not used by --set {name}{where}")
    if name == DETERMINISTIC:
        deterministic = RingFA3(f"{RINGFA3} deterministic", deterministic=True)
        found, missing = ([], []) if smoke else _flash_attentions(options, deterministic=True)
        missing.append("cuDNN: PyTorch has no deterministic backward of it")
        return [deterministic, RingFA3(), *found], missing
    if name in (FP8, INT8):
        found, missing = ([], []) if smoke else _flash_attentions(options)
        if name == FP8 and not smoke and "cudnn" in options.peers:
            cudnn = cudnn_fp8()
            if isinstance(cudnn, str):
                missing.append(f"{CUDNN_FP8}: {cudnn}")
            else:
                found.append(cudnn)
        whole = RingFA3(f"{RINGFA3} {name} with quantisation", precision=name)
        return [QuantisedRingFA3(name), whole, RingFA3(), *found], missing
    if precision := QUANTISED_BACKWARD.get(name):
        return [RingFA3(f"{RINGFA3} {precision}", precision=precision), RingFA3()], []
    if name == ABLATION:
        if not ablation_folder().is_dir():
            raise BenchError(
                f"--set {ABLATION} compiles {ablation_folder()}, which does not exist: run it "
                "from a checkout of the repository"
            )
        if smoke:
            raise BenchError(f"--set {ABLATION} compiles kernels: it needs a GPU")
        fp8 = [QuantisedRingFA3(FP8), *(Fp8Variant(variant) for variant in FP8_VARIANTS)]
        return [ForwardVariant(), *(ForwardVariant(variant) for variant in VARIANTS), *fp8], []
    if name == BELOW:
        found, missing = ([], []) if smoke else _flash_attentions(options)
        return [RingFA3(), ZeroColumns(), *found], missing
    if name == MLA:
        deterministic = RingFA3(f"{RINGFA3} deterministic", deterministic=True)
        math = Sdpa("SDPA math", SDPBackend.MATH)
        found, missing = ([math], []) if smoke else _peers(options)
        return [RingFA3(), deterministic, *found], missing
    if name == SPANS:
        return [RingFA3(), OnAnotherCase(f"{RINGFA3} without spans", RingFA3(), without_spans)], []
    if name == TREE:
        found, missing = ([], []) if smoke else _flash_attentions(options)
        one_by_one = [RingFA3(), *(x for x in found if x.name == FA3)]
        return [
            RingFA3(),
            *(OnAnotherCase(f"{x.name} unfolded", x, unfolded, True) for x in one_by_one),
            *(x for x in found if x.name == FA4),
            FlexAttention(),
        ], missing
    assert name == SINKS
    return [RingFA3(f"{RINGFA3} with a sink", sink=FAR_BELOW), RingFA3()], []


def planned_rows(
    options: Options, device: torch.device
) -> tuple[list[tuple[Case, str]], list[str]]:
    """The rows to measure, in order, and a line for each group of cases without a kernel."""
    smoke = device.type == "cpu"
    shrink = CPU_SHRINK if smoke else 1
    cases = [
        case
        for case in select(options.sets, options.head_dims, shrink)
        if case.packed or max(case.lengths) * shrink >= options.shortest
    ]
    planned: list[tuple[Case, str]] = []
    missing: dict[tuple[str, str], list[int]] = {}
    for direction in DIRECTIONS[options.direction]:
        without = set()
        for d, v_dim in dict.fromkeys((case.head_dim, case.v_dim) for case in cases):
            q = torch.empty(1, 1, d, dtype=DTYPES[options.dtype], device=device)
            if not smoke and (reason := fallback_reason(direction, q, v_dim=v_dim)):
                missing.setdefault((direction, reason), []).append(d)
                without.add((d, v_dim))
        planned += [
            (case, direction)
            for case in cases
            if (case.head_dim, case.v_dim) not in without
            and OWN_IMPLEMENTATIONS.get(case.set) in (None, direction)
        ]
    left_out = [
        f"{direction} at head dim {', '.join(map(str, dims))}: {reason}, "
        "and the PyTorch fallback is not timed instead"
        for (direction, reason), dims in missing.items()
    ]
    return planned, left_out


def _settings(options: Options) -> dict[str, Any]:
    """What `provenance.command` makes the command line of again."""
    own: dict[str, Any] = {
        "sets": options.sets,
        "dtype": options.dtype,
        "direction": options.direction,
    }
    own |= {"peers": [name for name in PEERS if name in options.peers]}
    own |= {"sample_ms": options.sample_ms, "errors_only": options.errors_only}
    own |= {"one_by_one": options.one_by_one}
    if options.sample_ms <= 0:
        raise BenchError(f"--sample-ms {options.sample_ms:g}: it must be above 0")
    if options.errors_only and options.sets != [SCORES]:
        raise BenchError(f"--errors-only goes with --set {SCORES} alone: no other has rms errors")
    inputs = {"inputs": SHAPED} if SCORES in options.sets else {}
    return own | protocol(options.pairs) | inputs
