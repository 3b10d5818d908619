"""The host code of a ring call, over any transport: from its inputs to its results."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from ringfa3.attention_op import out_shape
from ringfa3.kernels.dispatch import BackwardPass, select_backward, select_forward
from ringfa3.kernels.reference import accum_dtype
from ringfa3.pass_interface import HopTensors, RingPass
from ringfa3.planning.context_plan import ContextPlan

BackwardInputs: TypeAlias = tuple[  # dout, dlse, q, k, v, out, lse, sink
    torch.Tensor, torch.Tensor | None,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None,
]  # fmt: skip


class Call(Protocol):
    """What a call depends on, besides its inputs and settings."""

    @property
    def plan(self) -> ContextPlan: ...

    @property
    def precision(self) -> str: ...


def forward_hops(
    scale: float,
    call: Call,
    ring_pass: RingPass,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all hops. The sink counts at each row's last hop."""
    # which `prepare_call` has built
    kernel = select_forward(q, call.plan.hops.clipped, v.shape[-1])
    hops = ring_pass.hops.clipped
    tilings = hops.forward(kernel.tile_m)
    out = q.new_empty(out_shape(q, v))
    once = hops.single_hop(kernel.tile_m)
    running = out[:0] if once else kernel.new_partial_out(q, hops)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accum_dtype(q.dtype))

    def attend(hop: int, x: HopTensors) -> None:
        more = () if x.arrivals is None else (x.arrivals,)
        kernel.attend(q, x.k, x.v, tilings[hop], scale, out, running, lse, *more, sink=sink)

    ring_pass.start(k, v, kernel.takes_arrivals)
    ring_pass.run(attend)
    return out, lse


def gradients(
    scale: float,
    deterministic: bool,
    call: Call,
    ring_pass: RingPass,
    *inputs: Any,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), and dsink for a sink."""
    backward = _backward_hops(inputs, scale, deterministic, call, ring_pass)
    dk, dv = ring_pass.grads
    dv = dv[..., : inputs[4].shape[2]].contiguous()
    return backward.dq(), dk, dv, *(() if inputs[7] is None else (backward.dsink(),))


def _backward_hops(
    inputs: BackwardInputs,
    scale: float,
    deterministic: bool,
    call: Call,
    ring_pass: RingPass,
) -> BackwardPass:
    """The pass after all hops: it has the float32 dQ, and `ring_pass` has dK and dV."""
    dout, dlse, q, k, v, out, lse, sink = inputs
    hops = ring_pass.hops.of_backward(call.precision, deterministic)
    kernel = select_backward(q, call.precision, hops.clips, v.shape[2])
    ring_pass.start(k, v)
    tilings = hops.backward(kernel.tile_n, kernel.tile_m, deterministic)
    heads_of_calls = k.shape[1], ring_pass.first_heads
    backward = kernel.make_pass(
        dout, dlse, q, out, lse, hops, scale, deterministic, *heads_of_calls, sink
    )
    group = q.shape[1] // k.shape[1]

    def attend(hop: int, x: HopTensors) -> None:
        assert x.dk is not None
        assert x.dv is not None
        heads = group * x.first_head, group * x.k.shape[1]
        backward.hop(x.k, x.v, tilings[hop], x.dk, x.dv, *heads)

    ring_pass.run(attend)
    return backward
