"""`KernelSpec`: calls to come, whose schedules and tables are made with their plan."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ringfa3.kernels.reference import accum_dtype
from ringfa3.kernels.symbolic import Gpu, ScheduleError
from ringfa3.pass_interface import LocalPass, RingPass
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.schedules.host_code import forward_hops, gradients
from ringfa3.schedules.link import signature_of
from ringfa3.schedules.schedule import Inputs, build
from ringfa3.schedules.settings import SINK, Heads, Settings, ring_settings
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, budget_error, select_forward_mode
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.stream_ops import BufferSpec
from ringfa3.validation import check_scale

META = torch.device("meta")


class _Call(NamedTuple):
    """`host_code.Call` of a plan alone."""

    plan: ContextPlan
    precision: str = "native"


@dataclass(frozen=True)
class KernelSpec:
    """Calls of `ring_attn_func` on CUDA tensors, for `plan_context(..., prepare=[spec])`.

    It can be pickled, and prepares in any process, without a GPU. Calls that it does not fit build
    what they need themselves; one line logs each way in which they differ. Calls over "nccl" use
    nothing of it.

    Args:
        heads, kv_heads, head_dim: of q, k and v.
        dtype: of q, k and v: bfloat16 or float16.
        num_sms: SMs of the GPU; H100 and H200 with SXM have 132.
        softmax_scale: as in `ring_attn_func`.
        deterministic: as in `ring_attn_func`, or `torch.use_deterministic_algorithms` is on there.
        token_strides: elements from a token to the next in q, k and v; None: they are contiguous.
        lse_gradient: whether LSE has a gradient.
        sink: whether calls have one.

    Raises ValueError, TypeError: a setting is not allowed.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    num_sms: int = 132
    softmax_scale: float | None = None
    deterministic: bool = False
    token_strides: tuple[int, int, int] | None = None
    lse_gradient: bool = False
    sink: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"dtype is {self.dtype}: kernels take torch.bfloat16, torch.float16")
        for name in ("heads", "kv_heads", "head_dim", "num_sms"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be an integer above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}: it must be a multiple of kv_heads, {self.kv_heads}"
            )

        if self.softmax_scale is not None:
            check_scale(self.softmax_scale)
        strides = self.token_strides
        if strides is not None and len(strides) != len("qkv"):
            raise ValueError(f"token_strides is {strides}: give 3 integers, of q, k and v")

    def prepare(self, plan: ContextPlan) -> None:
        """Adds the schedules of a forward and a backward to `plan.prepared`.

        Nothing to add where a rank has no tokens, no kernel takes the head dim, the group spans
        hosts, between which calls run over "nccl", or the plan's budget refuses "symmetric".
        """
        if len(set(plan.hosts)) > 1 or budget_error(plan):
            return
        _ = plan.digest  # which travels along, as `BufferSpec.slot_bytes`: first calls agree on it
        q, k, v, out, dout = self._tensors(plan)
        if not q.numel() or not k.numel():
            return
        scale = self.head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)
        dtype = accum_dtype(q.dtype)
        lse = torch.empty((self.heads, plan.local_tokens), dtype=dtype, device=META)
        sink = torch.empty(self.heads, dtype=dtype, device=META) if self.sink else None
        dlse = torch.empty_like(lse) if self.lse_gradient else None
        mode = select_forward_mode(plan, q, k)
        forward = "gathered" if plan.world > 1 and mode == "gathered" else "forward"
        agreed = scale, self.deterministic, "native", "auto", mode
        of_ranks = ring_settings(plan, Heads.of(q, k, v), "cuda", *agreed)
        of_ranks = of_ranks.with_values(SINK if self.sink else {})
        for transport in ("auto", "symmetric"):
            given = {"deterministic": str(self.deterministic), "transport": transport}
            of_ranks.with_values(given).complete()
        inputs: Inputs = (q, k, v, sink)
        self._add(plan, forward, k, inputs, scale, partial(forward_hops, scale), of_ranks)
        settings = scale, self.deterministic, "native"
        inputs = dout, dlse, q, k, v, out, lse, sink
        code = partial(gradients, scale, self.deterministic)
        self._add(plan, "backward", k, inputs, settings, code, of_ranks)

    def _tensors(self, plan: ContextPlan) -> list[torch.Tensor]:
        """q, k, v, out and dout, without data."""
        d, strides = self.head_dim, self.token_strides
        counts = [(plan.local_tokens, self.heads), *[(plan.local_keys, self.kv_heads)] * 2]
        made = []
        for number, (tokens, heads) in enumerate(counts):
            stride = heads * d if strides is None else strides[number]
            given = (tokens, heads, d), (stride, d, 1)
            made.append(torch.empty_strided(*given, dtype=self.dtype, device=META))
        shape = plan.local_tokens, self.heads, d
        return [*made, *(torch.empty(shape, dtype=self.dtype, device=META) for _ in range(2))]

    def _add(
        self,
        plan: ContextPlan,
        pass_type: str,
        k: torch.Tensor,
        inputs: Inputs,
        settings: Hashable,
        code: Any,
        of_ranks: Settings,
    ) -> None:
        gpu = Gpu(self.num_sms)
        signature = signature_of(pass_type, inputs, settings, gpu)
        if signature in plan.prepared:
            return
        ring_pass: RingPass = LocalPass(plan, pass_type)
        spec = None
        if plan.world > 1:
            ring_pass = SymmetricRingPass(None, plan, pass_type)
            spec = BufferSpec(plan, pass_type, k)
            _ = spec.slot_bytes  # which travel along
        try:
            call = partial(code, _Call(plan), ring_pass)
            made = build(inputs, call, gpu).encode()
            asked = os.environ.get(FORWARD_MODE_ENV)
            made = replace(made, spec=spec, settings=of_ranks, forward_mode=asked)
            _ = made.references  # before the first call, if the plan stays in this process
            plan.prepared[signature] = made
        except ScheduleError:  # the PyTorch fallback runs such calls
            return
