"""If this fails, results depend on PyTorch's default dtype, device or modes. What PyTorch gives
every call from the state of the program changes no bit of a result.

The reference of each call is the same call outside of the state; the tolerance is 0. Numbers of
tokens differ from state to state, so that each finds no plan, index or program of another.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringfa3 import functional
from ringfa3.kernels.dispatch import select_forward
from tests.support import ambient
from tests.support.ranks import Ranks

ORDERS = pytest.mark.parametrize("state_first", [True, False], ids=["state first", "state last"])
KINDS = {
    "attention": ambient.attention_calls,
    "ring": ambient.ring_calls,
    "trainer": ambient.model_calls,
    "transformers": ambient.hf_calls,
}


# What reaches the buffers of a ring; each has agreements and messages of its own.
OF_RINGS = ("bfloat16", "default device", "inference", "deterministic")


def _seed(state: str, state_first: bool) -> int:
    return 2 * list(ambient.STATES).index(state) + state_first


@ORDERS
@pytest.mark.parametrize("state", ambient.STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_computes_the_same_bits(kind: str, state: str, state_first: bool) -> None:
    calls = KINDS[kind]("cpu", _seed(state, state_first))
    assert ambient.check(calls, state, state_first, times=1) == []


def _check_ring(group: dist.ProcessGroup, state_first: bool) -> list[str]:
    unequal = []
    for state in OF_RINGS:
        calls = ambient.ring_calls("cpu", 100 + _seed(state, state_first), group)
        found = ambient.check(calls, state, state_first, times=1)
        unequal += [f"{state}: {x}" for x in found]
    return unequal


@ORDERS
def test_ranks_compute_the_same_bits(ranks: Ranks, state_first: bool) -> None:
    assert ranks.run(2, _check_ring, state_first) == [[], []]


def test_kernels_run_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory which a call leaves for later calls is no inference tensor."""
    modes = []

    def select(q: torch.Tensor, plan: object, v_dim: int) -> object:
        modes.append(torch.is_inference_mode_enabled())
        return select_forward(q, plan, v_dim)

    monkeypatch.setattr(functional, "select_forward", select)
    q = torch.ones(1, 4, 1, 8, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        functional.flash_attn_func(q, q, q)
        assert torch.is_inference_mode_enabled()
    assert modes == [False]
