"""Swaps: exchanges equal tokens of unequal work between ranks, until their work is balanced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringfa3.planning.placement.costs import TILE, Ints
from ringfa3.planning.placement.loads import ONE, ROWS, Chunk, Loads

BALANCED = ONE // 160  # accepted excess of a rank's work
WORTH = ONE // 2000  # a swap lowers the larger of two loads by at least so much
CUT = ONE // 2000  # price of a cut
PARTNERS = 4  # ranks with least work, of a host and of all, with which a rank exchanges
HEADS = TILE, 2 * TILE  # first tokens of a chunk that a rank may give
# Candidates of a swap: the chunks with most work, and chunks of all lengths.
MINE, THEIRS = 8, 64
NEAR = 8192  # only chunks whose last position is below it, and whole documents, are exchanged


def swap_chunks(loads: Loads, hosts: Ints, heads: Sequence[int]) -> None:
    """Swaps between the rank with most work and those with little: of its host, and of all."""
    stuck = np.zeros(len(hosts), bool)
    for _ in range(2 * len(hosts)):
        load = loads.load
        full = int(np.argmax(np.where(stuck, -1, load)))
        mean = int(load.sum()) // len(load)
        if stuck[full] or load[full] <= mean + BALANCED:
            return
        order = np.argsort(load, kind="stable")
        near = order[hosts[order] == hosts[full]]
        others = np.unique(np.concatenate((near[:PARTNERS], order[:PARTNERS])))
        others = others[load[others] < load[full] - WORTH]
        stuck[full] = not len(others) or not _swap(loads, full, others, heads)


def _swap(loads: Loads, full: int, others: Ints, heads: Sequence[int]) -> bool:
    """Gives the last tokens of a chunk of `full` for as many of another rank; whether it did.

    Those are a whole chunk, or the first tiles of one.
    """
    mine = loads.table(full)
    tables = [loads.table(other) for other in others.tolist()]
    size = [len(table[0]) for table in tables]
    other, index = np.repeat(others, size), np.concatenate([np.arange(n) for n in size])
    theirs = [np.concatenate(column) for column in zip(*tables, strict=True)]
    whole = mine[2] == loads.lengths[mine[0]]
    i = np.flatnonzero(np.isin(mine[0], theirs[0]) | (mine[1] + mine[2] <= NEAR) | whole)
    first = np.concatenate([theirs[2], *(np.full(len(other), tokens) for tokens in heads)])
    j = np.tile(np.arange(len(other)), 1 + len(heads))
    usable = (theirs[1][j] + first <= NEAR) & (first <= theirs[2][j])
    j, m = j[usable], first[usable]
    work = loads.work_of(*(x[i] for x in mine))
    largest = np.argsort(-work, kind="stable")[:MINE]
    i, work = i[largest], work[largest, None]
    j, m = (x[np.argsort(m, kind="stable")[:: len(m) // THEIRS + 1]] for x in (j, m))
    if not len(i) or not len(j):
        return False
    d, p, n = (x[i][:, None] for x in mine)
    e, q, length = (x[j] for x in theirs)
    moved = np.minimum(n, m)
    starts = np.stack((p + n - moved, np.broadcast_to(p, moved.shape)))
    tail, rest = loads.work_of(d, starts, np.stack((moved, n - moved)))
    starts = np.stack((q, q + m, q))
    back, kept, held = loads.work_of(e, starts, np.stack((m, length - m, length)))
    full_load = loads.load[full] - work + rest + back
    peak = np.maximum(full_load, loads.load[other[j]] - held + kept + tail)
    rows = np.where(m < n, p + n - m, 0) + np.where(m < length, q + m, 0)
    cuts = ((m < n).astype(np.int64) + (m < length)) * CUT
    score = np.where(m <= n, peak + rows * ROWS // int(loads.quota[full]) + cuts, 1 << 62)
    a, b = divmod(int(score.argmin()), len(j))
    if score[a, b] >= loads.load[full] - WORTH:
        return False
    partner, tokens = int(other[j[b]]), int(m[b])
    gives, takes = int(i[a]), int(index[j[b]])
    document, position, count = loads.chunks[full][gives]
    another, begin, held_tokens = loads.chunks[partner][takes]
    added = [
        (full, (document, position, count - tokens)),
        (partner, (document, position + count - tokens, tokens)),
        (full, (another, begin, tokens)),
        (partner, (another, begin + tokens, held_tokens - tokens)),
    ]
    loads.change([(full, gives), (partner, takes)], added)
    for rank in (full, partner):
        loads.chunks[rank] = merged(loads.chunks[rank])
    return True


def merged(chunks: list[Chunk]) -> list[Chunk]:
    """Chunks in order; adjacent ones of a document are one."""
    result: list[Chunk] = []
    for document, position, length in sorted(chunks):
        if result and (last := result[-1])[0] == document and last[1] + last[2] == position:
            result[-1] = document, last[1], last[2] + length
        else:
            result.append((document, position, length))
    return result
