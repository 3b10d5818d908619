"""If this fails, rings compute something else than one device. The ring on 1 to 4 ranks: equal to
one device, in any group, and bitwise repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfa3 import ContextPlan, flash_attn_varlen_func, plan_context, ring_attn_func
from ringfa3.kernels import reference
from ringfa3.ring import p2p
from ringfa3.ring.levels.flow_messages import KV, RETURN
from ringfa3.ring.p2p import GlooTransport, Message
from tests.support.dense import attention, band, cumulative, gradients, mask, tensors, worst
from tests.support.ranks import Ranks, group_of

EXACT = 1e-12  # float64
Group = dist.ProcessGroup
NAMES = ("out", "lse", "dq", "dk", "dv")
TAGS = {KV: "K/V", RETURN: "dK/dV"}
EXCHANGE = GlooTransport.exchange


@contextmanager
def tile_sizes(m: int, n: int, block: int) -> Iterator[None]:
    with mock.patch.multiple(reference, TILE_M=m, TILE_N=n, BLOCK=block):
        yield


def ring_results(
    plan: ContextPlan,
    everything: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor],
    **options: object,
) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] of this rank's tokens."""
    inputs, dout, dlse = everything
    leaves = [plan.shard(x).requires_grad_() for x in inputs]
    outputs = ring_attn_func(*leaves, plan, return_lse=True, **options)  # type: ignore[arg-type]
    assert isinstance(outputs, tuple)
    grads = gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))
    return [*(x.detach() for x in outputs), *grads]


def shards_of(plan: ContextPlan, results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        plan.shard(x, 1 if name == "lse" else 0) for name, x in zip(NAMES, results, strict=True)
    ]


def dense_results(lengths: list[int], causal: bool, window: tuple[int, int],
                  everything: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor],
                  ) -> list[torch.Tensor]:  # fmt: skip
    """[out, lse, dq, dk, dv] of all tokens from the float64 reference."""
    inputs, dout, dlse = everything
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = attention(*leaves, mask(lengths, lengths, *band(causal, window)))
    return [*(x.detach() for x in outputs), *gradients(leaves, outputs, dout, dlse)]


def random_case(
    rng: random.Random,
) -> tuple[list[int], str, bool, tuple[int, int], tuple[int, int]]:
    kinds = [lambda: 0, lambda: 1, lambda: 17, lambda: rng.randint(0, 90)]
    lengths = [rng.choice(kinds)() for _ in range(rng.randint(0, 6))]
    window = (rng.choice([-1, -1, 0, 5, 20]), rng.choice([-1, 0, 7]))
    heads = rng.choice([(4, 2), (3, 3), (4, 1)])
    return lengths, rng.choice(["zigzag", "contiguous"]), rng.random() < 0.6, window, heads


def _compare(group: Group, seed: int, count: int, sizes: tuple[int, int, int]) -> float:
    """Largest error over random documents, windows, layouts, heads, shards of 0 tokens included."""
    rng = random.Random(seed)
    error = 0.0
    with tile_sizes(*sizes):
        for i in range(count):
            lengths, layout, causal, window, heads = random_case(rng)
            plan = plan_context(cumulative(lengths), group, layout, causal, window)
            everything = tensors(i, sum(lengths), heads, 4)
            got = ring_results(plan, everything, deterministic=bool(i % 2))
            whole = dense_results(lengths, causal, window, everything)
            here = worst(list(zip(got, shards_of(plan, whole), strict=True)))
            assert here < EXACT, (here, lengths, layout, causal, window, heads)
            error = max(error, here)
    return error


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(8, 8, 256), (8, 12, 5), (128, 128, 256)], ids=str)
def test_equals_dense_attention(ranks: Ranks, world: int, sizes: tuple[int, int, int]) -> None:
    """Float64 reference, 1e-12: 25 random cases; many small tiles, and the default ones."""
    ranks.run(world, _compare, 100 * world + sizes[1], 25, sizes)


