"""Shards: which tokens of which documents each rank holds, as segments.

A *segment* is a run of consecutive tokens of one document on one rank. Two layouts exist:

``contiguous``
    the packed tokens in order, the same number to every rank;
``zigzag``
    work and tokens balanced. A document is cut only if balance needs it, into 2m chunks; owner i
    takes chunks i and 2m-1-i, so under a causal mask every owner gets an early and a late chunk.
    Other documents stay whole; each goes, largest first, to the rank with the least load.

Both give every rank the same number of tokens, off by one if the world does not divide the total.
Cuts favour multiples of `CUT`, so that tiles stay full.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
# work(documents, p): pairs that are allowed for the first p rows of each of these documents
Work: TypeAlias = Callable[[Ints, Ints], Ints]

CUT = 128  # tokens of a row tile, at whose multiples cuts are favoured
# Shares of a rank's mean work, tried in turn: documents with more work are cut; 0: all are.
SHARES = (1.0, 1 / 16, 1 / 64, 0.0)
BALANCED = 1.015  # accepted maximum of a rank's work, over the mean


@dataclass(frozen=True)
class Segments:
    """Runs of document tokens as arrays of one length, in the order of their local rows.

    row       first local row
    length    tokens, > 0
    sequence  index of the document
    position  of the first token inside its document
    """

    row: Ints
    length: Ints
    sequence: Ints
    position: Ints

    def __len__(self) -> int:
        return len(self.row)

    @property
    def tokens(self) -> int:
        return int(self.length.sum())

    def take(self, index: Ints) -> Segments:
        """Those with these numbers."""
        return Segments(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def repeated(self, times: int) -> Segments:
        """Those of one sequence, for so many sequences of its length."""
        index = np.repeat(np.arange(times), len(self))
        length, position = (np.tile(x, times) for x in (self.length, self.position))
        return Segments(np.tile(self.row, times) + index * self.tokens, length, index, position)


def whole_sequences(lengths: Ints) -> Segments:
    """Every sequence as one segment, packed in order; an empty sequence has no segment."""
    (sequence,) = np.nonzero(lengths)
    length = lengths[sequence]
    return Segments(np.cumsum(length) - length, length, sequence, np.zeros_like(length))


def pairs_before(p: Ints, length: Ints, left: int, right: int) -> Ints:
    """Allowed (query, key) pairs of the first `p` rows of a self-attending document.

    Row r attends to keys [max(r - left, 0), min(r + right, length - 1)]; -1 stands for unlimited.
    """
    reach = length if right < 0 else np.minimum(right, length)
    inside: Ints = np.clip(length - reach, 0, p)  # rows whose last visible key lies inside
    ends: Ints = inside * (inside - 1) // 2 + inside * reach + (p - inside) * (length - 1)
    if left < 0:
        return ends + p
    started: Ints = np.maximum(p - 1 - left, 0)  # rows to which the first key is masked
    return ends + p - started * (started + 1) // 2


def partition(
    lengths: Ints, world: int, layout: str, left: int = -1, right: int = 0
) -> list[Segments]:
    """The segments of every rank.

    Args:
        lengths: (documents,) int64, tokens per document, zeros allowed.
        world: number of ranks.
        layout: one of `validation.LAYOUTS`.
        left, right: the window, -1 for unlimited; causal is right = 0. It matters for balance only.
    """
    total = int(lengths.sum())
    quota = total // world + (np.arange(world) < total % world)  # (world,) tokens
    if layout == "contiguous" or world == 1:
        rank, sequence, position, length = _contiguous(lengths, quota)
    else:

        def work(document: Ints, p: Ints) -> Ints:
            return pairs_before(p, lengths[document], left, right)

        rank, sequence, position, length = zigzag(lengths, quota, work)
    return by_rank(world, rank, sequence, position, length)


def by_rank(world: int, rank: Ints, sequence: Ints, position: Ints, length: Ints) -> list[Segments]:
    """Chunks in any order as one `Segments` a rank; adjacent chunks of a document are joined."""
    keep = length > 0
    rank, sequence, position, length = (x[keep] for x in (rank, sequence, position, length))
    order = np.lexsort((position, sequence, rank))
    rank, sequence, position, length = (x[order] for x in (rank, sequence, position, length))
    joins = (
        (rank[1:] == rank[:-1])
        & (sequence[1:] == sequence[:-1])
        & (position[1:] == position[:-1] + length[:-1])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins))) if len(rank) else np.zeros(0, int)
    length = np.add.reduceat(length, starts) if len(starts) else length
    rank, sequence, position = rank[starts], sequence[starts], position[starts]
    bounds = np.searchsorted(rank, np.arange(world + 1))
    segments = []
    for a, b in itertools.pairwise(bounds):
        rows = length[a:b]
        segments.append(Segments(np.cumsum(rows) - rows, rows, sequence[a:b], position[a:b]))
    return segments


def _contiguous(lengths: Ints, quota: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts the packed tokens at every document start and at every rank's first token."""
    document_start = np.cumsum(lengths) - lengths
    rank_start = np.cumsum(quota) - quota
    cuts = np.unique(np.concatenate((document_start, rank_start, [int(lengths.sum())])))
    start, length = cuts[:-1], np.diff(cuts)
    # the last document that starts at or before a cut: empty ones start there, too
    sequence = np.searchsorted(document_start, start, side="right") - 1
    rank = np.searchsorted(rank_start, start, side="right") - 1
    return rank, sequence, start - document_start[sequence], length


