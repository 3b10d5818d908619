"""`plan_context` and its `ContextPlan`: how documents are spread over a context-parallel group."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ringfa3.custom_op import require_no_compiler, untraced
from ringfa3.masks.checks import check_mask_tokens, mask_or_documents
from ringfa3.masks.mask import Mask, check_mask
from ringfa3.planning.exchange.buffers import check_kv_budget
from ringfa3.planning.exchange.launch_exchange import LaunchExchange
from ringfa3.planning.graph_plan import DenseBatch, GraphPlan
from ringfa3.planning.handles import new_handle
from ringfa3.planning.kv_exchange import KVExchange, plan_ring
from ringfa3.planning.mask_shards import cross_mask, one_sequence, partition_mask
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.placement.hosts import Hosts, find_hosts
from ringfa3.planning.process_groups import Group, GroupRef, resolve_group, warn_if_alone
from ringfa3.planning.refinement import clip_launches, plan_mask
from ringfa3.planning.sharding import Segments, effective_window, pairs_of, partition
from ringfa3.planning.tile_schedule import MAX_ROWS
from ringfa3.planning.tiling import Plan
from ringfa3.planning.token_shards import TokenShards
from ringfa3.validation import (
    LAYOUTS,
    Window,
    check_bool,
    check_choice,
    check_window,
    cumulative_bytes,
    sequence_lengths,
)

# Recent plans that `plan_context` returns again; of each, those of other windows and masks.
PLANS_KEPT = 64


class ContextPlan(TokenShards):
    """Documents spread over a context-parallel (CP) group. Make one with `plan_context`.

    Attributes:
        rank: this rank's number in the CP group, of `world` ranks.
        layout: as given to `plan_context`, as are `causal`, `window_size` and `kv_budget`.
        hosts: (world,) tuple of int, the number of each rank's host.
        mask: the Mask of the plan; None for documents, with `causal` and `window_size`.
        query_plan: of a plan that `cross` made, that of the queries, and `key_plan`; else None.
        total_tokens: tokens of all documents.
        local_tokens: queries on this rank. `local_keys`: keys, as many in self-attention.
        tokens_per_rank: list of int.
        handle: int that stands for the plan in custom ops, as long as the plan is alive.
    """

    query_plan: ContextPlan | None = None
    key_plan: ContextPlan | None = None

    _LOCAL = "_bound _launches _variants _aligned _origin handle contiguous exchanges"

    def __init__(
        self,
        lengths: Ints, shards: list[Segments], rank: int, group: GroupRef | None,
        hosts: tuple[int, ...], layout: str, causal: bool, window_size: tuple[int, int],
        implicit: bool = False, alignment: int = 1, mask: Mask | None = None,
        key_shards: list[Segments] | None = None, kv_budget: int | None = None,
    ) -> None:  # fmt: skip
        """alignment: as in `plan_ring`; key_shards: as in `TokenShards`, default `shards`; other
        arguments as in `plan_context`."""
        super().__init__(lengths, shards, shards if key_shards is None else key_shards, rank, group)
        self.hosts = hosts
        self.implicit = implicit  # one process, because torch.distributed is not initialised
        self.layout, self.causal, self.window_size = layout, causal, window_size
        self.mask, self.kv_budget = mask, kv_budget
        self._register()
        if mask is not None:
            self._positions = mask.positions[self._token_index]
            self._key_positions = mask.key_positions[self._key_index]
        self.hops, self.kv_exchange = self._exchange(alignment=alignment)
        if kv_budget is not None:
            self.by_messages()  # raises a ValueError for too small a budget

    def _exchange(self, grid: int = 1, alignment: int = 1) -> tuple[Plan, KVExchange]:
        """Spans and exchange; arguments as in `plan_exchange`."""
        if self.mask is None:
            return plan_ring(self.shards, self.rank, *self.effective_window, grid, alignment)
        queries = one_sequence(self.lengths, self.shards)
        keys = queries if self.key_shards is self.shards else self.key_shards
        return plan_mask(self.mask, queries, keys, self.rank, grid, alignment)

    def _register(self) -> None:
        """Sets the attributes of `_LOCAL`."""
        self._bound: dict[GroupRef, ContextPlan] = {}
        self._launches: dict[tuple[int, bytes], LaunchExchange] = {}
        self._variants: dict[tuple[int, int] | Mask, ContextPlan] = {}  # windows and masks
        self._aligned: dict[int, ContextPlan] = {}
        self._origin: ContextPlan | None = None  # the plan that made this one
        self.handle = new_handle(self)

    @untraced
    def bound_to(self, group: dist.ProcessGroup) -> ContextPlan:
        """As of `TokenShards`; the two plans of a `cross` plan are bound too."""
        bound = super().bound_to(group)
        if self.query_plan and self.key_plan and not torch.compiler.is_compiling():
            bound.query_plan = self.query_plan.bound_to(group)
            bound.key_plan = self.key_plan.bound_to(group)
        return bound

    @untraced
    def with_window(self, window_size: Window) -> ContextPlan:
        """The plan that holds the same tokens on the same ranks, under another window.

        Layers of different windows need it: `plan_context` balances the work that a window leaves,
        so two of its plans may assign a token to different ranks.

        Args:
            window_size: (left, right) as in `plan_context`; `causal` stays as it is.

        Returns:
            This plan for its own window. For another one the same object each time, until this plan
            has made 64 plans of further windows and masks. Work is balanced for the window that
            `plan_context` was given.

        Raises:
            ValueError, TypeError: window_size is not a pair as in `plan_context` or needs a larger
                kv_budget, or the plan was made from a Mask.
        """
        window = check_window(window_size)
        if self.mask is not None:
            raise ValueError(
                f"window_size={window} of a plan with {self.mask!r}: use "
                "plan.with_mask(Mask.documents(cu, window_size=...))"
            )
        if torch.compiler.is_compiling():
            return cast(ContextPlan, GraphPlan(self, self.group, window))
        return self._variant(window, lambda origin: origin._remade(window, None))

    @untraced
    def with_mask(self, mask: Mask) -> ContextPlan:
        """The plan that holds the same tokens on the same ranks, under another mask.

        Args:
            mask: of the same number of queries and keys. The new plan takes its positions from it.

        Returns:
            As `with_window`. Hold the plan until the backward of a compiled function to which you
            gave it.

        Raises:
            ValueError: the mask has other numbers of tokens, or needs a larger kv_budget.
            TypeError: it is no Mask.
            RuntimeError: torch.compile traces the call.
        """
        require_no_compiler("plan.with_mask")
        check_mask_tokens(mask, self.total_tokens, sum(s.tokens for s in self.key_shards))
        return self._variant(mask, lambda origin: origin._remade((-1, -1), mask))

    @untraced
    def cross(self, keys: ContextPlan, mask: Mask | None = None) -> ContextPlan:
        """The plan of cross-attention, whose queries have this plan and whose keys another one.

        Args:
            keys: a plan of the same group.
            mask: of all queries and keys; default: query document i attends to key document i.

        Returns:
            The same object each time, with the positions of both plans. Its kv_budget is the larger
            one of the two plans, None if one has none.
            Tokens stay where they are.

        Raises:
            ValueError: the plans have other ranks or hosts, no documents that form pairs, or too
                small a kv_budget.
            TypeError: keys is no plan, or mask no Mask.
            RuntimeError: torch.compile traces the call.
        """
        require_no_compiler("plan.cross")
        check_plan(keys)
        return _cached_cross_plan(self, keys, None if mask is None else check_mask(mask))

    def _variant(
        self, key: tuple[int, int] | Mask, make: Callable[[ContextPlan], ContextPlan]
    ) -> ContextPlan:
        origin = self._origin or self
        if key == (origin.window_size if origin.mask is None else origin.mask):
            return origin
        if key not in origin._variants:
            made = make(origin)
            made._origin = origin
            while len(origin._variants) >= PLANS_KEPT:  # each batch may bring a mask of its own
                del origin._variants[next(iter(origin._variants))]
            origin._variants[key] = made
            return made
        return origin._variants[key]

    def aligned(self, keys: int) -> ContextPlan:
        """The plan where each run that ranks exchange begins with a tile of so many keys.

        This plan if all do: only a band's lower end lets runs begin inside a segment.
        """
        if self.mask is None and self.effective_window[0] < 0:
            return self
        if keys not in self._aligned:
            self._aligned[keys] = self._remade(self.window_size, self.mask, keys)
        return self._aligned[keys]

    def _remade(
        self, window: tuple[int, int], mask: Mask | None, alignment: int = 1,
        keys: list[Segments] | None = None, kv_budget: int | None = None,
    ) -> ContextPlan:  # fmt: skip
        """Without keys, which bring a budget of their own, with those of this plan."""
        if keys is None:
            keys = None if self.key_shards is self.shards else self.key_shards
            kv_budget = self.kv_budget
        given = self.lengths, self.shards, self.rank, self._group, self.hosts, self.layout
        causal = self.causal and mask is None
        more = self.implicit, alignment, mask, keys, kv_budget
        return ContextPlan(*given, causal, window, *more)

    def _laid_out(self, shards: list[Segments], layout: str) -> ContextPlan:
        given = self.lengths, shards, self.rank, self._group, self.hosts, layout
        return ContextPlan(*given, self.causal, self.window_size, self.implicit)

    def by_messages(self, launch: Ints | None = None, keys: int = 1) -> LaunchExchange:
        """What this rank sends and receives by messages, and the spans of its launches.

        Args:
            launch: (steps,) the launch of each `HostRanks.ring_step`, default `launch_of_step`.
            keys: ranks exchange whole tiles of so many keys.
        """
        key = keys, b"" if launch is None else launch.tobytes()
        if key not in self._launches:
            hops, exchange = (self.hops, self.kv_exchange) if keys == 1 else self._exchange(keys)
            made = LaunchExchange.of(exchange, hops, self.rank, self.hosts, launch, self.kv_budget)
            clip_launches(self.mask, hops, made.hops)
            self._launches[key] = made
        return self._launches[key]

    @property
    def gathered(self) -> Plan:
        """All hops as one, over K/V that lie as in `KVExchange.gathered_layout`."""
        return self.hops.gathered(lambda: self.kv_exchange.gathered_layout(self.rank)[0])

    @property
    def effective_window(self) -> tuple[int, int]:
        """The window with causal folded in: (left, right), -1 for unlimited."""
        return effective_window(self.causal, self.window_size)

    @cached_property
    def digest(self) -> str:
        """Hash of all that must be equal on all ranks."""
        mask = None if self.mask is None else self.mask.digest
        placed = super().digest, self.hosts, self.layout
        given = *placed, *self.effective_window, mask, self.kv_budget
        return hashlib.sha256(repr(given).encode()).hexdigest()[:16]

    @property
    def work_per_rank(self) -> list[int]:
        """Allowed (query, key) pairs of each rank's queries, over all hops."""
        if self.mask is not None:
            return [int(self.mask.pairs_by_row[self.index_of(r)].sum()) for r in range(self.world)]
        return [pairs_of(s, self.lengths, *self.effective_window) for s in self.shards]


