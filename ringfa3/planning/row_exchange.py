"""Rows that ranks exchange, so that each gets tokens that it does not hold.

Remaps between layouts, shifts and halos differ only in the tokens that each rank wants. All ranks
know who holds and who wants which token, so messages carry rows alone (`ring.row_messages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import torch

from ringfa3.planning.communication import (
    agreed_settings,
    communication,
    require_agreement,
    upload,
)
from ringfa3.planning.placement.costs import Ints
from ringfa3.validation import check_plain, shown, whole_number

# The `TokenShards` of the input, and the tokens that each rank wants, as `RowExchange.of` has them;
# of a call with an n, which is the argument.
Wanted: TypeAlias = Callable[[int], tuple[Any, list[Ints]]]


class RowIndex(NamedTuple):
    """Rows in a given order: a slice where they are consecutive, else an int64 index."""

    rows: slice | torch.Tensor

    @property
    def consecutive(self) -> bool:
        return isinstance(self.rows, slice)

    @classmethod
    def of(cls, rows: Ints, device: torch.device) -> RowIndex:
        """rows: (n,) row numbers; the index is for tensors on `device`."""
        return cls.of_each([rows], device)[0]

    @classmethod
    def of_run(cls, rows: Ints) -> RowIndex | None:
        """The slice of rows (n,), None if they are not consecutive."""
        if not len(rows):
            return cls(slice(0, 0))
        consecutive = bool((np.diff(rows) == 1).all())
        return cls(slice(int(rows[0]), int(rows[-1]) + 1)) if consecutive else None

    @classmethod
    def of_each(cls, lists: list[Ints], device: torch.device) -> list[RowIndex]:
        """As `of`, of several lists in one upload, which does not block the host."""
        found = [cls.of_run(rows) for rows in lists]
        given = [rows for rows, index in zip(lists, found, strict=True) if index is None]
        source = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *given]))
        uploaded = upload(source, device)
        parts = iter(torch.split(uploaded, [len(rows) for rows in given]))
        return [cls(next(parts)) if index is None else index for index in found]

    def part(self, begin: int, end: int) -> RowIndex:
        """Rows [begin, end) of the index."""
        if isinstance(self.rows, slice):
            return RowIndex(slice(self.rows.start + begin, self.rows.start + end))
        return RowIndex(self.rows[begin:end])

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the rows from x (tokens, ...) to out (n, ...)."""
        if isinstance(self.rows, slice):
            out.copy_(x[self.rows])
        else:
            torch.index_select(x, 0, self.rows, out=out)

    def read(self, x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """The rows of x (tokens, ...): a view where they are consecutive, else in `scratch`."""
        if isinstance(self.rows, slice):
            return x[self.rows]
        return torch.index_select(x, 0, self.rows, out=scratch[: len(self.rows)])

    def add(self, gradients: torch.Tensor, to: torch.Tensor) -> None:
        """Adds (n, ...) to the rows of `to` (tokens, ...)."""
        if isinstance(self.rows, slice):
            to[self.rows].add_(gradients)
        else:
            to.index_add_(0, self.rows, gradients)


class RowExchange(NamedTuple):
    """What one rank sends and receives.

    send, receive            rows of the input and of the result, grouped by the other rank. The
                             rank that sends to another orders its rows as that one receives them
    send_sizes, receive_sizes  (world,) rows to and from each rank
    rows                     of the result
    """

    send: Ints
    send_sizes: Ints
    receive: Ints
    receive_sizes: Ints
    rows: int

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
        """The exchange of gradients, which go back to the `rows` rows of the input. Where several
        rows of a result are one row of the input, `receive` has that row again."""
        return RowExchange(self.receive, self.receive_sizes, self.send, self.send_sizes, rows)


def exchange_rows(
    x: torch.Tensor,
    plan: Any,
    name: str,
    find: Wanted,
    dim: int,
    fill: complex = 0,
    n: SupportsIndex | None = None,
) -> torch.Tensor:
    """What each rank wants of x, a tensor of tokens along `dim`.

    plan: the `TokenShards` that is asked. It keeps the exchange of each call.
    name, n: of the public call. Ranks agree on it before they exchange.

    Raises as `TokenShards.to_contiguous`.
    """
    call = name if n is None else f"{name}(n={n})"
    if torch.compiler.is_compiling():
        raise RuntimeError(f"plan.{call} inside a compiled function: call it between graphs")
    if plan.world > 1 and plan.group is None:
        raise ValueError(
            f"plan.{call}: this plan was made from (rank, world) and cannot exchange rows: make "
            "it with group=<ProcessGroup>"
        )
    try:
        check_plain("x", x)
        step = 0 if n is None else whole_number("n", n)  # first: "1" is written as 1 is
        call = name if n is None else f"{name}(n={step})"
        if call not in plan.exchanges:
            holder, wanted = find(step)
            held = [holder.index_of(rank) for rank in range(plan.world)]
            plan.exchanges[call] = holder, RowExchange.of(held, wanted, plan.rank)
        holder, exchange = plan.exchanges[call]
        settings = {"call": call, **agreed_settings(x, holder, dim), "fill": str(fill)}
        _check_fill(fill, x.dtype)
        rows = x.movedim(dim, 0).contiguous()
    except Exception as problem:  # whatever it is, the other ranks wait
        require_agreement(plan.group if plan.world > 1 else None, {}, problem)
        raise  # which the line before has done, on all ranks
    return communication().move(rows, exchange, plan, settings, fill).movedim(0, dim)


def _check_fill(fill: Any, dtype: torch.dtype) -> None:
    """Raises TypeError: fill is no number; ValueError: the dtype cannot hold it, rounded if it has
    a fraction."""
    number, real = isinstance(fill, Number), not isinstance(fill, complex)
    if not number:
        raise TypeError(f"fill={shown(fill)}: give a number")
    if dtype == torch.bool:
        fits = fill in (0, 1)
    elif dtype.is_complex or dtype.is_floating_point:
        fits = (real or dtype.is_complex) and not torch.finfo(dtype).max < abs(fill) < math.inf
    else:
        limits = torch.iinfo(dtype)
        fits = real and limits.min <= fill <= limits.max and fill == int(fill)
    if not fits:
        raise ValueError(f"fill={fill!r}: x is of {dtype}, which cannot hold it")
