"""One row: RingFA3, or whoever comes first, against each of the others on one problem."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ringfa3.bench.cases import Case
from ringfa3.bench.gate import PEER_LENIENCY, Gate, WrongResultError
from ringfa3.bench.problem import Attempt, Contestant, Problem, RefusalError, make_problem
from ringfa3.bench.results import ALONE, Match, Row
from ringfa3.bench.timing import Stopwatch, compare, median, paired


class DeviceLostError(Exception):
    """The GPU no longer answers: nothing more can be measured by this process."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.row: Row | None = None  # the row that it happened in


class _StoppedError(Exception):
    """Why a row, or one match of it, has no figures."""


def hold(
    case: Case,
    direction: str,
    dtype: torch.dtype,
    device: torch.device,
    contestants: Sequence[Contestant],
    pairs: int,
    stopwatch: Stopwatch,
) -> Row:
    """Check and time one case.

    The first contestant's failure stops the row, another's only its match with it. Raises
    DeviceLostError, with the row, where the GPU does not survive it.
    """
    row = Row.of(case, direction, str(dtype).removeprefix("torch."), [c.name for c in contestants])
    try:
        _release(device)
        with _explained(device):
            problem = make_problem(case, direction, dtype, device)
        _fill(row, problem, contestants, pairs, stopwatch)
    except _StoppedError as stopped:
        row.stopped = str(stopped)
    except DeviceLostError as lost:
        row.stopped = f"failed: the GPU no longer answers: {lost}"
        lost.row = row
        raise
    return row


def _fill(
    row: Row,
    problem: Problem,
    contestants: Sequence[Contestant],
    pairs: int,
    stopwatch: Stopwatch,
) -> None:
    first, *others = contestants
    device = problem.q.device
    with _explained(device):
        ours = first.prepare(problem)
        gate = Gate(problem)
        row.allowed = gate.bound
        row.errors = _check(gate, ours)
    for other in others:
        try:
            with _explained(device):
                match = _match(problem, gate, ours, other, pairs, stopwatch)
        except _StoppedError as stopped:
            match = Match(stopped=str(stopped))
        row.matches[other.name] = match
    if row.head is None:  # nobody to compare with: its own speed all the same
        with _explained(device):
            row.matches[ALONE] = _timed(problem, ours, ours, pairs, stopwatch)


def _match(
    problem: Problem,
    gate: Gate,
    ours: Attempt,
    other: Contestant,
    pairs: int,
    stopwatch: Stopwatch,
) -> Match:
    theirs = other.prepare(problem)
    errors = _check(gate, theirs, PEER_LENIENCY)
    differences = gate.differences(ours.outputs(ours.run()), theirs.outputs(theirs.run()))
    match = _timed(problem, ours, theirs, pairs, stopwatch)
    match.errors, match.differences = errors, differences
    return match


def _timed(
    problem: Problem, ours: Attempt, theirs: Attempt, pairs: int, stopwatch: Stopwatch
) -> Match:
    times = paired(ours.run, theirs.run, pairs, stopwatch)
    ratio = compare(times.a, times.b)
    flops = problem.case.flops(problem.direction)
    return Match(
        seconds=(times.a, times.b),
        tflops=(flops / median(times.a) / 1e12, flops / median(times.b) / 1e12),
        ratio=ratio.median,
        interval=(ratio.low, ratio.high),
        calls=times.calls,
        host_seconds=times.host,
        host_bound=times.host_bound,
    )


def _check(gate: Gate, attempt: Attempt, leniency: float = 1.0) -> dict[str, float]:
    return gate.errors(attempt.outputs(attempt.run()), leniency)


@contextmanager
def _explained(device: torch.device) -> Iterator[None]:
    """Makes what stops a case a `_StoppedError`: its kind and one line."""
    try:
        yield
    except RefusalError as error:
        stopped = _StoppedError(f"refused: {error}")
    except WrongResultError as error:
        stopped = _StoppedError(f"wrong: {error}")
    except torch.OutOfMemoryError:
        stopped = _StoppedError("out of memory")
    except Exception as error:  # of whatever library is measured
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        stopped = _StoppedError(f"failed: {line}")
    else:
        return
    _release(device)
    raise stopped


def _release(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(str(error).splitlines()[0]) from error