def check_plan(plan: object) -> None:
    """Raises TypeError unless `plan` is a ContextPlan."""
    if not isinstance(plan, (ContextPlan, GraphPlan)):
        raise TypeError(f"plan must come from plan_context, got {type(plan).__name__}")


@untraced
def plan_context(
    cu_seqlens: Sequence[int] | torch.Tensor | int | Mask,
    group: Group = None,
    layout: str = "zigzag",
    causal: bool = True,
    window_size: Window = (-1, -1),
    hosts: Hosts = None,
    prepare: Sequence[Any] = (),
    kv_budget: int | None = None,
) -> ContextPlan:
    """The plan of packed, self-attending documents, or of a mask, over a context-parallel group.

    Plans are cached: the same arguments give the same object.

    Args:
        cu_seqlens: cumulative document lengths from 0 to the total, as a list or an integer
            tensor on the CPU; or one int, the length of a single document. A tensor on the GPU
            costs one synchronisation. Or a Mask, which decides all that `causal` and
            `window_size`, left at their defaults, would.
        group: a ProcessGroup or a DeviceMesh of one dimension; None for the default group, or for
            one process if torch.distributed is not initialised, with a warning under torchrun;
            or (rank, world), in a data loader.
        layout: "zigzag" balances work, "contiguous" keeps tokens in order.
        causal: hide later keys of a document.
        window_size: (left, right) keys around a query to which it attends, -1 or None for
            unlimited.
        hosts: the number of hosts, of equally many ranks in order, or the host of each rank: few
            documents span two. None for what RINGFA3_HOSTS or torchrun's variables say of a process
            group, and for one host if `group` is (rank, world). Equal on all ranks.
        prepare: `ringfa3.KernelSpec`s, for which what first calls would make is made now.
        kv_budget: the most rows that all buffers of other ranks' K/V hold at once on a rank, and
            those of dK/dV too; a row is a token's K and V of all KV heads. More rows let a launch
            attend to more hops. None for the default of each transport. Equal on all ranks. Calls
            in 8 bits refuse it.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it and what is allowed.
        RuntimeError: torch.compile traces the call.
    """
    require_no_compiler("plan_context")
    kv_budget = check_kv_budget(kv_budget)
    mask, cu = mask_or_documents(cu_seqlens)
    check_choice("layout", layout, LAYOUTS)
    window = check_window(window_size)
    rank, world, process_group = resolve_group(group)
    if implicit := group is None and process_group is None:
        warn_if_alone()
    ref = None if process_group is None else weakref.ref(process_group)
    of_rank = find_hosts(hosts, world, process_group)
    causal = check_bool("causal", causal)
    if mask is not None:
        if not causal or window != (-1, -1):
            raise ValueError(
                f"causal={causal}, window_size={window} with a Mask, which decides both: leave "
                "them out, and give them to Mask.documents"
            )
        plan = _cached_mask_plan(mask, rank, ref, of_rank, layout, implicit, kv_budget)
    else:
        given = rank, ref, of_rank, layout, causal, window, 0, implicit, kv_budget
        plan = _cached_plan(cu, *given)
    return plan.prepare(prepare)


