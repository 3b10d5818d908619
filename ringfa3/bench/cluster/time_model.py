"""Predicted seconds of attention in a step: forward and backward of one layer on all ranks.

Each direction takes as long as the slowest of three: the work of a rank, what a GPU moves over
NVLink, and what it moves between hosts. They overlap fully. All-to-alls come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ringfa3.bench.cluster.rates import Rates
from ringfa3.planning.placement.costs import TILE

Floats = npt.NDArray[np.float64]

COMPUTE, NVLINK, NIC, ALL_TO_ALL = "compute", "NVLink", "NIC", "all-to-all"


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer. K/V are in 16 bits, dK/dV that move are float32."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Of a row of K and V."""
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def grad_bytes(self) -> int:
        """Of a row of dK and dV."""
        return 2 * self.kv_heads * self.head_dim * 4

    @property
    def row_bytes(self) -> int:
        """Of a row of both."""
        return self.kv_bytes + self.grad_bytes

    def flops(self, blocks: float) -> tuple[float, float]:
        """Of so many blocks of TILE x TILE scores of all heads, forward and backward."""
        products = blocks * TILE * TILE * self.heads * self.head_dim
        return 4 * products, 10 * products


@dataclass(frozen=True)
class Traffic:
    """What each rank moves over its links of one type in a forward, (world,) each.

    A backward moves as many rows of K/V, and of float32 dK/dV.

    received, sent  rows of K/V
    messages        to or from a rank, whichever are more
    rings           whether dK/dV follow K/V around a ring; else they go back the other way
    """

    received: Floats
    sent: Floats
    messages: Floats
    rings: bool = False

    @classmethod
    def none(cls, world: int) -> Traffic:
        return cls(*np.zeros((3, world)))

    def seconds(self, rate: float, message: float, heads: Heads) -> tuple[float, float]:
        """Of the rank that takes longest: a forward and a backward."""
        kv, grad, cost = heads.kv_bytes, heads.grad_bytes, self.messages * message
        forward = np.maximum(self.received, self.sent) * kv
        arriving, leaving = self._grads
        inward, outward = self.received * kv + arriving * grad, self.sent * kv + leaving * grad
        backward = np.maximum(inward, outward)
        times = forward / rate + cost, backward / rate + 2 * cost
        return float(times[0].max()), float(times[1].max())

    def received_bytes(self, heads: Heads) -> Floats:
        """(world,) of a forward and a backward together."""
        moved: Floats = 2 * self.received * heads.kv_bytes + self._grads[0] * heads.grad_bytes
        return moved

    @property
    def _grads(self) -> tuple[Floats, Floats]:
        """Rows of dK/dV that each rank receives and sends."""
        ways = self.received, self.sent
        return ways if self.rings else ways[::-1]


@dataclass(frozen=True)
class Load:
    """What a strategy asks of each rank for one layer, (world,) each.

    blocks       of TILE x TILE scores
    tokens       of its own
    nvlink, nic  what it moves inside its host and between hosts
    held         bytes of buffers in a backward, for K/V and dK/dV other than its own
    exchanged    bytes of a forward's all-to-alls that it sends over NVLink, and of a backward's
    """

    blocks: Floats
    tokens: Floats
    nvlink: Traffic
    nic: Traffic
    held: Floats
    exchanged: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Prediction:
    """Of one batch and one layer. Times are in milliseconds, bytes in 1e9, lists by direction.

    step, forward, backward  over the ideal: the work of uncut documents, equal on all ranks, and no
                             communication
    ms, ideal_ms   of a step: forward and backward together
    parts          of a forward and a backward: the milliseconds of each part
    limit          the part that takes longest
    work, tokens   of the fullest rank over the mean
    inflation      work of all ranks over that of uncut documents
    nvlink_gb, nic_gb  what a GPU receives in a step, on average
    held_gb        buffers for K/V and dK/dV other than a rank's own, on the rank with most
    """

    step: float
    forward: float
    backward: float
    ms: float
    ideal_ms: float
    parts: dict[str, list[float]] = field(repr=False)
    limit: str
    work: float
    tokens: float
    inflation: float
    nvlink_gb: float
    nic_gb: float
    held_gb: float


def predict(load: Load, ideal: float, heads: Heads, rates: Rates) -> Prediction:
    """ideal: blocks of a rank if documents were uncut and work were equal."""
    speeds = rates.forward, rates.backward
    most, least = heads.flops(float(load.blocks.max())), heads.flops(ideal)
    compute, wanted = (
        [1e3 * flops / speed for flops, speed in zip(x, speeds, strict=True)] for x in (most, least)
    )
    nvlink = load.nvlink.seconds(rates.nvlink, rates.message, heads)
    nic = load.nic.seconds(rates.nic, rates.message, heads)
    parts = {
        COMPUTE: compute,
        NVLINK: [1e3 * x for x in nvlink],
        NIC: [1e3 * x for x in nic],
        ALL_TO_ALL: [1e3 * x / rates.nvlink for x in load.exchanged],
    }
    overlapped = [max(parts[p][i] for p in (COMPUTE, NVLINK, NIC)) for i in range(2)]
    times = [t + x for t, x in zip(overlapped, parts[ALL_TO_ALL], strict=True)]
    over_links = [float(x.received_bytes(heads).mean()) for x in (load.nvlink, load.nic)]
    return Prediction(
        step=sum(times) / sum(wanted),
        forward=times[0] / wanted[0],
        backward=times[1] / wanted[1],
        ms=sum(times),
        ideal_ms=sum(wanted),
        parts=parts,
        limit=max(parts, key=lambda part: sum(parts[part])),
        work=float(load.blocks.max() / load.blocks.mean()),
        tokens=float(load.tokens.max() / load.tokens.mean()),
        inflation=float(load.blocks.mean() / ideal),
        nvlink_gb=(over_links[0] + sum(load.exchanged)) / 1e9,
        nic_gb=over_links[1] / 1e9,
        held_gb=float(load.held.max()) / 1e9,
    )
