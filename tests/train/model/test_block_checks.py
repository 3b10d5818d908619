"""If this fails, wrong gradients of very long contexts pass the tests on GPUs. The checks of a long
block, on a short one: they pass, and find what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringfa3 import RingFA3Attention
from tests.train.block_checks import compare
from train.config import ModelConfig
from train.model import matmul, swiglu
from train.model.transformer import Block

SMALL = ModelConfig(
    dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, n_layers=1, zero_init=False
)


def small() -> dict[str, float]:
    return compare(SMALL, 150, 64, 24, torch.device("cpu"))


def test_the_checks_pass_on_a_small_block() -> None:
    """150 tokens in chunks of 64, on the CPU: all outcomes are compared."""
    found = small()
    matrices = [name for name, p in Block(SMALL).named_parameters() if p.dim() == 2]
    rows = ["attention", "dq", "dk", "dv", "mlp"]
    assert {f"whole: {name}" for name in (*rows, *matrices)} <= found.keys()
    assert {f"chunked: {name}" for name in rows} <= found.keys()
    assert all(found[f"whole: {name}"] > 0 for name in matrices)


def without_the_last_rows(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Zeros the last 4 rows of what a call on 100 rows and more returns."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        result = call(*given, **named).clone()
        if len(result) >= 100:
            result[-4:] = 0
        return result

    return wrong


def without_the_last_gradients(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Zeros the gradients of the last 4 rows of k."""

    def wrong(layer: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        copied = k.clone()
        rows = torch.arange(len(k), device=k.device)[:, None, None]
        copied.register_hook(lambda gradient: gradient * (rows < len(k) - 4))
        return call(layer, q, copied, v, plan=plan)

    return wrong


def in_bfloat16(call: Callable[..., Any]) -> Callable[..., Any]:
    """Sums the gradients of a weight in bfloat16, 10 tokens at a time."""

    def wrong(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros_like(weight, dtype=torch.bfloat16)
        for one, other in zip(dy.split(10), x.split(10), strict=True):
            total += one.T @ other
        return call(dy, x, weight)[0], total.to(weight.dtype)

    return wrong


def without_the_first_chunk(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves the first 64 tokens out of the gradients of the weights."""

    def wrong(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return call(dy, x, *rest)[0], *call(dy[64:], x[64:], *rest)[1:]

    return wrong


@pytest.mark.parametrize(
    ("place", "name", "wrong", "found"),
    [
        (swiglu, "_forward", without_the_last_rows, "'chunked: mlp'"),
        (swiglu, "_backward", without_the_first_chunk, "'chunked and sum: mlp.up.weight'"),
        (matmul, "linear_backward", in_bfloat16, "'whole: mlp.up.weight'"),
        (RingFA3Attention, "forward", without_the_last_rows, "'whole: attention'"),
        (RingFA3Attention, "forward", without_the_last_gradients, "'whole: dk'"),
    ],
)
def test_the_checks_find_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    wrong: Callable[[Any], Any],
    found: str,
) -> None:
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(AssertionError, match=re.escape(found)):
        small()
