"""Handles: numbers that stand for plans in custom ops, which take tensors, numbers and names."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ringfa3.custom_op import custom_op, register_fake

_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(plan: object) -> int:
    """A handle, which is valid as long as the plan is alive."""
    handle = next(_numbers)
    _living[handle] = plan
    return handle


def from_handle(handle: int) -> Any:
    """The plan. Raises RuntimeError: it no longer exists."""
    plan = _living.get(handle)
    if plan is None:
        raise RuntimeError(
            f"plan {handle} no longer exists: keep a reference to a plan until the backward "
            "of every call that used it has run"
        )
    return plan


def graph_handle(plan: Any) -> int:
    """The plan's handle, for an op. Raises RuntimeError where a program records the op that may run
    in another process, in which the handle stands for no plan, or another one."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    # Dynamo of PyTorch 2.11 traces `is_exporting` as true for torch.compile, too.
    if tracing or (torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()):
        raise RuntimeError(
            "torch.export and torch.jit.trace cannot record a plan, which lives in one process: "
            "use torch.compile"
        )
    handle: int = plan.handle
    return handle


@custom_op
def plan_table(plan: int, name: str, tokens: int) -> torch.Tensor:
    """A plan's attribute with a number for each of its `tokens` local tokens, int64.

    A copy, because a compiler may write other results into memory that the graph needs no longer.
    """
    return torch.tensor(getattr(from_handle(plan), name), dtype=torch.int64, device="cpu")


@register_fake(plan_table)
def _fake_table(plan: int, name: str, tokens: int) -> torch.Tensor:
    return torch.empty((tokens,), dtype=torch.int64, device="cpu")
