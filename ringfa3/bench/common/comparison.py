"""One row: the first implementation against each of the others, on one problem."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ringfa3.bench.common.accuracy import PEER_LENIENCY, AccuracyCheck, WrongResultError
from ringfa3.bench.common.cases import Case
from ringfa3.bench.common.communicator import Communicator, RankFailedError, RankLostError
from ringfa3.bench.common.problem import (
    Implementation,
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    make_problem,
)
from ringfa3.bench.common.results import SELF, Comparison, RingRow, Row
from ringfa3.bench.common.timing import Paired, Stopwatch, compare, median, paired


class DeviceLostError(Exception):
    """The GPU, or a rank, no longer answers: this process can measure nothing more.

    row  the row in which it happened
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.row: Row | None = None


class StoppedError(Exception):
    """Why a row, or one comparison, has no figures; the same text on every rank."""


def measure_row(
    case: Case,
    direction: str,
    dtype: torch.dtype,
    device: torch.device,
    implementations: Sequence[Implementation],
    pairs: int,
    stopwatch: Stopwatch,
    single_gpu: Implementation | None = None,
) -> Row:
    """Check and time one case.

    A failure of the first implementation stops the row; a failure of another one stops only its
    comparison.

    Args:
        pairs: of timings; with 0 nothing is timed, and the float64 reference covers every head.
        single_gpu: for implementations that shard the problem over ranks: computes all of it on
            one device. Their results are compared with its result.

    Raises:
        DeviceLostError: with the row, where the GPU or a rank does not survive it.
    """
    row_type = Row if single_gpu is None else RingRow
    names = [i.name for i in implementations]
    row = row_type.of(case, direction, str(dtype).removeprefix("torch."), names)
    with recording_stop(row, stopwatch.comm):
        release_memory(device)
        with raising_on_all_ranks(device, stopwatch.comm):
            problem = make_problem(case, direction, dtype, device)
        _measure(row, problem, implementations, pairs, stopwatch, single_gpu)
    return row


@contextmanager
def recording_stop(row: Row, comm: Communicator) -> Iterator[None]:
    """Write a StoppedError or DeviceLostError of the block into `row.stopped`."""
    try:
        yield
    except StoppedError as stopped:
        row.stopped = str(stopped)
        if _ranks_diverged(row.stopped):
            comm.renew_process_groups()
    except DeviceLostError as lost:
        comm.report_loss(str(lost))
        row.stopped = f"failed: {lost}"
        lost.row = row
        raise


def _measure(
    row: Row,
    problem: Problem,
    implementations: Sequence[Implementation],
    pairs: int,
    stopwatch: Stopwatch,
    single_gpu: Implementation | None,
) -> None:
    first, *others = implementations
    device, comm = problem.q.device, stopwatch.comm
    with raising_on_all_ranks(device, comm):
        ours = first.prepare(problem)
        whole = ours if single_gpu is None else single_gpu.prepare(problem)
        check = AccuracyCheck(problem, all_parts=not pairs)
        row.allowed = check.bound
        if isinstance(row, RingRow):
            row.single_gpu_errors = _errors(check, whole, comm)
            check.differences(whole.results(), ours.results(), ours.rows)
        row.errors = _errors(check, ours, comm)
    for other in others:
        try:
            with raising_on_all_ranks(device, comm):
                comparison = _compare(problem, check, whole, ours, other, pairs, stopwatch)
        except StoppedError as stopped:
            comparison = Comparison(stopped=str(stopped))
        row.comparisons[other.name] = comparison
        if comm.world > 1 and _ranks_diverged(comparison.stopped):
            comm.renew_process_groups()
            with raising_on_all_ranks(device, comm):
                ours = first.prepare(problem)
                whole = ours if single_gpu is None else whole
    if pairs and row.first_timed is None:  # no other has figures: time the first against itself
        with raising_on_all_ranks(device, comm):
            row.comparisons[SELF] = _timed(problem, ours, ours, pairs, stopwatch)


def _ranks_diverged(stopped: str | None) -> bool:
    """Whether some ranks may have started a collective that others did not."""
    return stopped is not None and stopped.startswith(("failed", "out of memory"))


def _compare(
    problem: Problem,
    check: AccuracyCheck,
    whole: PreparedRun,
    ours: PreparedRun,
    other: Implementation,
    pairs: int,
    stopwatch: Stopwatch,
) -> Comparison:
    theirs = other.prepare(problem)
    try:
        if theirs.outputs is None:
            return _timed(problem, ours, theirs, pairs, stopwatch)
        errors = _errors(check, theirs, stopwatch.comm, PEER_LENIENCY)
        rms = whole.rms or theirs.rms
        differences = check.differences(whole.results(), theirs.results(), theirs.rows, rms)
        found = _timed(problem, ours, theirs, pairs, stopwatch) if pairs else Comparison()
        found.errors, found.differences = errors, differences
        return found
    finally:
        theirs.close()


def _timed(
    problem: Problem, ours: PreparedRun, theirs: PreparedRun, pairs: int, stopwatch: Stopwatch
) -> Comparison:
    times = paired(ours.run, theirs.run, pairs, stopwatch)
    our_flops = problem.case.flops(problem.direction)
    their_flops = theirs.flops or our_flops
    found = comparison_of(times, our_flops / their_flops)
    found.tflops = our_flops / median(times.a) / 1e12, their_flops / median(times.b) / 1e12
    return found


def comparison_of(times: Paired, work: float = 1.0) -> Comparison:
    """The comparison that paired times give, without TFLOP/s. work: A's FLOPs over B's."""
    ratio = compare(times.a, times.b, work)
    return Comparison(
        seconds=(times.a, times.b),
        ratio=ratio.median,
        interval=(ratio.low, ratio.high),
        calls=times.calls,
        host_seconds=times.host,
        host_bound=times.host_bound,
    )


def _errors(
    check: AccuracyCheck, prepared: PreparedRun, comm: Communicator, leniency: float = 1.0
) -> dict[str, float]:
    """The errors of a run, by output, each from the rank where it is largest."""
    errors = check.errors(prepared.results(), leniency, prepared.rows, prepared.rms)
    return dict(zip(errors, comm.maximum(list(errors.values())), strict=True))


@contextmanager
def raising_on_all_ranks(device: torch.device, comm: Communicator) -> Iterator[None]:
    """Turn any error of the block on any rank into one `StoppedError` on every rank.

    Its text is the kind of the error and the first line of its message. Raises DeviceLostError
    where a rank or a GPU is gone.
    """
    error_text = None
    exchanged = False
    try:
        yield
    except RankLostError as error:
        raise DeviceLostError(str(error)) from error
    except RankFailedError as error:
        error_text, exchanged = str(error), True
    except UnsupportedCaseError as error:
        error_text = f"refused: {error}"
    except WrongResultError as error:
        error_text = f"wrong: {error}"
    except torch.OutOfMemoryError:
        error_text = "out of memory"
    except Exception as error:  # whatever the measured library raises
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        error_text = f"failed: {line}"
    if not exchanged:
        try:
            comm.all_gather_object(error=error_text)
            return
        except RankFailedError as error:
            error_text = str(error)
        except RankLostError as error:
            raise DeviceLostError(str(error)) from error
    release_memory(device)
    raise StoppedError(error_text)


def release_memory(device: torch.device) -> None:
    """Return unreferenced GPU memory to the driver; nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise DeviceLostError(f"the GPU no longer answers: {line}") from error
