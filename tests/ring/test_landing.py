"""Rings of several hosts: each row crosses once for each host that needs it, and one sum of its
dK/dV comes back."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3.pass_interface import Attend, HopTensors
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.ring.p2p_pass import KV, RETURN, P2PRingPass
from tests.planning.test_tiling import rectangles
from tests.ring.test_p2p_pass import Sent
from tests.ring.test_ring_op import EXACT, dense_results, ring_results, shards_of
from tests.support.dense import cumulative, mask, tensors, worst
from tests.support.masks import Union, unions
from tests.support.message_ring import run_passes
from tests.support.ranks import Ranks, sacrifice
from tests.support.strategies import Case, cases, layouts

NUMBER = 1000  # of the first key
Allowed = npt.NDArray[np.bool_]

# Hosts of 2 x 2, 2 x 4, 4 x 2 and 3 x 1 ranks, and any of up to 8 ranks.
topologies = st.one_of(
    st.sampled_from([(0, 0, 1, 1), (0,) * 4 + (1,) * 4, (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2)]),
    st.lists(st.integers(0, 3), min_size=1, max_size=8).map(tuple),
)


def numbers(plan: ContextPlan) -> torch.Tensor:
    """(local_keys, 2, 1): the number of each key, in both heads."""
    keys = torch.from_numpy(plan._key_index.copy()) + NUMBER
    return keys.to(torch.float64)[:, None, None].expand(-1, 2, 1).contiguous()


def check_forward(plans: list[ContextPlan], allowed: Allowed) -> Counter[tuple[int, int, int]]:
    """Launches cover exactly the pairs of the mask. Returns rows sent by tag, sender, receiver."""
    covered = np.zeros(allowed.shape, int)

    def attend(plan: ContextPlan, ring: P2PRingPass) -> Attend:
        tilings = ring.hops.forward(8)
        queries = plan.token_index.numpy()

        def launch(hop: int, tensors: HopTensors) -> None:
            assert torch.equal(tensors.k, tensors.v)
            assert not tensors.k.isnan().any(), "rows are read before they have come"
            keys = tensors.k[:, 0, 0].numpy().astype(int) - NUMBER
            for tile in tilings[hop].tiles:
                for _, rows, columns, pairs in rectangles(tilings[hop], tile, "forward"):
                    covered[np.ix_(queries[rows], keys[columns])] += pairs

        return launch

    links = run_passes(plans, "forward", numbers, attend)[1]
    np.testing.assert_array_equal(covered, allowed)
    return links.sent


def check_backward(plans: list[ContextPlan], allowed: Allowed) -> Counter[tuple[int, int, int]]:
    """A reader stores 2^rank as dK and dV of a key: sums are exact and have a bit for each reader.
    Returns rows sent by tag, sender, receiver."""

    def attend(plan: ContextPlan, _: P2PRingPass) -> Attend:
        def launch(_: int, tensors: HopTensors) -> None:
            assert not tensors.k.isnan().any(), "rows are read before they have come"
            assert tensors.dk is not None
            assert tensors.dv is not None
            tensors.dk.fill_(2**plan.rank)
            tensors.dv.fill_(2**plan.rank)

        return launch

    rings, links = run_passes(plans, "backward", numbers, attend)
    readers = [allowed[plan.token_index.numpy()].any(0) for plan in plans]
    bits = np.sum([2**rank * needs for rank, needs in enumerate(readers)], 0)
    for plan, ring in zip(plans, rings, strict=True):
        keys = plan._key_index
        own = (1 - readers[plan.rank][keys]) * 2**plan.rank  # all own keys are stored
        expected = torch.from_numpy(bits[keys] + own).double()
        for grads in ring.grads:
            assert grads.shape == (len(keys), 2, 1)
            assert (grads == expected[:, None, None]).all()
    return links.sent


def check(plans: list[ContextPlan], allowed: Allowed) -> None:
    """Exactly: pairs of the forward, sums of the backward, and rows between each two hosts."""
    hosts = np.array(plans[0].hosts)
    needs = np.array([allowed[plan.token_index.numpy()].any(0) for plan in plans])
    count = hosts.max() + 1
    expected = np.zeros((count, count), int)
    for plan in plans:
        for host in set(range(count)) - {plan.hosts[plan.rank]}:
            rows = needs[hosts == host][:, plan._key_index].any(0).sum()
            expected[plan.hosts[plan.rank], host] += rows
    for plan in plans:
        np.testing.assert_array_equal(plan.by_messages().between_hosts, expected)
    for direction in (check_forward, check_backward):
        crossed = np.zeros((2, count, count), int)
        for (tag, sender, receiver), rows in direction(plans, allowed).items():
            crossed[int(tag == RETURN), hosts[sender], hosts[receiver]] += rows
        np.fill_diagonal(crossed[0], 0)
        np.fill_diagonal(crossed[1], 0)
        np.testing.assert_array_equal(crossed[0], 2 * expected)  # K and V
        returned = expected.T if direction is check_backward else 0 * expected
        np.testing.assert_array_equal(crossed[1], returned)


@settings(max_examples=60)
@given(case=cases, hosts=topologies)
def test_documents_and_windows(case: Case, hosts: tuple[int, ...]) -> None:
    """Packed documents. Reference: the dense mask, exactly."""
    cu, world = np.cumsum([0, *case.lengths]).tolist(), len(hosts)
    given = case.layout, case.causal, case.window, hosts
    plans = [plan_context(cu, (rank, world), *given) for rank in range(world)]
    check(plans, mask(case.lengths, case.lengths, *case.band))


@settings(max_examples=30)
@given(union=unions(40), hosts=topologies, layout=layouts)
def test_masks(union: Union, hosts: tuple[int, ...], layout: str) -> None:
    """Random masks, also of other keys than queries. Reference: the dense mask, exactly."""
    given, world = union.mask(), len(hosts)
    plans = [plan_context(given, (rank, world), layout, hosts=hosts) for rank in range(world)]
    check(plans, union.dense())


CASES = [
    ([300], "zigzag", (-1, -1)),
    ([300], "contiguous", (120, -1)),
    ([90, 1, 0, 170, 33], "zigzag", (-1, -1)),
]
ROW_BYTES = 2 * 2 * 4 * 8  # K and V, or dK and dV, of 2 heads of 4 in float64


def _real(group: dist.ProcessGroup, hosts: tuple[int, ...]) -> list[Counter[tuple[int, int]]]:
    """Bytes of each case that a forward and backward send, by tag and host of the receiver.

    Checks results: float64 reference to 1e-12, and bits of a second run.
    """
    found = []
    for lengths, layout, window in CASES:
        plan = plan_context(cumulative(lengths), group, layout, True, window, hosts=hosts)
        everything = tensors(0, sum(lengths), (4, 2), 4)
        with Sent() as sent:
            got = ring_results(plan, everything, deterministic=True)
        again = ring_results(plan, everything, deterministic=True)
        assert all(map(torch.equal, got, again)), "another run has other bits"
        expected = shards_of(plan, dense_results(lengths, True, window, everything))
        assert worst(list(zip(got, expected, strict=True))) < EXACT
        by_host: Counter[tuple[int, int]] = Counter()
        for (tag, peer), count in sent.bytes.items():
            by_host[tag, hosts[peer]] += count
        found.append(by_host)
    return found


def check_real(hosts: tuple[int, ...], results: list[list[Counter[tuple[int, int]]]]) -> None:
    """Between hosts exactly the bytes of each row once: K/V in both passes, dK/dV in one."""
    for number, (lengths, layout, window) in enumerate(CASES):
        given = (0, len(hosts)), layout, True, window, hosts
        rows = plan_context(cumulative(lengths), *given).by_messages().between_hosts
        assert rows.any()
        sent: Counter[tuple[int, int, int]] = Counter()
        for host, result in zip(hosts, results, strict=True):
            for (tag, to), count in result[number].items():
                sent[tag, host, to] += count
        for a, b in itertools.permutations(range(len(rows)), 2):
            assert sent[KV, a, b] == 2 * ROW_BYTES * rows[a, b]
            assert sent[RETURN, a, b] == ROW_BYTES * rows[b, a]


def test_two_hosts_of_two_ranks(ranks: Ranks) -> None:
    """Forward and gradients to 1e-12 in float64, bits of two runs, bytes between hosts exactly."""
    hosts = (0, 0, 1, 1)
    check_real(hosts, ranks.run(4, _real, hosts))


@pytest.mark.soak
@pytest.mark.parametrize(
    "hosts",
    [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2), (0, 1, 1, 0, 1, 2, 1)],
    ids=str,
)
def test_more_hosts(hosts: tuple[int, ...]) -> None:
    """As with two hosts: 2 x 4, 4 x 2, 3 x 1 ranks, and unequal hosts in any order."""
    check_real(hosts, sacrifice(len(hosts), 20, _real, hosts, limit=60))
