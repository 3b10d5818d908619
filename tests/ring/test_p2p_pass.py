"""If this fails, rings by messages send more or hold more memory than documented. The bytes that a
ring call sends, exactly, and the buffers that it allocates."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringfa3 import ContextPlan, plan_context, ring_attn_func
from ringfa3.bench.cluster.mixes import DISTRIBUTIONS, Mix
from ringfa3.planning.row_exchange import RowIndex
from ringfa3.ring.levels.flow_messages import KV, RETURN, _SentRows
from ringfa3.ring.p2p import Exchange, FakeTransport, GlooTransport, Message, NcclTransport
from ringfa3.ring.p2p_pass import P2PRingPass
from tests.support.dense import band, cumulative, mask, tensors
from tests.support.ranks import Ranks

Group = dist.ProcessGroup


class Sent:
    """As a context manager: bytes that this rank passes to its transport, by tag and peer."""

    def __init__(self, transport: type[GlooTransport | NcclTransport] = GlooTransport) -> None:
        self._transport = transport
        self.bytes: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self._inner = transport.exchange

    def __enter__(self) -> Sent:
        def exchange(transport: Any, sends: list[Message], receives: list[Message]) -> Exchange:
            for counter, messages in ((self.bytes, sends), (self.received, receives)):
                for m in messages:
                    assert m.tensor.numel(), "an empty message"
                    counter[m.tag, m.peer] += m.tensor.numel() * m.tensor.element_size()
            return self._inner(transport, sends, receives)

        self._patch = mock.patch.object(self._transport, "exchange", exchange)
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
    return [dict(m) for m in moved]


def sent_by(rank: int, rows: np.ndarray) -> list[Counter[tuple[int, int]]]:
    """[forward, backward] bytes of a rank: rows[o, r] rows of rank o are needed on rank r.
    bf16 K/V: 2 x 2 heads x 4 x 2 bytes a row; float32 dK/dV: twice that."""
    others = [peer for peer in range(len(rows)) if peer != rank]
    kv = Counter({(KV, peer): 32 * int(rows[rank, peer]) for peer in others})
    back = Counter({(RETURN, peer): 64 * int(rows[peer, rank]) for peer in others})
    return [+kv, +(kv + back)]


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
def test_bytes_sent_are_those_that_readers_need(
    ranks: Ranks, world: int, case: tuple[list[int], str, tuple[int, int]]
) -> None:
    """Exactly, by tag and peer, forward and backward; every message sent is received. Reference:
    the mask."""
    lengths, layout, window = case
    allowed = mask(lengths, lengths, *band(True, window))
    tokens = [
        plan_context(cumulative(lengths), (rank, world), layout, True, window).token_index.numpy()
        for rank in range(world)
    ]
    rows = np.array([[allowed[np.ix_(r, o)].any(0).sum() for r in tokens] for o in tokens])
    results = ranks.run(world, _bytes, *case)
    for rank, (forward, _, backward, _) in enumerate(results):
        assert [forward, backward] == sent_by(rank, rows)
    for direction in (0, 2):
        sent = {(r, peer, tag): n for r in range(world)
                for (tag, peer), n in results[r][direction].items()}  # fmt: skip
        received = {(peer, r, tag): n for r in range(world)
                    for (tag, peer), n in results[r][direction + 1].items()}  # fmt: skip
        assert sent == received


def _buffers(group: Group, tokens: int) -> tuple[list[int], list[int]]:
    """Rows of each (rows, hk, d) or (rows, 2, hk, d) tensor that a forward and a backward make."""
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
        rows.append([s[0] for s in made if s[-2:] == (2, 4)])
        made.clear()
        out.backward(plan.shard(dout))
        rows.append([s[0] for s in made if s[-2:] == (2, 4)])
    return rows[0], rows[1]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_two_buffers_whatever_the_world(ranks: Ranks, world: int) -> None:
    """Forward: two buffers of K and of V, and none of gathered rows. Backward: these, the rank's
    own dK/dV, two buffers of launches and one of returned rows. Two ranks need one of two."""
    block = 120
    twice = block if world > 2 else 0
    for rank, (forward, backward) in enumerate(ranks.run(world, _buffers, block * world)):
        sent = block if rank else block // 2  # the other ranks see half of the first one's rows
        assert max(forward) <= block
        assert sum(forward) <= 2 * (block + twice)
        assert forward[4:] == [0, 0]
        assert backward[:6] == forward
        assert backward[6] == block
        assert sum(backward[7:9]) <= block + twice
        assert backward[9:] == [sent]


def _kv_rows(cu: list[int] | int, rank: int, pass_type: str) -> tuple[list[int], ContextPlan]:
    """Rows of each buffer of K that a pass of 16 ranks makes, and the plan. Nothing attends."""
    plan = plan_context(cu, (rank, 16))
    k = torch.empty(plan.local_keys, 2, 8, dtype=torch.bfloat16, device="meta")
    made: list[int] = []
    inner = torch.Tensor.new_empty

    def new_empty(x: torch.Tensor, size: tuple[int, ...], **options: object) -> torch.Tensor:
        if len(size) == 3 and x is k:
            made.append(size[0])
        return inner(x, size, **options)  # type: ignore[arg-type]

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        P2PRingPass(FakeTransport(), plan, pass_type).start(k, k.clone())
    return made, plan


@pytest.mark.parametrize("pass_type", ["forward", "backward"])
def test_a_long_document_is_never_held_whole(pass_type: str) -> None:
    """16 ranks and a document of 2^20 tokens: the rank with its last tokens attends to 15 blocks of
    64k rows and holds two of them."""
    made, plan = _kv_rows(1 << 20, 0, pass_type)
    rows = [end - begin for parts in plan.by_messages().direct.arriving for *_, begin, end in parts]
    assert rows == [65536] * 15
    assert made == [65536, 65536, 0]


def test_launches_of_many_documents_hold_two_blocks() -> None:
    """16 ranks of 8k tokens, 100 documents of up to 32k: all buffers of K together."""
    lengths = Mix("magi8", DISTRIBUTIONS["magi"], 8192).draw(0, 16).tolist()
    made, plan = _kv_rows(cumulative(lengths), 3, "forward")
    exchange = plan.kv_exchange
    largest = int(np.diff(exchange.visible).max())
    assert min(made) > 0
    assert sum(made) <= max(2 * int(exchange.block_rows.max()), 3 * largest)


@pytest.mark.parametrize("lists", [[[1, 2, 3], [5, 1, 9], [], [4]], [], [[]], [[7, 3]]])
def test_rows_to_send_lie_in_one_upload(lists: list[list[int]]) -> None:
    """Reference: `RowIndex.of_each`, which CPU tensors use."""
    sent = [np.array(rows, np.int64) for rows in lists]
    tables = _SentRows(sent)
    memory = torch.from_numpy(tables.packed.data)
    found = tables.at(memory, memory.data_ptr())
    for index, expected in zip(found, RowIndex.of_each(sent, memory.device), strict=True):
        assert type(index.rows) is type(expected.rows)
        x = torch.arange(20)
        assert torch.equal(x[index.rows], x[expected.rows])
