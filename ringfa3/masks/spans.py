"""The algebra of spans, whose results are spans again.

A table of spans is (n, 6) int64: q0, q1, k0, k1, lo, hi. Row r of [q0, q1) attends to column c of
[k0, k1) iff lo <= c - r <= hi. So bands here are diagonals of the whole score matrix, which do not
shift when a rectangle shrinks; `local_bands` gives those of `planning.tiling`.

The intersection of two spans is one span. Their difference is at most four rectangles with a band,
around the other rectangle, and two bands inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNLIMITED = 1 << 40  # beyond every diagonal; `tight` cuts it
MAX_PAIRS = 1 << 20  # candidates that one step of a search holds in memory
MAX_ROUNDS = 32  # of `subtract`, whose time is their number squared


def empty() -> Ints:
    return np.zeros((0, 6), np.int64)


def local_bands(spans: Ints) -> Ints:
    """The same spans with the bands of `planning.tiling`: lo <= (c - k0) - (r - q0) <= hi."""
    shifted: Ints = spans.copy()
    shifted[:, 4:] += (spans[:, 0] - spans[:, 2])[:, None]
    return shifted


def global_bands(spans: Ints) -> Ints:
    """The inverse of `local_bands`."""
    shifted: Ints = spans.copy()
    shifted[:, 4:] -= (spans[:, 0] - spans[:, 2])[:, None]
    return shifted


def has_pairs(spans: Ints) -> Bools:
    """(n,) whether a row of each span attends to a column."""
    q0, q1, k0, k1, lo, hi = spans.T
    some: Bools = (q0 < q1) & (k0 < k1) & (lo <= hi) & (hi > k0 - q1) & (lo < k1 - q0)
    return some


def tight(spans: Ints) -> Ints:
    """Those with pairs, their bands cut to the diagonals that their rectangles have."""
    kept = spans[has_pairs(spans)]
    np.maximum(kept[:, 4], kept[:, 2] - kept[:, 1] + 1, out=kept[:, 4])
    np.minimum(kept[:, 5], kept[:, 3] - kept[:, 0] - 1, out=kept[:, 5])
    return kept


def rectangles(q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> Ints:
    """Spans whose rows attend to all of their columns."""
    wide = np.full_like(q0, UNLIMITED)
    return tight(np.stack((q0, q1, k0, k1, -wide, wide), axis=1))


def pairs(spans: Ints) -> Ints:
    """(n,) pairs of a row and a column that each span allows."""
    q0, q1, k0, k1, lo, hi = local_bands(spans).T
    count: Ints = _below(q1 - q0, k1 - k0, hi) - _below(q1 - q0, k1 - k0, lo - 1)
    return count


def _below(rows: Ints, columns: Ints, diagonal: Ints) -> Ints:
    """Cells (r, c) of each rectangle with c - r <= diagonal: the sum of clip(r + diagonal + 1)."""

    def ramp(n: Ints) -> Ints:  # the sum of min(t, columns) for t of [1, n]
        inside = np.clip(n, 0, columns)
        total: Ints = inside * (inside + 1) // 2 + np.maximum(n - columns, 0) * columns
        return total

    cells: Ints = ramp(rows + diagonal) - ramp(diagonal)
    return cells


def attended(spans: Ints, k_tokens: int) -> Bools:
    """(k_tokens,): keys of some pair. Spans are diagonal ones, with at least a pair each."""
    q0, q1, k0, k1, lo, hi = spans.T
    change = np.zeros(k_tokens + 1, np.int64)
    np.add.at(change, np.maximum(k0, q0 + lo), 1)
    np.add.at(change, np.minimum(k1, q1 + hi), -1)
    return change[:-1].cumsum() > 0


def run_ends(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """(begins, ends), ascending, of the runs that none of the ranges [begin, end) leaves.

    A range begins a run if no other one that begins earlier reaches beyond its begin.
    """
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    starts = np.ones(len(begin), bool)
    starts[1:] = begin[1:] >= reached[:-1]
    (first,) = np.nonzero(starts)
    return begin[first], reached[np.append(first[1:], len(begin))[: len(first)] - 1]


class RowPairs(NamedTuple):
    """How many columns each row attends to, as runs of rows where the number grows evenly.

    begin    (n,) first row of each run, ascending from 0; the last run has no end
    columns  (n,) columns of that row
    growth   (n,) columns that each further row has more
    before   (n,) pairs of all rows before the run
    """

    begin: Ints
    columns: Ints
    growth: Ints
    before: Ints

    @classmethod
    def of(cls, spans: Ints) -> RowPairs:
        q0, q1, k0, k1, lo, hi = local_bands(spans).T
        nq, nk = q1 - q0, k1 - k0
        zero = np.zeros(1, np.int64)
        rows, steps, slopes = [zero], [zero], [zero]  # changes of the count, and of its growth
        for sign, offset in ((1, hi + 1), (-1, lo)):  # clip(r + offset, 0, nk) grows in [a, b)
            a = np.minimum(np.maximum(-offset, 0), nq - 1)
            b = np.clip(nk - offset, a, nq - 1)
            none = 0 * a
            rows += [q0, q1, q0 + 1 + a, q0 + 1 + b]
            ends = np.clip(offset, 0, nk), np.clip(nq - 1 + offset, 0, nk)
            steps += [sign * ends[0], -sign * ends[1], none, none]
            slopes += [none, none, none + sign, none - sign]
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")  # fast: rows are a few ascending runs
        new = np.diff(row[order], prepend=-1) > 0
        begin, at = row[order[new]], np.empty_like(order)
        at[order] = np.cumsum(new) - 1
        step, slope = (  # float64, exact below 2^53
            np.bincount(at, np.concatenate(x), len(begin)).astype(np.int64) for x in (steps, slopes)
        )
        growth, size = np.cumsum(slope), np.diff(begin)
        inside = np.concatenate((zero, (size - 1) * growth[:-1]))  # from a run's first to last row
        columns = np.cumsum(step + growth + inside)
        held = size * columns[:-1] + size * (size - 1) // 2 * growth[:-1]
        return cls(begin, columns, growth, np.concatenate((zero, np.cumsum(held))))

    def pairs_before(self, row: Ints) -> Ints:
        """Pairs of all rows before each of these."""
        run = np.searchsorted(self.begin, row, side="right") - 1
        n = row - self.begin[run]
        pairs: Ints = self.before[run] + n * self.columns[run] + n * (n - 1) // 2 * self.growth[run]
        return pairs


def pairs_by_row(spans: Ints, rows: int) -> Ints:
    """(rows,) columns to which each row attends."""
    return np.diff(RowPairs.of(spans).pairs_before(np.arange(rows + 1)))


def cell(span: Ints) -> tuple[int, int]:
    """(row, column) of the first pair of a span (6,), which has one."""
    q0, _, k0, _, lo, hi = span.tolist()
    row = max(q0, k0 - hi)
    return row, max(k0, row + lo)


def meet(a: Ints, b: Ints) -> Ints:
    """The intersections of spans, row by row; some may have no pairs."""
    both = np.maximum(a, b)
    both[:, 1::2] = np.minimum(a, b)[:, 1::2]
    return both


def first_overlap(spans: Ints) -> tuple[int, int] | None:
    """Indices of two spans that share a pair, or None if each pair is in one span at most."""
    best = min((0, 2), key=lambda axis: _count_starts(spans, axis))
    order = np.argsort(spans[:, best], kind="stable")
    begin, end = spans[order, best], spans[order, best + 1]
    count = np.searchsorted(begin, end) - np.arange(1, len(order) + 1)
    for i, j in _ranges(np.arange(1, len(order) + 1), count):
        shared = has_pairs(meet(spans[order[i]], spans[order[j]]))
        if shared.any():
            at = int(np.argmax(shared))
            return int(order[i[at]]), int(order[j[at]])
    return None


def _count_starts(spans: Ints, axis: int) -> int:
    """Pairs of spans whose second one starts in the first one along an axis: 0 rows, 2 columns."""
    begin = np.sort(spans[:, axis])
    return int(np.searchsorted(begin, np.sort(spans[:, axis + 1])).sum())


def _ranges(begin: Ints, count: Ints) -> Iterator[tuple[Ints, Ints]]:
    """(i, j) for all j of [begin[i], begin[i] + count[i]), at most about `MAX_PAIRS` at once."""
    last = np.cumsum(count)
    at = 0
    while at < len(count):
        done = int(last[at] - count[at])
        stop = max(at + 1, int(np.searchsorted(last, done + MAX_PAIRS, side="right")))
        here = count[at:stop]
        i = np.repeat(np.arange(at, stop), here)
        yield i, np.arange(len(i)) + np.repeat(begin[at:stop] - (np.cumsum(here) - here), here)
        at = stop


def _meeting(a: Ints, b: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Indices of spans of a and of b that share a pair."""

    def starts(x: Ints, y: Ints, axis: int, side: str) -> tuple[Ints, Ints, Ints]:
        """Per span of x: the spans of y, in an order, that start in it along an axis."""
        order = np.argsort(y[:, axis], kind="stable")
        begin = y[order, axis]
        first = np.searchsorted(begin, x[:, axis], side)  # type: ignore[call-overload]
        return order, first, np.maximum(np.searchsorted(begin, x[:, axis + 1]) - first, 0)

    searches = {axis: (starts(a, b, axis, "left"), starts(b, a, axis, "right")) for axis in (0, 2)}
    axis = min(searches, key=lambda x: sum(int(count.sum()) for *_, count in searches[x]))
    (of_b, *b_range), (of_a, *a_range) = searches[axis]
    for i, j in _ranges(*b_range):
        shared = has_pairs(meet(a[i], b[of_b[j]]))
        yield i[shared], of_b[j[shared]]
    for j, i in _ranges(*a_range):
        shared = has_pairs(meet(a[of_a[i]], b[j]))
        yield of_a[i[shared]], j[shared]


