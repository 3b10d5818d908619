"""A transformer block under activation checkpointing: attention kept, recomputed, or all stored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ringfa3 import keep_attention, ring_attn_func
from ringfa3.bench.common.accuracy import WrongResultError
from ringfa3.bench.common.cases import BACKWARD
from ringfa3.bench.common.comparison import (
    comparison_of,
    raising_on_all_ranks,
    recording_stop,
    release_memory,
)
from ringfa3.bench.common.implementations import tensor
from ringfa3.bench.common.results import RingRow
from ringfa3.bench.common.timing import Stopwatch, paired
from ringfa3.bench.ring.cases import RingCase
from ringfa3.bench.ring.implementations import Ring
from ringfa3.planning.context_plan import ContextPlan

# Checkpointed with `keep_attention`, checkpointed without it, and not checkpointed.
KEPT, RECOMPUTED, STORED = MODES = ("kept", "recomputed", "stored")
WIDTH, SMOKE_WIDTH = 4096, 64  # of the model, on a GPU and on a CPU
RINGS = (
    torch.ops.ringfa3.ring_attention.default,
    torch.ops.ringfa3.ring_attention_backward.default,
)


@dataclass(frozen=True)
class Block:
    """y = x + wo attention(q, k, v), q, k, v from RMS-normed x; x, y (t, width), t local tokens.

    inputs  by name: x, norm (width,), wq, wk, wv, wo (out, in), in this order and of one dtype
    dy      the gradient of y
    """

    plan: ContextPlan
    transport: str
    head_dim: int
    inputs: dict[str, torch.Tensor]
    dy: torch.Tensor

    @classmethod
    def of(cls, case: RingCase, ring: Ring, dtype: torch.dtype, device: torch.device) -> Block:
        """Random tensors: weights equal on all ranks, tokens different."""
        plan = ring.plan(case)
        width = WIDTH if device.type == "cuda" else SMOKE_WIDTH
        heads, kv_heads = case.heads * case.head_dim, case.kv_heads * case.head_dim
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        weights = {
            "norm": torch.ones(width, dtype=dtype, device=device),
            "wq": normal(heads, width) * width**-0.5,
            "wk": normal(kv_heads, width) * width**-0.5,
            "wv": normal(kv_heads, width) * width**-0.5,
            "wo": normal(width, heads) * heads**-0.5,
        }
        generator.manual_seed(1 + plan.rank)
        x, dy = (normal(plan.local_tokens, width) for _ in range(2))
        inputs = {name: leaf.requires_grad_() for name, leaf in ({"x": x} | weights).items()}
        return cls(plan, ring.transport, case.head_dim, inputs, dy)

    def forward(self, mode: str, deterministic: bool = False) -> torch.Tensor:
        """y; mode: one of `MODES`."""
        block, inputs = partial(self._forward, deterministic), self.inputs.values()
        if mode == STORED:
            return block(*inputs)
        policy: dict[str, Any] = {"context_fn": keep_attention} if mode == KEPT else {}
        return tensor(checkpoint(block, *inputs, use_reentrant=False, **policy))

    def backward(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients of all inputs."""
        gradients = torch.autograd.grad(y, tuple(self.inputs.values()), self.dy)
        return dict(zip(self.inputs, gradients, strict=True))

    def step(self, mode: str, deterministic: bool = False) -> dict[str, torch.Tensor]:
        return self.backward(self.forward(mode, deterministic))

    def _forward(
        self,
        deterministic: bool,
        x: torch.Tensor,
        norm: torch.Tensor,
        wq: torch.Tensor,
        wk: torch.Tensor,
        wv: torch.Tensor,
        wo: torch.Tensor,
    ) -> torch.Tensor:
        normed = F.rms_norm(x, norm.shape, norm)
        q, k, v = (F.linear(normed, w).view(len(x), -1, self.head_dim) for w in (wq, wk, wv))
        out = ring_attn_func(
            q, k, v, self.plan, deterministic=deterministic, transport=self.transport
        )
        return x + F.linear(tensor(out).flatten(1), wo)


def measure_checkpointed(
    case: RingCase,
    ring: Ring,
    dtype: torch.dtype,
    device: torch.device,
    pairs: int,
    stopwatch: Stopwatch,
) -> RingRow:
    """The row of a case: `KEPT` against the other modes.

    Timed only if `KEPT` runs one forward ring a step and its gradients equal those of `STORED`.
    """
    row = RingRow.of(case, BACKWARD, str(dtype).removeprefix("torch."), MODES)
    comm = stopwatch.comm
    with recording_stop(row, comm):
        release_memory(device)
        with raising_on_all_ranks(device, comm):
            block = Block.of(case, ring, dtype, device)
            row.rings = {mode: _ring_calls(block, mode) for mode in MODES}
            _check(block, row.rings)
        with raising_on_all_ranks(device, comm):
            if device.type == "cuda":
                for mode in MODES:
                    peak, retained = comm.maximum(_memory(block, mode))
                    row.memory[mode], row.retained[mode] = int(peak), int(retained)
            for mode in MODES[1:]:
                kept, other = partial(block.step, KEPT), partial(block.step, mode)
                row.comparisons[mode] = comparison_of(paired(kept, other, pairs, stopwatch))
    return row


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts executed ops. Ops whose result a checkpoint policy has saved are not executed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.of[func] += 1
        return func(*args, **(kwargs or {}))


def _ring_calls(block: Block, mode: str) -> list[int]:
    """Forward and backward ring calls of a step."""
    with _Calls() as calls:
        block.step(mode)
    return [calls.of[op] for op in RINGS]


def _check(block: Block, rings: dict[str, list[int]]) -> None:
    """Raises WrongResultError unless `KEPT` calls the ring as `STORED` does, with equal gradients.

    Bit for bit, in deterministic mode: otherwise the order in which dQ is summed varies.
    """
    kept, stored = (block.step(way, deterministic=True) for way in (KEPT, STORED))
    wrong = [name for name in kept if not torch.equal(kept[name], stored[name])]
    if wrong:
        raise WrongResultError(f"{KEPT} and {STORED} differ in the gradient of {', '.join(wrong)}")
    if rings[KEPT] != rings[STORED]:
        raise WrongResultError(f"{KEPT} ran the ring {rings[KEPT][0]} times forward")


def _memory(block: Block, mode: str) -> list[int]:
    """Bytes of tensors beyond the inputs, from PyTorch's allocator: at the peak of a step, and
    between its forward and its backward."""
    device = block.dy.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    y = block.forward(mode)
    retained = torch.cuda.memory_allocated(device) - before
    block.backward(y)
    return [torch.cuda.max_memory_allocated(device) - before, retained]
