"""What must be equal on all ranks of a ring call."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import torch

from ringfa3.planning.context_plan import ContextPlan

SINK = {"sink": "given"}  # of calls with one


class Settings(dict[str, str]):
    """What must be equal on all ranks of a call: arguments' names and values. Never changed."""

    @cached_property
    def key(self) -> str:
        return json.dumps(self, sort_keys=True)

    @cached_property
    def digest(self) -> int:
        return zlib.crc32(self.key.encode())

    @cached_property
    def fingerprint(self) -> str:
        """By which ranks agree on settings that no rank has seen before."""
        return blake2b(self.key.encode(), digest_size=16).hexdigest()

    def with_values(self, values: Mapping[str, str]) -> Settings:
        """With these values, made once; the same object if it has them."""
        key = tuple(values.items())
        made = self._variants.get(key)
        if made is None:
            same = values.items() <= self.items()
            made = self if same else Settings({**self, **values})
            self._variants[key] = made
        return made

    @cached_property
    def _variants(self) -> dict[tuple[tuple[str, str], ...], Settings]:
        return {}

    def of_pass(self, direction: str) -> Settings:
        """Those of a call in a direction, "forward" or "backward"."""
        return self.with_values({"pass": direction})

    def complete(self) -> None:
        """Makes what calls and agreements need of it, which travels along."""
        for settings in (self, self.of_pass("forward"), self.of_pass("backward")):
            _ = settings.digest, settings.fingerprint


class Heads(NamedTuple):
    """Heads and head dims of q, k and v, and their dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        return cls(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype)


def ring_settings(
    plan: ContextPlan,
    heads: Heads,
    device: str,
    scale: float,
    deterministic: bool,
    precision: str,
    transport: str,
    forward_mode: str,
) -> Settings:
    """The settings of calls on a type of device, in both directions."""
    return Settings(
        {
            "plan.layout": plan.layout,
            "plan.window": f"(left, right) = {plan.effective_window}"
            if plan.mask is None
            else repr(plan.mask),
            "plan.hosts": str(plan.hosts),
            "plan.kv_budget": str(plan.kv_budget),
            "plan.cu_seqlens": f"{len(plan.lengths)} documents, {plan.total_tokens} tokens, "
            f"digest {plan.digest}",
            "q": f"{heads.heads} heads, head_dim {heads.head_dim}, {heads.dtype} on {device}",
            "k": f"{heads.kv_heads} heads",
            "v": f"head_dim {heads.v_head_dim}",
            "softmax_scale": repr(scale),
            "deterministic": str(deterministic),
            "precision": precision,
            "transport": transport if device == "cuda" else "gloo",
            "forward": forward_mode,  # of a backward too: it needs no agreement of its own then
        }
    )
