"""What a run has measured, as JSON and back, and its summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ringfa3.bench.common.cases import Case

FORMAT = 1
FILE = "results.json"
ALONE = "itself"  # the other of a match that only shows the speed of the first, and the noise


class ResultsError(ValueError):
    """A file that is no result of this benchmark, or of another version of it."""


@dataclass
class Match:
    """A row's first contestant (A) against another (B). `stopped` says why there are no figures.

    seconds       per call, pair by pair, of A and of B
    tflops        medians of A and of B
    ratio         median of the paired B / A: above 1, A is faster; `interval` is its 95% interval
    calls         in each timed sample
    host_seconds  to start one call; `host_bound` where that is longer than the device takes
    errors        of B against float64; `differences` between A and B
    """

    stopped: str | None = None
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    tflops: tuple[float, float] | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    calls: int = 0
    host_seconds: tuple[float, float] | None = None
    host_bound: tuple[bool, bool] = (False, False)
    errors: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """One case and direction. `stopped` says why nothing of it was timed."""

    set: str
    label: str
    mask: str
    window: tuple[int, int]
    lengths: list[int]
    packed: bool
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    direction: str
    beside: str | None
    pairs: int  # visible (query, key) pairs of one head
    flops: int
    lineup: list[str]  # who takes part; the first is held against each of the others
    stopped: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    matches: dict[str, Match] = field(default_factory=dict)
    clocks: dict[str, str] = field(default_factory=dict)  # of the GPU right after the row
    keys: list[int] | None = None  # of each sequence, where they are not its tokens

    @classmethod
    def of(cls, case: Case, direction: str, dtype: str, lineup: Sequence[str]) -> Row:
        """The row of a case, nothing measured yet."""
        named = {f.name: getattr(case, f.name) for f in fields(case)} | {
            "lengths": list(case.lengths),
            "keys": case.keys and list(case.keys),
        }
        flops = case.flops(direction)
        return cls(
            **named,
            mask=case.mask,
            dtype=dtype,
            direction=direction,
            pairs=case.pairs,
            flops=flops,
            lineup=list(lineup),
        )

    @property
    def first(self) -> str:
        return self.lineup[0]

    @property
    def series(self) -> str:
        """What it is summed up with."""
        return self.set

    @property
    def head(self) -> Match | None:
        """The first match with figures: whose figure of A stands for A."""
        return next((m for m in self.matches.values() if m.tflops), None)

    def tflops(self, name: str) -> float | None:
        """Of one contestant, A's from the first match with figures."""
        if name == self.first:
            return self.head.tflops[0] if self.head and self.head.tflops else None
        match = self.matches.get(name)
        return match.tflops[1] if match and match.tflops else None

    def why_not(self, name: str) -> str | None:
        """Why a contestant has no figure."""
        match = self.matches.get(name)
        return self.stopped or (match.stopped if match else None)


