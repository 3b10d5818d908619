"""If this fails, rings in 8 bits compute something else than one device. The ring in 8 bits, on 1
to 4 ranks: against float64 attention, and against one device."""

from __future__ import annotations

import random
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import ContextPlan, Mask, flash_attn_varlen_func, plan_context, ring_attn_func
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.sharding import Segments
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.key_tiles import KEY_TILE
from ringfa3.quantisation.operands import quantise_kv, quantise_q
from ringfa3.ring import quantised_forward
from ringfa3.ring.p2p import GlooTransport
from ringfa3.ring.quantised_forward import local_tiles
from tests.support.dense import attention, band, cumulative, gradients, mask
from tests.support.masks import random_union
from tests.support.ranks import Ranks
from tests.support.straight_through import Rounded
from tests.support.straight_through import gradients as dense_gradients

Group = dist.ProcessGroup
D = 64
HALF_STEP = {"fp8": 2.0**-4, "int8": 2.0**-8}  # of P in E4M3 and in bfloat16
LEAST_P = 2.0**-13  # half a step of the smallest E4M3 P over the largest P of a row, 8


def inputs(seed: int, tokens: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    """q, k, v; K with means of 2, V with means of 3."""
    torch.manual_seed(seed)
    h, hk = heads
    q, k, v = (torch.randn(tokens, n, D) for n in (h, hk, hk))
    return [x.bfloat16() for x in (q, k + 2, v + 3)]


class Case(NamedTuple):
    """A plan of `group`, its dense mask (all queries, all keys), and, in words, what it is."""

    plan: ContextPlan
    allowed: torch.Tensor
    what: str

    def placed_keys(self) -> list[tuple[Ints, Segments]]:
        """Of every rank: the keys that it holds, and the runs of them that begin with a tile."""
        plan = self.plan
        if plan.mask is None:
            return [(plan.index_of(rank), s) for rank, s in enumerate(plan.shards)]
        of = [
            plan_context(plan.mask, (rank, plan.world), plan.layout) for rank in range(plan.world)
        ]
        return [(p._key_index, local_tiles(p).keys) for p in of]


def random_documents(rng: random.Random, group: Group) -> Case:
    lengths = [rng.choice([0, 1, 130, rng.randint(0, 500)]) for _ in range(rng.randint(1, 4))]
    window = (rng.choice([-1, 0, 100, 200]), rng.choice([-1, 0, 40]))
    causal, layout = rng.random() < 0.6, rng.choice(["zigzag", "contiguous"])
    return documents(group, lengths, layout, causal, window)


def documents(
    group: Group, lengths: list[int], layout: str, causal: bool, window: tuple[int, int]
) -> Case:
    plan = plan_context(cumulative(lengths), group, layout, causal, window)
    allowed = torch.from_numpy(mask(lengths, lengths, *band(causal, window)))
    return Case(plan, allowed, f"{lengths}, {layout}, causal {causal}, window {window}")


def random_mask(rng: random.Random, group: Group, cross: bool) -> Case:
    union = random_union(rng, 500, cross)
    while union.dense().sum() < 1000:  # some pairs, whose gradients have a size
        union = random_union(rng, 500, cross)
    plan = plan_context(union.mask(), group, rng.choice(["zigzag", "contiguous"]))
    return Case(plan, torch.from_numpy(union.dense()), str(union))


def inputs_of(case: Case, seed: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    """`inputs`, of as many queries and keys as the case has."""
    q, k, v = inputs(seed, max(case.allowed.shape), heads)
    return [q[: case.allowed.shape[0]], *(x[: case.allowed.shape[1]] for x in (k, v))]


def repeated(case: Case, x: torch.Tensor) -> torch.Tensor:
    """x of all keys, where those in no pair have the values of their rank's first key in one."""
    x, seen = x.clone(), case.allowed.any(0)
    for at, _ in case.placed_keys():
        rows, some = torch.as_tensor(at), seen[at]
        x[rows[~some]] = x[rows[some][0]].clone() if some.any() else torch.zeros_like(x[0])
    return x


def rounded_inputs(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: str
) -> list[torch.Tensor]:
    """Float64: this rank's q and its products with K's mean, all k, centred v, and V's mean; K's.

    K and V are rounded as every rank rounds its own.
    """
    formats, placed = FORMATS[precision], case.placed_keys()
    if case.plan.mask is not None:
        k, v = repeated(case, k), repeated(case, v)
    parts = [ChannelStatistics.of(k[at], v[at]) for at, _ in placed]
    centres = KVCentres.of(ChannelStatistics.combine(parts), formats)
    queries = quantise_q(case.plan.shard(q), centres, formats)
    keys, values = (torch.zeros(x.shape, dtype=torch.float64) for x in (k, v))
    for at, segments in placed:
        kv = quantise_kv(k[at], v[at], segments, centres, formats)
        keys[at] = kv.k.double() * kv.k_scale.double().unsqueeze(-1)
        values[at] = kv.v.double() * centres.v_scale.double()
    rows = queries.values.double() * queries.scale.double().unsqueeze(-1)
    means = centres.v_mean.double(), centres.k_mean.double()
    return [rows, queries.k_offset.double(), keys, values, *means]


def _rounding_of_p(group: Group, seed: int, precision: str) -> int:
    """Checks random cases; the number of rows that were compared."""
    rng = random.Random(seed)
    compared = 0
    for i in range(8):
        rows_per_hop = rng.choice([1, 1 << 30])  # several hops in a launch, or each in its own
        case = random_mask(rng, group, i % 4 == 3) if i % 2 else random_documents(rng, group)
        plan = case.plan
        h, hk = rng.choice([(4, 2), (3, 3), (2, 1)])
        q, k, v = inputs_of(case, i, (h, hk))
        shards = plan.shard(q), plan.shard_keys(k), plan.shard_keys(v)
        with mock.patch.object(quantised_forward, "ROWS_PER_HOP", rows_per_hop):
            out, lse = ring_attn_func(*shards, plan, return_lse=True, precision=precision)
        rows, offset, keys, values, v_mean, _ = rounded_inputs(case, q, k, v, precision)
        allowed = case.allowed[plan.token_index]
        centred, expected_lse = attention(rows, keys, values, allowed)
        expected_lse += (offset * D**-0.5).t()
        what = f"{case.what}, heads {h}:{hk}, {rows_per_hop}"
        torch.testing.assert_close(
            lse.double(), expected_lse, atol=2e-4, rtol=1e-5, msg=lambda m, w=what: f"{w}: {m}"
        )
        mean = v_mean.repeat_interleave(h // hk, 0)
        expected = torch.where(allowed.any(1)[:, None, None], centred + mean, 0)
        size, _ = attention(rows, keys, values.abs(), allowed)
        limit = HALF_STEP[precision] * size + 2.0**-8 * expected.abs() + 1e-4
        if precision == "fp8":
            all_v = values.abs().repeat_interleave(h // hk, 1)
            limit += LEAST_P * torch.einsum("tn,nhd->thd", allowed.double(), all_v)
        assert ((out - expected).abs() <= limit).all(), what
        compared += len(out)
    return compared


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rounding_of_p_is_the_only_error(ranks: Ranks, world: int, precision: str) -> None:
    """Random documents, windows and masks, layouts, heads, hops of a launch; means are of all
    ranks' K/V.

    Reference: float64 attention of the operands that the ranks round. out: to half a step of P, of
    the smallest P and of bfloat16; LSE to 2e-4.
    """
    assert sum(ranks.run(world, _rounding_of_p, 10 * world, precision)) > 500


def _gradients(group: Group, seed: int, precision: str) -> float:
    """The largest error of this rank's rows, of random cases, over the rms of dq."""
    rng, world = random.Random(seed), dist.get_world_size(group)
    worst = 0.0
    for i in range(6):
        if i < 2:  # a window begins inside a tile of the neighbour's keys, before its last tile
            tokens, window = 300 * world, (rng.randint(50, 170), 0)
            case = documents(group, [tokens], "contiguous", True, window)
            if i == 1:
                given = Mask.documents(tokens, window_size=window)
                case = case._replace(plan=plan_context(given, group, "contiguous"))
        else:
            case = random_mask(rng, group, i == 5) if i % 2 else random_documents(rng, group)
        plan = case.plan
        h, hk = rng.choice([(4, 2), (3, 3), (2, 1)])
        if i < 2 and world > 1:
            exchange = plan.aligned(KEY_TILE).kv_exchange
            assert (exchange.visible != plan.kv_exchange.visible).any()
        q, k, v = (x.float() for x in inputs_of(case, i, (h, hk)))
        dout, dlse = torch.randn(q.shape), torch.randn(h, len(q))
        sink = torch.randn(h, requires_grad=True) if i in (1, 2, 5) else None
        leaves = [plan.shard(q), plan.shard_keys(k), plan.shard_keys(v)]
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = ring_attn_func(
            *leaves, plan, return_lse=True, precision=precision, sink=sink, deterministic=i > 2
        )
        wanted = leaves if sink is None else [*leaves, sink]
        weights = plan.shard(dout), plan.shard(dlse, 1)
        got = list(torch.autograd.grad((out, lse), wanted, weights))
        if sink is not None and plan.world > 1:
            dist.all_reduce(got[3], group=group)
        everywhere = plan.unshard(out.detach())
        _, _, keys, values, v_mean, k_mean = rounded_inputs(case, q, k, v, precision)
        formats = FORMATS[precision]
        centres = KVCentres(*(x.float() for x in (k_mean, v_mean, v_mean)))
        queries = quantise_q(q, centres, formats)
        rounded = Rounded(
            queries.values.double() * queries.scale.double().unsqueeze(-1),
            keys,
            values + v_mean,
            k_mean,
        )
        expected = dense_gradients(q, k, v, dout, everywhere, case.allowed, rounded, sink, dlse)
        rms = expected[0].square().mean().sqrt()  # of dq
        dq, dk, dv, *dsink = expected
        expected = [plan.shard(dq), plan.shard_keys(dk), plan.shard_keys(dv), *dsink]
        for x, y in zip(got, expected, strict=True):
            if x.numel():  # a rank may have no token
                error = float((x.double() - y).abs().max() / rms)
                assert error < 5e-4, (error, i, case.what)
                worst = max(worst, error)
    return worst


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_those_of_the_rounded_function(
    ranks: Ranks, world: int, precision: str
) -> None:
    """float32; random documents and masks, windows that cut tiles, layouts, heads, sinks and
    gradients of LSE. Reference: `gradients` of tests/support, float64; the largest error over
    the rms: 5e-4."""
    assert max(ranks.run(world, _gradients, 10 * world, precision)) < 5e-4


def _squares(group: Group, precision: str) -> list[tuple[float, float]]:
    """(squared error of the ring, of one device) against float64: out, lse, dq, dk, dv."""
    lengths = [700, 1, 323]
    q, k, v = inputs(3, 1024, (4, 2))
    dout = torch.randn(q.shape).bfloat16()
    plan = plan_context(cumulative(lengths), group)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor(cumulative(lengths))
    one, mine = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    local = [plan.shard(x.detach()).requires_grad_() for x in mine]
    outputs = [
        attention(*exact, mask(lengths, lengths, -1, 0)),
        flash_attn_varlen_func(*one, cu, cu, causal=True, return_lse=True, precision=precision),
        ring_attn_func(*local, plan, return_lse=True, precision=precision),
    ]
    results = []
    for leaves, (out, lse), do in zip(
        (exact, one, local), outputs, (dout.double(), dout, plan.shard(dout)), strict=True
    ):
        grads = gradients(leaves, (out, lse), do, torch.zeros_like(lse))
        results.append([out.detach(), lse.detach(), *grads])
    expected, alone, ring = results
    shards = [
        [plan.shard(x, 1 if i == 1 else 0).double() for i, x in enumerate(whole)]
        for whole in (expected, alone)
    ]
    return [
        ((r.double() - e).square().sum().item(), (a - e).square().sum().item())
        for e, a, r in zip(*shards, ring, strict=True)
    ]


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_the_error_does_not_grow_with_ranks(ranks: Ranks, precision: str) -> None:
    """Rms errors against float64 attention, over one device's: of out and LSE <= 1.02, of
    gradients <= 1.1."""
    for world in (2, 4):
        results = ranks.run(world, _squares, precision)
        for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
            ring, alone = (sum(r[i][which] for r in results) for which in range(2))
            limit = 1.02 if name in ("out", "lse") else 1.1
            assert 0 < ring <= limit**2 * alone, (world, name, ring, alone)


def _bytes_of_keys(group: Group, precision: str) -> list[int]:
    """Sizes of the K/V messages that this rank sends."""
    q, k, v = inputs(0, 1024, (4, 2))
    plan = plan_context([0, 1024], group, causal=False)
    sent: list[int] = []
    exchange = GlooTransport.exchange

    def note(self, sends, receives):  # type: ignore[no-untyped-def]
        sent.extend(m.tensor.nbytes for m in sends if "K/V" in m.what and "hop" in m.what)
        return exchange(self, sends, receives)

    with mock.patch.object(GlooTransport, "exchange", note):
        ring_attn_func(*(plan.shard(x) for x in (q, k, v)), plan, precision=precision)
    return sent


@pytest.mark.parametrize(("precision", "v_bytes"), [("fp8", 1), ("int8", 2)])
def test_keys_travel_in_8_bits(ranks: Ranks, precision: str, v_bytes: int) -> None:
    """512 keys of a rank: numbers of K and V, and 4 scales of float32 a head."""
    sizes = ranks.run(2, _bytes_of_keys, precision)[:2]
    assert sizes == [[512 * 2 * D * (1 + v_bytes) + 4 * 2 * 4]] * 2


def _other_precision(group: Group) -> str:
    q, k, v = inputs(0, 256, (4, 2))
    plan = plan_context([0, 256], group)
    precision = "fp8" if dist.get_rank(group) else "int8"
    with pytest.raises(ValueError, match="precision differs") as caught:
        ring_attn_func(*(plan.shard(x) for x in (q, k, v)), plan, precision=precision)
    return str(caught.value)


def test_ranks_agree_on_the_precision(ranks: Ranks) -> None:
    assert all("fp8" in message for message in ranks.run(2, _other_precision)[:2])


@pytest.mark.parametrize(
    ("tokens", "group_size", "world", "expected"),
    [
        (4096, 4, 4, [0, 1, 2, 3]),  # 16,384 query rows per KV head: a hop a launch
        (8192, 4, 4, [0, 1, 1, 2]),
        (32768, 4, 4, [0, 1, 1, 1]),
        (1 << 20, 8, 8, [0, 1, 1, 1, 2, 2, 3, 3]),  # at most three
        (64, 1, 2, [0, 1]),
    ],
)
def test_longer_shards_join_more_hops_in_a_launch(
    tokens: int, group_size: int, world: int, expected: list[int]
) -> None:
    plan = plan_context(tokens * world, (0, world))
    assert quantised_forward.launches(plan, group_size).tolist() == expected


def test_rows_that_land_together_share_no_launch_with_others() -> None:
    """Two hosts of three ranks, and three of two, with up to three steps in a launch."""
    for hosts, expected in ((2, [0, 1, 1, 2, 2, 2]), (3, [0, 1, 2, 2, 3, 3])):
        plan = plan_context(6 << 17, (0, 6), hosts=hosts)
        assert quantised_forward.launches(plan, 8).tolist() == expected


def _messages(group: Group) -> list[list[tuple[str, int]]]:
    """Of every exchange of K/V of a call whose launches join all hops: what, and to which peer."""
    q, k, v = inputs(0, 1024, (4, 2))
    plan = plan_context([0, 1024], group, causal=False)
    sent: list[list[tuple[str, int]]] = []
    exchange = GlooTransport.exchange

    def note(self, sends, receives):  # type: ignore[no-untyped-def]
        sent.append([(m.what, m.peer) for m in sends if "hop" in m.what])
        return exchange(self, sends, receives)

    with (
        mock.patch.object(GlooTransport, "exchange", note),
        mock.patch.object(quantised_forward, "ROWS_PER_HOP", 1),
    ):
        ring_attn_func(*(plan.shard(x) for x in (q, k, v)), plan, precision="fp8")
    return [x for x in sent if x]


def test_all_messages_of_a_launch_move_beside_the_one_before(ranks: Ranks) -> None:
    """In one exchange: NCCL's second one would wait for the kernel beside it."""
    hops = range(1, 4)
    expected = [[[(f"forward hop {t}: K/V", (r + t) % 4) for t in hops]] for r in range(4)]
    assert ranks.run(4, _messages)[:4] == expected
