"""The accuracy check that every result passes before it is timed.

The reference is float64 attention on one or two *parts* of a case: whole sequences at single KV
heads. The bound is twice the error of plain PyTorch attention in the inputs' dtype. Where a case
shapes its scores, those of the plain forward are float32 (bfloat16 rounds 64 nats by a quarter),
and the bound of gradients is doubled: other than plain PyTorch, flash attention takes the row sums
of dO * O from a rounded O. Outside these parts, two implementations are compared with each other.

Other libraries get twice the bound: some round the gradients of a shared KV head once per query
head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.problem import GRADIENTS, Outputs, Problem
from ringfa3.masks.mask import Mask

FACTOR, SLACK = 2.0, 1e-5
ROUNDED_O = 2.0  # times the factor, for gradients of shaped scores
PEER_LENIENCY = 2.0  # times the bound, for other libraries
MAX_SCORES = 1 << 26  # elements of a score matrix in memory at once
MAX_COMPARED = 1 << 26  # elements compared at once
LONG = 1 << 16  # tokens above which one part is checked, not two
KEY_TENSORS = ("k", "v", "dk", "dv")  # with a row for each key, and a head for each KV head


class WrongResultError(Exception):
    """An error against float64, or a difference between two implementations, is above its bound."""


@dataclass(frozen=True)
class Part:
    """One sequence at one KV head and the query heads that share it.

    begin, end  its rows
    keys        its rows of K and V, [first, end); None: the same
    """

    begin: int
    end: int
    kv_head: int
    group: int
    keys: tuple[int, int] | None = None

    def of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This part of an input or output, (rows, heads, d)."""
        return self.heads_of(name, x)[self.rows_of(name)]

    def rows_of(self, name: str) -> slice:
        if self.keys and name in KEY_TENSORS:
            return slice(*self.keys)
        return slice(self.begin, self.end)

    def heads_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        width = 1 if name in KEY_TENSORS else self.group
        first = self.kv_head * width
        return x[:, first : first + width]


class AccuracyCheck:
    """The float64 reference of some parts of a problem, and the bounds for results there.

    bound   by output: 2 max|x_pt - reference| + 1e-5 over all parts; 4 for gradients of shaped
            scores
    """

    def __init__(self, problem: Problem, all_parts: bool = False) -> None:
        """all_parts: check every sequence and head, not one or two."""
        self.parts = every_part(problem) if all_parts else parts(problem)
        self.reference = [attention(problem, p, torch.float64) for p in self.parts]
        shaped, forward = problem.case.scores is not None, problem.direction == FORWARD
        plain = [attention(problem, p, problem.q.dtype, shaped and forward) for p in self.parts]
        factor = FACTOR * ROUNDED_O if shaped and not forward else FACTOR
        self.bound = {
            name: factor * max(_distance(x[name], t[name]) for x, t in self._zip(plain)) + SLACK
            for name in self.reference[0]
        }

    def _zip(self, results: list[Outputs]) -> Iterator[tuple[Outputs, Outputs]]:
        return zip(results, self.reference, strict=True)

    def errors(
        self,
        results: Outputs,
        leniency: float = 1.0,
        rows: torch.Tensor | None = None,
        rms: float | None = None,
    ) -> dict[str, float]:
        """max|result - reference| over all parts, by output.

        rows: the problem's tokens that `results` has; None: all.
        rms: the most that the rms of an output's errors may be, over that of the reference.
        Raises WrongResultError where an error is above `leniency` times its bound; with `rms`,
        where that of the errors in a part is above it.
        """
        errors = dict.fromkeys(self.bound, 0.0)
        for part, reference in zip(self.parts, self.reference, strict=True):
            for name in errors:
                of_result: slice | torch.Tensor = part.rows_of(name)
                of_reference: slice | torch.Tensor = slice(None)
                if rows is not None:
                    inside = (rows >= part.begin) & (rows < part.end)
                    (of_result,) = torch.nonzero(inside, as_tuple=True)
                    of_reference = rows[of_result] - part.begin
                result = part.heads_of(name, results[name])[of_result]
                exact = reference[name][of_reference]
                errors[name] = _larger(errors[name], _distance(result, exact))
                if rms is not None:
                    _require_rms(name, result, exact, rms)
        if rms is None:
            self._require(errors, leniency, "is off by {:.2e} from float64")
        return errors

    def differences(
        self,
        ours: Outputs,
        theirs: Outputs,
        rows: torch.Tensor | None = None,
        rms: float | None = None,
    ) -> dict[str, float]:
        """max|ours - theirs| of whole outputs; `theirs` has the tokens `rows`.

        Raises WrongResultError where one is above the sum of both bounds; with `rms`, where that of
        the differences of a head is above so much of theirs.
        """
        here = ours if rows is None else {name: x[rows] for name, x in ours.items()}
        differences = {name: _distance(here[name], theirs[name]) for name in self.bound}
        if rms is None:
            self._require(differences, 1 + PEER_LENIENCY, "of the two differs by {:.2e}")
        else:
            for name, x in here.items():
                for head in range(x.shape[1]):
                    _require_rms(name, x[:, head], theirs[name][:, head], rms)
        return differences

    def _require(self, errors: dict[str, float], times: float, message: str) -> None:
        for name, error in errors.items():
            allowed = times * self.bound[name]
            if not error <= allowed:  # also for NaN
                raise WrongResultError(f"{name} {message.format(error)}, allowed {allowed:.2e}")


def parts(problem: Problem) -> list[Part]:
    """The longest sequence at the last KV head, and the last sequence at the first KV head.

    Only the first of the two for one sequence of more than `LONG` tokens.
    """
    case = problem.case
    longest = case.lengths.index(max(case.lengths))
    chosen = {(longest, case.kv_heads - 1)}
    if len(case.lengths) > 1 or case.tokens <= LONG:
        chosen.add((len(case.lengths) - 1, 0))
    return _parts(problem, chosen)


def every_part(problem: Problem) -> list[Part]:
    case = problem.case
    return _parts(problem, itertools.product(range(len(case.lengths)), range(case.kv_heads)))


def _parts(problem: Problem, chosen: Iterable[tuple[int, int]]) -> list[Part]:
    """chosen: (sequence, KV head)."""
    case = problem.case
    group, bounds = case.heads // case.kv_heads, case.cumulative
    keys = list(itertools.accumulate(case.key_lengths, initial=0))
    return [
        Part(bounds[i], bounds[i + 1], head, group, (keys[i], keys[i + 1]))
        for i, head in sorted(chosen)
    ]


def attention(
    problem: Problem, part: Part, dtype: torch.dtype, float32_scores: bool = False
) -> Outputs:
    """Plain attention of one part in `dtype`, with score matrices of a chunk of query rows.

    float32_scores: scores and softmax are float32, P is in `dtype`.
    """
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    backward = problem.direction != FORWARD
    if backward:
        tensors["dout"] = problem.dout
    here = {
        name: part.of(name, x.flatten(0, 1) if x.dim() == 4 else x).to(dtype)
        for name, x in tensors.items()
    }
    k, v = (here[name].squeeze(1) for name in ("k", "v"))
    n = part.end - part.begin
    step = max(1, MAX_SCORES // (len(k) * part.group))
    aligned = len(k) - n  # the mask is aligned at the bottom right
    sums = [torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32)) for x in (k, v)]
    rows = []
    for begin in range(0, n, step):
        chunk = slice(begin, begin + step)
        q = here["q"][chunk].detach().requires_grad_(backward)
        row0, window, spans = begin + aligned, problem.case.window, problem.case.spans
        if spans is None:
            seen = _visible_keys(row0, len(q), len(k), window)
            hidden = _hidden(row0 - seen.start, len(q), seen.stop - seen.start, window, q.device)
        else:
            seen, hidden = _hidden_by_spans(spans, begin, len(q), q.device)
        k_seen, v_seen = (x[seen].detach().requires_grad_(backward) for x in (k, v))
        out = _attend(q, k_seen, v_seen, hidden, float32_scores)
        if backward:
            dq, *dkv = torch.autograd.grad(out, (q, k_seen, v_seen), here["dout"][chunk])
            for total, gradient in zip(sums, dkv, strict=True):
                total[seen] += gradient
        rows.append(dq if backward else out)
    if not backward:
        return {"out": torch.cat(rows)}
    dk, dv = (x.to(dtype).unsqueeze(1) for x in sums)
    return dict(zip(GRADIENTS, (torch.cat(rows), dk, dv), strict=True))


def _visible_keys(row0: int, rows: int, keys: int, window: tuple[int, int]) -> slice:
    """The keys visible to any of `rows` rows; the diagonal of the first is at key `row0`."""
    left, right = window
    begin = 0 if left < 0 else min(max(0, row0 - left), keys - 1)
    end = keys if right < 0 else min(keys, row0 + rows + right)
    return slice(begin, max(begin + 1, end))


def _hidden(
    row0: int, rows: int, keys: int, window: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """(rows, keys) bool of a window; the diagonal of the first row is at key `row0`."""
    row = torch.arange(row0, row0 + rows, device=device)[:, None]
    distance = torch.arange(keys, device=device) - row
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def _hidden_by_spans(
    mask: Mask, row0: int, rows: int, device: torch.device
) -> tuple[slice, torch.Tensor]:
    """The keys from the first to the last that rows [row0, row0 + rows) attend to, n of them; and
    (rows, n) bool, of these keys."""
    spans = mask.diagonal_spans
    here = spans[(spans[:, 0] < row0 + rows) & (spans[:, 1] > row0)]
    first, last = int(here[:, 2].min()), int(here[:, 3].max())
    hidden = torch.ones(rows, last - first, dtype=torch.bool, device=device)
    for q0, q1, k0, k1, lo, hi in here.tolist():
        row = torch.arange(max(q0, row0), min(q1, row0 + rows), device=device)[:, None]
        diagonal = torch.arange(k0, k1, device=device) - row
        inside = slice(max(q0, row0) - row0, min(q1, row0 + rows) - row0)
        hidden[inside, k0 - first : k1 - first] &= (diagonal < lo) | (diagonal > hi)
    return slice(first, last), hidden


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    float32_scores: bool,
) -> torch.Tensor:
    """Rows q (m, g, d) on k, v (n, d) where `hidden` (m, n) is False: (m, g, d)."""
    wide = torch.float32 if float32_scores else q.dtype
    scores = torch.einsum("mgd,nd->gmn", q.to(wide), k.to(wide)) * q.shape[-1] ** -0.5
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("gmn,nd->mgd", p, v)


def _require_rms(name: str, x: torch.Tensor, exact: torch.Tensor, most: float) -> None:
    """Raises WrongResultError where rms(x - exact) is not at most `most` times rms(exact)."""
    share = ((x.float() - exact.float()).norm() / exact.float().norm()).item()
    if not share <= most:  # also for NaN
        raise WrongResultError(f"{name} has an rms error of {share:.1%}, allowed {most:.0%}")


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """max|x - y| in the wider of both dtypes, at least float32; NaN where either has one."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    if x.shape != y.shape:
        raise WrongResultError(f"shape {tuple(x.shape)}, expected {tuple(y.shape)}")
    if not x.numel():
        return 0.0
    worst = [
        (a.to(dtype) - b.to(dtype)).abs().max()
        for a, b in zip(_chunks(x.detach()), _chunks(y.detach()), strict=True)
    ]
    return torch.stack(worst).max().item()


def _larger(a: float, b: float) -> float:
    """The larger one; NaN if either is NaN."""
    return a if a >= b or a != a else b


def _chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x, max(1, MAX_COMPARED // max(1, x[0].numel())))