@dataclass
class RingRow(Row):
    """One case and direction on `world` ranks; FLOPs and TFLOP/s are those of one GPU.

    yardsticks    of the line-up: one GPU without communication, on as many FLOPs
    engine        what ran RingFA3's tiles: "kernels" or "executor"
    transport     what moved its K/V, None for one rank
    gathered      bytes of all K/V that the rank with most gathers for its forward in one launch,
                  part of `memory`; None: its forward goes hop by hop
    alone         errors of RingFA3 on one device, on the same tensors; `errors` are the ring's
    memory        of one forward and backward, bytes by the device beyond the inputs, of the rank
                  with most; or why there is no figure. On backward rows
    kept          of those bytes, what is not given back after the call
    rings         of a block that is checkpointed: [forward, backward] ones that a step runs, by
                  contestant. Such rows have the times of a step, whose `memory` is that of tensors
                  by PyTorch, and `kept` what is held between its forward and its backward
    host          seconds of the host to start a call, on each rank, by whose and what call
    imbalance     most pairs of a rank over the mean
    fullness      real rows of forward tiles, weighted by the keys that they visit
    kv_bytes      of K/V that a forward moves between ranks, by the plan; `kv_share` of what moving
                  all K/V to every rank would take
    """

    world: int = 1
    yardsticks: list[str] = field(default_factory=list)
    engine: str = ""
    transport: str | None = None
    gathered: int | None = None
    alone: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int | str] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    rings: dict[str, list[int]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    imbalance: float = 1.0
    fullness: float = 1.0
    kv_bytes: int = 0
    kv_share: float = 0.0

    @property
    def series(self) -> str:
        return f"{self.set} on {self.world} GPU{'s' * (self.world > 1)}"

    @property
    def of_yardstick(self) -> tuple[str, Match] | None:
        """The match with the faster of the yardsticks, whose ratio is the ring's share of it."""
        found = [(y, m) for y in self.yardsticks if (m := self.matches.get(y)) and m.ratio]
        return min(found, key=lambda pair: pair[1].ratio or 0.0, default=None)

    @property
    def error_growth(self) -> dict[str, float]:
        """By output, the ring's error over that of one device, against float64."""
        return self.growth(self.errors)

    def milliseconds(self, name: str) -> float:
        """The median of one contestant's calls, A's from the first match."""
        first = next(iter(self.matches.values()))
        seconds = first.seconds[0] if name == self.first else self.matches[name].seconds[1]
        return 1e3 * float(np.median(seconds))

    def growth(self, errors: dict[str, float]) -> dict[str, float]:
        return {n: e / self.alone[n] for n, e in errors.items() if self.alone.get(n)}


KINDS: dict[str, type[Row]] = {"attention": Row, "ring": RingRow}


@dataclass
class Results:
    """A run: its settings, what it ran on, and its rows.

    benchmark  of `KINDS`
    smoke      on the CPU, by the executor: no figure of it says anything about kernels
    complete   whether the run came to its end
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    smoke: bool
    left_out: list[str]
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    benchmark: str = "attention"

    def save(self, folder: Path) -> Path:
        """Write `results.json`, replacing it at once."""
        content = {"format": FORMAT, **asdict(self)}
        content["summary"] = [asdict(s) for s in summaries(self)]
        path = folder / FILE
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(fresh, path)
        return path

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises ResultsError, OSError."""
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ResultsError(f"{path} is no JSON: {error}") from None
        if not isinstance(content, dict) or content.get("benchmark") not in KINDS:
            raise ResultsError(f"{path} is no result of these benchmarks")
        if content.get("format") != FORMAT:
            raise ResultsError(f"{path} has format {content.get('format')}, this reads {FORMAT}")
        own = {f.name: content[f.name] for f in fields(cls)}
        own["rows"] = [_row(KINDS[own["benchmark"]], row) for row in content["rows"]]
        return cls(**own)


def _row(kind: type[Row], content: dict[str, Any]) -> Row:
    matches = {name: Match(**_tuples(m)) for name, m in content["matches"].items()}
    return kind(**{**_tuples(content), "matches": matches})


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples: the fields that are of two."""
    two = ("window", "seconds", "tflops", "interval", "host_seconds", "host_bound")
    return {k: tuple(v) if k in two and v is not None else v for k, v in content.items()}


@dataclass(frozen=True)
class Summary:
    """A direction's rows of one series and head dim against one peer."""

    direction: str
    set: str
    head_dim: int
    peer: str
    rows: int
    geometric_mean: float  # of the ratios, above 1: A is faster
    worst: float
    worst_row: str


def summaries(results: Results) -> list[Summary]:
    """Of every direction, set, head dim and peer with figures; yardsticks beside masks left out."""
    return list(_summaries([row for row in results.rows if row.beside is None]))


def _summaries(rows: list[Row]) -> Iterator[Summary]:
    keys = dict.fromkeys((r.direction, r.series, r.head_dim) for r in rows)
    for direction, group, d in keys:
        here = [r for r in rows if (r.direction, r.series, r.head_dim) == (direction, group, d)]
        for peer in here[0].lineup[1:]:
            ratios = {
                f"{r.mask} {r.label}": ratio
                for r in here
                if peer in r.matches and (ratio := r.matches[peer].ratio) is not None
            }
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                mean = geometric_mean(ratios.values())
                yield Summary(direction, group, d, peer, len(ratios), mean, ratios[worst], worst)


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def one_line(results: Results, peer: str) -> str:
    """Geometric means against `peer` by set and head dim, and the worst row."""
    found = [s for s in summaries(results) if s.peer == peer]
    if not found:
        return f"no row against {peer} was measured"
    first = next(r.first for r in results.rows if peer in r.lineup)
    means = ", ".join(f"{s.direction} {s.set} d{s.head_dim} {s.geometric_mean:.3f}" for s in found)
    worst = min(found, key=lambda s: s.worst)
    where = f"{worst.direction} d{worst.head_dim} {worst.worst_row}"
    stopped = sum(1 for r in results.rows if r.stopped)
    rest = f"; {stopped} rows without figures" if stopped else ""
    label = "SMOKE RUN, no kernel figures: " if results.smoke else ""
    means = f"{first} / {peer}, geometric means: {means}"
    return f"{label}{means}; worst {worst.worst:.3f} ({where}){rest}"
