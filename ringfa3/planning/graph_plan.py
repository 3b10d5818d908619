"""`GraphPlan`: what stands for a plan that cannot be made while torch.compile traces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringfa3.custom_op import untraced
from ringfa3.planning.handles import graph_handle
from ringfa3.validation import check_window

WINDOWED = ("digest", "hops", "gathered", "work_per_rank")  # what of a plan depends on its window


class DenseBatch(NamedTuple):
    """The arguments of `dense_plan`, which may be symbols, and this rank's number in the group."""

    rank: int
    world: int
    batch: int
    tokens: int
    layout: str
    causal: bool
    mask: None = None


class GraphPlan:
    """A plan that an op makes when the graph runs: see `ring.graph_op`.

    origin       the plan that it differs from in group or window, or a `DenseBatch`
    group        to run in; None for the default group
    window_size  as in `plan_context`

    `origin` has the other attributes. Code that gets it where a graph ends reads the plan itself.
    """

    def __init__(
        self, origin: Any, group: dist.ProcessGroup | None, window_size: tuple[int, int]
    ) -> None:
        self.origin, self.group, self.window_size = origin, group, window_size

    def bound_to(self, group: dist.ProcessGroup) -> GraphPlan:
        return GraphPlan(self.origin, group, self.window_size)

    def with_window(self, window_size: tuple[int, int]) -> GraphPlan:
        if self.mask is not None:
            raise ValueError(
                f"window_size={window_size} of a plan with {self.mask!r}: use plan.with_mask"
            )
        return GraphPlan(self.origin, self.group, check_window(window_size))

    @property
    def effective_window(self) -> tuple[int, int]:
        """As `ContextPlan.effective_window`."""
        left, right = self.window_size
        return left, 0 if self.causal else right

    def arguments(self) -> tuple[int, int, int, str, bool, str, int, int]:
        """For the op: (handle of `origin` or 0, batch, tokens, layout, causal, name of the group or
        "", *window)."""
        handle, batch, tokens = 0, 0, 0
        if isinstance(self.origin, DenseBatch):
            batch, tokens = self.origin.batch, self.origin.tokens
        else:
            handle = graph_handle(self.origin)
        name = "" if self.group is None else self.group.group_name
        return handle, batch, tokens, self.layout, self.causal, name, *self.window_size

    @untraced
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that has no attributes yet
            raise AttributeError(name)
        if torch.compiler.is_compiling():
            if name in WINDOWED:
                raise RuntimeError(f"plan.{name} inside a compiled function: read it outside")
            return getattr(self.origin, name)
        plan = self.origin
        if plan.group is None and self.group is not None:
            plan = plan.bound_to(self.group)
        if plan.mask is None:
            plan = plan.with_window(self.window_size)
        return getattr(plan, name)
