"""Predicted seconds of attention in a step: forward and backward of one layer on all ranks.

Each direction takes as long as the slowest of four: the work of a rank, what its host needs to
start it, what a GPU moves over NVLink, and what it moves between hosts. They overlap fully.
All-to-alls come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringfa3.bench.cluster.rates import Rates
from ringfa3.planning.placement.costs import TILE

Floats = npt.NDArray[np.float64]

COMPUTE, HOST, NVLINK, NIC = "compute", "host", "NVLink", "NIC"
ALL_TO_ALL = "all-to-all"
DIRECTIONS = range(2)  # forward and backward


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


class Work(NamedTuple):
    """Of a rank: blocks of TILE x TILE scores, and tiles of TILE rows, both of one query head."""

    blocks: float
    tiles: float


class Launches(NamedTuple):
    """Launches of a call, and the tiles of each rank.

    number  of launches on the rank with most
    tiles   (world,) tiles of TILE rows of queries, in a backward of keys, once for each launch that
            attends with them
    """

    number: int
    tiles: Floats


@dataclass(frozen=True)
class Load:
    """What a strategy asks of each rank for one layer, (world,) each.

    blocks       of TILE x TILE scores
    tokens       of its own
    launches     of a forward and a backward
    nvlink, nic  what it moves inside its host and between hosts
    held         bytes of buffers in a backward, for K/V and dK/dV other than its own
    exchanged    bytes of a forward's all-to-alls that it sends over NVLink, and of a backward's
    """

    blocks: Floats
    tokens: Floats
    launches: tuple[Launches, Launches]
    nvlink: Traffic
    nic: Traffic
    held: Floats
    exchanged: tuple[float, float] = (0.0, 0.0)

    def on_gpu(self, heads: Heads, direction: int) -> tuple[float, float, float, float]:
        """What `Rates` price of a GPU, on the rank with most of each: calls, launches after the
        first, tiles of all query heads, and FLOPs."""
        number, tiles = self.launches[direction]
        flops = heads.flops(float(self.blocks.max()))[direction]
        return 1, number - 1, heads.heads * float(tiles.max()), flops

    def on_host(self, direction: int) -> tuple[float, float, float]:
        """The same of a host: calls, launches after the first, and messages."""
        messages = float((self.nvlink.messages + self.nic.messages).max())
        return 1, self.launches[direction].number - 1, (1 + direction) * messages


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


def predict(load: Load, ideal: Work, heads: Heads, rates: Rates) -> Prediction:
    """ideal: of a rank if documents were uncut and work were equal."""
    parts = milliseconds(load, heads, rates)
    times = overlapped(parts)
    flops = heads.flops(ideal.blocks)
    wanted = [
        1e3 * _gpu_seconds((1, 0, heads.heads * ideal.tiles, flops[i]), rates, i)
        for i in DIRECTIONS
    ]
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
        inflation=float(load.blocks.mean() / ideal.blocks),
        nvlink_gb=(over_links[0] + sum(load.exchanged)) / 1e9,
        nic_gb=over_links[1] / 1e9,
        held_gb=float(load.held.max()) / 1e9,
    )


def milliseconds(load: Load, heads: Heads, rates: Rates) -> dict[str, list[float]]:
    """By part: of a forward and of a backward."""
    links = (
        load.nvlink.seconds(rates.nvlink, rates.message, heads),
        load.nic.seconds(rates.nic, rates.message, heads),
    )
    parts = {
        COMPUTE: [_gpu_seconds(load.on_gpu(heads, i), rates, i) for i in DIRECTIONS],
        HOST: [_host_seconds(load.on_host(i), rates, i) for i in DIRECTIONS],
        NVLINK: links[0],
        NIC: links[1],
        ALL_TO_ALL: [x / rates.nvlink for x in load.exchanged],
    }
    return {part: [1e3 * x for x in seconds] for part, seconds in parts.items()}


def overlapped(parts: dict[str, list[float]]) -> list[float]:
    """Milliseconds of a forward and of a backward, from `milliseconds`."""
    longest = (max(parts[p][i] for p in (COMPUTE, HOST, NVLINK, NIC)) for i in DIRECTIONS)
    return [t + x for t, x in zip(longest, parts[ALL_TO_ALL], strict=True)]


def _gpu_seconds(counts: tuple[float, float, float, float], rates: Rates, direction: int) -> float:
    """counts: as in `Load.on_gpu`."""
    x, speed = rates.overheads[direction], (rates.forward, rates.backward)[direction]
    calls, launches, tiles, flops = counts
    return calls * x.call + launches * x.launch + tiles * x.tile + flops / speed


def _host_seconds(counts: tuple[float, float, float], rates: Rates, direction: int) -> float:
    """counts: as in `Load.on_host`."""
    x = rates.overheads[direction]
    calls, launches, messages = counts
    return calls * x.host + launches * x.host_launch + messages * x.host_message
