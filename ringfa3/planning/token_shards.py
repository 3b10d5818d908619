"""`TokenShards`: which tokens this rank holds, and how tensors of tokens are split and joined."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.planning.handles import graph_handle, plan_table
from ringfa3.planning.process_groups import GroupRef, require_alive
from ringfa3.planning.sharding import Ints, Segments
from ringfa3.planning.tile_schedule import concat_ranges
from ringfa3.planning.unshard import Unshard, require_agreement
from ringfa3.validation import check_plain


class TokenShards:
    """Documents of `lengths` tokens, of which rank o holds the segments shards[o].

    Keys of cross-attention are other tokens, one sequence, in the segments key_shards[o];
    in self-attention key_shards is shards.
    """

    handle: int

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

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup, or None if made from (rank, world). The plan does not keep it alive.

        Raises ValueError: it has been destroyed.
        """
        return None if self._group is None else require_alive(self._group())

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
        return x.index_select(dim, self.token_index.to(x.device))

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
        return x.index_select(dim, self._table("_key_index", self.local_keys).to(x.device))

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
        result: torch.Tensor = Unshard.apply(x_local, self, dim)  # type: ignore[no-untyped-call]
        return result
