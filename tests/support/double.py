"""Models in float64 throughout, so that two of them differ by 1e-12 on any processor.

transformers casts norms, routers and the softmax of eager attention to float32, whatever the dtype
of a model. Two orders of a sum then differ by 1e-7, which some models amplify thirtyfold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

R = TypeVar("R")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class _Float32IsFloat64(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(map(_wide, args))
        return func(*args, **{name: _wide(x) for name, x in (kwargs or {}).items()})


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def double() -> Iterator[None]:
    """In here every cast to float32 is one to float64, and new tensors are float64.

    PyTorch leaves modes of functions before a backward: see `recomputed_in_double`.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float32IsFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def recomputed_in_double(contexts: Contexts = noop_context_fn) -> Contexts:
    """`context_fn` of checkpointed layers, whose backward computes them again in here."""

    @contextmanager
    def both(inner: AbstractContextManager[Any]) -> Iterator[None]:
        with double(), inner:
            yield

    def made() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = contexts()
        return forward, both(recomputation)

    return made


def in_double(group: dist.ProcessGroup, function: Callable[..., R], *args: Any) -> R:
    """What `function(group, *args)` returns, for ranks of a pool."""
    with double():
        return function(group, *args)
