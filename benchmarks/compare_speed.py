"""Times two builds of the kernels against each other: `compare_speed.py OLD_CACHE NEW_CACHE`.

Use it for changes that alter machine code but should not alter speed. Both caches are folders that
`python -m ringfa3.build` has filled. Both builds must have the tiles and the argument structs of
this checkout. It needs a Hopper GPU. Inputs are N(0,1), or have the scores of `--scores`: 16k
tokens in sequences of `--length`, of 512 for a short unit, hidden size 2048. The old build
quantises the operands of 8-bit units. Units that quantise or clip spans are listed but not timed:
`python -m ringfa3.bench fp8 --bandwidth` and `attention --set spans` time them.

Runs alternate, old and new, `--pairs` times. Prints one line per unit and mask: the median of the
paired ratios, old time over new time, and their quartiles; above 1 the new build is faster. Exits
with 1 if a cache has no build of a unit, or without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_sass import latest
from ringfa3 import host
from ringfa3.bench.attention.quantised import QuantisedRingFA3
from ringfa3.bench.common.cases import CAUSAL, FULL, Case
from ringfa3.bench.common.implementations import RingFA3
from ringfa3.bench.common.problem import make_problem
from ringfa3.bench.common.scores import SCORES
from ringfa3.build.units import UNITS, Unit, select_units
from ringfa3.errors import BuildError
from ringfa3.kernels import dispatch, launch

TOKENS, SHORT, HIDDEN = 16384, 512, 2048
QUANTISE = "quantise"  # the direction of units that are limited by bandwidth
SAMPLE_MS = 20.0  # about the time of a run, which sets its number of calls


class Switch:
    """Selects the build of the unit `timed`. The other units use the old build."""

    def __init__(self, old: Path, new: Path) -> None:
        self.caches, self.current = {"old": old, "new": new}, "old"
        self.timed: Unit | None = None
        self._libraries: dict[tuple[str, Unit], ctypes.CDLL] = {}

    def entry(self, unit: Unit, name: str) -> Callable[..., int]:
        key = self.current if unit == self.timed else "old", unit
        if key not in self._libraries:
            self._libraries[key] = ctypes.CDLL(str(latest(self.caches[key[0]], unit) / "kernel.so"))
        function: Any = getattr(self._libraries[key], f"ringfa3_{name}")
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        return function


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def ratios(switch: Switch, call: Callable[[], object], pairs: int) -> list[float]:
    """Old time over new time, pair by pair; the build that runs first alternates."""
    for switch.current in ("old", "new"):
        milliseconds(call, 2)
    repeats = max(1, round(SAMPLE_MS / milliseconds(call, 3)))
    result = []
    for pair in range(pairs):
        times = {}
        for switch.current in ("old", "new") if pair % 2 else ("new", "old"):
            times[switch.current] = milliseconds(call, repeats)
        result.append(times["old"] / times["new"])
    return result


def cases(unit: Unit, length: int | None = None, scores: str | None = None) -> list[Case]:
    """The cases that the unit runs. A short unit runs only causal sequences."""
    heads, masks = HIDDEN // unit.head_dim, (CAUSAL,) if unit.short else (FULL, CAUSAL)
    length = SHORT if unit.short else length or TOKENS
    lengths = (length,) * (TOKENS // length)
    return [
        Case("", "", lengths, heads, heads, unit.head_dim, mask, scores=scores) for mask in masks
    ]


def quantiser(unit: Unit) -> Unit:
    """The unit that quantises the operands of an 8-bit unit."""
    wanted = QUANTISE, unit.dtype, unit.head_dim
    return next(x for x in UNITS if (x.direction, x.dtype, x.head_dim) == wanted)


def operation(unit: Unit, case: Case, device: torch.device) -> Callable[[], object]:
    """One call of the unit's direction on fresh random tensors."""
    native = unit.precision == "native"
    implementation = RingFA3() if native else QuantisedRingFA3(unit.precision)
    dtype = getattr(torch, unit.dtype)
    return implementation.prepare(make_problem(case, unit.direction, dtype, device)).run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD_CACHE")
    parser.add_argument("new", type=Path, metavar="NEW_CACHE")
    parser.add_argument("--units", nargs="+", default=["bf16"], help="as in ringfa3.build")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--length", type=int, default=TOKENS, help="of a sequence, at most 16384")
    parser.add_argument("--scores", choices=SCORES, help="default: N(0,1)")
    asked = parser.parse_args(arguments)
    host.select("python")  # a program of the C++ launcher would hold the functions of one build
    if asked.pairs < 2:
        parser.error(f"--pairs {asked.pairs}: quartiles need at least 2")
    if not 1 <= asked.length <= TOKENS:
        parser.error(f"--length {asked.length}: it must be from 1 to {TOKENS}")
    try:
        selected = select_units(asked.units)
        units = [x for x in selected if x.direction != QUANTISE and not x.clips]
        for unit in units:  # before anything is timed
            latest(asked.old, unit), latest(asked.new, unit)
            if unit.precision != "native":
                latest(asked.old, quantiser(unit))
    except BuildError as error:
        sys.exit(f"compare_speed: {error}")
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        sys.exit("compare_speed: the kernels run on Hopper GPUs only, and there is none here")
    for unit in selected:
        if unit not in units:
            options = "attention --set spans" if unit.clips else "fp8 --bandwidth"
            print(f"{unit.name}: not timed here, but by `ringfa3.bench {options}`")
    switch = Switch(asked.old, asked.new)
    launch._entry = switch.entry  # type: ignore[assignment]
    dispatch._build_problem = lambda _: None  # type: ignore[assignment]  # nothing is compiled
    print(torch.cuda.get_device_name(), flush=True)
    for switch.timed in units:
        unit = switch.timed
        for case in cases(unit, asked.length, asked.scores):
            found = ratios(switch, operation(unit, case, torch.device("cuda")), asked.pairs)
            low, middle, high = statistics.quantiles(found, n=4)
            what = f"{unit.name} {case.mask} {case.lengths[0]} {case.scores or 'N(0,1)'}"
            print(f"{what}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
