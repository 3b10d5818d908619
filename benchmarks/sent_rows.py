"""Counts the K/V rows that a ring by messages sends for a mix of documents, from its plan.

    python -m benchmarks.sent_rows [--ranks 64] [--tokens 8192] [--draws 3]

The mix has the length buckets of MagiAttention's benchmark, at most a quarter of all tokens each.
Prints three rules, and for each the rows that a rank receives in a forward, mean and largest, with
the time of the largest on a link of 50 GB/s. A row has K and V of 8 heads of head dim 128 in 16
bits.

* `direct`: what RingFA3 sends, each row to each rank that needs it;
* `bounding`: one range of each owner's block for each reader, from its first such row to the last;
* `forwarded`: each row passes every rank up to its farthest reader.

Also prints how many launches attend to them. No GPU is needed.
"""

from __future__ import annotations

import argparse

import numpy as np

from ringfa3 import plan_context
from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.exchange.launches import launch_of_step
from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Ints

BUCKETS = (  # shortest, longest, share
    (1, 200, 0.185), (201, 500, 0.28), (501, 1024, 0.25), (1024, 2048, 0.16), (2048, 4096, 0.07),
    (4096, 8192, 0.03), (8192, 16384, 0.013), (16384, 32768, 0.008), (32768, 131072, 0.004),
)  # fmt: skip
ROW_BYTES = 2 * 8 * 128 * 2
LINK = 50e9  # bytes a second


def mix(total: int, seed: int) -> list[int]:
    """Cumulative lengths of documents of `total` tokens."""
    rng, ends = np.random.default_rng([seed, total]), [0]
    share = np.array([s for _, _, s in BUCKETS])
    while ends[-1] < total:
        low, high, _ = BUCKETS[rng.choice(len(BUCKETS), p=share / share.sum())]
        length = min(int(rng.integers(low, high + 1)), max(total // 4, 1))
        ends.append(min(ends[-1] + length, total))
    return ends


def received(exchange: KVExchange) -> dict[str, Ints]:
    """(ranks,) rows that each rank receives in a forward, by rule."""
    world = len(exchange.tokens)
    owner, hop, begin, end = exchange.runs().T
    direct = np.bincount((owner + hop) % world, end - begin, world).astype(np.int64)
    ranks = np.arange(world)
    visible = np.diff(exchange.visible)[..., 0]  # (owner, hop)
    bounding = visible[(ranks[:, None] - ranks) % world, ranks].sum(1)
    forwarded = np.zeros(world, np.int64)
    for rank in range(world):
        farthest = np.zeros(exchange.tokens[rank], np.int64)
        for t, a, b in zip(*(x[owner == rank] for x in (hop, begin, end)), strict=True):
            farthest[a:b] = np.maximum(farthest[a:b], t)
        passing = len(farthest) - np.searchsorted(np.sort(farthest), ranks[1:])
        np.add.at(forwarded, (rank + ranks[1:]) % world, passing)
    return {"direct": direct, "bounding": bounding, "forwarded": forwarded}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--draws", type=int, default=3, help="batches, of which means are printed")
    asked = parser.parse_args()
    for name in ("ranks", "tokens", "draws"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} {getattr(asked, name)}: it must be at least 1")
    draws = [
        plan_context(mix(asked.ranks * asked.tokens, seed), (0, asked.ranks)).kv_exchange
        for seed in range(asked.draws)
    ]
    rows = [received(exchange) for exchange in draws]
    for rule in rows[0]:
        mean = np.mean([r[rule].mean() for r in rows])
        largest = np.mean([r[rule].max() for r in rows])
        ms = largest * ROW_BYTES / LINK * 1e3
        print(f"{rule:10} {mean:9.0f} rows, largest {largest:9.0f}, {ms:6.2f} ms")
    launches = np.mean([launch_of_step(x, Landing.of(x, (0,) * asked.ranks))[-1] for x in draws])
    print(f"{launches:.1f} launches for {asked.ranks - 1} hops of other ranks")


if __name__ == "__main__":
    main()
