"""Which rank holds which tokens: documents cut into segments, segments placed on ranks.

A *segment* is a run of consecutive tokens of one document on one rank. Two layouts exist:

``contiguous``
    the packed tokens in order, the same number to every rank;
``zigzag``
    work and tokens balanced. A document is cut only where balance needs it: into 2m chunks of
    which owner i takes chunks i and 2m-1-i, so that under a causal mask every owner gets an early
    and a late chunk. All other documents stay whole, largest first on the least loaded rank.

Both give every rank the same number of tokens, off by one where the world does not divide the
total. Cuts favour multiples of `CUT`, so that tiles stay full.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

CUT = 128  # tokens; the row tile that cuts favour
SHARES = (1.0, 1 / 16, 1 / 64, 0.0)  # of a rank's mean work: documents of more are cut; 0: all
BALANCED = 1.015  # most work of a rank over the mean at which a placement is taken


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


def whole_sequences(lengths: Ints) -> Segments:
    """Every sequence as one segment, packed one behind the other; empty ones have none."""
    (sequence,) = np.nonzero(lengths)
    length = lengths[sequence]
    return Segments(np.cumsum(length) - length, length, sequence, np.zeros_like(length))


def work_before(p: Ints, length: Ints, left: int, right: int) -> Ints:
    """Allowed (query, key) pairs of the first `p` rows of a self-attending document.

    Row r sees keys [max(r - left, 0), min(r + right, length - 1)]; -1 stands for unlimited.
    """
    reach = length if right < 0 else np.minimum(right, length)
    inside: Ints = np.clip(length - reach, 0, p)  # rows whose right end lies inside the document
    ends: Ints = inside * (inside - 1) // 2 + inside * reach + (p - inside) * (length - 1)
    if left < 0:
        return ends + p
    started: Ints = np.maximum(p - 1 - left, 0)  # rows whose left end lies behind the first key
    return ends + p - started * (started + 1) // 2


def partition(
    lengths: Ints, world: int, layout: str, left: int = -1, right: int = 0
) -> list[Segments]:
    """The segments of every rank.

    Args:
        lengths: (documents,) int64, tokens per document, zeros allowed.
        world: number of ranks.
        layout: one of `validation.LAYOUTS`.
        left, right: the window, -1 for unlimited; causal is right = 0. Only balance depends on it.
    """
    total = int(lengths.sum())
    quota = total // world + (np.arange(world) < total % world)  # (world,) tokens
    if layout == "contiguous" or world == 1:
        rank, sequence, position, length = _contiguous(lengths, quota)
    else:
        rank, sequence, position, length = _zigzag(lengths, quota, left, right)
    return _by_rank(world, rank, sequence, position, length)


def _by_rank(
    world: int, rank: Ints, sequence: Ints, position: Ints, length: Ints
) -> list[Segments]:
    """Chunks in any order to one `Segments` a rank, neighbouring chunks of a document joined."""
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
    # the last document that starts at or before a cut: empty documents before it are passed over
    sequence = np.searchsorted(document_start, start, side="right") - 1
    rank = np.searchsorted(rank_start, start, side="right") - 1
    return rank, sequence, start - document_start[sequence], length


def _zigzag(lengths: Ints, quota: Ints, left: int, right: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The first placement that is balanced, from few cuts to every document cut on all ranks."""
    total = int(work_before(lengths, lengths, left, right).sum())
    best, best_peak = None, np.inf
    for share in SHARES:
        placement = _Placement(lengths, quota, (left, right), share)
        placement.level()
        rank, sequence, position, length = placement.chunks()
        pairs = work_before(position + length, lengths[sequence], left, right)
        pairs -= work_before(position, lengths[sequence], left, right)
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
            tokens to a second rank, so that token counts come out equal
    """

    def __init__(self, lengths: Ints, quota: Ints, window: tuple[int, int], share: float) -> None:
        self.lengths, self.quota, self.window = lengths, quota, window
        self.work = work_before(lengths, lengths, *window)
        self.whole = np.full(len(lengths), -1, np.int64)
        self.cut: dict[int, dict[int, int]] = {}
        self.sliced: dict[int, tuple[int, int, bool]] = {}
        self.load = [0.0] * len(quota)  # work, the mean over ranks being 1
        self.tokens = [0] * len(quota)
        self._place(share)

    def _place(self, share: float) -> None:
        """Largest first, each piece where it adds least to the sum of squares of loads.

        A load is the pair (work, tokens) over its mean, so long documents balance the work and
        the short ones, which hold little of it, the tokens.
        """
        ranks = range(len(self.quota))
        mean_work = max(float(self.work.sum()) / len(ranks), 1.0)
        mean_tokens = max(float(self.lengths.sum()) / len(ranks), 1.0)
        load, tokens = self.load, self.tokens
        relative = self.work / mean_work
        pieces = self._pieces(relative, share)
        shares = _even_shares(self.lengths, pieces, self.window)
        for d in np.argsort(-self.work, kind="stable").tolist():
            length, n = int(self.lengths[d]), int(pieces[d])
            if length == 0:
                break
            w, t = float(relative[d]) / n, length / n / mean_tokens / mean_tokens
            cost = [w * load[r] + t * tokens[r] for r in ranks]
            if n == 1:
                r = cost.index(min(cost))
                self.whole[d] = r
                load[r] += w
                tokens[r] += length
                continue
            owners = sorted(ranks, key=cost.__getitem__)[:n]  # most work to the least loaded
            held, work = shares[d]
            if any(load):
                by_work = sorted(range(n), key=work.__getitem__, reverse=True)
                owners = [r for _, r in sorted(zip(by_work, owners, strict=True))]
            self.cut[d] = dict(zip(owners, held, strict=True))
            for r, h, w in zip(owners, held, work, strict=True):
                load[r] += w / mean_work
                tokens[r] += h

    def _pieces(self, relative: npt.NDArray[np.float64], share: float) -> Ints:
        """Owners of each document: as many as bring a piece's work under `share`."""
        world = len(self.quota)
        pieces = np.ceil(relative / (share or SHARES[-2]))
        if share == 0:
            pieces = np.where(self.lengths >= 2 * world * CUT, world, pieces)
        return np.clip(pieces, 1, np.clip(self.lengths, 1, world)).astype(np.int64)

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
        """Gives up to `tokens` tokens of rank a to rank b with the fewest new cuts; how many."""
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
        for d in [d for d in self.sliced if self.whole[d] == a]:  # a third rank makes it a cut one
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
        """Cuts `tokens` off a whole document of rank a, so that work evens out as well.

        The work of a document's first x tokens is about (x/L)^2 of it, of its last 1 - (1-x/L)^2.
        """
        wanted = (self.load[a] - self.load[b]) / 2 * float(self.work.sum()) / len(self.quota)
        fraction = tokens / self.lengths[candidates]
        first = self.work[candidates] * fraction**2
        last = self.work[candidates] - self.work[candidates] * (1 - fraction) ** 2
        miss = np.abs(np.stack((first, last)) - wanted)
        at_end, i = divmod(int(np.argmin(miss)), len(candidates))
        moved = float((last if at_end else first)[i]) * len(self.quota) / float(self.work.sum())
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
    """The early chunk of owners' tokens: half, at a multiple of CUT where that is near.

    Unequal halves h and t - h tilt the work of the owners by up to |2h - t| / t: under 1% here.
    """
    near = (tokens // 2 + CUT // 2) // CUT * CUT
    return np.where(np.abs(2 * near - tokens) * CUT <= tokens, near, tokens // 2)


def _even_shares(
    lengths: Ints, pieces: Ints, window: tuple[int, int]
) -> dict[int, tuple[list[int], list[int]]]:
    """For every document of several pieces: the tokens and the work of each, in zigzag order."""
    (cut,) = np.nonzero(pieces > 1)
    n = pieces[cut]
    document = np.repeat(cut, n)
    i = np.arange(len(document)) - np.repeat(np.cumsum(n) - n, n)
    length = lengths[document]
    tokens = length // pieces[document] + (i < length % pieces[document])
    head = _head(tokens)
    before = np.cumsum(head) - head  # then counted from each document's first piece
    first = np.repeat(np.cumsum(n) - n, n)
    start = before - before[first]
    behind = np.cumsum(tokens - head)
    end = length - (behind - (behind - (tokens - head))[first]) + (tokens - head)
    work = work_before(start + head, length, *window) - work_before(start, length, *window)
    work += work_before(end, length, *window)
    work -= work_before(end - (tokens - head), length, *window)
    bounds = zip(cut.tolist(), (np.cumsum(n) - n).tolist(), np.cumsum(n).tolist(), strict=True)
    held, pairs = tokens.tolist(), work.tolist()
    return {d: (held[a:b], pairs[a:b]) for d, a, b in bounds}
