"""Rows that ranks exchange by one all-to-all, so that each gets tokens that it does not hold.

Remaps between layouts, shifts and halos differ only in the tokens that each rank wants. All ranks
know who holds and who wants which token, so messages carry rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.planning.sharding import Ints
from ringfa3.planning.unshard import agreed_settings, require_agreement
from ringfa3.validation import check_plain

# The `TokenShards` of the input, and the tokens that each rank wants, as `RowExchange.of` has them.
Wanted: TypeAlias = Callable[[], tuple[Any, list[Ints]]]


class RowExchange(NamedTuple):
    """What one rank sends and receives.

    send, receive            rows of the input and of the result, grouped by the other rank. The
                             rank that sends to another orders its rows as that one receives them
    send_sizes, receive_sizes  (world,) rows to and from each rank
    rows                     of the result
    repeats                  whether `receive` has a row twice: their values are added
    """

    send: Ints
    send_sizes: Ints
    receive: Ints
    receive_sizes: Ints
    rows: int
    repeats: bool = False

    @classmethod
    def of(cls, held: list[Ints], wanted: list[Ints], rank: int) -> RowExchange:
        """held[o], wanted[o]: global indices of the tokens that rank o has, and of those of its
        result, -1 for a row without one. Each token is held once."""
        world = len(held)
        everything = np.concatenate(held)
        owner, row = np.empty_like(everything), np.empty_like(everything)
        owner[everything] = np.repeat(np.arange(world), [len(x) for x in held])
        row[everything] = np.concatenate([np.arange(len(x)) for x in held])
        receive = np.flatnonzero(wanted[rank] >= 0)
        source = owner[wanted[rank][receive]]
        receive = receive[np.argsort(source, kind="stable")]
        asked = [w[w >= 0] for w in wanted]
        sent = [row[w[owner[w] == rank]] for w in asked]
        return cls(
            np.concatenate(sent),
            np.array([len(x) for x in sent]),
            receive,
            np.bincount(source, minlength=world),
            len(wanted[rank]),
        )

    def transposed(self, rows: int) -> RowExchange:
        """The exchange of gradients, which go back to the `rows` rows of the input."""
        back = self.receive, self.receive_sizes, self.send, self.send_sizes
        return RowExchange(*back, rows, repeats=True)

    def run(self, x: torch.Tensor, group: dist.ProcessGroup | None, fill: float) -> torch.Tensor:
        """(rows, ...) from x (tokens, ...); `fill` where no rank sends a row."""
        send, receive = (torch.from_numpy(i).to(x.device) for i in (self.send, self.receive))
        received = x.index_select(0, send)
        if group is not None:
            # as bytes: gloo and NCCL have no int16, and not every 8-bit float
            sent = received.view(len(send), math.prod(x.shape[1:])).view(torch.uint8)
            received = x.new_empty((len(receive), *x.shape[1:]))
            sizes = self.receive_sizes.tolist(), self.send_sizes.tolist()
            into = received.view(len(receive), math.prod(x.shape[1:])).view(torch.uint8)
            dist.all_to_all_single(into, sent, *sizes, group=group)
        if self.repeats:
            return x.new_zeros((self.rows, *x.shape[1:])).index_add_(0, receive, received)
        out = x.new_full((self.rows, *x.shape[1:]), fill)
        out[receive] = received
        return out


class ExchangeRows(torch.autograd.Function):
    """apply(x, exchange, group, fill): `RowExchange.run`. Its gradients are sums over all ranks."""

    @staticmethod
    def forward(ctx, x, exchange, group, fill):  # type: ignore[no-untyped-def]
        ctx.exchange, ctx.group, ctx.rows = exchange, group, len(x)
        return exchange.run(x, group, fill)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        back = ctx.exchange.transposed(ctx.rows)
        rows = grad.contiguous()
        return run_exchange(rows, back, ctx.group, 0), None, None, None


def run_exchange(
    x: torch.Tensor, exchange: RowExchange, group: dist.ProcessGroup | None, fill: float
) -> torch.Tensor:
    """`RowExchange.run`, differentiably."""
    rows: torch.Tensor = ExchangeRows.apply(x, exchange, group, fill)  # type: ignore[no-untyped-call]
    return rows


def exchange_rows(
    x: torch.Tensor, plan: Any, call: str, find: Wanted, dim: int, fill: float = 0
) -> torch.Tensor:
    """What each rank wants of x, a tensor of tokens along `dim`.

    plan: the `TokenShards` that is asked. It keeps the exchange of each call.
    call: the name of the public call, with its arguments. Ranks agree on it before they exchange.

    Raises as `TokenShards.to_contiguous`.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"plan.{call} inside a compiled function: call it between graphs")
    if plan.world > 1 and plan.group is None:
        raise ValueError(
            f"plan.{call}: this plan was made from (rank, world) and cannot exchange rows: make "
            "it with group=<ProcessGroup>"
        )
    group = plan.group if plan.world > 1 else None
    error: Exception | None = None
    settings: dict[str, str] = {}
    try:
        check_plain("x", x)
        if call not in plan.exchanges:
            holder, wanted = find()
            held = [holder.index_of(rank) for rank in range(plan.world)]
            plan.exchanges[call] = holder, RowExchange.of(held, wanted, plan.rank)
        holder, exchange = plan.exchanges[call]
        settings = {"call": call, **agreed_settings(x, holder, dim)}
    except Exception as problem:  # whatever it is, the other ranks wait
        error = problem
    require_agreement(group, settings, error)
    rows = x.movedim(dim, 0).contiguous()
    return run_exchange(rows, exchange, group, fill).movedim(0, dim)
