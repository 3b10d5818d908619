"""Ops that a compiler, a checkpoint's policy and autocast see as one node, and their gradients.

What `torch.library.custom_op` and its `register_autograd` do, at less than half of the host's time:
no check that results are new tensors, which they are, and no look at the schema in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo  # does not import the compiler, as its public name does
from torch.library import Library

F = TypeVar("F", bound=Callable[..., Any])

_library: Any = Library("ringfa3", "FRAGMENT")  # type: ignore[no-untyped-call]


def custom_op(kernel: F) -> F:
    """The op ringfa3::NAME of a function that changes no argument and returns none of them."""
    name = kernel.__name__
    schema = torch.library.infer_schema(kernel, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _disable_dynamo(kernel), "CompositeExplicitAutograd")
    op: F = getattr(torch.ops.ringfa3, name).default
    return op


def register_fake(op: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what gives an op's results for tensors without data."""
    overload: Any = op
    register: Callable[..., Any] = torch.library.register_fake(overload, lib=_library)
    return register


def register_autograd(
    op: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], tuple[torch.Tensor, ...]], None],
    gradients: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    """Gives an op its gradient, once differentiable.

    save(ctx, inputs, outputs), then gradients(ctx, *grads), of the leading inputs; a grad is None
    where an output has none, which spares a tensor of zeros.
    """
    overload: Any = op
    twice = f"{overload} can be differentiated once, not twice".encode()
    none = (None,) * len(overload._schema.arguments)
    below = torch._C._after_autograd_keyset

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = overload.redispatch(keys & below, *inputs)
            ctx.set_materialize_grads(False)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            with torch.no_grad():
                found = gradients(ctx, *grads)
            if torch.is_grad_enabled():  # someone may differentiate them again
                refuse = torch._C._functions.DelayedError(twice, len(found))
                found = refuse(*(x.detach().requires_grad_() for x in found))
            return (None, *found, *none[len(found) :])

    def run(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return Node.apply(keys, *inputs)  # type: ignore[no-untyped-call]
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & below, *inputs)

    _library.impl(overload._opname, run, "Autograd", with_keyset=True)


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast the tensors in its dtype, else as they are; float64 stays float64.

    The same rule as that of PyTorch's attention.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )
