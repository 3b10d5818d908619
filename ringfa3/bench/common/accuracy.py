"""Whether results are right, before anything is timed.

On a part of a case, whole sequences of single KV heads, the truth is known in float64 and so is
the error of plain PyTorch attention in the inputs' dtype. A result may be twice as far from the
truth as that. Everywhere else two implementations are held against each other.

A peer must compute the same, but may be half as exact: some round the gradients of a shared KV
head once per query head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.problem import GRADIENTS, Outputs, Problem

FACTOR, SLACK = 2.0, 1e-5
PEER_LENIENCY = 2.0
SCORES = 1 << 26  # elements of a score matrix held at once
COMPARED = 1 << 26  # elements compared at once
LONG = 1 << 16  # tokens, above which the truth of one head is enough
KEYS = ("k", "v", "dk", "dv")  # tensors with a row for each key, and a head for each KV head


class WrongResultError(Exception):
    """A result is farther from the truth, or from another's, than it may be."""


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
        """That part of an input or output, (rows, heads, d)."""
        return self.heads_of(name, x)[self.rows_of(name)]

    def rows_of(self, name: str) -> slice:
        return slice(*self.keys) if self.keys and name in KEYS else slice(self.begin, self.end)

    def heads_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        width = 1 if name in KEYS else self.group
        first = self.kv_head * width
        return x[:, first : first + width]


class Gate:
    """The truth of a problem on some of its parts, and how far from it results may be there.

    bound   name of an output -> 2 max|x_pt - truth| + 1e-5 over all parts
    """

    def __init__(self, problem: Problem, of_all: bool = False) -> None:
        """of_all: on every part, not on one or two."""
        self.parts = every_part(problem) if of_all else parts(problem)
        self.truth = [attention(problem, p, torch.float64) for p in self.parts]
        plain = [attention(problem, p, problem.q.dtype) for p in self.parts]
        self.bound = {
            name: FACTOR * max(_distance(x[name], t[name]) for x, t in self._zip(plain)) + SLACK
            for name in self.truth[0]
        }

    def _zip(self, results: list[Outputs]) -> Iterator[tuple[Outputs, Outputs]]:
        return zip(results, self.truth, strict=True)

    def errors(
        self, results: Outputs, leniency: float = 1.0, rows: torch.Tensor | None = None
    ) -> dict[str, float]:
        """max|result - truth| over all parts, by output.

        `rows` are the tokens that the results are of, where they are not of all.
        Raises WrongResultError where one is above `leniency` times its bound.
        """
        found = dict.fromkeys(self.bound, 0.0)
        for part, truth in zip(self.parts, self.truth, strict=True):
            for name in found:
                mine: slice | torch.Tensor = part.rows_of(name)
                its: slice | torch.Tensor = slice(None)
                if rows is not None:
                    (mine,) = torch.nonzero((rows >= part.begin) & (rows < part.end), as_tuple=True)
                    its = rows[mine] - part.begin
                error = _distance(part.heads_of(name, results[name])[mine], truth[name][its])
                found[name] = _larger(found[name], error)
        self._hold(found, leniency, "is off by {:.2e} from float64")
        return found

    def differences(
        self, ours: Outputs, peers: Outputs, rows: torch.Tensor | None = None
    ) -> dict[str, float]:
        """max|ours - peer's| of whole outputs, the peer's being of the tokens `rows`.

        Raises WrongResultError where one is above what both may be off together.
        """
        here = ours if rows is None else {name: x[rows] for name, x in ours.items()}
        found = {name: _distance(here[name], peers[name]) for name in self.bound}
        self._hold(found, 1 + PEER_LENIENCY, "of the two differs by {:.2e}")
        return found

    def _hold(self, found: dict[str, float], times: float, said: str) -> None:
        for name, error in found.items():
            allowed = times * self.bound[name]
            if not error <= allowed:  # NaN is wrong too
                raise WrongResultError(f"{name} {said.format(error)}, allowed {allowed:.2e}")


def parts(problem: Problem) -> list[Part]:
    """The longest sequence at the last KV head, the last at the first: of a very long one, one."""
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
    """By sequence and KV head."""
    case = problem.case
    group, bounds = case.heads // case.kv_heads, case.cumulative
    keys = list(itertools.accumulate(case.key_lengths, initial=0))
    return [
        Part(bounds[i], bounds[i + 1], head, group, (keys[i], keys[i + 1]))
        for i, head in sorted(chosen)
    ]


def attention(problem: Problem, part: Part, dtype: torch.dtype) -> Outputs:
    """Plain attention of one part, with score matrices, in `dtype`; by runs of query rows."""
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
    step = max(1, SCORES // (len(k) * part.group))
    aligned = len(k) - n  # at the bottom right
    sums = [torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32)) for x in (k, v)]
    rows = []
    for begin in range(0, n, step):
        chunk = slice(begin, begin + step)
        q = here["q"][chunk].detach().requires_grad_(backward)
        row0, window = begin + aligned, problem.case.window
        seen = _seen(row0, len(q), len(k), window)
        k_seen, v_seen = (x[seen].detach().requires_grad_(backward) for x in (k, v))
        out = _attend(q, k_seen, v_seen, row0 - seen.start, window)
        if backward:
            dq, *dkv = torch.autograd.grad(out, (q, k_seen, v_seen), here["dout"][chunk])
            for total, gradient in zip(sums, dkv, strict=True):
                total[seen] += gradient
        rows.append(dq if backward else out)
    if not backward:
        return {"out": torch.cat(rows)}
    dk, dv = (x.to(dtype).unsqueeze(1) for x in sums)
    return dict(zip(GRADIENTS, (torch.cat(rows), dk, dv), strict=True))


def _seen(row0: int, rows: int, keys: int, window: tuple[int, int]) -> slice:
    """The keys that some of `rows` rows see, the diagonal of the first beginning at key `row0`."""
    left, right = window
    begin = 0 if left < 0 else min(max(0, row0 - left), keys - 1)
    end = keys if right < 0 else min(keys, row0 + rows + right)
    return slice(begin, max(begin + 1, end))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row0: int, window: tuple[int, int]
) -> torch.Tensor:
    """Rows q (m, g, d), whose diagonal begins at key `row0`, against k, v (n, d): (m, g, d)."""
    scores = torch.einsum("mgd,nd->gmn", q, k) * q.shape[-1] ** -0.5
    row = torch.arange(row0, row0 + len(q), device=q.device)[:, None]
    distance = torch.arange(len(k), device=q.device) - row
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("gmn,nd->mgd", p, v)


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """max|x - y| in the wider of both dtypes, at least float32; NaN where either has one."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    if x.shape != y.shape:
        raise WrongResultError(f"shape {tuple(x.shape)}, expected {tuple(y.shape)}")
    if not x.numel():
        return 0.0
    worst = [
        (a.to(dtype) - b.to(dtype)).abs().max()
        for a, b in zip(_runs(x.detach()), _runs(y.detach()), strict=True)
    ]
    return torch.stack(worst).max().item()


def _larger(a: float, b: float) -> float:
    """The larger one; NaN is larger than all."""
    return a if a >= b or a != a else b


def _runs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x, max(1, COMPARED // max(1, x[0].numel())))
