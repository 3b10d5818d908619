"""`plan_context` and its `ContextPlan`: how documents are spread over a context-parallel group."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.custom_op import untraced
from ringfa3.planning.graph_plan import DenseBatch, GraphPlan
from ringfa3.planning.handles import from_handle, graph_handle, new_handle, plan_table
from ringfa3.planning.kv_exchange import KVExchange, plan_ring
from ringfa3.planning.process_groups import (
    Group,
    GroupRef,
    require_alive,
    resolve_group,
    warn_if_alone,
)
from ringfa3.planning.row_index import RowIndex
from ringfa3.planning.sharding import Ints, Segments, pairs_before, partition
from ringfa3.planning.tiling import MAX_ROWS, Plan, concat_ranges
from ringfa3.planning.unshard import Unshard, require_agreement
from ringfa3.validation import (
    LAYOUTS,
    Window,
    check_bool,
    check_choice,
    check_plain,
    check_window,
    cumulative_bytes,
    sequence_lengths,
)

PLANS_KEPT = 64  # the most recent plans, which `plan_context` returns again


class ContextPlan:
    """Documents spread over a context-parallel (CP) group. Make one with `plan_context`.

    Attributes:
        rank, world: this rank's number in the CP group, and the size of the group.
        layout, causal, window_size: as given to `plan_context`.
        total_tokens: tokens of all documents.
        local_tokens: tokens on this rank.
        tokens_per_rank: list of int.
        handle: int that stands for the plan in custom ops, as long as the plan is alive.
    """

    # Attributes that a copy in another process must not have.
    _LOCAL = ("_bound", "_published", "_grids", "_windows", "_aligned", "_origin", "handle")

    def __init__(
        self,
        lengths: Ints,
        shards: list[Segments],
        rank: int,
        group: GroupRef | None,
        layout: str,
        causal: bool,
        window_size: tuple[int, int],
        implicit: bool = False,
        alignment: int = 1,
    ) -> None:
        """alignment: as in `plan_ring`; other arguments as in `plan_context`."""
        self.implicit = implicit  # one process, because torch.distributed is not initialised
        self.lengths, self.shards = lengths, shards
        self.rank, self.world, self._group = rank, len(shards), group
        self.layout, self.causal, self.window_size = layout, causal, window_size
        self.tokens_per_rank = [s.tokens for s in shards]
        self.total_tokens = sum(self.tokens_per_rank)
        self.local_tokens = self.tokens_per_rank[rank]
        self._register()
        window = self.effective_window
        self.hops, self.kv_exchange = plan_ring(shards, rank, *window, alignment=alignment)

    def _register(self) -> None:
        """Sets the attributes of `_LOCAL`."""
        self._bound: dict[GroupRef, ContextPlan] = {}
        self._published: dict[tuple[torch.device, int], RowIndex] = {}
        self._grids: dict[int, tuple[Plan, KVExchange]] = {}
        self._windows: dict[tuple[int, int], ContextPlan] = {}  # made by `with_window`
        self._aligned: dict[int, ContextPlan] = {}
        self._origin: ContextPlan | None = None  # the plan whose `with_window` made this one
        self.handle = new_handle(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup, or None if made from (rank, world). The plan does not keep it alive.

        Raises ValueError: it has been destroyed.
        """
        return None if self._group is None else require_alive(self._group())

    def __getstate__(self) -> dict[str, object]:
        if self._group is not None:
            raise TypeError(
                "a plan with a ProcessGroup cannot be sent to another process: in a data loader "
                "make it with group=(rank, world)"
            )
        return {name: value for name, value in self.__dict__.items() if name not in self._LOCAL}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._register()

    def __deepcopy__(self, memo: dict[int, object]) -> ContextPlan:
        """The plan itself, which never changes and whose group cannot be copied."""
        del memo
        return self

    @staticmethod
    def from_handle(handle: int) -> ContextPlan:
        return cast(ContextPlan, from_handle(handle))

    @untraced
    def bound_to(self, group: dist.ProcessGroup) -> ContextPlan:
        """A plan that was made from (rank, world), with a process group."""
        if torch.compiler.is_compiling():
            return cast(ContextPlan, GraphPlan(self, group, self.window_size))
        key = weakref.ref(group)
        if key not in self._bound:
            bound = copy.copy(self)  # the tables are shared
            bound._group = key
            self._bound = {g: p for g, p in self._bound.items() if g() is not None} | {key: bound}
        return self._bound[key]

    @untraced
    def with_window(self, window_size: Window) -> ContextPlan:
        """The plan that holds the same tokens on the same ranks, under another window.

        Layers of different windows need it: `plan_context` balances the work that a window leaves,
        so two of its plans may assign a token to different ranks.

        Args:
            window_size: (left, right) as in `plan_context`; `causal` stays as it is.

        Returns:
            The same object for the same window, alive as long as this plan. This plan for its own
            window. Work is balanced for the window that `plan_context` was given.

        Raises:
            ValueError, TypeError: window_size is not a pair as in `plan_context`.
        """
        window = check_window(window_size)
        if torch.compiler.is_compiling():
            return cast(ContextPlan, GraphPlan(self, self.group, window))
        origin = self._origin or self
        if window == origin.window_size:
            return origin
        if window not in origin._windows:
            made = origin._remade(window)
            made._origin = origin
            origin._windows[window] = made
        return origin._windows[window]

    def aligned(self, keys: int) -> ContextPlan:
        """The plan where each run that ranks exchange begins with a tile of so many keys.

        This plan if all do: only a window to the left lets runs begin inside a segment.
        """
        if self.effective_window[0] < 0:
            return self
        if keys not in self._aligned:
            self._aligned[keys] = self._remade(self.window_size, keys)
        return self._aligned[keys]

    def _remade(self, window: tuple[int, int], alignment: int = 1) -> ContextPlan:
        given = self.lengths, self.shards, self.rank, self._group, self.layout, self.causal
        return ContextPlan(*given, window, self.implicit, alignment)

    def on_grid(self, keys: int) -> tuple[Plan, KVExchange]:
        """`hops` and `kv_exchange` where ranks exchange whole tiles of so many keys."""
        if keys not in self._grids:
            self._grids[keys] = plan_ring(self.shards, self.rank, *self.effective_window, keys)
        return self._grids[keys]

    def published_rows(self, device: torch.device, keys: int = 1) -> RowIndex:
        """The exchange's `published`, for tensors on a device; of tiles of so many keys."""
        if (device, keys) not in self._published:
            exchange = self.kv_exchange if keys == 1 else self.on_grid(keys)[1]
            self._published[device, keys] = RowIndex.of(exchange.published, device)
        return self._published[device, keys]

    @cached_property
    def gathered(self) -> Plan:
        """All hops as one, over K/V that lie as in `KVExchange.gathered_layout`."""
        return self.hops.gathered(self.kv_exchange.gathered_layout(self.rank)[0])

    @property
    def effective_window(self) -> tuple[int, int]:
        """The window with causal folded in: (left, right), -1 for unlimited."""
        return effective_window(self.causal, self.window_size)

    @cached_property
    def digest(self) -> str:
        """Hash of all that must be equal on all ranks."""
        h = hashlib.sha256(repr((self.world, self.layout, *self.effective_window)).encode())
        h.update(self.lengths.tobytes())
        for s in self.shards:  # the same lengths may be laid out dense or packed
            h.update(np.stack((s.sequence, s.position, s.length)).tobytes())
        return h.hexdigest()[:16]

    @property
    def work_per_rank(self) -> list[int]:
        """Allowed (query, key) pairs of each rank's queries, over all hops."""
        work = []
        for s in self.shards:
            length, end = self.lengths[s.sequence], s.position + s.length
            before = (pairs_before(p, length, *self.effective_window) for p in (end, s.position))
            work.append(int(np.subtract(*before).sum()))
        return work

    # Tensors are made at each access: inference or fake mode makes some that only serve inside.
    @property
    def positions(self) -> torch.Tensor:
        """(local_tokens,) int64: position of each local token inside its document."""
        return self._table("_positions")

    @cached_property
    def _positions(self) -> Ints:
        mine = self.shards[self.rank]
        return concat_ranges(mine.position, mine.length)

    @property
    def token_index(self) -> torch.Tensor:
        """(local_tokens,) int64: global index of each local token."""
        return self._table("_token_index")

    def _table(self, name: str) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return plan_table(graph_handle(self), name, self.local_tokens)
        return torch.from_numpy(getattr(self, name))

    @cached_property
    def _token_index(self) -> Ints:
        return self.index_of(self.rank)

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


