"""Landing ranks: where K/V rows of another host arrive once, for all ranks that need them there.

Inside a host every link is fast, so one rank receives a row and sends it on. The rows of an owner
land on one rank of the host, and the ranks share what lands evenly, so all network cards work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringfa3.planning.kv_exchange import KVExchange
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.tile_schedule import join_ranges


@dataclass(frozen=True, eq=False)
class HostRanks:
    """The ranks of each host.

    host    (world,) the number of each rank's host
    number  (world,) of each rank among those of its host
    ranks   (hosts, most) by number, `most` of the largest host; -1 where a host has fewer
    """

    host: Ints
    number: Ints
    ranks: Ints

    @classmethod
    def of(cls, hosts: tuple[int, ...]) -> HostRanks:
        """hosts: of each rank, numbered from 0."""
        host = np.array(hosts, np.int64)
        size = np.bincount(host)
        by_host = np.argsort(host, kind="stable")
        number = np.empty_like(host)
        number[by_host] = np.arange(len(host)) - (np.cumsum(size) - size)[host[by_host]]
        ranks = np.full((len(size), size.max()), -1)
        ranks[host, number] = np.arange(len(host))
        return cls(host, number, ranks)

    def ring_step(self, owner: Ints, reader: Ints) -> Ints:
        """The position of owners in the order in which readers attend to them: 0 for own keys.

        Step most * d + i is for the owner that is d hosts and i ranks of a host away. So owners on
        the reader's host come first, and all readers of a host come to those of another host within
        the same `most` steps. At each step a rank reads from at most one other, and is read by at
        most one. With one host, or one rank a host, ring steps are hops.
        """
        hosts, most = self.ranks.shape
        far = (self.host[reader] - self.host[owner]) % hosts
        return np.asarray(most * far + (self.number[reader] - self.number[owner]) % most)

    @cached_property
    def two_levels(self) -> bool:
        """Whether rows land: there are several hosts, and one has several ranks."""
        return 1 not in self.ranks.shape


@dataclass(frozen=True, eq=False)
class Landing:
    """What each host needs of the owners on other hosts, and where it lands.

    ranks  the ranks of each host
    runs   (n, 4): owner, host, and the owner's local rows [begin, end) that ranks of the host need.
           Ordered by owner, host and begin; runs of one owner and host neither overlap nor touch
    rows   (world, hosts) number of these rows
    rank   (world, hosts) where they land. -1: they go straight to their readers, on the owner's
           host or the one rank of another
    """

    ranks: HostRanks
    runs: Ints
    rows: Ints
    rank: Ints

    @classmethod
    def of(cls, exchange: KVExchange, hosts: tuple[int, ...]) -> Landing:
        """hosts: of each rank, numbered from 0."""
        ranks = HostRanks.of(hosts)
        world, count = len(ranks.host), len(ranks.ranks)
        owner, hop, begin, end = exchange.needs
        host = ranks.host[(owner + hop) % world]
        (far,) = np.nonzero(host != ranks.host[owner])
        _, pair, begin, end = join_ranges((count * owner + host)[far], begin[far], end[far])
        rows = np.bincount(pair, end - begin, world * count).astype(np.int64).reshape(world, count)
        runs = np.stack((*np.divmod(pair, count), begin, end), 1)
        return cls(ranks, runs, rows, _landing_ranks(ranks, rows))

    @property
    def between_hosts(self) -> Ints:
        """(hosts, hosts) K/V rows that go from host to host in a forward; as many sums of dK/dV
        come back in a backward."""
        rows = np.zeros((self.rows.shape[1],) * 2, np.int64)
        np.add.at(rows, self.ranks.host, self.rows)
        return rows


def _landing_ranks(ranks: HostRanks, rows: Ints) -> Ints:
    """`Landing.rank`. The owners of one host come in the order of rows sent, most first. Each lands
    on the rank on which fewest have landed so far. Integers decide, so all ranks find the same."""
    landing = np.full_like(rows, -1)
    if not ranks.two_levels:
        return landing
    hosts = np.arange(len(ranks.ranks))
    size = (ranks.ranks >= 0).sum(1)
    load = np.where(ranks.ranks >= 0, 0, np.iinfo(np.int64).max // 2)
    for far in hosts[1:]:
        owners = ranks.ranks[hosts - far]  # (hosts, most): host h receives from h - far
        sent = np.where(owners >= 0, rows[owners, hosts[:, None]], -1)
        largest = np.argsort(-sent, 1, kind="stable")
        emptiest = np.argsort(load, 1, kind="stable")
        for i in range(owners.shape[1]):
            owner, at = owners[hosts, largest[:, i]], emptiest[hosts, i % size]
            (some,) = np.nonzero((owner >= 0) & (size > 1))
            landing[owner[some], some] = ranks.ranks[some, at[some]]
            load[some, at[some]] += rows[owner[some], some]
    return landing
