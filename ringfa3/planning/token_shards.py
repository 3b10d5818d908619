"""`TokenShards`: which tokens this rank holds, and how tensors of tokens are split and joined."""

from __future__ import annotations

import copy
import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.custom_op import untraced
from ringfa3.masks.mask import Mask
from ringfa3.planning.communication import communication, require_agreement, select
from ringfa3.planning.graph_plan import GraphPlan
from ringfa3.planning.handles import from_handle, graph_handle, plan_table
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.placement.hosts import warn_of_hosts
from ringfa3.planning.process_groups import GroupRef, require_alive
from ringfa3.planning.row_exchange import exchange_rows
from ringfa3.planning.sharding import Segments, partition
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.validation import check_plain

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` from Python 3.11 on


class TokenShards(ABC):
    """Documents of `lengths` tokens, of which rank o holds the segments shards[o].

    Keys of cross-attention are other tokens, one sequence, in the segments key_shards[o];
    in self-attention key_shards is shards.
    """

    handle: int
    hosts: tuple[int, ...]
    window_size: tuple[int, int]
    _bound: dict[GroupRef, Self]
    mask: Mask | None = None
    _LOCAL = ""  # attributes that a copy in another process must not have

    def __init__(
        self,
        lengths: Ints,
        shards: list[Segments],
        key_shards: list[Segments],
        rank: int,
        group: GroupRef | None,
    ) -> None:
        self.lengths, self.shards, self.key_shards = lengths, shards, key_shards
        self.rank, self.world, self._group = rank, len(shards), group
        self.tokens_per_rank = [s.tokens for s in shards]
        self.total_tokens = sum(self.tokens_per_rank)
        self.local_tokens = self.tokens_per_rank[rank]
        self.local_keys = key_shards[rank].tokens
        self.prepared: dict[Hashable, Any] = {}  # schedules of calls, by `KernelSpec.prepare`

    def prepare(self, specs: Iterable[Any]) -> Self:
        """The plan itself, after each spec has prepared calls on it."""
        for spec in specs:
            spec.prepare(self)
        return self

    @classmethod
    def from_handle(cls, handle: int) -> Self:
        plan: Self = from_handle(handle)
        return plan

    def __getstate__(self) -> dict[str, object]:
        if self._group is not None:
            raise TypeError(
                "a plan with a ProcessGroup cannot be sent to another process: in a data loader "
                "make it with group=(rank, world)"
            )
        local = self._LOCAL.split()
        return {name: value for name, value in self.__dict__.copy().items() if name not in local}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._register()

    @abstractmethod
    def _register(self) -> None:
        """Sets the attributes of `_LOCAL`."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """The plan itself, which never changes and whose group cannot be copied."""
        del memo
        return self

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup, or None if made from (rank, world). The plan does not keep it alive.

        Raises ValueError: it has been destroyed.
        """
        return None if self._group is None else require_alive(self._group())

    @untraced
    def bound_to(self, group: dist.ProcessGroup) -> Self:
        """A plan that was made from (rank, world), with a process group."""
        if torch.compiler.is_compiling():
            return cast("Self", GraphPlan(self, group, self.window_size))
        key = weakref.ref(group)
        if key not in self._bound:
            warn_of_hosts(self.hosts, group)
            bound = copy.copy(self)  # the tables are shared, what `_register` makes is not
            bound._group = key
            self._bound = {g: p for g, p in self._bound.items() if g() is not None} | {key: bound}
        return self._bound[key]

    @cached_property
    def digest(self) -> str:
        """Hash of the documents and of the segments of all ranks."""
        h = hashlib.sha256(self.lengths.tobytes())
        keys = [] if self.key_shards is self.shards else self.key_shards
        for s in (*self.shards, *keys):  # the same lengths may be laid out dense or packed
            h.update(b"rank" + np.stack((s.sequence, s.position, s.length)).tobytes())
        return h.hexdigest()[:16]

    # Tensors are made at each access: inference or fake mode makes some that only serve inside.
    @property
    def positions(self) -> torch.Tensor:
        """(local_tokens,) int64: position of each local token inside its document."""
        return self._table("_positions", self.local_tokens)

    @cached_property
    def _positions(self) -> Ints:
        mine = self.shards[self.rank]
        return concat_ranges(mine.position, mine.length)

    @property
    def key_positions(self) -> torch.Tensor:
        """(local_keys,) int64: `positions` of this rank's keys, for rotary embeddings."""
        return self._table("_key_positions", self.local_keys)

    @cached_property
    def _key_positions(self) -> Ints:
        return self._positions

    @property
    def token_index(self) -> torch.Tensor:
        """(local_tokens,) int64: global index of each local token."""
        return self._table("_token_index", self.local_tokens)

    @cached_property
    def _token_index(self) -> Ints:
        return self.index_of(self.rank)

    @cached_property
    def _key_index(self) -> Ints:
        """(local_keys,) global index of each local key."""
        if self.key_shards is self.shards:
            return self._token_index
        mine = self.key_shards[self.rank]
        return concat_ranges(mine.position, mine.length)

    def _table(self, name: str, size: int) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return plan_table(graph_handle(self), name, size)
        return torch.from_numpy(getattr(self, name))

    def index_of(self, rank: int) -> Ints:
        """(tokens of the rank,) int64: global index of each."""
        s = self.shards[rank]
        start = np.cumsum(self.lengths) - self.lengths
        return concat_ranges(start[s.sequence] + s.position, s.length)

    def shard(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's tokens of a tensor that holds all of them along `dim`.

        Raises:
            ValueError: x.shape[dim] is not `total_tokens`.
            TypeError: x is a DTensor.
        """
        check_plain("x", x)
        if x.shape[dim] != self.total_tokens:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim}; the plan has {self.total_tokens}: "
                "pass all tokens of the batch, on every rank"
            )
        return select(x, self.token_index, dim)

    def shard_keys(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's keys of a tensor that holds all of them along `dim`: for cross-attention.

        In self-attention, as `shard`.

        Raises:
            ValueError: x.shape[dim] is not the number of all keys.
            TypeError: x is a DTensor.
        """
        if self.key_shards is self.shards:
            return self.shard(x, dim)
        check_plain("x", x)
        total = sum(s.tokens for s in self.key_shards)
        if x.shape[dim] != total:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim}; the plan has {total} keys: pass all "
                "keys of the batch, on every rank"
            )
        return select(x, self._table("_key_index", self.local_keys), dim)

    def unshard(self, x_local: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """All tokens from every rank's local ones: the inverse of `shard`, on every rank.

        Takes any dtype, the same on all ranks. All ranks must compute the same from the result: the
        gradient of `x_local` is this rank's shard of its own gradient of the result, not a sum over
        ranks. Ranks agree on the arguments before each call.

        Raises:
            ValueError: on every rank of the group: x_local.shape[dim] is not `local_tokens` on one,
                or its other sizes, dtype, dim or plan differ over the ranks. On this rank: the
                plan was made from (rank, world) and has no group to gather over.
            IndexError: the plan has one rank, and x_local no such dim.
            RingError: a rank did not enter within the group's timeout.
        """
        if self.world > 1 and self._group is None:
            raise ValueError(
                "this plan was made from (rank, world) and cannot gather: make it with "
                "group=<ProcessGroup> to unshard"
            )
        try:
            check_plain("x_local", x_local)
        except TypeError as problem:  # no op takes it; the other ranks wait
            require_agreement(self.group if self.world > 1 else None, {}, problem)
        return communication().unshard(x_local, self, dim)

    @cached_property
    def contiguous(self) -> Self:
        """The plan of `to_contiguous`: the packed tokens in order, equally many on every rank.

        `contiguous.shards[rank]` has the documents of a rank, in order. Only the first may begin on
        an earlier rank.

        Raises ValueError: the plan was made from a Mask, which does not state documents.
        """
        if self.mask is not None:
            raise ValueError(
                f"the documents of a plan with {self.mask!r} are not known: make the plan from "
                "cumulative lengths"
            )
        plan: Self = self._laid_out(partition(self.lengths, self.world, "contiguous"), "contiguous")
        return plan

    @abstractmethod
    def _laid_out(self, shards: list[Segments], layout: str) -> Any:
        """The plan of these documents in other segments."""

    @cached_property
    def exchanges(self) -> dict[str, Any]:
        """(holder, `RowExchange`) of the calls below, by name and arguments."""
        return {}

    def to_contiguous(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Moves tokens to the ranks and the order of `contiguous`, for recurrent layers.

        x has `local_tokens` along `dim`, and any dtype. Gradients return in the same way, and are
        differentiable. Every rank must run the backward if one does, in the same order.

        Raises:
            ValueError: on every rank of the group: x.shape[dim] is not `local_tokens` on one, or
                its other sizes, dtype, requires_grad, dim or plan differ over the ranks; or the
                plan has a Mask. On this rank: the plan was made from (rank, world).
            TypeError: on every rank: x is no tensor on one, or a DTensor.
            RuntimeError: torch.compile traces the call.
            RingError: a rank did not enter within the group's timeout, or does not run the
                backward.

        Ranks agree at the first call of these arguments. If one deviates later, ranks raise as in
        `ring_attn_func`: a rank that receives nothing in the call raises at its next one.
        """
        return exchange_rows(x, self, "to_contiguous", lambda _: (self, self.contiguous._held), dim)

    def from_contiguous(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The inverse of `to_contiguous`: x has the tokens of `contiguous`. All else as there."""
        return exchange_rows(
            x, self, "from_contiguous", lambda _: (self.contiguous, self._held), dim
        )

    def shift(self, x: torch.Tensor, n: int, dim: int = 0, fill: float = 0) -> torch.Tensor:
        """`torch.roll(x, n)` within each document, with `fill` in place of what comes around.

        So `shift(x, 1)` gives each token the row of the token before, `shift(x, -1)` of the next:
        `shift(ids, -1, fill=-100)` are labels. Dtypes, backward and errors as in `to_contiguous`;
        also ValueError: the dtype of x cannot hold `fill`; TypeError: n or fill is no number.
        """

        def find(step: int) -> tuple[TokenShards, list[Ints]]:
            return self, [
                self._tokens_of(s.sequence, s.position - step, s.length) for s in self.shards
            ]

        return exchange_rows(x, self, "shift", find, dim, fill, n)

    def halo(self, x: torch.Tensor, n: int, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Local tokens with the n tokens before each segment, for convolutions.

        Returns:
            x with n more rows before each segment of this rank along `dim`, and the rows that are
            this rank's own tokens, (local_tokens,) int64. The new rows hold the tokens of the
            segment's document that precede it, zeros before the first one. A causal convolution
            over n + 1 rows is exact at the own ones.

        Dtypes, backward and errors as in `to_contiguous`; also ValueError: n is negative.
        """

        def find(step: int) -> tuple[TokenShards, list[Ints]]:
            if step < 0:
                raise ValueError(f"n={step}: a halo has 0 or more tokens; use plan.shift")
            return self, [
                self._tokens_of(s.sequence, s.position - step, s.length + step) for s in self.shards
            ]

        rows = exchange_rows(x, self, "halo", find, dim, n=n)
        mine, n = self.shards[self.rank], index(n)
        own = concat_ranges(mine.row + n * np.arange(1, len(mine) + 1), mine.length)
        return rows, torch.from_numpy(own).to(x.device)

    @property
    def _held(self) -> list[Ints]:
        """`index_of` each rank."""
        return [self.index_of(rank) for rank in range(self.world)]

    def _tokens_of(self, sequence: Ints, position: Ints, count: Ints) -> Ints:
        """Global indices of `count` tokens of documents, from a position on; -1 outside of one.

        Raises ValueError as `contiguous`.
        """
        begin = self.contiguous.lengths.cumsum() - self.lengths
        place = concat_ranges(position, count)
        document = np.repeat(sequence, count)
        inside = (place >= 0) & (place < self.lengths[document])
        return np.where(inside, begin[document] + place, -1)
