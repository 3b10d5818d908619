"""One call of attention, its gradients, and how often the host library replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringfa3 import flash_attn_func, host
from tests.support.host_calls import Shape

SHAPE = Shape(tokens=200, keys=200)


def leaves(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [x.to(dtype).requires_grad_() for x in SHAPE.inputs()[:3]]


def attend(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    out = flash_attn_func(*inputs, causal=True, **options)
    assert isinstance(out, torch.Tensor)
    return out


def step(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Out and gradients of a call."""
    out = attend(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, SHAPE.inputs()[3])]


def recorded() -> list[torch.Tensor]:
    """Out and gradients of a call after which its kind has programs."""
    step(leaves())
    return step(leaves())


@contextmanager
def replays(count: int) -> Iterator[None]:
    """The block replays `count` programs."""
    before = host.counts()["replayed"]
    yield
    assert host.counts()["replayed"] - before == count
