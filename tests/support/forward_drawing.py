"""Draws a forward over two hosts, for docs/dev/architecture.md:

    python -m tests.support.forward_drawing docs/dev/two-hosts.svg

Each rank's ring pass runs on a transport that only records, so the picture has what the pass does:
its launches and, in the column of the launch that runs concurrently, the messages of an exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringfa3 import plan_context
from ringfa3.ring.p2p import Message
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.schedules.plot import COMPUTE, Mark, plot

TOKENS, RANKS, HOSTS = 1024, 4, 2  # one causal document
EXCHANGE = "EXCHANGE"


@dataclass
class Recorder:
    """A `Transport` that moves nothing, and its launches."""

    marks: list[Mark] = field(default_factory=list)
    launch: int = 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Recorder:
        """K and V of the same rows have one line."""
        found = [("to", m) for m in sends] + [("from", m) for m in receives]
        labels = [
            f"{m.what.partition(': ')[2]}, {len(m.tensor)} rows {to} {m.peer}" for to, m in found
        ]
        text = "\n".join(dict.fromkeys(labels))
        self.marks.append(Mark(self.launch, EXCHANGE, text, "tab:orange"))
        return self

    def wait(self) -> None:
        """Nothing is under way."""

    def attend(self, launch: int, hop: Any) -> None:
        self.marks.append(
            Mark(
                launch,
                COMPUTE,
                f"attend to {len(hop.k)} {'keys' if launch else 'own keys'}",
                "tab:blue",
            )
        )
        self.launch = launch + 1


def forward(rank: int) -> list[Mark]:
    """What a rank does."""
    plan = plan_context(TOKENS, (rank, RANKS), hosts=HOSTS)
    recorder = Recorder()
    ring = P2PRingPass(recorder, plan, "forward")  # type: ignore[arg-type]
    k = torch.zeros(plan.local_tokens, 1, 8)
    ring.start(k, k.clone())
    ring.run(recorder.attend)
    return recorder.marks


def main(path: str) -> None:
    import matplotlib

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ringfa3"}
    figure = plot(
        [forward(rank) for rank in range(RANKS)], "launch, and the exchange concurrent with it"
    )
    figure.set_size_inches(12, 8)
    for text in figure.axes[0].texts:
        text.set_fontsize(9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
