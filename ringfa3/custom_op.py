"""Custom ops: one node for a compiler and for a checkpoint's policy, with a fake and a gradient.

As `torch.library.custom_op`, at less than half of its host time: a call does not check that outputs
are new tensors, and does not read the schema.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.library import Library

F = TypeVar("F", bound=Callable[..., Any])

_library: Any = Library("ringfa3", "FRAGMENT")  # type: ignore[no-untyped-call]

# Ops with outputs (out, lse), which `keep_attention` keeps under activation checkpointing.
checkpointed: list[Callable[..., Any]] = []

OpHook = Callable[[str], AbstractContextManager[object]]
_op_hook: OpHook | None = None
_on_change: list[Callable[[OpHook | None], object]] = []

# Runs the kernel of an op instead of a plain call: runner(name, kernel, arguments).
Runner = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
_runner: Runner | None = None


def set_op_hook(hook: OpHook | None) -> None:
    """Runs every op inside ``hook(name)``, its forward and its backward op, eager or compiled.

    None removes the hook. It does not run for tensors without data, with which a compiler traces.
    """
    global _op_hook
    _op_hook = hook
    for changed in _on_change:
        changed(hook)


def on_hook_change(changed: Callable[[OpHook | None], object]) -> None:
    """Calls changed(hook) now and after every `set_op_hook`."""
    if changed not in _on_change:
        _on_change.append(changed)
    changed(_op_hook)


def run_with(runner: Runner | None) -> None:
    """Lets a runner run the kernels of all ops, inside the op hook. None ends it."""
    global _runner
    _runner = runner


def untraced(function: F) -> F:
    """Decorator: torch.compile traces no frame of a function that runs, nor of what it calls.

    As `torch.compiler.disable`, which would import the compiler: that takes as long as
    `import torch`. A function that is being traced still traces a call of this one.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def custom_op(kernel: F, mutates: Sequence[str] = ()) -> F:
    """Decorator: the op ringfa3::NAME of a function that returns no argument, and changes those
    that `mutates` names.

    The kernel never runs in inference mode, unless it changes an argument, which may be an
    inference tensor. So what a call leaves for later calls, such as buffers, uploads and indices,
    are normal tensors: later calls could neither write to an inference tensor nor save it.
    """
    name = kernel.__name__
    schema = torch.library.infer_schema(kernel, mutates_args=mutates)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))

    def compute(args: tuple[Any, ...]) -> Any:
        runner = _runner
        if torch.is_inference_mode_enabled() and not mutates:
            with torch.inference_mode(False), torch._C._AutoDispatchBelowAutograd():
                return kernel(*args) if runner is None else runner(name, kernel, args)
        return kernel(*args) if runner is None else runner(name, kernel, args)

    @untraced
    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        hook = _op_hook  # another thread may remove it meanwhile
        if hook is None:
            return compute(args)
        with hook(name):
            return compute(args)

    _library.impl(name, run, "CompositeExplicitAutograd")
    op: F = getattr(torch.ops.ringfa3, name).default
    return op


def register_fake(op: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function gives an op's outputs for fake tensors, which have no data."""
    overload: Any = op
    register: Callable[..., Any] = torch.library.register_fake(overload, lib=_library)
    return register


def register_autograd(
    op: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], tuple[torch.Tensor, ...]], None],
    gradients: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    """Registers an op's gradient, for torch.func's transforms too.

    Args:
        save: save(ctx, inputs, outputs) runs in the forward.
        gradients: gradients(ctx, *grads) gives the gradients of the leading inputs. A grad is None
            for an output without gradient, in place of a tensor of zeros.
    """
    overload: Any = op
    none = (None,) * len(overload._schema.arguments)
    below = torch._C._after_autograd_keyset

    def redispatch(keys: Any, inputs: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & below, *inputs)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
            if torch._C._are_functorch_transforms_active():
                # The next level differentiates too; a Function's forward has switched it off.
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    outputs = redispatch(keys, inputs)
            else:
                outputs = redispatch(keys, inputs)
            ctx.set_materialize_grads(False)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            if forward_ad._current_level >= 0:
                _refuse_tangents(overload, grads)
            results = gradients(ctx, *grads)
            return (None, *results, *none[len(results) :])

    # The dispatcher calls `run` once a level of torch.func's transforms, and unwraps the tensors
    # below it. `Function.apply` would go through all levels at once.
    one_level: Any = super(torch.autograd.Function, Node).apply

    def run(keys: Any, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(overload, inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            if not torch._C._are_functorch_transforms_active():
                return Node.apply(keys, *inputs)  # type: ignore[no-untyped-call]
            with enable_single_level_autograd_function():
                return one_level(keys, *inputs)
        return redispatch(keys, inputs)

    _library.impl(overload._opname, run, "Autograd", with_keyset=True)


def differentiable_once(backward: Callable[..., Any], op: Callable[..., Any]) -> None:
    """Lets derivatives of a backward's results raise, instead of being zero; `op` is named."""

    def refuse(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise RuntimeError(f"{op} can be differentiated once, not twice")

    register_autograd(backward, lambda ctx, inputs, outputs: None, refuse)


def _refuse_tangents(op: Any, inputs: tuple[Any, ...]) -> None:
    """Raises NotImplementedError: an input, or a gradient of an output, has a tangent, which the
    results would lose."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            f"{op} has no forward-mode derivative: use reverse mode, backward() or torch.autograd"
        )


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts tensors as autocast does for PyTorch's attention: float64 stays, others get its dtype.

    Without autocast they come back as they are.
    """
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # autocast knows no meta device
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def require_no_compiler(
    function: str,
    outside: str = "call it outside, and give the plan to the function as an argument",
) -> None:
    """Raises RuntimeError while torch.compile traces the call of a function."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{function} inside a compiled function: {outside}")