def _compare_long(group: Group, layout: str) -> float:
    plan = plan_context([0, 700, 701, 1500], group, layout)
    everything = tensors(0, 1500, (2, 1), 8)
    one = [x.clone().requires_grad_() for x in everything[0]]
    cu = torch.tensor([0, 700, 701, 1500])
    outputs = flash_attn_varlen_func(*one, cu, cu, causal=True, return_lse=True)
    whole = [*(x.detach() for x in outputs), *gradients(one, outputs, *everything[1:])]
    return worst(list(zip(ring_results(plan, everything), shards_of(plan, whole), strict=True)))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_equals_one_device(ranks: Ranks, world: int, layout: str) -> None:
    """Against `flash_attn_varlen_func` on all tokens, float64, 1e-12, tiles of 128."""
    assert max(ranks.run(world, _compare_long, layout)) < EXACT


def _gate(group: Group, dtype: torch.dtype) -> list[dict[str, float]]:
    """[errors of the ring, of plain attention] by name: this rank's rows against float64."""
    lengths = [300, 1, 0, 211]
    inputs, dout, dlse = tensors(7, 512, (4, 2), 32, dtype)
    zero = torch.zeros_like(dlse)
    plan = plan_context(cumulative(lengths), group)
    exact = dense_results(
        lengths, True, (-1, -1), ([x.double() for x in inputs], dout.double(), zero)
    )
    plain = dense_results(lengths, True, (-1, -1), (inputs, dout, zero))
    got = ring_results(plan, (inputs, dout, zero))
    mine = [shards_of(plan, x) for x in (exact, plain)]
    errors = [(worst([(g, e)]), worst([(p, e)])) for g, e, p in zip(got, *mine, strict=True)]
    return [dict(zip(NAMES, e, strict=True)) for e in zip(*errors, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_does_not_grow_with_ranks(ranks: Ranks, dtype: torch.dtype) -> None:
    """The gate 2 max|x_pt - ref| + 1e-5 in every world; the error on 4 ranks <= 1.5 times that on
    one; for out, lse, dq, dk, dv."""
    errors = {}
    for world in (1, 2, 3, 4):
        results = ranks.run(world, _gate, dtype)
        for name in NAMES:
            ours, plain = (max(r[i][name] for r in results) for i in range(2))
            assert ours <= 2 * plain + 1e-5, (world, name)
            errors[world, name] = ours
    for name in NAMES:
        assert errors[4, name] <= 1.5 * errors[1, name] + 1e-6, name


def _in_the_default_group(group: Group) -> float:
    lengths = [40, 3, 61]
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = plan_context(cumulative(lengths), (rank, world))
    everything = tensors(0, 104, (2, 1), 4)
    whole = dense_results(lengths, True, (-1, -1), everything)
    return worst(list(zip(ring_results(plan, everything), shards_of(plan, whole), strict=True)))


def test_a_plan_from_rank_and_world_runs_in_the_default_group(ranks: Ranks) -> None:
    """Float64, 1e-12."""
    assert max(ranks.run(4, _in_the_default_group)) < EXACT


def _side_by_side(group: Group) -> float:
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    half = halves[0] if dist.get_rank() in (0, 2) else halves[1]
    lengths = [40, 3, 61] if half is halves[0] else [90, 25]
    error = 0.0
    for i in range(3):
        plan = plan_context(cumulative(lengths), half, window_size=(50 * i, -1))
        everything = tensors(i, sum(lengths), (2, 1), 4)
        whole = dense_results(lengths, True, (50 * i, -1), everything)
        got = ring_results(plan, everything)
        error = max(error, worst(list(zip(got, shards_of(plan, whole), strict=True))))
    return error


def test_two_context_groups_run_side_by_side(ranks: Ranks) -> None:
    """Ranks (0, 2) and (1, 3) with other documents each, float64, 1e-12."""
    assert max(ranks.run(4, _side_by_side)) < EXACT


def _repeat(group: Group, dtype: torch.dtype) -> list[bytes]:
    plan = plan_context([0, 300, 450], group)
    everything = tensors(0, 450, (4, 2), 16, dtype)
    runs = [ring_results(plan, everything, deterministic=True) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    return []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_deterministic_is_bitwise_repeatable(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, _repeat, dtype)


def _events(group: Group, kv_heads: int) -> tuple[list[str], list[str]]:
    """The order of what a forward and a backward do; messages by their tags."""
    events: list[str] = []

    def noted(name: str, inner: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            events.append(name)
            return inner(*args, **options)

        return call

    def move(transport: GlooTransport, sends: list[Message], receives: list[Message]) -> object:
        tags = {m.tag for m in (*sends, *receives)}
        events.append(" and ".join(name for tag, name in TAGS.items() if tag in tags))
        return EXCHANGE(transport, sends, receives)

    plan = plan_context(100, group)
    inputs, dout, _ = tensors(0, 100, (6, kv_heads), 4)
    waiting = p2p._GlooExchange
    with (
        mock.patch.object(reference, "attend", noted("compute", reference.attend)),
        mock.patch.object(
            reference, "attend_backward", noted("compute", reference.attend_backward)
        ),
        mock.patch.object(GlooTransport, "exchange", move),
        mock.patch.object(waiting, "wait", noted("wait", waiting.wait)),
    ):
        out = ring_attn_func(*(plan.shard(x).requires_grad_() for x in inputs), plan)
        forward = events.copy()
        events.clear()
        out.backward(plan.shard(dout))
    return forward, events


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rows_move_while_a_hop_is_computed(ranks: Ranks, kv_heads: int) -> None:
    """In one exchange, which ends after the hop. The last rows return beside some heads of the
    rank's own keys, if it has several."""
    kv, both, returned = ([what, "compute", "wait"] for what in ("K/V", "K/V and dK/dV", "dK/dV"))
    last = returned if kv_heads > 1 else ["dK/dV", "wait"]
    for forward, backward in ranks.run(4, _events, kv_heads):
        assert forward == [*kv, *kv, *kv, "compute"]
        assert backward == [*kv, *kv, *both, *returned, *last]


class Late:
    """An exchange whose messages arrive only in `wait`."""

    def __init__(
        self, transport: GlooTransport, sends: list[Message], receives: list[Message]
    ) -> None:
        self.sends, self.receives = sends, receives
        self.sent = [m.tensor.clone() for m in sends]
        self.arrived = [m._replace(tensor=torch.empty_like(m.tensor)) for m in receives]
        for m in receives:
            m.tensor.fill_(torch.nan)
        self.exchange = EXCHANGE(transport, sends, self.arrived)

    def wait(self) -> None:
        self.exchange.wait()
        for m, before in zip(self.sends, self.sent, strict=True):
            assert torch.equal(m.tensor, before), f"{m.what} was written while it was sent"
        for m, arrived in zip(self.receives, self.arrived, strict=True):
            assert m.tensor.isnan().all(), f"{m.what} was written while it was received"
            m.tensor.copy_(arrived.tensor)


def _poisoned(x: torch.Tensor, size: tuple[int, ...], **options: object) -> torch.Tensor:
    return x.new_full(size, torch.nan, **options)  # type: ignore[arg-type]


def _compare_late(group: Group, count: int) -> float:
    with (
        mock.patch.object(GlooTransport, "exchange", lambda *given: Late(*given)),
        mock.patch.object(torch.Tensor, "new_empty", _poisoned),
    ):
        return _compare(group, 11, count, (8, 8, 256))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_buffers_of_messages_under_way_are_not_touched(ranks: Ranks, world: int) -> None:
    """Messages are read and written as late as a GPU may; new buffers are NaN; float64, 1e-12."""
    ranks.run(world, _compare_late, 25)


def _fresh(group: Group) -> float:
    fresh = group_of(3)
    return _compare(fresh, 5, 3, (8, 8, 256)) if dist.get_rank() < 3 else 0.0


def test_a_new_group_starts_afresh(ranks: Ranks) -> None:
    """The same documents in a group made later: other connections, the same result."""
    assert max(ranks.run(4, _fresh)) < EXACT
    assert max(ranks.run(4, _fresh)) < EXACT


def _with_more_groups_on_one_rank(group: Group) -> float:
    alone = dist.new_group([0])
    fresh = group_of(3)
    assert (dist.get_rank() == 0) == isinstance(alone, Group)
    return _compare(fresh, 5, 3, (8, 8, 256)) if dist.get_rank() < 3 else 0.0


def test_ranks_may_belong_to_different_numbers_of_groups(ranks: Ranks) -> None:
    assert max(ranks.run(4, _with_more_groups_on_one_rank)) < EXACT
