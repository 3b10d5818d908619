"""`zigzag`: documents on ranks with equal tokens and equal work, cut only where work needs it.

Only integers decide, so all processors make the same placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringfa3.planning.placement.costs import TILE, Bools, Cost, Ints
from ringfa3.planning.placement.cuts import cut_tokens, early_chunks, fewest
from ringfa3.planning.placement.levelling import level
from ringfa3.planning.placement.loads import ONE, Loads
from ringfa3.planning.placement.swaps import HEADS, swap_chunks

SMALL = ONE // 16  # no document with less work is dense
# A whole document may exceed a rank's mean work by so much, which swaps take away again: a cut
# would send its K/V between all owners. Of documents that are cut, ranks exceed it by CLOSE.
WHOLE, CLOSE = ONE // 16, ONE // 100
# No rank owns less than one part in so many of a cut document, if others have capacity: each owner
# needs nearly all K/V of the document.
CRUMB = 32
# A whole document may exceed a rank's tokens by one part in so many; levelling moves them on.
OVER = 16
FULL = 1 << 62  # growth of a rank without room


def zigzag(
    lengths: Ints,
    quota: Ints,
    cost: Cost,
    in_order: Bools,
    hosts: Ints,
    heads: Sequence[int] = HEADS,
) -> tuple[Ints, Ints, Ints, Ints]:
    """Chunks (rank, document, position, length), in any order.

    A document is *dense* if a token of it has more work than the average token. Dense documents
    fill the work of each rank above that which sparse ones will bring along with the rest of its
    tokens. What is left is placed in the same way, until no document has much work. Then each goes
    to the rank where work and tokens grow most evenly.

    Args:
        lengths: (documents,) tokens, zeros allowed.
        quota: (world,) tokens of each rank; their sum is that of `lengths`.
        cost: work of chunks.
        in_order: (documents,) bool: owners get one chunk each, in order, since each row has the
            same work. Others get an early and a late one.
        hosts: (world,) number of each rank's host.
        heads: numbers of first tokens of a chunk that ranks may exchange.
    """
    loads = Loads(lengths, quota, cost)
    documents = _Documents(loads, in_order, hosts)
    (given,) = np.nonzero(lengths)
    if len(given) == 1:  # its zigzag is balanced, and all ranks have the same hops
        documents.cut(int(given[0]), np.flatnonzero(quota), quota[quota > 0])
    else:
        documents.fill(documents.dense_levels())
        level(loads, hosts)
        swap_chunks(loads, hosts, heads)
    chunks = [(r, *chunk) for r, held in enumerate(loads.chunks) for chunk in held]
    rank, document, position, length = np.array(chunks, np.int64).reshape(-1, 4).T
    return rank, document, position, length


@dataclass
class _Sparse:
    """The documents that a level leaves for later: their work and tokens in all."""

    work: int
    tokens: int

    def work_of(self, tokens: Ints | int) -> Ints | int:
        """What so many of their tokens have on average."""
        return tokens * self.work // max(self.tokens, 1)


class _Documents:
    """Adds documents to the ranks' loads."""

    def __init__(self, loads: Loads, in_order: Bools, hosts: Ints) -> None:
        self._loads, self._in_order, self._hosts = loads, in_order, hosts

    def dense_levels(self) -> Ints:
        """Places dense documents, level by level. Returns the others, largest first."""
        loads = self._loads
        left = np.lexsort((-loads.lengths, -loads.work))
        left = left[loads.lengths[left] > 0]
        while len(left):
            work, tokens = loads.work[left], loads.lengths[left]
            total, all_tokens = int(work.sum()), int(tokens.sum())
            # The one block of a tiny document is much for its tokens: they count as four tiles.
            dense = work * all_tokens > total * np.maximum(tokens, 4 * TILE)
            if work[0] <= SMALL or not dense.any() or dense.all():
                break
            top, left = left[dense], left[~dense]
            sparse = _Sparse(int(work[~dense].sum()), int(tokens[~dense].sum()))
            for document in top.tolist():
                self._add_dense(document, sparse)
        return left

    def _add_dense(self, document: int, sparse: _Sparse) -> None:
        loads = self._loads
        tokens = int(loads.lengths[document])
        excess = int(loads.work[document]) - int(sparse.work_of(tokens))
        capacity = ONE - loads.load - sparse.work_of(loads.room)
        best = int(np.argmax(np.where(loads.room >= tokens, capacity, -FULL)))
        if loads.room[best] >= tokens and capacity[best] >= excess - WHOLE:
            loads.add_whole(best, document)
            return
        least = max(TILE * excess // tokens, min(excess, ONE) // CRUMB)
        limit = np.maximum(loads.room - 1, 0) * excess // tokens
        over, share = 0, np.zeros_like(limit)
        while int(share.sum()) < excess - excess // 1024 and over < ONE * len(limit):
            share = np.minimum(np.maximum(capacity + over, 0), limit)
            share = np.where(share > (min(least, over) if over else least), share, 0)
            over = max(2 * over, CLOSE // 2)
        owners, share = fewest(share, excess, self._hosts, CLOSE)
        self.cut(document, owners, share)

    def fill(self, documents: Ints) -> None:
        """Places each where the sum of squared loads, of work and of tokens, grows least."""
        loads = self._loads
        mean = max(int(loads.quota.sum()) // len(loads.quota), 1)
        used = (loads.quota - loads.room) * ONE // mean
        columns = loads.lengths, loads.work, loads.lengths * ONE // mean
        rows = zip(*(x[documents].tolist() for x in columns), strict=True)
        for document, (tokens, work, share) in zip(documents.tolist(), rows, strict=True):
            growth = loads.load * work + used * share
            rank = int(growth.argmin())
            least = tokens - min(tokens, mean) // OVER
            if loads.room[rank] < least:
                growth[loads.room < least] = FULL
                rank = int(growth.argmin())
            if growth[rank] == FULL:
                owners, given = fewest(np.maximum(loads.room, 0), tokens, self._hosts, 0)
                self.cut(document, owners, given)
                used = (loads.quota - loads.room) * ONE // mean
            else:
                loads.add_whole(rank, document)
                used[rank] += share

    def cut(self, document: int, owners: Ints, share: Ints) -> None:
        """Cuts a document over owners, in rank order, with tokens in proportion to their shares."""
        loads, tokens = self._loads, int(self._loads.lengths[document])
        owners, share = self._with_room(tokens, owners, share)
        held = cut_tokens(tokens, share, np.maximum(loads.room[owners], 0))
        heads = held if self._in_order[document] else early_chunks(held)
        position, added = 0, []
        for ranks, sizes in ((owners, heads), (owners[::-1], (held - heads)[::-1])):
            for rank, size in zip(ranks.tolist(), sizes.tolist(), strict=True):
                added.append((rank, (document, position, size)))
                position += size
        loads.change([], added)

    def _with_room(self, tokens: int, owners: Ints, share: Ints) -> tuple[Ints, Ints]:
        """These owners, or more, until they have room for the tokens; shares are room then."""
        room = np.maximum(self._loads.room, 0)
        missing = tokens - int(room[owners].sum())
        if missing <= 0:
            return owners, share
        room[owners] = 0
        more, _ = fewest(room, missing, self._hosts, 0)
        owners = np.sort(np.concatenate((owners, more)))
        return owners, np.maximum(self._loads.room[owners], 0)