def zigzag(
    lengths: Ints, quota: Ints, work: Work, shares: tuple[float, ...] = SHARES
) -> tuple[Ints, Ints, Ints, Ints]:
    """The first balanced placement of some shares, else the best one.

    Returns (rank, document, position, length) of chunks, in any order.
    """
    total = int(work(np.arange(len(lengths)), lengths).sum())
    best, best_peak = None, np.inf
    for share in shares:
        placement = _Placement(lengths, quota, work, share)
        placement.level()
        rank, sequence, position, length = placement.chunks()
        pairs = work(sequence, position + length)
        pairs -= work(sequence, position)
        peak = np.bincount(rank, pairs, len(quota)).max(initial=0)
        if peak < best_peak:
            best, best_peak = (rank, sequence, position, length), peak
        if best_peak * len(quota) <= BALANCED * max(total, 1):
            break
    assert best is not None
    return best


class _Placement:
    """Documents on ranks: whole on one, or cut among several.

    whole   (documents,) rank of a document that is not cut, else -1
    cut     document -> its owners' tokens, {rank: tokens}, in zigzag order
    sliced  document -> (rank, tokens, at_end): a whole document that gave its first or last
            tokens to a second rank, to make token counts equal
    """

    def __init__(self, lengths: Ints, quota: Ints, work: Work, share: float) -> None:
        self.lengths, self.quota, self._work_of = lengths, quota, work
        self.work = work(np.arange(len(lengths)), lengths)
        self.whole = np.full(len(lengths), -1, np.int64)
        self.cut: dict[int, dict[int, int]] = {}
        self.sliced: dict[int, tuple[int, int, bool]] = {}
        self.load = [0.0] * len(quota)  # work over its mean
        self.tokens = [0] * len(quota)
        self._assign(share)

    def _assign(self, share: float) -> None:
        """Assigns documents, largest first, each part where the sum of squared loads grows least.

        A load is the pair (work, tokens) over its mean. So long documents balance the work, and
        short ones, which hold little work, the tokens.
        """
        world, load, tokens = len(self.quota), self.load, self.tokens
        mean_work = max(float(self.work.sum()) / world, 1.0)
        mean_tokens = max(float(self.lengths.sum()) / world, 1.0)
        relative = self.work / mean_work
        parts = self._parts(relative, share)
        shares = _even_shares(self.lengths, parts, self._work_of)
        order = np.argsort(-self.work, kind="stable")
        order = order[: int((self.lengths[order] > 0).argmin())] if 0 in self.lengths else order
        part = relative / parts, self.lengths / parts / mean_tokens / mean_tokens
        columns = (x[order].tolist() for x in (self.lengths, parts, *part))
        whole: list[tuple[int, int]] = []
        for d, length, n, w, t in zip(order.tolist(), *columns, strict=True):
            cost = [w * x + t * y for x, y in zip(load, tokens, strict=True)]
            if n == 1:
                r = cost.index(min(cost))
                whole.append((d, r))
                load[r] += w
                tokens[r] += length
                continue
            owners = sorted(range(world), key=cost.__getitem__)[:n]  # most work to the least loaded
            held, work = shares[d]
            if any(load):
                by_work = sorted(range(n), key=work.__getitem__, reverse=True)
                owners = [r for _, r in sorted(zip(by_work, owners, strict=True))]
            self.cut[d] = dict(zip(owners, held, strict=True))
            for r, h, w in zip(owners, held, work, strict=True):
                load[r] += w / mean_work
                tokens[r] += h
        documents, ranks = np.array(whole, np.int64).reshape(-1, 2).T
        self.whole[documents] = ranks

    def _parts(self, relative: npt.NDArray[np.float64], share: float) -> Ints:
        """(documents,) owners of each: enough to bring the work of a part under `share`."""
        world = len(self.quota)
        parts = np.ceil(relative / (share or SHARES[-2]))
        if share == 0:
            parts = np.where(self.lengths >= 2 * world * CUT, world, parts)
        return np.clip(parts, 1, np.clip(self.lengths, 1, world)).astype(np.int64)

    def level(self) -> None:
        """Moves tokens until every rank holds its quota."""
        spare = (np.array(self.tokens) - self.quota).tolist()
        for a in range(len(spare)):
            for b in range(len(spare)):
                while spare[a] > 0 and spare[b] < 0:
                    moved = self._move(a, b, min(spare[a], -spare[b]))
                    spare[a] -= moved
                    spare[b] += moved

    def _move(self, a: int, b: int, tokens: int) -> int:
        """Moves up to `tokens` tokens from rank a to b with few new cuts; returns the number."""
        shared = [d for d, held in self.cut.items() if a in held and b in held]
        donor = max(shared, key=lambda d: self.cut[d][a], default=-1)
        if donor >= 0 and self.cut[donor][a] >= 4 * tokens:
            self.cut[donor][a] -= tokens
            self.cut[donor][b] += tokens
            return tokens
        candidates = np.flatnonzero(self.whole == a)
        candidates = candidates[[d not in self.sliced for d in candidates.tolist()]]
        small = candidates[self.lengths[candidates] <= tokens]
        if len(small):
            d = int(small[np.argmax(self.lengths[small])])
            self.whole[d] = b
            return int(self.lengths[d])
        if len(candidates):
            return self._slice(a, b, tokens, candidates)
        for d in [d for d in self.sliced if self.whole[d] == a]:  # a third owner: a cut document
            rank, held, _ = self.sliced.pop(d)
            self.whole[d] = -1
            self.cut[d] = {a: int(self.lengths[d]) - held, rank: held}
        owned = [d for d, held in self.cut.items() if held.get(a, 0) > 0]
        d = max(owned, key=lambda d: self.cut[d][a])
        moved = min(tokens, self.cut[d][a])
        self.cut[d][a] -= moved
        self.cut[d][b] = self.cut[d].get(b, 0) + moved
        return moved

    def _slice(self, a: int, b: int, tokens: int, candidates: Ints) -> int:
        """Moves `tokens` tokens of one whole document from rank a to b, chosen to balance the work.

        The first x of L tokens hold about (x/L)^2 of a document's work, the last x 1 - (1-x/L)^2.
        """
        total = float(self.work.sum())
        wanted = (self.load[a] - self.load[b]) / 2 * total / len(self.quota)
        fraction = tokens / self.lengths[candidates]
        first = self.work[candidates] * fraction**2
        last = self.work[candidates] - self.work[candidates] * (1 - fraction) ** 2
        miss = np.abs(np.stack((first, last)) - wanted)
        at_end, i = divmod(int(np.argmin(miss)), len(candidates))
        moved = float((last if at_end else first)[i]) * len(self.quota) / max(total, 1.0)
        self.load[a] -= moved
        self.load[b] += moved
        self.sliced[int(candidates[i])] = (b, tokens, bool(at_end))
        return tokens

    def chunks(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(rank, document, position, length) of every chunk."""
        plain = self.whole >= 0
        plain[list(self.sliced)] = False
        (sequence,) = np.nonzero(plain)
        columns = [
            np.stack((self.whole[plain], sequence, np.zeros_like(sequence), self.lengths[plain]))
        ]
        rows: list[tuple[int, int, int, int]] = []
        for d, (rank, tokens, at_end) in self.sliced.items():
            rest = int(self.lengths[d]) - tokens
            home = int(self.whole[d])
            if at_end:
                rows += [(home, d, 0, rest), (rank, d, rest, tokens)]
            else:
                rows += [(rank, d, 0, tokens), (home, d, tokens, rest)]
        for d, held in self.cut.items():
            early = _head(np.fromiter(held.values(), np.int64)).tolist()
            heads = list(zip(held, early, strict=True))
            tails = [(rank, held[rank] - head) for rank, head in reversed(heads)]
            position = 0
            for rank, tokens in heads + tails:
                rows.append((rank, d, position, tokens))
                position += tokens
        if rows:
            columns.append(np.array(rows, np.int64).T)
        rank, sequence, position, length = np.concatenate(columns, axis=1)
        return rank, sequence, position, length


def _head(tokens: Ints) -> Ints:
    """Tokens of each owner's early chunk: half of all, or the multiple of CUT near it.

    Unequal halves h and t - h change the owners' work by up to |2h - t| / t: here less than 1%.
    """
    near = (tokens // 2 + CUT // 2) // CUT * CUT
    return np.where(np.abs(2 * near - tokens) * CUT <= tokens, near, tokens // 2)


def _even_shares(
    lengths: Ints, parts: Ints, work_of: Work
) -> dict[int, tuple[list[int], list[int]]]:
    """For every document of several parts: the tokens and the work of each, in zigzag order."""
    (cut,) = np.nonzero(parts > 1)
    n = parts[cut]
    document = np.repeat(cut, n)
    i = np.arange(len(document)) - np.repeat(np.cumsum(n) - n, n)
    length = lengths[document]
    tokens = length // parts[document] + (i < length % parts[document])
    head = _head(tokens)
    before = np.cumsum(head) - head  # in all documents; `start` counts inside one
    first = np.repeat(np.cumsum(n) - n, n)
    start = before - before[first]
    behind = np.cumsum(tokens - head)
    end = length - (behind - (behind - (tokens - head))[first]) + (tokens - head)
    work = work_of(document, start + head) - work_of(document, start)
    work += work_of(document, end)
    work -= work_of(document, end - (tokens - head))
    bounds = zip(cut.tolist(), (np.cumsum(n) - n).tolist(), np.cumsum(n).tolist(), strict=True)
    held, pairs = tokens.tolist(), work.tolist()
    return {d: (held[a:b], pairs[a:b]) for d, a, b in bounds}