def effective_window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right) with causal folded in: no key to the right of the diagonal."""
    left, right = window_size
    return left, 0 if causal else right


def check_plan(plan: object) -> None:
    """Raises TypeError unless `plan` is a ContextPlan."""
    if not isinstance(plan, (ContextPlan, GraphPlan)):
        raise TypeError(f"plan must come from plan_context, got {type(plan).__name__}")


@untraced
def plan_context(
    cu_seqlens: Sequence[int] | torch.Tensor | int,
    group: Group = None,
    layout: str = "zigzag",
    causal: bool = True,
    window_size: Window = (-1, -1),
) -> ContextPlan:
    """The plan of packed, self-attending documents over a context-parallel (CP) group.

    Plans are cached: the same arguments give the same object.

    Args:
        cu_seqlens: cumulative document lengths from 0 to the total, as a list or an integer
            tensor on the CPU; or one int, the length of a single document. A tensor on the GPU
            costs one synchronisation.
        group: a ProcessGroup or a DeviceMesh of one dimension; None for the default group, or for
            one process if torch.distributed is not initialised, with a warning under torchrun;
            or (rank, world), in a data loader.
        layout: "zigzag" balances work, "contiguous" keeps tokens in order.
        causal: hide later keys of a document.
        window_size: (left, right) keys around a query to which it attends, -1 or None for
            unlimited.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it and what is allowed.
        RuntimeError: torch.compile traces the call.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "plan_context inside a compiled function: call it outside, and give the plan to the "
            "function as an argument"
        )
    cu = cumulative_bytes("cu_seqlens", cu_seqlens)
    check_choice("layout", layout, LAYOUTS)
    window = check_window(window_size)
    rank, world, process_group = resolve_group(group)
    implicit = group is None and process_group is None
    if implicit:
        warn_if_alone()
    ref = None if process_group is None else weakref.ref(process_group)
    causal = check_bool("causal", causal)
    return _cached_plan(cu, rank, world, ref, layout, causal, window, 0, implicit)


