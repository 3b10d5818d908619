"""Rms errors against float64, pooled over seeds, of every implementation and of plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ringfa3.bench.common.accuracy import Part, attention, every_part
from ringfa3.bench.common.cases import FORWARD, Case
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.comparison import StoppedError, raising_on_all_ranks
from ringfa3.bench.common.problem import Implementation, Outputs, Problem, make_problem
from ringfa3.bench.common.results import PLAIN, PLAIN_FLOAT32, Comparison, Row

SEEDS = 5
ROWS = 256  # of the end of a sequence, of which `out` is compared
KV_HEADS = 2  # the first and the last
GRADIENT_TOKENS = 2048  # gradients of keys need every row: their problem is shorter


@dataclass
class _Sum:
    """Squared errors: their sum and number, by output."""

    squares: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, result: torch.Tensor, exact: torch.Tensor, name: str) -> None:
        error = (result.double() - exact.double()).square().sum().item()
        self.squares[name] = self.squares.get(name, 0.0) + error
        self.count[name] = self.count.get(name, 0) + exact.numel()

    @property
    def rms(self) -> dict[str, float]:
        return {name: math.sqrt(x / self.count[name]) for name, x in self.squares.items()}


def add_errors(
    row: Row,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    implementations: Sequence[Implementation],
) -> None:
    """Fill `row.rms`, and say "wrong" where an error is inf or NaN and that of another is finite.

    Only implementations that nothing has stopped in this row are called.
    Raises DeviceLostError, with the row.
    """
    sums: dict[str, _Sum] = {}
    comm = Communicator()
    for seed in range(SEEDS):
        problem = make_problem(
            problem_case(case, row.direction), row.direction, dtype, device, seed
        )
        parts = compared_parts(problem)
        exact = [attention(problem, part, torch.float64) for part in parts]
        plain = [attention(problem, part, dtype) for part in parts]
        _add(sums.setdefault(PLAIN, _Sum()), plain, exact)
        if row.direction == FORWARD:
            plain = [attention(problem, part, dtype, float32_scores=True) for part in parts]
            _add(sums.setdefault(PLAIN_FLOAT32, _Sum()), plain, exact)
        for implementation in implementations:
            name = implementation.name
            if row.stop_reason(name):
                continue
            try:
                with raising_on_all_ranks(device, comm):
                    results = implementation.prepare(problem).results()
            except StoppedError as stopped:
                sums.pop(name, None)
                _stop(row, name, str(stopped))
                continue
            mine = [{n: part.of(n, x) for n, x in results.items()} for part in parts]
            _add(sums.setdefault(name, _Sum()), mine, exact)
    row.rms = {name: total.rms for name, total in sums.items()}
    for implementation in implementations:
        for output, error in row.rms.get(implementation.name, {}).items():
            elsewhere = any(math.isfinite(errors[output]) for errors in row.rms.values())
            if elsewhere and not math.isfinite(error):
                _stop(row, implementation.name, f"wrong: {output} has an rms error of {error}")


def problem_case(case: Case, direction: str) -> Case:
    """The case whose errors are measured: as it is forward, of few tokens and heads backward."""
    if direction == FORWARD:
        return case
    group, tokens = case.heads // case.kv_heads, min(GRADIENT_TOKENS, case.lengths[0])
    heads = min(KV_HEADS, case.kv_heads)
    return replace(case, lengths=(tokens,), heads=heads * group, kv_heads=heads)


def compared_parts(problem: Problem) -> list[Part]:
    """The last rows on all keys at the first and last KV head; backward, everything."""
    if problem.direction != FORWARD:
        return every_part(problem)
    case = problem.case
    end = case.lengths[0]
    heads = sorted({0, case.kv_heads - 1})
    group = case.heads // case.kv_heads
    return [Part(max(0, end - ROWS), end, head, group, (0, end)) for head in heads]


def _add(total: _Sum, results: Sequence[Outputs], exact: Sequence[Outputs]) -> None:
    for result, reference in zip(results, exact, strict=True):
        for name in reference:
            total.add(result[name], reference[name], name)


def _stop(row: Row, name: str, reason: str) -> None:
    if name == row.first:
        row.stopped = reason
    else:
        row.comparisons[name] = Comparison(stopped=reason)
