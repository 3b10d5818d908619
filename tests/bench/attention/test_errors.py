"""If this fails, the published rms errors are wrong. Rms errors of `--set scores`: against a
brute-force float64 reference, pooled over seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringfa3.bench.__main__ import main
from ringfa3.bench.attention import errors as module
from ringfa3.bench.attention import run as attention_run
from ringfa3.bench.attention.errors import SEEDS, add_errors, problem_case
from ringfa3.bench.common.accuracy import AccuracyCheck, attention, parts
from ringfa3.bench.common.cases import BACKWARD, CAUSAL, FORWARD, FULL, Case
from ringfa3.bench.common.implementations import RingFA3
from ringfa3.bench.common.problem import PreparedRun, Problem, UnsupportedCaseError, make_problem
from ringfa3.bench.common.results import PLAIN, PLAIN_FLOAT32, Results, Row
from tests.support import dense

CPU = torch.device("cpu")
CASE = Case("scores", "sigma 4", (90,), 8, 4, 32, CAUSAL, scores="sigma 4")
NAMES = {FORWARD: ("out",), BACKWARD: ("dq", "dk", "dv")}


class Changed:
    """RingFA3; `change` gets each output and the problem's number, which counts from 0."""

    def __init__(self, change: Callable[[torch.Tensor, int], object], name: str) -> None:
        self.name, self.change, self.calls = name, change, 0

    def prepare(self, problem: Problem) -> PreparedRun:
        prepared, number = RingFA3().prepare(problem), self.calls
        self.calls += 1

        def run() -> object:
            result = prepared.run()
            for x in result if isinstance(result, tuple) else (result,):
                self.change(x, number)
            return result

        return replace(prepared, run=run)


def measured(case: Case, direction: str, *others: Changed, dtype: torch.dtype) -> Row:
    implementations = [RingFA3(), *others]
    names = [i.name for i in implementations]
    row = Row.of(case, direction, str(dtype).removeprefix("torch."), names)
    add_errors(row, case, dtype, CPU, implementations)
    return row


