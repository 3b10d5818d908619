"""If this fails, runs that ask PyTorch for deterministic algorithms differ from each other.
`torch.use_deterministic_algorithms(True)` means `deterministic=True`, whatever starts calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ringfa3 import (
    RingFA3Attention,
    flash_attn_func,
    flash_attn_varlen_func,
    host,
    plan_context,
    ring_attn_func,
)
from ringfa3.hf.attention import attention_forward
from ringfa3.kernels.backward import BackwardArgs
from tests.support import ambient
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import Shape, call
from tests.support.ranks import Ranks

TOKENS = 200
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., torch.Tensor]


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return RingFA3Attention(4, 2, 64)(q, k, v)


def _ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ring_attn_func(q[0], k[0], v[0], plan_context(TOKENS, (0, 1)))


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attn_varlen_func(q[0], k[0], v[0], [0, TOKENS], [0, TOKENS], causal=True)


def _transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Module()
    module.is_causal = True
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return attention_forward(module, *heads_first, None)[0]


CALLS: dict[str, Attend] = {
    "flash_attn_func": lambda *qkv: flash_attn_func(*qkv, causal=True),
    "flash_attn_varlen_func": _varlen,
    "ring_attn_func": _ring,
    "RingFA3Attention": _layer,
    "transformers": _transformers,
}


def _turns(kernels: FakeKernels) -> list[bool]:
    """Of each backward kernel that has been launched: whether dQ is added in turns."""
    launched = (x for x in kernels.take() if x.name == "backward")
    return [bool(BackwardArgs.from_buffer_copy(x.words).dq_semaphore) for x in launched]


def _inputs() -> list[torch.Tensor]:
    return [x.requires_grad_() for x in Shape(tokens=TOKENS, keys=TOKENS).inputs()[:3]]


@pytest.mark.parametrize("starts", host.HOSTS)
@pytest.mark.parametrize("name", CALLS)
def test_the_mode_of_the_backward_decides(kernels: FakeKernels, name: str, starts: str) -> None:
    """As in PyTorch's own attention: dQ is added in turns if the mode is on when a backward runs.

    Each backward runs three times: the host library records the second and replays the third. A
    program of one mode serves no call of the other.
    """
    host.select(starts)
    for on in (False, True, False, True):
        for _ in range(3):
            with ambient.deterministic() if not on else torch.enable_grad():
                loss = CALLS[name](*_inputs()).float().sum()  # the other mode, in the forward
            _turns(kernels)
            with ambient.deterministic() if on else torch.enable_grad():
                loss.backward()
            assert _turns(kernels) == [on]


@pytest.mark.parametrize("starts", host.HOSTS)
@pytest.mark.parametrize("warn_only", [False, True])
def test_the_mode_launches_what_the_argument_launches(
    kernels: FakeKernels, starts: str, warn_only: bool
) -> None:
    """Byte for byte, and without a warning: there is nothing to warn of."""
    host.select(starts)
    shape = Shape(tokens=TOKENS, keys=TOKENS)
    inputs = shape.inputs()
    for _ in range(3):
        wanted = call(kernels, shape, inputs, causal=True, deterministic=True)
        with ambient.deterministic(warn_only), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = call(kernels, shape, inputs, causal=True)
        assert [x[0] for x in found.launches].count("backward") == 1
        assert found.differences(wanted) == []


def _one_rank_in_the_mode(group: dist.ProcessGroup) -> str:
    plan = plan_context(TOKENS, group)
    q, k, v = (torch.ones(plan.local_tokens, 2, 16, requires_grad=True) for _ in range(3))
    try:
        with ambient.deterministic() if group.rank() == 1 else torch.enable_grad():
            ring_attn_func(q, k, v, plan)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_agree_on_the_mode(ranks: Ranks) -> None:
    """The first call of a plan: both ranks raise, and name the setting."""
    for text in ranks.run(2, _one_rank_in_the_mode):
        assert "deterministic" in text
        assert "True" in text
        assert "False" in text
