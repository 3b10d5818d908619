"""Counts the K/V rows that a ring by messages sends for a mix of documents, from its plan.

    python -m benchmarks.sent_rows [--ranks 64] [--per-host 8] [--tokens 8192] [--draws 3]

The mix has the length buckets of MagiAttention's benchmark, at most a quarter of all tokens each.
Prints three rules, and for each the rows that a rank receives in a forward, mean and largest, with
the time of the largest on a link of 50 GB/s. A row has K and V of 8 heads of head dim 128 in 16
bits.

* `direct`: each row to each rank that needs it, as RingFA3 sends them inside a host;
* `bounding`: one range of each owner's block for each reader, from its first such row to the last;
* `forwarded`: each row passes every rank up to its farthest reader.

Then it prints rows by link: those that a rank sends or receives, whichever is more, between hosts
(45 GB/s a GPU each way) and inside a host (330 GB/s). `direct` sends each row to each reader, `two
levels` once to a landing rank of each host, which sends it on. That is what RingFA3 does.

Last it prints how many launches attend to them. No GPU is needed.
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
NETWORK, NVLINK = 45e9, 330e9  # between hosts and inside a host


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


def by_link(exchange: KVExchange, landing: Landing) -> dict[str, tuple[Ints, float]]:
    """(ranks,) rows that each rank sends or receives, whichever is more, by link and rule; and
    bytes a second."""
    world, host = len(exchange.tokens), landing.ranks.host
    owner, hop, begin, end = exchange.runs().T
    reader, rows = (owner + hop) % world, end - begin
    via = landing.rank[owner, host[reader]]
    near, lands = host[owner] == host[reader], via >= 0

    def most(*moves: tuple[Ints, Ints, Ints]) -> Ints:
        both = np.zeros((2, world), np.int64)
        for sender, receiver, count in moves:
            moved = np.where(sender == receiver, 0, count)
            np.add.at(both[0], sender, moved)
            np.add.at(both[1], receiver, moved)
        return np.asarray(both.max(0))

    direct = owner, reader, rows * near
    landed, to = np.nonzero(landing.rank >= 0)
    crosses = landed, landing.rank[landed, to], landing.rows[landed, to]
    return {
        "between hosts, direct": (most((owner, reader, rows * ~near)), NETWORK),
        "between hosts, two levels": (
            most(crosses, (owner, reader, rows * ~(near | lands))),
            NETWORK,
        ),
        "inside hosts, direct": (most(direct), NVLINK),
        "inside hosts, two levels": (
            most(direct, (np.where(lands, via, reader), reader, rows)),
            NVLINK,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--per-host", type=int, default=8, help="ranks of a host")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--draws", type=int, default=3, help="batches, of which means are printed")
    asked = parser.parse_args()
    for name in ("ranks", "per_host", "tokens", "draws"):
        if getattr(asked, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(asked, name)}: it must be at least 1")
    hosts = -(-asked.ranks // asked.per_host)
    if asked.ranks % hosts:
        parser.error(f"--ranks {asked.ranks}: it must be a multiple of --per-host {asked.per_host}")
    draws = [
        plan_context(mix(asked.ranks * asked.tokens, seed), (0, asked.ranks), hosts=hosts)
        for seed in range(asked.draws)
    ]
    exchanges = [plan.kv_exchange for plan in draws]
    landings = [Landing.of(plan.kv_exchange, plan.hosts) for plan in draws]
    rows = [received(exchange) for exchange in exchanges]
    for rule in rows[0]:
        mean = np.mean([r[rule].mean() for r in rows])
        largest = np.mean([r[rule].max() for r in rows])
        ms = largest * ROW_BYTES / LINK * 1e3
        print(f"{rule:10} {mean:9.0f} rows, largest {largest:9.0f}, {ms:6.2f} ms")
    links = [by_link(*given) for given in zip(exchanges, landings, strict=True)]
    for name, (_, speed) in links[0].items():
        mean = np.mean([link[name][0].mean() for link in links])
        largest = np.mean([link[name][0].max() for link in links])
        ms = largest * ROW_BYTES / speed * 1e3
        print(f"{name:26} {mean:9.0f} rows, largest {largest:9.0f}, {ms:6.2f} ms")
    given = zip(exchanges, landings, strict=True)
    launches = np.mean([launch_of_step(*both)[-1] for both in given])
    print(f"{launches:.1f} launches for {asked.ranks - 1} hops of other ranks")


if __name__ == "__main__":
    main()
