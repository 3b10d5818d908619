"""Where the time of a step goes: tables of a trace of `torch.profiler`.

A trace is Chrome's: a list of events with `ts` and `dur` in microseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.compare_trainers.stopwatch import RECORDED

KERNELS, OPS, GAPS = 25, 15, 10  # rows of the tables
WIDTH = 72  # characters of a kernel's name
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
LEAST_GAP_US = 1.0

Event = dict[str, Any]
Interval = tuple[float, float]  # begin, end


class Gap(NamedTuple):
    """A time in which the device had nothing to do, in microseconds, and the kernels around it."""

    begin: float
    end: float
    before: str
    after: str


def report(events: Iterable[Event]) -> str:
    """The tables of a trace of `RECORDED` steps; times are milliseconds of one step.

    Kernels are counted by name and by the op that launched them. The time of an op on the host is
    its own, without that of ops inside it. A device is idle if none of its streams has work, and
    waits for other ranks if they have NCCL's kernels alone.

    Raises ValueError: the trace has no work of a device, as on CPUs.
    """
    kept = [x for x in events if x.get("ph") == "X" and x.get("cat") in ON_DEVICE + ON_HOST]
    work = sorted((x for x in kept if x["cat"] in ON_DEVICE), key=lambda x: float(x["ts"]))
    host = [x for x in kept if x["cat"] in ON_HOST]
    if not work:
        raise ValueError("the trace has no kernels: profile on a GPU")
    whole = max(_interval(x)[1] for x in work) - _interval(work[0])[0]
    busy = _union(_interval(x) for x in work)
    computing = _union(_interval(x) for x in work if "nccl" not in x["name"].lower())
    idle, waiting = whole - _length(busy), _length(busy) - _length(computing)
    lines = [
        f"a recorded step {_ms(whole)} ms: idle {idle / whole:.1%}, in NCCL alone "
        f"{waiting / whole:.1%}",
        *_kernel_table(work, host),
        *_op_table(host),
        *_gap_table(_gaps(work), host),
    ]
    return "\n".join(lines)


def _kernel_table(work: list[Event], host: list[Event]) -> Iterator[str]:
    op_of = {
        x["args"]["External id"]: x
        for x in host
        if x["cat"] == "cpu_op" and "External id" in x.get("args", {})
    }
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for x in work:
        op = op_of.get(x.get("args", {}).get("External id"), {"name": "-"})
        times[op["name"], _largest_input(op), x["name"][:WIDTH]].append(x["dur"])
    total = sum(sum(found) for found in times.values())
    yield f"kernels: {len(work) / RECORDED:.0f} a step, {_ms(total)} ms"
    yield f"{'ms':>8} {'calls':>6}  op, its largest input, kernel"
    rows = sorted(times.items(), key=lambda row: -sum(row[1]))
    for (op_name, shape, name), found in rows[:KERNELS]:
        yield f"{_ms(sum(found)):>8} {len(found) / RECORDED:>6.0f}  {op_name} {shape} {name}"
    rest = sum(sum(found) for _, found in rows[KERNELS:])
    yield f"{_ms(rest):>8} {'':>6}  {len(rows[KERNELS:])} others"


def _op_table(host: list[Event]) -> Iterator[str]:
    times: dict[str, list[float]] = defaultdict(list)
    for thread in _threads(host):
        for x, own in _own_times(thread):
            times[x["name"]].append(own)
    yield "host: the largest own times, calls of CUDA included"
    yield f"{'ms':>8} {'calls':>6}  op"
    for name, found in sorted(times.items(), key=lambda row: -sum(row[1]))[:OPS]:
        yield f"{_ms(sum(found)):>8} {len(found) / RECORDED:>6.0f}  {name}"


def _gap_table(gaps: list[Gap], host: list[Event]) -> Iterator[str]:
    """The longest gaps, not divided by steps, and the host's outermost ops in each."""
    outer = [x for thread in _threads(host) for x in _outermost(thread)]
    yield f"the longest of {len(gaps) / RECORDED:.0f} gaps a step, and what the host did"
    for gap in sorted(gaps, key=lambda gap: gap.begin - gap.end)[:GAPS]:
        inside: dict[str, float] = defaultdict(float)
        for x in outer:
            begin, end = _interval(x)
            if (common := min(end, gap.end) - max(begin, gap.begin)) > 0:
                inside[x["name"]] += common
        longest = sorted(inside.items(), key=lambda row: -row[1])[:3]
        ops = ", ".join(f"{name} {common / 1e3:.2f}" for name, common in longest) or "Python alone"
        yield (
            f"{(gap.end - gap.begin) / 1e3:8.2f}  {ops}; from {gap.before[:40]} to {gap.after[:40]}"
        )


def _largest_input(op: Event) -> str:
    """Shape and dtype."""
    found = op.get("args", {})
    shapes, dtypes = found.get("Input Dims", []), found.get("Input type", [])
    given = [(x, t) for x, t in zip(shapes, dtypes, strict=False) if x and isinstance(x[0], int)]
    if not given:
        return ""
    shape, dtype = max(given, key=lambda x: math.prod(x[0]))
    return f"{dtype.removeprefix('c10::')} {shape}"


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _gaps(work: list[Event]) -> list[Gap]:
    """Where no stream has work; `work` is sorted by its begin."""
    gaps, last = list[Gap](), work[0]
    for x in work[1:]:
        begin, end = _interval(x)
        if begin - _interval(last)[1] >= LEAST_GAP_US:
            gaps.append(Gap(_interval(last)[1], begin, last["name"], x["name"]))
        if end > _interval(last)[1]:
            last = x
    return gaps


def _threads(host: list[Event]) -> list[list[Event]]:
    """Events by thread, in order; of two that begin together the longer one, which has the other
    inside it, comes first."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for x in host:
        by_thread[x.get("pid"), x.get("tid")].append(x)
    return [
        sorted(found, key=lambda x: (float(x["ts"]), -float(x["dur"])))
        for found in by_thread.values()
    ]


def _own_times(thread: list[Event]) -> Iterator[tuple[Event, float]]:
    """Events of a thread, each with its time without the events inside it."""
    own = [float(x["dur"]) for x in thread]
    open_events: list[int] = []
    for number, x in enumerate(thread):
        while open_events and _interval(thread[open_events[-1]])[1] <= float(x["ts"]):
            open_events.pop()
        if open_events:
            own[open_events[-1]] -= float(x["dur"])
        open_events.append(number)
    yield from zip(thread, own, strict=True)


def _outermost(thread: list[Event]) -> Iterator[Event]:
    """Events of a thread that are inside no other."""
    until = float("-inf")
    for x in thread:
        if float(x["ts"]) >= until:
            yield x
            until = _interval(x)[1]


def _ms(microseconds: float) -> str:
    return f"{microseconds / RECORDED / 1e3:.2f}"
