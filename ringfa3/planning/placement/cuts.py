"""How a document is cut: over which ranks, with how many tokens of each, into which chunks."""

from __future__ import annotations

import numpy as np

from ringfa3.planning.placement.costs import TILE, Ints


def fewest(share: Ints, need: int, hosts: Ints, tolerance: int) -> tuple[Ints, Ints]:
    """The fewest ranks whose shares reach `need`, on the fewest hosts; and what each gives.

    One host if one suffices, the one with the least to spare; else whole hosts, those with most
    first, and of the last host the ranks with most. The rank that is left with most gives less.

    Args:
        share: (world,) what each rank could give, at least 0.
        tolerance: so much less is enough.
    """
    of_host = np.bincount(hosts, share).astype(np.int64)  # exact below 2^53
    by_size = np.argsort(-of_host, kind="stable")
    enough = of_host[by_size] >= need - tolerance
    if enough.any():
        last = by_size[int(np.flatnonzero(enough)[-1])]
        full = by_size[:0]
    else:
        count = int(np.searchsorted(np.cumsum(of_host[by_size]), need - tolerance))
        full = by_size[: min(count, len(by_size) - 1)]
        missing = need - tolerance - int(of_host[full].sum())
        others = by_size[len(full) :]
        fits = others[of_host[others] >= missing]
        last = fits[-1] if len(fits) else others[0]
    whole = np.flatnonzero(np.isin(hosts, full) & (share > 0))
    missing = need - int(share[whole].sum())
    ranks = np.flatnonzero((hosts == last) & (share > 0))
    ranks = ranks[np.argsort(-share[ranks], kind="stable")]
    ranks = ranks[: int(np.searchsorted(np.cumsum(share[ranks]), missing - tolerance)) + 1]
    owners = np.sort(np.concatenate((whole, ranks)))
    given = share[owners].copy()
    if len(ranks) and (spare := int(given.sum()) - need) > 0:
        at = np.searchsorted(owners, ranks[-1])
        given[at] = max(given[at] - spare, 1)
    return owners, given


def cut_tokens(tokens: int, share: Ints, room: Ints) -> Ints:
    """(owners,) tokens of each, in proportion to shares, in whole tiles if `room` allows.

    Where `room`, (owners,) tokens, is not enough in all, the last owner gets the rest.
    """
    edge = np.cumsum(share) * tokens // max(int(share.sum()), 1)
    rounded = np.minimum((edge + TILE // 2) // TILE * TILE, tokens)
    rounded[-1] = tokens
    held = np.diff(rounded, prepend=0)
    if (held > room).any() or (held == 0).any():
        held = np.minimum(np.diff(edge, prepend=0), room)
        more = np.cumsum(room - held)  # what owners could take in addition, up to each one
        missing = tokens - int(held.sum())
        held += np.diff(np.minimum(more, missing), prepend=0)
        held[-1] += max(missing - int(more[-1]), 0)
    return held


def early_chunks(held: Ints) -> Ints:
    """(owners,) tokens of each owner's early chunk: about half of all, in whole tiles.

    Owners with equally many tokens get chunks of equal length: all have the same hops.
    """
    if (held[:-1] % TILE).any() or (held == held[0]).all():
        near = (held // 2 + TILE // 2) // TILE * TILE
        # Unequal halves change the work of owners: here by less than 1%.
        return np.where(np.abs(2 * near - held) * TILE <= held, near, held // 2)
    edge = np.cumsum(held) // 2 // TILE * TILE
    return np.minimum(np.diff(edge, prepend=0), held)
