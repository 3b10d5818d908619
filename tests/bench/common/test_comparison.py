"""If this fails, a wrong result gets a speed in the tables. Rows of the benchmark: right results
are timed, wrong ones are not; the check against `dense`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from ringfa3.bench.attention.sdpa import Sdpa
from ringfa3.bench.common import comparison as comparison
from ringfa3.bench.common.accuracy import AccuracyCheck, Part, WrongResultError, every_part, parts
from ringfa3.bench.common.accuracy import attention as part_of_attention
from ringfa3.bench.common.cases import BACKWARD, CAUSAL, FORWARD, FULL, Case
from ringfa3.bench.common.comparison import DeviceLostError, measure_row
from ringfa3.bench.common.implementations import RingFA3
from ringfa3.bench.common.problem import (
    Implementation,
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    make_problem,
)
from ringfa3.bench.common.results import SELF, Row
from ringfa3.bench.common.timing import Call, Reading, WallClock
from tests.support.dense import attention, gradients, mask, worst

CPU = torch.device("cpu")
DENSE = Case("any", "dense", (40, 40), 4, 2, 32, CAUSAL)
PACKED = Case("any", "packed", (5, 70, 1, 33), 4, 2, 32, CAUSAL, packed=True)
WINDOW = Case("any", "window", (90,), 4, 2, 32, (7, 0))
WHOLE = Case("any", "full", (33,), 4, 1, 32, FULL)
HOP = Case("any", "rectangle", (50, 50), 4, 2, 32, FULL, keys=(21, 21))
CORNER = Case("any", "corner", (20, 20), 4, 2, 32, CAUSAL, keys=(33, 33))
MATH = Sdpa("math", torch.nn.attention.SDPBackend.MATH)


class Changed:
    """RingFA3, its results changed in place by `change` before they are returned."""

    def __init__(self, change: Callable[[torch.Tensor], object], name: str = "changed") -> None:
        self.name, self.change = name, change

    def prepare(self, problem: Problem) -> PreparedRun:
        prepared = RingFA3().prepare(problem)

        def run() -> object:
            result = prepared.run()
            for x in result if isinstance(result, tuple) else (result,):
                self.change(x)
            return result

        return replace(prepared, run=run)


class Failing:
    """Raises an error in `prepare`."""

    def __init__(self, error: Exception, name: str = "failing") -> None:
        self.name, self.error = name, error

    def prepare(self, problem: Problem) -> PreparedRun:
        raise self.error


class Untimed(WallClock):
    """Fails when anything is timed."""

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        raise AssertionError("timed")


def row(
    case: Case,
    *implementations: Implementation,
    direction: str = FORWARD,
    stopwatch: WallClock | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    return measure_row(case, direction, dtype, CPU, implementations, 10, stopwatch or WallClock())


@pytest.mark.parametrize("case", [DENSE, PACKED, WINDOW, WHOLE, HOP, CORNER], ids=lambda c: c.label)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_the_reference_of_a_part_is_that_of_dense_attention(
    case: Case, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 to 1e-12, in runs of few rows, for the last KV head of every sequence."""
    monkeypatch.setattr("ringfa3.bench.common.accuracy.MAX_SCORES", 700)
    problem = make_problem(case, direction, torch.float64, CPU)
    q, k, v = (x.reshape(-1, *x.shape[-2:]).requires_grad_() for x in problem.inputs)
    out, lse = attention(q, k, v, mask(case.lengths, case.key_lengths, *case.window))
    expected = {"out": out}
    if direction == BACKWARD:
        grads = gradients([q, k, v], (out, lse), problem.dout.reshape(q.shape))
        expected = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    keys = pairwise(accumulate(case.key_lengths, initial=0))
    for (begin, end), its in zip(pairwise(case.cumulative), keys, strict=True):
        part = Part(begin, end, case.kv_heads - 1, case.heads // case.kv_heads, its)
        found = part_of_attention(problem, part, torch.float64)
        assert found.keys() == expected.keys()
        assert worst([(part.of(n, expected[n]), x) for n, x in found.items()]) < 1e-12


def test_the_longest_sequence_is_checked() -> None:
    chosen = parts(make_problem(PACKED, FORWARD, torch.float32, CPU))
    assert [(p.begin, p.end, p.kv_head) for p in chosen] == [(5, 75, 1), (76, 109, 0)]
    assert len(parts(make_problem(WHOLE, FORWARD, torch.float32, CPU))) == 1  # one KV head
    assert len(parts(make_problem(WINDOW, FORWARD, torch.float32, CPU))) == 2


def test_without_pairs_all_heads_are_checked_and_nothing_is_timed() -> None:
    problem = make_problem(PACKED, FORWARD, torch.float32, CPU)
    found = every_part(problem)
    assert [(p.begin, p.kv_head) for p in found] == [
        (begin, head) for begin in (0, 5, 75, 76) for head in (0, 1)
    ]
    untimed = measure_row(
        PACKED, BACKWARD, torch.bfloat16, CPU, [RingFA3(), RingFA3("again")], 0, WallClock()
    )
    assert untimed.stopped is None
    assert untimed.errors == untimed.comparisons["again"].errors
    assert untimed.first_timed is None


def test_one_head_of_a_very_long_sequence_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfa3.bench.common.accuracy.LONG", 89)
    chosen = parts(make_problem(WINDOW, FORWARD, torch.float32, CPU))
    assert [(p.begin, p.end, p.kv_head) for p in chosen] == [(0, 90, 1)]


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("case", [DENSE, PACKED, WINDOW, WHOLE, HOP], ids=lambda c: c.label)
def test_a_row_has_figures_and_errors_within_bounds(case: Case, direction: str) -> None:
    found = row(case, RingFA3(), MATH, direction=direction)
    assert found.stopped is None
    assert set(found.errors) == ({"out"} if direction == FORWARD else {"dq", "dk", "dv"})
    assert all(found.errors[n] <= found.allowed[n] for n in found.errors)
    other = found.comparisons["math"] if case in (DENSE, WHOLE, HOP) else found.comparisons[SELF]
    assert other.tflops is not None
    assert other.ratio is not None
    assert [len(t) for t in other.seconds] == [10, 10]
    middle = sorted(other.seconds[0])[4:6]
    assert other.tflops[0] == pytest.approx(found.flops / (sum(middle) / 2) / 1e12)
    if case in (PACKED, WINDOW):
        assert str(found.comparisons["math"].stopped).startswith("refused: no ")


WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "scaled": lambda x: x.mul_(1.1),
    "nan": lambda x: x.view(-1)[-1:].fill_(torch.nan),
    "unwritten row": lambda x: x.view(-1, *x.shape[-2:])[-3].zero_(),
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_wrong_result_of_ours_stops_the_row_untimed(how: str, direction: str) -> None:
    case = WHOLE  # one KV head: every head is compared with float64
    found = row(case, Changed(WRONG[how]), MATH, direction=direction, stopwatch=Untimed())
    assert str(found.stopped).startswith("wrong: ")
    assert "from float64, allowed" in str(found.stopped)
    assert not found.comparisons


def test_a_wrong_result_of_a_peer_stops_only_its_match() -> None:
    found = row(DENSE, RingFA3(), Changed(WRONG["scaled"]), MATH)
    assert str(found.comparisons["changed"].stopped).startswith("wrong: out is off by")
    assert found.comparisons["changed"].ratio is None
    assert found.comparisons["math"].ratio is not None


def test_a_wrong_place_outside_the_checked_parts_is_found_by_comparison() -> None:
    """The first sequence at the first KV head is in no part."""

    def spoil(x: torch.Tensor) -> None:
        x.view(-1, *x.shape[-2:])[7, 0] += 1.0

    problem = make_problem(DENSE, FORWARD, torch.bfloat16, CPU)
    prepared = Changed(spoil).prepare(problem)
    AccuracyCheck(problem).errors(prepared.outputs(prepared.run()))  # finds nothing
    found = row(DENSE, Changed(spoil), MATH, stopwatch=Untimed())
    assert "of the two differs by" in str(found.comparisons["math"].stopped)


def test_the_bound_is_twice_pytorchs_error() -> None:
    problem = make_problem(DENSE, FORWARD, torch.bfloat16, CPU)
    check = AccuracyCheck(problem)
    plain = [part_of_attention(problem, p, torch.bfloat16)["out"] for p in check.parts]
    error = max(
        float((x.double() - t["out"]).abs().max())
        for x, t in zip(plain, check.reference, strict=True)
    )
    assert check.bound["out"] == pytest.approx(2 * error + 1e-5)
    out = RingFA3().prepare(problem)
    result = out.outputs(out.run())["out"].double()
    check.errors({"out": result})
    for leniency in (1.0, 2.0):
        shifted = {"out": result + leniency * check.bound["out"]}
        with pytest.raises(WrongResultError, match="out is off by"):
            check.errors(shifted, leniency)
        check.errors(shifted, leniency + 1)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (UnsupportedCaseError("no window"), "refused: no window"),
        (RuntimeError("No available kernel.\nAborting"), "failed: No available kernel."),
        (AssertionError(), "failed: AssertionError"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_stops_a_peer_is_recorded_and_the_row_goes_on(error: Exception, message: str) -> None:
    found = row(DENSE, RingFA3(), Failing(error), MATH)
    assert found.comparisons["failing"].stopped == message
    assert found.stop_reason("failing") == message
    assert found.comparisons["math"].ratio is not None
    assert found.tflops("RingFA3") == found.comparisons["math"].tflops[0]  # type: ignore[index]
    assert row(DENSE, Failing(error), MATH).stopped == message


def test_a_lost_device_is_raised_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise DeviceLostError("the GPU no longer answers: an illegal memory access was encountered")

    problem = make_problem(DENSE, FORWARD, torch.bfloat16, CPU)
    monkeypatch.setattr(comparison, "make_problem", lambda *_: problem)
    failing = Failing(RuntimeError("illegal"))
    released = iter([lambda _: None, lost])
    monkeypatch.setattr(comparison, "release_memory", lambda device: next(released)(device))
    with pytest.raises(DeviceLostError) as caught:
        row(DENSE, failing, MATH)
    assert caught.value.row is not None
    assert "no longer answers: an illegal" in str(caught.value.row.stopped)
