"""`RingFA3Attention`, the ring as a layer; `flash_attn_mask_func`, the ring of one rank under any
mask; `keep_attention`, for activation checkpoints.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringfa3.attention_op import out_shape, packed
from ringfa3.custom_op import checkpointed, require_no_compiler
from ringfa3.functional import flash_attn_func
from ringfa3.masks.mask import Mask, check_mask
from ringfa3.planning.context_plan import (
    ContextPlan,
    check_plan,
    dense_plan,
    plan_context,
)
from ringfa3.planning.process_groups import Group, resolve_group
from ringfa3.ring.op import ring_attn_func
from ringfa3.ring.prepare_call import bind_to_group, default_group, raise_on_all_ranks
from ringfa3.symmetric.kernel_spec import KernelSpec
from ringfa3.validation import (
    LAYOUTS,
    TRANSPORTS,
    Window,
    check_bool,
    check_choice,
    check_heads,
    check_layer_inputs,
    check_precision,
    check_scale,
    check_tensors,
    check_window,
    is_deterministic,
)

_Contexts: TypeAlias = tuple[AbstractContextManager[object], AbstractContextManager[object]]


def keep_attention() -> _Contexts:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_attention)`.

    The checkpoint keeps (out, lse) of every attention, on one device or a ring, and recomputes the
    rest: no attention runs twice.
    """
    contexts: _Contexts = create_selective_checkpoint_contexts(checkpointed)  # type: ignore[no-untyped-call]
    return contexts


