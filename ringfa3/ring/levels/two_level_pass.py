"""A ring pass over two levels: copies inside a host, messages between hosts."""

from __future__ import annotations

import torch

from ringfa3.kernels.reference import accum_dtype
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.levels.flow_messages import Region, Regions
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.ring.p2p_pass import P2PRingPass


class TwoLevelPass(P2PRingPass):
    """`ringfa3.pass_interface.RingPass` by messages; ranks of a host copy theirs.

    What a rank publishes for an exchange has two parts: rows of K and of V for the next launch,
    either its own or landed ones, and dK/dV of the launch before. Each is as large as that of any
    rank, so all ranks know where it begins.
    """

    def __init__(self, transport: TwoLevelTransport, plan: ContextPlan, pass_type: str) -> None:
        """pass_type: "forward" or "backward"."""
        super().__init__(transport, plan, pass_type)
        self._copies = transport

    def run_schedule(self, *_: object) -> None:
        """As `RingPass.run_schedule`: Python issues the copies."""

    def _regions(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Regions, Regions]:
        offsets = self._exchange.host_offsets
        sent, arrived = offsets.most
        of_kv = sent * sum(x.shape[1:].numel() * x.itemsize for x in (k, v))
        size = of_kv
        if self._pass_type == "backward":
            size += arrived * 2 * k.shape[1:].numel() * accum_dtype(k.dtype).itemsize
        self._copies.begin(size)
        kv = Region(0, sent, offsets.direct), Region(0, sent, offsets.onward)
        grads = Region(of_kv, arrived, offsets.direct), Region(of_kv, arrived, offsets.onward)
        return kv, grads