@untraced
def dense_plan(
    batch: int, local_tokens: int, group: Group, layout: str, causal: bool,
    window_size: tuple[int, int],
) -> ContextPlan:  # fmt: skip
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
    hosts = find_hosts(None, world, process_group)
    return _cached_plan(cu, rank, ref, hosts, layout, causal, window_size, batch, False, None)


@lru_cache(PLANS_KEPT)
def _cached_plan(
    cu_seqlens: bytes,  # of int64
    rank: int, group: GroupRef | None, hosts: tuple[int, ...], layout: str, causal: bool,
    window_size: tuple[int, int], batch: int, implicit: bool, kv_budget: int | None,
) -> ContextPlan:  # fmt: skip
    cu = np.frombuffer(cu_seqlens, np.int64).tolist()
    lengths = np.array(sequence_lengths("cu_seqlens", cu), np.int64)
    if lengths.sum() >= MAX_ROWS:
        raise ValueError(
            f"cu_seqlens ends at {lengths.sum()}: the limit is 2^31 - 1 tokens; split the batch"
        )
    given = len(hosts), layout, *effective_window(causal, window_size), hosts
    shards = partition(lengths[:1] if batch else lengths, *given)
    if batch:
        shards = [s.repeated(len(lengths)) for s in shards]
    what = lengths, shards, rank, group, hosts, layout, causal, window_size, implicit
    return ContextPlan(*what, kv_budget=kv_budget)


@lru_cache(PLANS_KEPT)
def _cached_mask_plan(
    mask: Mask, rank: int, group: GroupRef | None, hosts: tuple[int, ...], layout: str,
    implicit: bool, kv_budget: int | None,
) -> ContextPlan:  # fmt: skip
    queries, keys = partition_mask(mask, hosts, layout)
    lengths = np.array([mask.q_tokens], np.int64)
    given = lengths, queries, rank, group, hosts, layout, False, (-1, -1), implicit
    key_shards = None if keys is queries else keys
    return ContextPlan(*given, mask=mask, key_shards=key_shards, kv_budget=kv_budget)


@lru_cache(PLANS_KEPT)
def _cached_cross_plan(queries: ContextPlan, keys: ContextPlan, mask: Mask | None) -> ContextPlan:
    shards = one_sequence(keys.lengths, keys.shards)
    budgets = [x.kv_budget for x in (queries, keys) if x.kv_budget is not None]
    budget = max(budgets) if len(budgets) == 2 else None
    plan = queries._remade((-1, -1), cross_mask(queries, keys, mask), 1, shards, budget)
    plan._positions, plan._key_positions = queries._positions, keys._positions
    plan.query_plan, plan.key_plan = queries, keys
    return plan
