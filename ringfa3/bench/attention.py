"""The benchmark of attention on one device: who and what takes part, row by row, to the results."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn.attention import SDPBackend

from ringfa3.bench import cases as case_sets
from ringfa3.bench import machine, plot
from ringfa3.bench.cases import ABLATION, BACKWARD, FORWARD, Case
from ringfa3.bench.contest import DeviceLostError, hold
from ringfa3.bench.peers import (
    FA3,
    MODULE,
    OURS,
    Ours,
    PeerError,
    Sdpa,
    Variant,
    flash_attention_3,
)
from ringfa3.bench.problem import Contestant
from ringfa3.bench.results import FILE, Results, Row, one_line, summaries
from ringfa3.bench.table import figure, tables
from ringfa3.bench.timing import CudaStopwatch, Stopwatch, WallClock
from ringfa3.build import VARIANTS
from ringfa3.engine import executor_reason

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIRECTIONS = {"fwd": (FORWARD,), "bwd": (BACKWARD,), "both": (FORWARD, BACKWARD)}
CPU_SHRINK = 256  # sequences of a run without a GPU are this much shorter
FEWEST_PAIRS = 10


class BenchError(Exception):
    """The run cannot start; one line says why and what to do."""


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
    if options.pairs < FEWEST_PAIRS:
        raise BenchError(f"--pairs {options.pairs}: an interval needs {FEWEST_PAIRS} or more")
    device = _device(options.device)
    contestants, notes = _contestants(device, options)
    todo, left_out = _todo(options, device)
    if not todo:
        raise BenchError("nothing to measure: " + "; ".join(left_out or ["no such case"]))
    results = Results(
        settings=_settings(options),
        machine=machine.describe(device) | {"before": machine.clocks(device)},
        smoke=device.type == "cpu",
        left_out=left_out + notes,
    )
    for contestant in contestants:
        if identity := getattr(contestant, "identity", None):
            results.machine[contestant.name] = identity
    folder = _folder(options, device)
    console = Console(stderr=True, quiet=options.quiet)
    for line in results.left_out:
        console.print(f"left out: {line}", soft_wrap=True, markup=False)
    stopwatch: Stopwatch = WallClock() if results.smoke else CudaStopwatch()
    lost: DeviceLostError | None = None
    with _progress(console, len(todo)) as done:
        for case, direction in todo:
            arguments = (case, direction, DTYPES[options.dtype], device)
            row: Row | None
            try:
                row = hold(*arguments, contestants, options.pairs, stopwatch)
            except DeviceLostError as error:
                lost, row = error, error.row
            if row is not None:
                row.clocks = machine.clocks(device)
                results.rows.append(row)
                results.save(folder)
                done(row)
            if lost:
                break
    results.machine["after"] = machine.clocks(device)
    results.complete = lost is None
    written = [results.save(folder), *_plots(results, folder, console)]
    _show(results, written, options.quiet)
    if lost:
        print(f"ringfa3.bench: stopped, the GPU no longer answers: {lost}", file=sys.stderr)
    return 1 if lost or any(_at_fault(row) for row in results.rows) else 0


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BenchError(
            "no CUDA GPU is visible; --device cpu tries the machinery on small shapes, "
            "without any figure of a kernel"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device)
        raise BenchError(f"{name} is no Hopper GPU: there are no kernels for it to measure")
    return device


def _contestants(device: torch.device, options: Options) -> tuple[list[Contestant], list[str]]:
    """Ours first; and what is missing, in a line."""
    library = options.fa3
    if ABLATION in options.sets:
        if options.sets != [ABLATION] or device.type == "cpu" or library is not None:
            raise BenchError(
                f"--set {ABLATION} measures our kernel against itself: it stands alone, without "
                "--fa3, and needs a GPU"
            )
        return [Variant(), *(Variant(name) for name in VARIANTS)], []
    if device.type == "cpu":
        if library is not None:
            raise BenchError("--fa3 needs a GPU; leave it out with --device cpu")
        math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
        return [
            Ours(f"{OURS} executor"), Sdpa("SDPA math", math), Sdpa("SDPA flash", flash)
        ], []  # fmt: skip
    try:
        fa3 = flash_attention_3(library)
    except PeerError as error:
        raise BenchError(str(error)) from None
    cudnn = Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION)
    if fa3 is None:
        return [Ours(), cudnn], [f"{FA3}: {MODULE} is not installed and no --fa3 PATH was given"]
    return [Ours(), fa3, cudnn], []


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
        todo += [(case, direction) for case in found if case.head_dim not in without]
    left_out = [
        f"{direction} at head dim {', '.join(map(str, dims))}: {reason}, "
        "and the executor is not timed in its place"
        for (direction, reason), dims in missing.items()
    ]
    return todo, left_out


def _settings(options: Options) -> dict[str, Any]:
    return {
        "sets": options.sets,
        "dtype": options.dtype,
        "direction": options.direction,
        "pairs": options.pairs,
        "inputs": "standard normal",
        "l2_cache": "not flushed",
        "flops": "exact visible pairs; backward 2.5 times forward",
    }


def _folder(options: Options, device: torch.device) -> Path:
    """Where results go, made. Never a folder that has some."""
    if options.out is not None:
        folder = options.out
        if (folder / FILE).exists():
            raise BenchError(f"--out {folder} has results already: give another folder")
    else:
        root = Path("runs/bench" if device.type == "cpu" else "docs/results")
        day = datetime.datetime.now(datetime.timezone.utc).date()
        name = "cpu-smoke" if device.type == "cpu" else machine.slug(machine.device_name(device))
        stem = root / "attention" / f"{name}-{day}-{options.dtype}"
        folder, number = stem, 1
        while (folder / FILE).exists():
            number += 1
            folder = stem.with_name(f"{stem.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {folder}: {error.strerror}") from None
    return folder


@contextmanager
def _progress(console: Console, rows: int) -> Iterator[Any]:
    """A bar on a terminal, a line per row elsewhere."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal or console.quiet,
    )
    task = bar.add_task("attention", total=rows)

    def done(row: Row) -> None:
        bar.advance(task)
        line = _line(row)
        bar.update(task, description=line)
        if not console.is_terminal:
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    with bar:
        yield done