def exact(problem: Problem) -> dict[str, torch.Tensor]:
    """Dense attention of the whole problem in float64."""
    case = problem.case
    q, k, v = (x.double().flatten(0, 1).requires_grad_() for x in problem.inputs)
    outputs = dense.attention(q, k, v, dense.mask(case.lengths, case.key_lengths, *case.window))
    if problem.direction == FORWARD:
        return {"out": outputs[0]}
    dout = problem.dout.double().flatten(0, 1)
    return dict(zip(NAMES[BACKWARD], dense.gradients([q, k, v], outputs, dout), strict=True))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_errors_are_the_root_of_the_mean_square_over_seeds(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last rows of the first and last KV head forward, of everything backward; to 1e-6."""
    monkeypatch.setattr(module, "ROWS", 20)
    row = measured(CASE, direction, dtype=torch.bfloat16)
    assert set(row.rms) == {"RingFA3", PLAIN} | ({PLAIN_FLOAT32} if direction == FORWARD else set())
    squares: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES[direction]}
    for seed in range(SEEDS):
        case = problem_case(CASE, direction)
        problem = make_problem(case, direction, torch.bfloat16, CPU, seed)
        results = RingFA3().prepare(problem).results()
        for name, reference in exact(problem).items():
            square = (results[name].double() - reference).square()
            if direction == FORWARD:
                square = square[-20:, [0, 1, 6, 7]]  # 2 query heads on each KV head
            squares[name].append(square.flatten())
    for name, found in squares.items():
        expected = torch.cat(found).mean().sqrt().item()
        assert row.rms["RingFA3"][name] == pytest.approx(expected, rel=1e-6)
        assert row.error_ratios(PLAIN)[name] == pytest.approx(expected / row.rms[PLAIN][name])
    assert row.untimed
    assert row.stopped is None


def test_gradients_are_compared_on_few_tokens_and_heads() -> None:
    long = replace(CASE, lengths=(16384,), heads=32, kv_heads=8)
    assert problem_case(long, FORWARD) is long
    short = problem_case(long, BACKWARD)
    assert (short.lengths, short.heads, short.kv_heads) == ((2048,), 8, 2)
    assert (short.scores, short.window) == (long.scores, long.window)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_larger_error_of_one_seed_counts(direction: str) -> None:
    again = Changed(lambda x, n: None, "again")
    worse = Changed(lambda x, n: x.add_(0.5 * (n == SEEDS - 1)), "worse")
    row = measured(CASE, direction, again, worse, dtype=torch.float32)
    for name in NAMES[direction]:
        assert row.error_ratios("again")[name] == 1
        assert row.rms["worse"][name] == pytest.approx(0.5 / SEEDS**0.5, rel=0.01)
        assert row.error_ratios("worse")[name] < 1e-4


def test_an_error_that_is_not_finite_is_wrong_unless_all_are() -> None:
    spoiled = Changed(lambda x, n: x.view(-1)[-1:].fill_(torch.nan), "spoiled")
    row = measured(CASE, FORWARD, spoiled, dtype=torch.bfloat16)
    assert row.comparisons["spoiled"].stopped == "wrong: out has an rms error of nan"
    assert row.stopped is None
    row = Row.of(CASE, FORWARD, "bfloat16", ["spoiled", "RingFA3"])
    add_errors(row, CASE, torch.bfloat16, CPU, [spoiled, RingFA3()])
    assert row.stopped == "wrong: out has an rms error of nan"
    assert row.error_ratios("RingFA3") == {"out": float("inf")}


def test_a_library_that_refuses_has_no_error_and_says_why() -> None:
    def refuse(x: torch.Tensor, n: int) -> None:
        raise UnsupportedCaseError("no causal")

    row = measured(CASE, FORWARD, Changed(refuse, "refusing"), dtype=torch.bfloat16)
    assert row.comparisons["refusing"].stopped == "refused: no causal"
    assert "refusing" not in row.rms
    assert row.error_ratios("refusing") == {}


def test_the_bound_of_shaped_scores_is_that_of_float32_scores() -> None:
    """At 16 nats bfloat16 scores are off by a quarter, and out by far more than P's rounding."""
    case = replace(CASE, scores="sigma 16", window=FULL)
    shaped = make_problem(case, FORWARD, torch.bfloat16, CPU)
    plain = replace(shaped, case=replace(case, scores=None))
    bound, loose = (AccuracyCheck(p).bound["out"] for p in (shaped, plain))
    assert bound < loose / 4
    (part, _) = parts(shaped)
    exact, close, far = (
        attention(shaped, part, *how)["out"].double()
        for how in ((torch.float64,), (torch.bfloat16, True), (torch.bfloat16,))
    )
    assert (close - exact).abs().max() <= bound / 2
    assert (far - exact).abs().max() > bound


@pytest.mark.parametrize("errors_only", [False, True])
def test_the_set_from_end_to_end(
    errors_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed rows have ratios and errors, untimed ones errors alone."""
    small = [replace(CASE, scores=name, label=name) for name in ("6 nats down", "sink", "outliers")]
    monkeypatch.setattr(attention_run, "select", lambda *_: small)
    more = ["--errors-only"] * errors_only
    arguments = ["--device", "cpu", "--set", "scores", "--out", str(tmp_path), *more]
    assert main(["attention", *arguments]) == 0
    found = Results.load(tmp_path / "results.json")
    assert [row.scores for row in found.rows] == ["6 nats down", "sink", "outliers"] * 2
    for row in found.rows:
        assert row.stopped is None
        assert row.untimed == (errors_only or row.scores == "outliers")
        assert set(row.error_ratios("SDPA math")) == set(NAMES[row.direction])
        assert bool(row.comparisons) is not row.untimed
    assert found.inputs.endswith("--set scores: as its rows say")
    text = (tmp_path / "table.txt").read_text()
    assert "error / PyTorch:" in text
    assert "largest rms error over that of PyTorch: " in text
    assert (tmp_path / "forward-scores.png").exists() is not errors_only
