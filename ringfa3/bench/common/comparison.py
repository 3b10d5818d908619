"""One row: RingFA3, or whoever comes first, against each of the others on one problem."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ringfa3.bench.common.accuracy import PEER_LENIENCY, Gate, WrongResultError
from ringfa3.bench.common.cases import Case
from ringfa3.bench.common.problem import Attempt, Contestant, Problem, RefusalError, make_problem
from ringfa3.bench.common.ranks import LostError, Team, ToldError
from ringfa3.bench.common.results import ALONE, Match, RingRow, Row
from ringfa3.bench.common.timing import Paired, Stopwatch, compare, median, paired


class DeviceLostError(Exception):
    """The GPU, or a rank, no longer answers: nothing more can be measured by this process."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.row: Row | None = None  # the row that it happened in


class StoppedError(Exception):
    """Why a row, or one match of it, has no figures; the same on every rank."""


def hold(
    case: Case,
    direction: str,
    dtype: torch.dtype,
    device: torch.device,
    contestants: Sequence[Contestant],
    pairs: int,
    stopwatch: Stopwatch,
    alone: Contestant | None = None,
) -> Row:
    """Check and time one case.

    The first contestant's failure stops the row, another's only its match with it. Raises
    DeviceLostError, with the row, where the GPU or a rank does not survive it.

    `alone` computes the whole problem on one device where the contestants share it among ranks:
    each of them is then held against it. Without pairs nothing is timed, and the truth is that of
    all heads.
    """
    kind = Row if alone is None else RingRow
    row = kind.of(case, direction, str(dtype).removeprefix("torch."), [c.name for c in contestants])
    with filling(row, stopwatch.team):
        release(device)
        with explained(device, stopwatch.team):
            problem = make_problem(case, direction, dtype, device)
        _fill(row, problem, contestants, pairs, stopwatch, alone)
    return row


@contextmanager
def filling(row: Row, team: Team) -> Iterator[None]:
    """Around all that is measured for a row: what stops it is said in it."""
    try:
        yield
    except StoppedError as stopped:
        row.stopped = str(stopped)
        if _lost_step(row.stopped):
            team.renew()
    except DeviceLostError as lost:
        team.leave(str(lost))
        row.stopped = f"failed: {lost}"
        lost.row = row
        raise


def _fill(
    row: Row,
    problem: Problem,
    contestants: Sequence[Contestant],
    pairs: int,
    stopwatch: Stopwatch,
    alone: Contestant | None,
) -> None:
    first, *others = contestants
    device, team = problem.q.device, stopwatch.team
    with explained(device, team):
        ours = first.prepare(problem)
        reference = ours if alone is None else alone.prepare(problem)
        gate = Gate(problem, of_all=not pairs)
        row.allowed = gate.bound
        if isinstance(row, RingRow):
            row.alone = _check(gate, reference, team)
            gate.differences(reference.results(), ours.results(), ours.rows)
        row.errors = _check(gate, ours, team)
    for other in others:
        try:
            with explained(device, team):
                match = _match(problem, gate, reference, ours, other, pairs, stopwatch)
        except StoppedError as stopped:
            match = Match(stopped=str(stopped))
        row.matches[other.name] = match
        if team.world > 1 and _lost_step(match.stopped):
            team.renew()
            with explained(device, team):
                ours = first.prepare(problem)
                reference = ours if alone is None else reference
    if pairs and row.head is None:  # nobody to compare with: its own speed all the same
        with explained(device, team):
            row.matches[ALONE] = _timed(problem, ours, ours, pairs, stopwatch)


def _lost_step(stopped: str | None) -> bool:
    """Whether some ranks may have begun what others did not."""
    return stopped is not None and stopped.startswith(("failed", "out of memory"))


def _match(
    problem: Problem,
    gate: Gate,
    reference: Attempt,
    ours: Attempt,
    other: Contestant,
    pairs: int,
    stopwatch: Stopwatch,
) -> Match:
    theirs = other.prepare(problem)
    try:
        if theirs.outputs is None:
            return _timed(problem, ours, theirs, pairs, stopwatch)
        errors = _check(gate, theirs, stopwatch.team, PEER_LENIENCY)
        differences = gate.differences(reference.results(), theirs.results(), theirs.rows)
        match = _timed(problem, ours, theirs, pairs, stopwatch) if pairs else Match()
        match.errors, match.differences = errors, differences
        return match
    finally:
        theirs.close()


def _timed(
    problem: Problem, ours: Attempt, theirs: Attempt, pairs: int, stopwatch: Stopwatch
) -> Match:
    times = paired(ours.run, theirs.run, pairs, stopwatch)
    mine = problem.case.flops(problem.direction)
    its = theirs.flops or mine
    match = match_of(times, mine / its)
    match.tflops = mine / median(times.a) / 1e12, its / median(times.b) / 1e12
    return match


def match_of(times: Paired, work: float = 1.0) -> Match:
    """With times alone. `work` is A's over B's where they do not do the same."""
    ratio = compare(times.a, times.b, work)
    return Match(
        seconds=(times.a, times.b),
        ratio=ratio.median,
        interval=(ratio.low, ratio.high),
        calls=times.calls,
        host_seconds=times.host,
        host_bound=times.host_bound,
    )


def _check(gate: Gate, attempt: Attempt, team: Team, leniency: float = 1.0) -> dict[str, float]:
    """The errors of an attempt, of the rank where they are largest."""
    errors = gate.errors(attempt.results(), leniency, attempt.rows)
    return dict(zip(errors, team.largest(list(errors.values())), strict=True))


@contextmanager
def explained(device: torch.device, team: Team) -> Iterator[None]:
    """Makes what stops a case a `StoppedError`, on every rank: its kind and one line."""
    problem = None
    told = False
    try:
        yield
    except LostError as error:
        raise DeviceLostError(str(error)) from error
    except ToldError as error:
        problem, told = str(error), True
    except RefusalError as error:
        problem = f"refused: {error}"
    except WrongResultError as error:
        problem = f"wrong: {error}"
    except torch.OutOfMemoryError:
        problem = "out of memory"
    except Exception as error:  # of whatever library is measured
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        problem = f"failed: {line}"
    if not told:
        try:
            team.meet(problem=problem)
            return
        except ToldError as error:
            problem = str(error)
        except LostError as error:
            raise DeviceLostError(str(error)) from error
    release(device)
    raise StoppedError(problem)


def release(device: torch.device) -> None:
    """Give back what nobody holds, on a GPU."""
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise DeviceLostError(f"the GPU no longer answers: {line}") from error
