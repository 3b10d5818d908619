"""If this fails, rings over several hosts give wrong results, or send rows twice between hosts.
Rings of several hosts: each row crosses once for each host that needs it, and one sum of its dK/dV
comes back."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3 import Mask, ring_attn_func
from ringfa3.pass_interface import Attend, HopTensors
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.quantisation.key_tiles import KEY_TILE
from ringfa3.ring import quantised_forward
from ringfa3.ring.levels.flow_messages import KV, RETURN, sent_rows
from ringfa3.ring.p2p_pass import ArrivingKV, P2PRingPass, start_exchange
from tests.planning.test_tiling import rectangles
from tests.ring.test_p2p_pass import Sent
from tests.ring.test_ring_op import EXACT, dense_results, ring_results, shards_of
from tests.support.dense import cumulative, mask, tensors, worst
from tests.support.masks import Union, unions
from tests.support.message_ring import Links, Transport, in_threads, run_passes
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


def check_forward(
    plans: list[ContextPlan], allowed: Allowed, run: Any = run_passes
) -> Counter[tuple[int, int, int]]:
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

    sent: Counter[tuple[int, int, int]] = run(plans, "forward", numbers, attend)[1].sent
    np.testing.assert_array_equal(covered, allowed)
    return sent


def check_backward(
    plans: list[ContextPlan], allowed: Allowed, run: Any = run_passes
) -> Counter[tuple[int, int, int]]:
    """Tiles cover exactly the pairs of the mask. They store 2^rank as dK and dV of their keys: sums
    are exact and have a bit for each reader. Returns rows sent by tag, sender, receiver."""
    covered = np.zeros((2, *allowed.shape), int)  # by head

    def attend(plan: ContextPlan, ring: P2PRingPass) -> Attend:
        tilings = ring.hops.backward(4, 8, True)
        queries = plan.token_index.numpy()

        def launch(hop: int, tensors: HopTensors) -> None:
            assert not tensors.k.isnan().any(), "rows are read before they have come"
            assert tensors.dk is not None
            assert tensors.dv is not None
            keys = tensors.k[:, 0, 0].numpy().astype(int) - NUMBER
            for tile in tilings[hop].tiles:
                stored = slice(tile["row0"], tile["row0"] + tile["rows"])
                tensors.dk[stored], tensors.dv[stored] = 2**plan.rank, 2**plan.rank
                for _, rows, columns, pairs in rectangles(tilings[hop], tile, "backward"):
                    for head in range(tensors.first_head, tensors.first_head + tensors.k.shape[1]):
                        covered[head][np.ix_(queries[rows], keys[columns])] += pairs

        return launch

    rings, links = run(plans, "backward", numbers, attend)
    np.testing.assert_array_equal(covered, np.stack((allowed, allowed)))
    readers = [allowed[plan.token_index.numpy()].any(0) for plan in plans]
    bits = np.sum([2**rank * needs for rank, needs in enumerate(readers)], 0)
    for plan, ring in zip(plans, rings, strict=True):
        keys = plan._key_index
        own = (1 - readers[plan.rank][keys]) * 2**plan.rank  # all own keys are stored
        expected = torch.from_numpy(bits[keys] + own).double()
        for grads in ring.grads:
            assert grads.shape == (len(keys), 2, 1)
            assert (grads == expected[:, None, None]).all()
    sent: Counter[tuple[int, int, int]] = links.sent
    return sent


def check_bounds(plans: list[ContextPlan], needs: Allowed) -> None:
    """No buffer has more rows than two thirds of the largest block, or the rows of an owner that
    one rank or one host attends to. needs: (ranks, all keys)."""
    hosts = np.array(plans[0].hosts)
    largest = 0
    for plan in plans:
        here = needs[:, plan._key_index]
        far = [here[hosts == h].any(0).sum() for h in set(plan.hosts) - {hosts[plan.rank]}]
        largest = max([largest, plan.kv_exchange.visible[plan.rank, :, 1].max(), *far])
    limit = max(2 * plans[0].kv_exchange.block_rows.max() // 3, largest)
    for plan in plans:
        moved = plan.by_messages()
        both = zip(moved.direct.sent, moved.onward.sent, strict=True)
        leaving = [len(own) + len(landed) for own, landed in both]
        landing = [*map(len, moved.landing.sent), *(chunk.rows for chunk in moved.chunks)]
        assert max([*moved.rows[1:], *leaving, *landing]) <= limit


def check_offsets(plans: list[ContextPlan]) -> None:
    """Exactly: ranks of a host find each part of a peer at the row where the peer has it. No launch
    has parts of both flows."""
    moved = [plan.by_messages() for plan in plans]
    for plan, here in zip(plans, moved, strict=True):
        offsets = here.host_offsets
        for name, found in (("direct", offsets.direct), ("onward", offsets.onward)):
            flows = [getattr(x, name) for x in moved]
            for transfer in range(len(here.rows)):
                for side, other in (("leaving", "arriving"), ("arriving", "leaving")):
                    peers = [part.peer for part in getattr(flows[plan.rank], side)[transfer]]
                    expected = {
                        (peer, part.begin)
                        for peer in peers
                        if peer != plan.rank and plan.hosts[peer] == plan.hosts[plan.rank]
                        for part in getattr(flows[peer], other)[transfer]
                        if part.peer == plan.rank
                    }
                    assert set(getattr(found, side)[transfer].items()) == expected
        leaving = zip(offsets.direct.leaving, offsets.onward.leaving, strict=True)
        assert not any(own and landed for own, landed in leaving)
        sent = max(len(rows) for x in moved for rows in (*x.direct.sent, *x.onward.sent))
        assert offsets.most == (sent, max(max([0, *x.rows[1:]]) for x in moved))


def check(plans: list[ContextPlan], allowed: Allowed, run: Any = run_passes) -> None:
    """Exactly: pairs of the forward, sums of the backward, and rows between each two hosts."""
    hosts = np.array(plans[0].hosts)
    needs = np.array([allowed[plan.token_index.numpy()].any(0) for plan in plans])
    count = hosts.max() + 1
    if len(set(np.bincount(hosts).tolist())) == 1:
        check_bounds(plans, needs)
    expected = np.zeros((count, count), int)
    for plan in plans:
        for host in set(range(count)) - {plan.hosts[plan.rank]}:
            rows = needs[hosts == host][:, plan._key_index].any(0).sum()
            expected[plan.hosts[plan.rank], host] += rows
    check_offsets(plans)
    for plan in plans:
        np.testing.assert_array_equal(plan.by_messages().between_hosts, expected)
    for direction in (check_forward, check_backward):
        crossed = np.zeros((2, count, count), int)
        for (tag, sender, receiver), rows in direction(plans, allowed, run).items():
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


def own_tiles(plan: ContextPlan) -> torch.Tensor:
    """(tiles, KEY_TILE): numbers of the rank's own keys, tile by tile; 0 after a segment's end."""
    keys, (own,) = plan.hops.keys, np.nonzero(plan.hops.key_hop == 0)
    tiles = []
    for i in own[np.argsort(keys.row[own], kind="stable")]:
        row, end = int(keys.row[i]), int(keys.row[i] + keys.length[i])
        for begin in range(row, end, KEY_TILE):
            numbers = plan._key_index[begin : min(begin + KEY_TILE, end)] + NUMBER
            tiles.append(np.pad(numbers, (0, KEY_TILE - len(numbers))))
    return torch.from_numpy(np.array(tiles).reshape(-1, KEY_TILE)).double()


def check_tiles(plans: list[ContextPlan], allowed: Allowed, group_size: int) -> None:
    """A forward's launches in 8 bits, of one K/V buffer, cover exactly the pairs of the mask."""
    covered, links = np.zeros(allowed.shape, int), Links()

    def run(plan: ContextPlan) -> None:
        exchange = plan.by_messages(quantised_forward.launches(plan, group_size), KEY_TILE)
        local, queries = own_tiles(plan), plan.token_index.numpy()
        sent = sent_rows(exchange, local.device)
        arriving = ArrivingKV(exchange, [local], "forward", sent, num_buffers=1)
        transport: Any = Transport(plan.rank, links)
        for launch, tiling in enumerate(exchange.hops.forward(64)):
            kv = arriving.received(launch)[0].clone() if launch else local
            assert not kv.isnan().any(), "tiles are read before they have come"
            moving = start_exchange(transport, arriving.messages(launch + 1))
            keys = kv.numpy().astype(int).ravel() - NUMBER
            for tile in tiling.tiles:
                for _, rows, columns, pairs in rectangles(tiling, tile, "forward"):
                    real = keys[columns] >= 0
                    assert not pairs[:, ~real].any()
                    with links.lock:
                        at = np.ix_(queries[rows], keys[columns][real])
                        covered[at] += pairs[:, real]
            if moving is not None:
                moving.wait()

    def guarded(plan: ContextPlan) -> None:
        try:
            run(plan)
        except BaseException:
            links.broken = True
            raise

    in_threads(plans, guarded, links)
    np.testing.assert_array_equal(covered, allowed)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=4).filter(any),
    hosts=topologies.filter(lambda hosts: len(hosts) > 1),
    layout=layouts,
    group_size=st.sampled_from([1, 120, 400]),  # a launch has one step, two or three
)
def test_tiles_of_8_bits(
    lengths: list[int], hosts: tuple[int, ...], layout: str, group_size: int
) -> None:
    """Packed documents. Reference: the dense mask, exactly."""
    cu, world = np.cumsum([0, *lengths]).tolist(), len(hosts)
    given = layout, True, (-1, -1), hosts
    plans = [plan_context(cu, (rank, world), *given) for rank in range(world)]
    check_tiles(plans, mask(lengths, lengths, -1, 0), group_size)