def _line(row: Row) -> str:
    name = f"{row.direction} {row.set} {row.mask} d{row.head_dim} {row.label}"
    if row.stopped:
        return f"{name}: {row.stopped}"
    said = [
        f"{peer} {match.ratio:.3f}" if match.ratio is not None else f"{peer} {match.stopped}"
        for peer, match in row.matches.items()
    ]
    return f"{name}: {figure(row.tflops(row.first))} TFLOP/s; ratio to {', '.join(said)}"


def _plots(results: Results, folder: Path, console: Console) -> list[Path]:
    try:
        return plot.draw(results, folder)
    except ModuleNotFoundError as error:
        console.print(f"no plots: {error}; pip install 'ringfa3\\[bench]', then --plot-only")
        return []


def _show(results: Results, written: Sequence[Path], quiet: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if not quiet:
        for table in tables(results):
            console.print(table)
        print("wrote " + ", ".join(map(str, written)))
    print(one_line(results, _yardstick(results)))


def _yardstick(results: Results) -> str:
    """Whom the last line is about: FA3, or the first peer with figures, or who took part."""
    peers = [s.peer for s in summaries(results)] or results.rows[0].lineup[1:]
    return FA3 if FA3 in peers else peers[0]


def _at_fault(row: Row) -> bool:
    """Whether somebody's result was wrong, or a call failed."""
    stopped = [row.stopped, *(match.stopped for match in row.matches.values())]
    return any(s is not None and s.startswith(("wrong", "failed")) for s in stopped)
