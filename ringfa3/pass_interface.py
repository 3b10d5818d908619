"""The interface of a ring pass, which moves K/V and dK/dV between ranks while attention runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.tiling import Plan

# Tokens of a rank up to which its backward splits the heads of its own keys. Measured: 2 H200 gain
# 3% at 8k tokens and lose 5% at 16k.
MAX_SPLIT_TOKENS = 8192


class HopTensors(NamedTuple):
    """What the attention of a hop reads and writes.

    k, v        (rows, hk, d) of the hop's block. Rows outside the hop's spans may hold anything
    dk, dv      backward: (rows, hk, d) in the accumulation dtype, in a world of one rank in those
                of k and v, to be stored where the hop's tiles have rows
    first_head  number of the first KV head in k, v, dk and dv, which may have a part of the heads
    arrivals    gathered forward: (world,) int32. The rows of hop t may be read once arrivals[t] is
                not 0. None if all rows are there
    """

    k: torch.Tensor
    v: torch.Tensor
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    first_head: int = 0
    arrivals: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], first_head: int = 0) -> HopTensors:
        """From (k, v), or (k, v, dk, dv)."""
        k, v, *grads = tensors
        dk, dv = grads or (None, None)
        return cls(k, v, dk, dv, first_head)


# attend(hop, tensors) computes a hop: 0 for the rank's own keys, and for gathered K/V.
Attend: TypeAlias = Callable[[int, HopTensors], None]


def first_heads(kv_heads: int, tokens: int) -> int:
    """Number of KV heads of a rank's own keys that a backward computes first; the others last.

    The first heads run during the first K/V transfers, the others during the last transfers of
    float32 dK/dV, which have twice as many bytes. 0 for long shards: there the tail of a second
    kernel takes longer than what it hides.
    """
    return -(-kv_heads // 3) if kv_heads > 1 and tokens <= MAX_SPLIT_TOKENS else 0


class LocalHeads(NamedTuple):
    """The split of the KV heads of a rank's own keys in a backward.

    first  number of heads that run before the hops; the others run after them. 0: no split
    """

    first: int

    @classmethod
    def of(cls, k: torch.Tensor) -> LocalHeads:
        """For k (local_keys, hk, d)."""
        tokens, kv_heads, _ = k.shape
        return cls(first_heads(kv_heads, tokens))

    def attend_first(self, attend: Attend, *tensors: torch.Tensor) -> None:
        """Calls `attend` with the first heads of k, v, dk, dv, if there is a split."""
        if self.first:
            attend(0, HopTensors.of(x[:, : self.first] for x in tensors))

    def attend_last(self, attend: Attend, *tensors: torch.Tensor) -> None:
        """Calls `attend` with the other heads, or with all if there is no split."""
        if self.first:
            attend(0, HopTensors.of((x[:, self.first :] for x in tensors), self.first))
        else:
            attend(0, HopTensors.of(tensors))


# The host code of a call, from its inputs to its results.
HostCode: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]


class RingPass(Protocol):
    """One rank's forward or backward pass over the ring, over any transport.

    precision    of the call
    first_heads  backward, after `start`: as in `LocalHeads`
    """

    precision: str
    first_heads: int

    @property
    def hops(self) -> Plan:
        """The spans that its kernels compute; a launch may attend to several hops of the plan."""

    def run_schedule(
        self,
        k: torch.Tensor,
        inputs: tuple[torch.Tensor | None, ...],
        settings: Hashable,
        code: HostCode,
    ) -> tuple[torch.Tensor, ...] | None:
        """The results of the whole call by its schedule, which the first call of a call signature
        builds. None: it has no schedule, and the caller runs the host code.

        Args:
            k: (local_keys, hk, d), the rank's own.
            inputs: all tensors of the call; the first one is given.
            settings: on which launches depend, besides the pass and the inputs' shapes.
            code: of the call; it calls `start` and `run` of this pass.
        """

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """Prepares the pass. Over `symmetric` the first transfers start here, and what the caller
        computes before `run` overlaps with them. Over messages `run` starts all transfers.

        Args:
            k, v: (local_keys, hk, d) and (local_keys, hk, d_v), the rank's own. Where ranks send K
                and V of a row together, `attend` gets V with d columns, zeros beyond d_v.
            waits_in_kernel: `attend` of a gathered forward takes `arrivals`.
        """

    def run(self, attend: Attend) -> None:
        """Calls `attend` for each launch of `hops`, and moves K/V and dK/dV meanwhile.

        In a backward the KV heads of hop 0 may come in two calls.
        """

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Backward, after `run`: dK and dV, (local_keys, hk, d) each, in the dtype of K. The pass
        no longer holds their float32 sums, so dQ may take that memory."""


class LocalPass:
    """The `RingPass` of a world of one rank: one hop, no messages. Nobody adds to dK and dV, so the
    kernel rounds."""

    grads: tuple[torch.Tensor, torch.Tensor]
    precision = "native"
    first_heads = 0
    hops: Plan

    def __init__(self, plan: ContextPlan, pass_type: str) -> None:
        """pass_type: "forward" or "backward"."""
        self._pass_type, self.hops = pass_type, plan.hops

    def run_schedule(
        self,
        k: torch.Tensor,
        inputs: tuple[torch.Tensor | None, ...],
        settings: Hashable,
        code: HostCode,
    ) -> tuple[torch.Tensor, ...] | None:
        """As `RingPass.run_schedule`: there is none."""

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """As `RingPass.start`."""
        self._local = (k, v)

    def run(self, attend: Attend) -> None:
        """As `RingPass.run`."""
        if self._pass_type == "backward":
            k, v = self._local
            # In 8 bits dK has the columns of V: K has more than its gradient.
            like = (v, v) if self.precision != "native" else (k, v)
            dk, dv = (x.new_empty(x.shape) for x in like)
            attend(0, HopTensors(k, v, dk, dv))
            self.grads = dk, dv
        else:
            attend(0, HopTensors(*self._local))
