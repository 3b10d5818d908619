"""Rows of a plan's tensors that go from rank to rank, differentiably.

All rows go to every rank by a collective of the plan's group, `unshard`. Other exchanges, which a
`RowExchange` describes, use messages.

An exchange begins like a ring call: ranks agree on its settings once, and its messages match none
of another call. So a rank that deviates later is an error on all ranks, neither a wrong result nor
a wait for messages that never come.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.custom_op import custom_op, register_fake
from ringfa3.kernels.streams import on
from ringfa3.planning.communication import (
    Communication,
    agreed_settings,
    require_agreement,
    select,
    set_communication,
)
from ringfa3.planning.handles import from_handle, graph_handle
from ringfa3.planning.row_exchange import RowExchange
from ringfa3.planning.token_shards import TokenShards
from ringfa3.ring.connect import connection
from ringfa3.ring.group import RingGroup
from ringfa3.ring.p2p import FakeTransport, Message, Transport
from ringfa3.ring.process_group import is_fake
from ringfa3.schedules.settings import Settings


class MoveRows(torch.autograd.Function):
    """`move_rows`. Its backward is the transposed exchange, and so is linear, too."""

    @staticmethod
    def forward(ctx, x, exchange, plan, settings, fill, of_call):  # type: ignore[no-untyped-def]
        ctx.exchange, ctx.plan, ctx.settings, ctx.rows = exchange, plan, settings, len(x)
        received, ctx.call = _receive(x, exchange, plan, settings, of_call)
        receive = torch.from_numpy(exchange.receive).to(x.device)
        if fill is None:
            out = x.new_zeros((exchange.rows, *x.shape[1:]))
            return out.index_add_(0, receive, received[:-1])
        received[-1:].fill_(fill)
        # read by an index: writing by one is not implemented for all dtypes
        source = receive.new_full((exchange.rows,), len(receive))
        source[receive] = torch.arange(len(receive), dtype=torch.int64, device=x.device)
        return select(received, source)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        settings = {**ctx.settings, "derivative": str(int(ctx.settings["derivative"]) + 1)}
        back = ctx.exchange.transposed(ctx.rows)
        rows = move_rows(grad.contiguous(), back, ctx.plan, settings, None, ctx.call)
        return rows, None, None, None, None, None


def move_rows(
    x: torch.Tensor,
    exchange: RowExchange,
    plan: TokenShards,
    settings: dict[str, str],
    fill: complex | None,
    of_call: int = 0,
) -> torch.Tensor:
    """(exchange.rows, ...) from x (tokens, ...). Gradients are sums over all ranks.

    settings: on which ranks agree.
    fill: of rows that no rank sends; None: add rows that are sent for one row of the result.
    of_call: number of the call whose gradient this is; 0 for none.

    Raises:
        ValueError, TypeError: on all ranks, if the settings of one differ.
        RingError: a rank has given up, or does not answer within the timeout.
    """
    differentiable = torch.is_grad_enabled() and x.requires_grad
    settings = {"derivative": "0", **settings, "x.requires_grad": str(differentiable)}
    rows: torch.Tensor = MoveRows.apply(x, exchange, plan, settings, fill, of_call)  # type: ignore[no-untyped-call]
    return rows


def _receive(
    x: torch.Tensor, exchange: RowExchange, plan: TokenShards, given: dict[str, str], of_call: int
) -> tuple[torch.Tensor, int]:
    """The rows for `exchange.receive`, and one more without values; the number of the call."""
    transport: Transport = FakeTransport()
    ring: RingGroup | None = None
    number = 0
    if plan.group is not None and plan.world > 1 and not is_fake(plan.group):
        ring, settings = RingGroup.of(plan.group), Settings(given)
        ring.agree(settings)
        ring.begin(settings, of_call)
        number = ring.call
        _, messages = connection(ring, x.device, "auto", by_messages=True)
        assert messages is not None
        transport = messages
    with nullcontext() if ring is None else ring, on(x.device):
        sent = select(x, torch.from_numpy(exchange.send))
        received = x.new_empty((len(exchange.receive) + 1, *x.shape[1:]))
        ends = (accumulate(s.tolist()) for s in (exchange.send_sizes, exchange.receive_sizes))
        sends, receives = [], []
        out_from = in_from = 0
        for peer, (out_to, in_to) in enumerate(zip(*ends, strict=True)):
            out, into = sent[out_from:out_to], received[in_from:in_to]
            out_from, in_from = out_to, in_to
            if peer == plan.rank:
                into.copy_(out)
                continue
            what = f"rows of plan.{given['call']}"
            sends += [Message(b, peer, what, 0) for b in _bytes(out)]
            receives += [Message(b, peer, what, 0) for b in _bytes(into)]
        transport.exchange(sends, receives).wait()
    return received, number


def _bytes(rows: torch.Tensor) -> list[torch.Tensor]:
    """(n, bytes) if there are any: gloo and NCCL have no int16, and not every 8-bit float."""
    if not rows.numel():
        return []
    return [rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)]


class Unshard(torch.autograd.Function):
    """apply(x_local, plan, dim): `TokenShards.unshard`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_local, plan, dim):  # type: ignore[no-untyped-def]
        return gather_tokens(x_local, graph_handle(plan), dim, plan.total_tokens)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, ctx.plan, ctx.dim = inputs

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.plan.shard(grad, ctx.dim), None, None


@custom_op
def gather_tokens(x_local: torch.Tensor, plan: int, dim: int, tokens: int) -> torch.Tensor:
    """All `tokens` tokens along `dim`; `plan` is a plan's handle."""
    context = from_handle(plan)
    error, settings = None, {}
    try:
        settings = agreed_settings(x_local, context, dim)
    except Exception as problem:  # whatever it is, the other ranks wait
        error = problem
    require_agreement(context.group if context.world > 1 else None, settings, error)
    rows = x_local.movedim(dim, 0)
    if context.world == 1:
        gathered = rows.contiguous()
    else:
        padded = rows.new_zeros((max(context.tokens_per_rank), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(context.world)]
        # as bytes: gloo and NCCL have no int16, and not every 8-bit float
        dist.all_gather(
            [x.view(torch.uint8) for x in parts], padded.view(torch.uint8), group=context.group
        )
        gathered = torch.cat([p[:n] for p, n in zip(parts, context.tokens_per_rank, strict=True)])
    index = np.argsort(np.concatenate([context.index_of(r) for r in range(context.world)]))
    return select(gathered, torch.from_numpy(index)).movedim(0, dim)


@register_fake(gather_tokens)
def _fake_gather(x_local: torch.Tensor, plan: int, dim: int, tokens: int) -> torch.Tensor:
    rows = x_local.movedim(dim, 0)
    return rows.new_empty((tokens, *rows.shape[1:])).movedim(0, dim)


def unshard(x_local: torch.Tensor, plan: TokenShards, dim: int) -> torch.Tensor:
    """As `TokenShards.unshard`, of a tensor."""
    result: torch.Tensor = Unshard.apply(x_local, plan, dim)  # type: ignore[no-untyped-call]
    return result


def agree_anew(group: dist.ProcessGroup, settings: dict[str, str], error: Exception | None) -> None:
    """Before each `unshard`: nobody would notice another rank's error later."""
    if not is_fake(group):
        RingGroup.of(group).agree(Settings(settings), error, anew=True)
    elif error is not None:
        raise error


set_communication(Communication(agree_anew, unshard, move_rows))