def test_the_ranks_of_a_host_share_what_lands() -> None:
    """Exactly. Four hosts of two ranks; all attend to the 8 keys of each first rank. So rows of
    three owners land on each host, on two ranks."""
    first = [(0, 64, 16 * host, 16 * host + 8, -64, 64) for host in range(4)]
    plans = [plan_context(Mask(first, 64), (r, 8), "contiguous", hosts=4) for r in range(8)]
    landed = [sum(chunk.rows for chunk in plan.by_messages().chunks) for plan in plans]
    assert [sorted(landed[n : n + 2]) for n in range(0, 8, 2)] == [[8, 16]] * 4


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


def _quantised(group: dist.ProcessGroup) -> tuple[float, list[int], list[int]]:
    """With one host and with two of two ranks: the largest difference of outputs; bytes that this
    rank sends to ranks 0 and 1 from 2 and 3, or back; and the tiles of keys that it should."""
    (q, k, v), _, _ = tensors(0, 600, (4, 2), 64, torch.float32)
    outputs, crossed, tiles = [], [], []
    for hosts in (1, 2):
        plan = plan_context(600, group, hosts=hosts)
        shards = [plan.shard(x) for x in (q, k, v)]
        with Sent() as sent:
            outputs.append(ring_attn_func(*shards, plan, precision="fp8"))
        side = plan.rank // 2
        far = (n for (tag, peer), n in sent.bytes.items() if tag == KV and peer // 2 != side)
        crossed.append(sum(far))
        exchange = plan.by_messages(quantised_forward.launches(plan, 2), KEY_TILE)
        leaving = itertools.chain(*exchange.direct.leaving)
        direct = sum(part.end - part.begin for part in leaving if part.peer // 2 != side)
        tiles.append(direct + sum(map(len, exchange.landing.sent)))
        if hosts == 2:
            assert direct == 0
            shared = int(exchange.between_hosts[side, 1 - side])
    first, second = outputs
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    return worst([(first, second)]), crossed, [*tiles, shared]


def test_tiles_of_8_bits_cross_once(ranks: Ranks) -> None:
    """Outputs of one host, which differ by roundings of float32, to 1e-5; bytes exactly."""
    results = ranks.run(4, _quantised)
    assert max(error for error, *_ in results) < 1e-5
    tile = results[0][1][0] // results[0][2][0]
    for _, crossed, (*tiles, _) in results:
        assert crossed == [tile * n for n in tiles]
    for side in (0, 2):
        here = results[side : side + 2]
        assert sum(tiles[1] for _, _, tiles in here) == here[0][2][2]
        assert sum(tiles[0] for _, _, tiles in here) > here[0][2][2]