def flash_attn_mask_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    *,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    precision: str = "native",
    sink: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, over the pairs that a mask allows.

    Its plan is made at the first call with a mask and kept for later ones. In a group, use
    `plan_context(mask, group)` and `ring_attn_func`.

    Args:
        q: (t, h, d); k: (t_k, h_kv, d); v: (t_k, h_kv, d_v), packed, as in
            `flash_attn_varlen_func`; t = mask.q_tokens and t_k = mask.k_tokens.
        mask: a `ringfa3.Mask`.

    Other arguments and results as in `flash_attn_varlen_func`; lse is (h, t). A query that
    attends to no key has output 0, LSE -inf (with a sink: the sink) and gradient 0.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and what is allowed.
        RuntimeError: torch.compile traces the call.
    """
    require_no_compiler(
        "flash_attn_mask_func",
        "make plan_context(mask, (0, 1)) outside, and give the plan to ring_attn_func inside",
    )
    check_mask(mask)
    check_tensors(q, k, v)
    for name, x, tokens in (("q", q, mask.q_tokens), ("k", k, mask.k_tokens)):
        if x.dim() != 3 or x.shape[0] != tokens:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: this mask needs ({tokens}, heads, head_dim)"
            )
    return ring_attn_func(
        q,
        k,
        v,
        plan_context(mask, (0, 1)),
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        return_lse=return_lse,
        precision=precision,
        sink=sink,
    )


class RingFA3Attention(nn.Module):
    """Exact attention over a context-parallel (CP) group. It has no parameters.

    Args:
        num_heads, num_kv_heads, head_dim: of q and of k and v; num_heads % num_kv_heads == 0.
        causal, window_size, layout: the mask and layout of calls without a plan.
        softmax_scale: positive, from 2^-64 to 2^64; default head_dim ** -0.5.
        group: as in `plan_context`; plans that were made from (rank, world) run in it.
        precision: as in `flash_attn_func` on one device, as in `ring_attn_func` on several.
        transport, deterministic: as in `ring_attn_func`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and what is allowed.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = True,
        window_size: Window = (-1, -1),
        softmax_scale: float | None = None,
        group: Group = None,
        layout: str = "zigzag",
        precision: str = "native",
        transport: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        check_heads(num_heads, num_kv_heads, head_dim)
        check_choice("layout", layout, LAYOUTS)
        check_choice("transport", transport, TRANSPORTS)
        check_precision(precision)
        if softmax_scale is not None:
            softmax_scale = check_scale(softmax_scale)
        if group is not None:
            resolve_group(group)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.window_size = check_bool("causal", causal), check_window(window_size)
        self.softmax_scale, self.group, self.layout = softmax_scale, group, layout
        self.precision, self.transport = precision, transport
        self.deterministic = check_bool("deterministic", deterministic)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, window_size={self.window_size}, layout={self.layout!r}"
        )

    def kernel_spec(
        self, dtype: torch.dtype = torch.bfloat16, num_sms: int = KernelSpec.num_sms
    ) -> KernelSpec:
        """The calls of this layer, for `plan_context(..., prepare=[spec])`.

        Args:
            dtype: of q, k and v, bfloat16 or float16.
            num_sms: SMs of the GPU.

        Its `deterministic` includes `torch.use_deterministic_algorithms`, as it is now.

        Raises ValueError: the layer computes in 8 bits, which has nothing to prepare.
        """
        if self.precision != "native":
            raise ValueError(
                f"precision is {self.precision!r}: only calls in 'native' can be prepared"
            )
        settings = self.softmax_scale, is_deterministic(self.deterministic)
        return KernelSpec(
            self.num_heads, self.num_kv_heads, self.head_dim, dtype, num_sms, *settings
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: ContextPlan | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's tokens.

        Args:
            q: (b, s, h, d) or (t, h, d), the rank's shard; k, v: the same with h_kv heads, v also
                with a smaller head dim d_v as in `flash_attn_func`.
            plan: which tokens these are, b * s or t of them. None: b sequences of world * s tokens,
                of each of which this rank holds s, in the layout of `plan_context(world * s)`. Only
                a plan has a `kv_budget`.
            sink: as in `flash_attn_func` on one device, as in `ring_attn_func` on several.

        Returns:
            The shape and dtype of q, with the head dim of v.

        Raises:
            ValueError, TypeError, RingError: as `ring_attn_func`.
        """
        _, world, group = resolve_group(self.group)
        try:
            self._check(q, k, v, plan, world)
        except (TypeError, ValueError) as problem:
            raise_on_all_ranks(group or default_group() if world > 1 else None, problem)
        if plan is None and world == 1:
            return self._one_device(q, k, v, sink)
        if plan is None:
            batch, tokens = (q.shape[0], q.shape[1]) if q.dim() == 4 else (1, q.shape[0])
            plan = dense_plan(batch, tokens, self.group, self.layout, self.causal, self.window_size)
        out = ring_attn_func(
            packed(q),
            packed(k),
            packed(v),
            bind_to_group(plan, group),
            softmax_scale=self.softmax_scale,
            deterministic=self.deterministic,
            precision=self.precision,
            transport=self.transport,
            sink=sink,
        )
        assert isinstance(out, torch.Tensor)
        return out.view(out_shape(q, v))

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: ContextPlan | None,
        world: int,
    ) -> None:
        """Raises TypeError or ValueError: inputs do not fit the layer."""
        if plan is not None:
            check_plan(plan)
            if plan.world != world:
                raise ValueError(
                    f"plan is for {plan.world} ranks; this layer's group has {world}: make the "
                    "plan with the layer's group"
                )
        check_layer_inputs(q, k, v, self.num_heads, self.num_kv_heads, self.head_dim)

    def __deepcopy__(self, memo: dict[int, object]) -> RingFA3Attention:
        """A copy that shares the process group, which cannot be copied."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        if self.group is not None:
            memo[id(self.group)] = self.group
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> RingFA3Attention:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, object]:
        """For pickle and torch.save. Raises TypeError: the layer has a group, which ends with its
        process."""
        if self.group is not None and not isinstance(self.group, tuple):
            raise TypeError(
                "a RingFA3Attention with a ProcessGroup cannot be pickled: save "
                "model.state_dict(), or set layer.group = None first and again after loading"
            )
        return self.__dict__.copy()

    def _one_device(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        out = flash_attn_func(
            _batched(q),
            _batched(k),
            _batched(v),
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window_size=self.window_size,
            deterministic=self.deterministic,
            precision=self.precision,
            sink=sink,
        )
        assert isinstance(out, torch.Tensor)
        return out.view(out_shape(q, v))


def _batched(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 4 else x.unsqueeze(0)