def meeting(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """(i, j): all pairs of a span of a and one of b that share a pair, by j, then i."""
    found = list(_meeting(a, b))
    i, j = (np.concatenate([pair[n] for pair in found] or [np.zeros(0, np.int64)]) for n in (0, 1))
    order = np.lexsort((i, j))
    return i[order], j[order]


def intersect(a: Ints, b: Ints) -> Ints:
    """What is in a span of a and in a span of b."""
    i, j = meeting(a, b)
    return tight(meet(a[i], b[j]))


def subtract(b: Ints, a: Ints) -> Ints:
    """What is in a span of b and in none of a."""
    i, j = meeting(a, b)
    for axis in (0, 2):
        (many,) = np.nonzero(np.bincount(j, minlength=len(b)) > MAX_ROUNDS)
        if len(many):
            b = _cut(b, many, a, i, j, axis)
            i, j = meeting(a, b)
    kept = np.ones(len(b), bool)
    kept[j] = False
    result = [b[kept]]
    # The n-th span of a that meets a span of b is subtracted in the n-th round, from all its parts.
    count = np.bincount(j, minlength=len(b))
    first = np.cumsum(count) - count
    (origin,) = np.nonzero(count)
    parts, n = b[origin], 0
    while len(parts):
        parts, kept_from = _subtract_one(parts, a[i[first[origin] + n]])
        origin, n = origin[kept_from], n + 1
        done = count[origin] <= n
        result.append(parts[done])
        parts, origin = parts[~done], origin[~done]
    return np.concatenate(result)


def _cut(b: Ints, many: Ints, a: Ints, i: Ints, j: Ints, axis: int) -> Ints:
    """b, with the spans of these numbers cut along an axis, 0 rows or 2 columns, where spans of a
    that they meet begin and end. i, j: from `meeting`."""
    parts = [np.delete(b, many, axis=0)]
    first = np.searchsorted(j, np.stack((many, many + 1), axis=1))
    for n, (begin, end) in zip(many, first, strict=True):
        whole = b[n, axis : axis + 2]
        bounds = np.unique(np.clip(np.append(a[i[begin:end], axis : axis + 2], whole), *whole))
        part = np.repeat(b[n : n + 1], len(bounds) - 1, axis=0)
        part[:, axis], part[:, axis + 1] = bounds[:-1], bounds[1:]
        parts.append(tight(part))
    return np.concatenate(parts)


def _subtract_one(b: Ints, a: Ints) -> tuple[Ints, Ints]:
    """(parts, index): the parts of each b[index] that are not in a[index], with pairs."""
    q0, q1, k0, k1, lo, hi = range(6)
    inside = np.stack([np.clip(a[:, x], b[:, x - x % 2], b[:, x - x % 2 + 1]) for x in range(4)], 1)
    pieces = np.repeat(b[None], 6, axis=0)
    above, under, left, right, below_band, above_band = pieces
    above[:, q1] = inside[:, q0]
    under[:, q0] = inside[:, q1]
    for piece in (left, right, below_band, above_band):
        piece[:, (q0, q1)] = inside[:, (q0, q1)]
    left[:, k1] = inside[:, k0]
    right[:, k0] = inside[:, k1]
    for piece in (below_band, above_band):
        piece[:, (k0, k1)] = inside[:, (k0, k1)]
    below_band[:, hi] = np.minimum(b[:, hi], a[:, lo] - 1)
    above_band[:, lo] = np.maximum(b[:, lo], a[:, hi] + 1)
    apart = ~has_pairs(meet(a, b))  # stays whole
    above[apart], pieces[1:, apart] = b[apart], 0
    flat = pieces.reshape(-1, 6)
    kept = has_pairs(flat)
    return tight(flat[kept]), np.tile(np.arange(len(b)), 6)[kept]
