"""The ring pass of a world of one rank: one hop and no messages."""

from __future__ import annotations

import torch

from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring_pass import Attend, HopTensors, NoRecording, Recording


class LocalPass:
    """`ringfa3.ring_pass.RingPass` of one rank. Nobody adds to dK and dV, so the kernel rounds."""

    grads: tuple[torch.Tensor, torch.Tensor]

    def __init__(self, plan: ContextPlan, kind: str) -> None:
        """kind: "forward" or "backward"."""
        self._kind = kind
        self.recording: Recording = NoRecording()

    def replay(self, *_: object) -> None:
        """As `RingPass.replay`: there are no programs."""

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """As `RingPass.start`."""
        self._local = (k, v)

    def run(self, attend: Attend) -> None:
        """As `RingPass.run`."""
        if self._kind == "backward":
            dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self._local)
            attend(0, HopTensors(*self._local, dk, dv))
            self.grads = dk, dv
        else:
            attend(0, HopTensors(*self._local))
