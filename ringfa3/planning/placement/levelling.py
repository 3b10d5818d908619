"""Levelling: moves tokens between ranks until each has its quota."""

from __future__ import annotations

import numpy as np

from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.placement.loads import ONE, ROWS, Loads


def level(loads: Loads, hosts: Ints) -> None:
    """Every rank has its quota afterwards. Ranks of one host exchange tokens first."""
    for host in (*dict.fromkeys(hosts.tolist()), None):
        ranks = np.arange(len(hosts)) if host is None else np.flatnonzero(hosts == host)
        while True:
            room = loads.room[ranks]
            giver, taker = ranks[int(room.argmin())], ranks[int(room.argmax())]
            tokens = min(-int(loads.room[giver]), int(loads.room[taker]))
            if tokens <= 0:
                break
            _move(loads, int(giver), int(taker), tokens)


def _move(loads: Loads, giver: int, taker: int, tokens: int) -> None:
    """Moves up to `tokens` tokens: a chunk, or the first or last ones of it.

    It minimises the larger load of both ranks, plus the price of rows. Under a causal mask the
    first tokens of a document need no other row, and those that follow need only these.
    """
    document, position, length = loads.table(giver)
    moved = np.minimum(length, tokens)
    rest, end = length - moved, position + length
    quota = int(loads.quota[giver])
    # Of a chunk: its work, then of the first tokens and the others, of the last and the others.
    starts = np.stack((position, position, position + moved, end - moved, position))
    sizes = np.stack((length, moved, rest, moved, rest))
    whole, *parts = loads.work_of(document, starts, sizes)
    giver_load = loads.load[giver] - whole
    too_few = (tokens - moved) * ONE // quota
    score = []
    for given, kept, rows in (
        (*parts[:2], position + np.where(rest > 0, moved, 0)),
        (*parts[2:], end - moved),
    ):
        peak = np.maximum(giver_load + kept, loads.load[taker] + given)
        score.append(peak + rows * ROWS // quota + too_few)
    last, index = divmod(int(np.argmin(np.stack(score))), len(length))
    d, p, n = loads.chunks[giver][index]
    x = int(moved[index])
    first = n - x if last else x
    ranks = (giver, taker) if last else (taker, giver)
    halves = (d, p, first), (d, p + first, n - first)
    loads.change([(giver, index)], list(zip(ranks, halves, strict=True)))
