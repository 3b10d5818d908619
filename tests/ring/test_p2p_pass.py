"""The bytes that a ring call sends, exactly, and the buffers that it allocates."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringfa3 import plan_context, ring_attn_func
from ringfa3.ring.p2p import GlooTransport, Message
from ringfa3.ring.p2p_pass import KV, PARTIAL, RETURN
from tests.support.dense import cumulative, tensors
from tests.support.ranks import Ranks

Group = dist.ProcessGroup


class Sent:
    """As a context manager: bytes that this rank passes to its transport, by tag and peer."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self._inner = GlooTransport.exchange

    def __enter__(self) -> Sent:
        def exchange(transport: GlooTransport, sends: list[Message], receives: list[Message]):  # type: ignore[no-untyped-def]
            for counter, messages in ((self.bytes, sends), (self.received, receives)):
                for m in messages:
                    assert m.tensor.numel(), "an empty message"
                    counter[m.tag, m.peer] += m.tensor.numel() * m.tensor.element_size()
            return self._inner(transport, sends, receives)

        self._patch = mock.patch.object(GlooTransport, "exchange", exchange)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def _bytes(group: Group, lengths: list[int], layout: str, window: tuple[int, int]):  # type: ignore[no-untyped-def]
    """Bytes that a forward and a backward in bf16 with 2 KV heads of 4 send and receive."""
    plan = plan_context(cumulative(lengths), group, layout, True, window)
    inputs, dout, _ = tensors(0, sum(lengths), (4, 2), 4, torch.bfloat16)
    leaves = [plan.shard(x).requires_grad_() for x in inputs]
    with Sent() as forward:
        out = ring_attn_func(*leaves, plan)
    with Sent() as backward:
        out.backward(plan.shard(dout))
    moved = [forward.bytes, forward.received, backward.bytes, backward.received]
    return [dict(m) for m in moved], plan.kv_exchange.rows, plan.kv_exchange.first_active


def sent_by(rank: int, rows: np.ndarray, first: np.ndarray) -> list[Counter[tuple[int, int]]]:
    """[forward, backward] bytes of a rank: rows[o, t + 1] rows of owner o's block go on at hop t.
    bf16 K/V: 2 x 2 heads x 4 x 2 bytes a row; float32 dK/dV: twice that."""
    world = len(rows)
    kv: Counter[tuple[int, int]] = Counter()
    partial: Counter[tuple[int, int]] = Counter()
    for hop in range(world):
        owner = (rank - hop) % world
        on = int(rows[owner, hop + 1])
        kv[KV, (rank + 1) % world] += 32 * on
        if hop >= 1:
            carried = on if hop >= first[owner] else 0
            partial[PARTIAL, (rank + 1) % world] += 64 * carried
            partial[RETURN, owner] += 64 * int(rows[owner, hop] - on)
    return [+kv, +(kv + partial)]


CASES = [
    ([1000], "zigzag", (-1, -1)),
    ([1000], "contiguous", (-1, -1)),
    ([1000], "contiguous", (40, -1)),
    ([1000], "contiguous", (400, -1)),
    ([300, 1, 0, 700, 33], "zigzag", (-1, -1)),
    ([100, 900, 77], "contiguous", (-1, -1)),
    ([20] * 128, "zigzag", (-1, -1)),
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_sent_are_those_of_the_plan(
    ranks: Ranks, world: int, case: tuple[list[int], str, tuple[int, int]]
) -> None:
    """Exactly, by tag and peer, forward and backward, returned rows included; every message sent is
    received."""
    results = ranks.run(world, _bytes, *case)
    for rank, ((forward, _, backward, _), rows, first) in enumerate(results):
        assert [forward, backward] == sent_by(rank, rows, first)
    for direction in (0, 2):
        sent = {(r, peer, tag): n for r in range(world)
                for (tag, peer), n in results[r][0][direction].items()}  # fmt: skip
        received = {(peer, r, tag): n for r in range(world)
                    for (tag, peer), n in results[r][0][direction + 1].items()}  # fmt: skip
        assert sent == received


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_are_those_of_a_ring(ranks: Ranks, world: int) -> None:
    """Written out without the plan: one causal document of 960 tokens on n ranks.

    In a forward a rank sends n-1 blocks of K/V; in a backward these again and n-1 blocks of float32
    dK/dV. No other rank sees the later half of rank 0's tokens, which it does not send. A document
    on one rank sends nothing, a window as many rows as it is wide.
    """
    block = 960 // world * 32
    for rank, (moved, _, _) in enumerate(ranks.run(world, _bytes, [960], "zigzag", (-1, -1))):
        forward = (world - 1) * block - (rank != world - 1) * block // 2
        partials = (world - 1) * block - (rank != 0) * block // 2
        assert sum(moved[0].values()) == forward
        assert sum(moved[2].values()) == forward + 2 * partials
    for moved, _, _ in ranks.run(world, _bytes, [20] * 32 * world, "zigzag", (-1, -1)):
        assert not any(moved)
    for rank, (moved, _, _) in enumerate(ranks.run(world, _bytes, [960], "contiguous", (40, -1))):
        last, head = rank == world - 1, rank == 0
        assert sum(moved[0].values()) == (0 if last else 40 * 32)
        assert sum(moved[2].values()) == (0 if last else 40 * 32) + (0 if head else 40 * 64)


def _buffers(group: Group, tokens: int) -> tuple[list[int], list[int]]:
    """Rows of each (rows, 2, hk, d) tensor that a forward allocates, and a backward."""
    plan = plan_context(tokens, group)
    inputs, dout, _ = tensors(0, tokens, (4, 2), 4, torch.float32)
    rows: list[list[int]] = []
    made: list[tuple[int, ...]] = []
    inner = torch.Tensor.new_empty

    def new_empty(x: torch.Tensor, size: tuple[int, ...], **options: object) -> torch.Tensor:
        made.append(tuple(size))
        return inner(x, size, **options)  # type: ignore[arg-type]

    leaves = [plan.shard(x).requires_grad_() for x in inputs]
    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        out = ring_attn_func(*leaves, plan)
        rows.append([s[0] for s in made if len(s) == 4])
        made.clear()
        out.backward(plan.shard(dout))
        rows.append([s[0] for s in made if len(s) == 4])
    return rows[0], rows[1]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_two_buffers_whatever_the_world(ranks: Ranks, world: int) -> None:
    """Forward: two K/V buffers of at most one block. Backward: these, the rank's own dK/dV, two
    buffers of partials, of which one may also hold returned rows, and one of contributions,
    empty for two ranks."""
    block = 120
    for forward, backward in ranks.run(world, _buffers, block * world):
        assert len(forward) == 2
        assert max(forward) == block
        assert len(backward) == 2 + 1 + 2 + 1
        assert sum(backward[:5]) <= (2 + 1 + 3) * block
        assert backward[5] <= (block if world > 2 else 0)