@untraced
def dense_plan(
    batch: int,
    local_tokens: int,
    group: Group,
    layout: str,
    causal: bool,
    window_size: tuple[int, int],
) -> ContextPlan:
    """The plan of `batch` equal sequences, each laid out over the group like one document.

    A rank's local tokens are its `local_tokens` of the first sequence, then of the second, ...
    """
    rank, world, process_group = resolve_group(group)
    if torch.compiler.is_compiling():
        dense = DenseBatch(rank, world, batch, local_tokens, layout, causal)
        return cast(ContextPlan, GraphPlan(dense, process_group, window_size))
    tokens = local_tokens * world
    cu = cumulative_bytes("cu_seqlens", range(0, batch * tokens + 1, tokens) if tokens else (0,))
    ref = None if process_group is None else weakref.ref(process_group)
    return _cached_plan(cu, rank, world, ref, layout, causal, window_size, batch, False)


@lru_cache(PLANS_KEPT)
def _cached_plan(
    cu_seqlens: bytes,  # of int64
    rank: int,
    world: int,
    group: GroupRef | None,
    layout: str,
    causal: bool,
    window_size: tuple[int, int],
    batch: int,
    implicit: bool,
) -> ContextPlan:
    cu = np.frombuffer(cu_seqlens, np.int64).tolist()
    lengths = np.array(sequence_lengths("cu_seqlens", cu), np.int64)
    if lengths.sum() >= MAX_ROWS:
        raise ValueError(
            f"cu_seqlens ends at {lengths.sum()}: the limit is 2^31 - 1 tokens; split the batch"
        )
    window = effective_window(causal, window_size)
    if batch:
        shards = [s.repeated(len(lengths)) for s in partition(lengths[:1], world, layout, *window)]
    else:
        shards = partition(lengths, world, layout, *window)
    return ContextPlan(lengths, shards, rank, group, layout, causal, window_size, implicit)
