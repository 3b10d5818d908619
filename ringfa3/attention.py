"""`RingFA3Attention`: the ring as a layer; `keep_attention`: no ring twice under a checkpoint."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringfa3.functional import attention, flash_attn_func
from ringfa3.planning.context_plan import (
    ContextPlan,
    Group,
    check_window,
    dense_plan,
    place,
)
from ringfa3.planning.sharding import LAYOUTS
from ringfa3.ring.op import ring_attention, ring_attn_func
from ringfa3.ring.prepare_call import TRANSPORTS, bind, default_group, refuse
from ringfa3.validation import check_precision

_Contexts: TypeAlias = tuple[AbstractContextManager[object], AbstractContextManager[object]]


def keep_attention() -> _Contexts:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_attention)`.

    Saves every (out, lse), of the ring and of one device; all else is computed again.
    """
    kept = [attention, ring_attention]
    contexts: _Contexts = create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]
    return contexts


class RingFA3Attention(nn.Module):
    """Exact attention over a context group; has no parameters.

    Args:
        num_heads, num_kv_heads, head_dim: of q and of k and v; num_heads % num_kv_heads == 0.
        causal, window_size, layout: the mask and layout where no plan is given.
        softmax_scale: positive; default head_dim ** -0.5.
        group: as in `plan_context`; plans made from (rank, world) run in it.
        precision, transport, deterministic: as in `ring_attn_func`.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        group: Group = None,
        layout: str = "zigzag",
        precision: str = "native",
        transport: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}, both > 0"
            )
        if head_dim < 1:
            raise ValueError(f"head_dim={head_dim} must be > 0")
        for name, value, allowed in (
            ("layout", layout, LAYOUTS),
            ("transport", transport, TRANSPORTS),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        check_precision(precision)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.window_size = causal, check_window(window_size)
        self.softmax_scale, self.group, self.layout = softmax_scale, group, layout
        self.precision, self.transport = precision, transport
        self.deterministic = deterministic

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, window_size={self.window_size}, layout={self.layout!r}"
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: ContextPlan | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's tokens.

        Args:
            q: (b, s, h, d) or (t, h, d), the rank's shard; k, v: the same with h_kv heads.
            plan: which tokens these are, b * s or t of them. None: b dense sequences, of each of
                which every rank holds s tokens in the layout of `plan_context(world * s)`.

        Returns:
            The shape and dtype of q.

        Raises:
            ValueError, TypeError, RingError: as `ring_attn_func`.
        """
        _, world, group = place(self.group)
        problem = self._problem(q, k, v, plan, world)
        if problem is not None:
            refuse(group or default_group() if world > 1 else None, problem)
        if plan is None and world == 1:
            return self._one_device(q, k, v)
        if plan is None:
            batch, tokens = (q.shape[0], q.shape[1]) if q.dim() == 4 else (1, q.shape[0])
            plan = dense_plan(batch, tokens, self.group, self.layout, self.causal, self.window_size)
        out = ring_attn_func(
            _packed(q),
            _packed(k),
            _packed(v),
            bind(plan, group),
            self.softmax_scale,
            self.deterministic,
            precision=self.precision,
            transport=self.transport,
        )
        assert isinstance(out, torch.Tensor)
        return out.view(q.shape)

    def _problem(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: ContextPlan | None,
        world: int,
    ) -> Exception | None:
        """What is wrong with the inputs that only the module can know."""
        if plan is not None and not isinstance(plan, ContextPlan):
            return TypeError(f"plan must come from plan_context, got {type(plan).__name__}")
        if plan is not None and plan.world != world:
            return ValueError(f"plan is for {plan.world} ranks; this layer's group has {world}")
        for name, x, heads in (
            ("q", q, self.num_heads),
            ("k", k, self.num_kv_heads),
            ("v", v, self.num_kv_heads),
        ):
            if not isinstance(x, torch.Tensor):
                return TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.dim() not in (3, 4) or x.shape[-2:] != (heads, self.head_dim):
                return ValueError(
                    f"{name} has shape {tuple(x.shape)}: give ([batch,] tokens, {heads}, "
                    f"{self.head_dim})"
                )
            if x.shape[:-2] != q.shape[:-2]:
                return ValueError(
                    f"{name} has shape {tuple(x.shape)}, q has {tuple(q.shape)}: batch and tokens "
                    "must be equal"
                )
        return None

    def __deepcopy__(self, memo: dict[int, object]) -> RingFA3Attention:
        """A copy in the same group: process groups are shared, not copied."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        if self.group is not None:
            memo[id(self.group)] = self.group
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _one_device(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(
            _batched(q),
            _batched(k),
            _batched(v),
            self.softmax_scale,
            self.causal,
            self.window_size,
            self.deterministic,
            precision=self.precision,
        )
        assert isinstance(out, torch.Tensor)
        return out.view(q.shape)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1) if x.dim() == 4 else x


def _batched(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 4 else x.unsqueeze(0)
