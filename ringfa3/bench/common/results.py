"""What a run has measured: its rows, as JSON and back, and their summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ringfa3.bench.common.cases import Case
from ringfa3.bench.common.implementations import FA3, FA4

R = TypeVar("R", bound="Row")
FORMAT = 1
FILE = "results.json"
INPUTS = {"standard normal": "N(0,1)"}  # distributions by their name in `Results.settings`
FASTER = f"the faster of {FA3} and {FA4}"  # a peer of ratios and summaries, row by row
PLAIN = "PyTorch"  # plain attention in the inputs' dtype; a key of `Row.rms`
PLAIN_FLOAT32 = "PyTorch, float32 scores"  # of the forward alone
SELF = "itself"  # a row's comparison where no other implementation has figures
# Attributes of `Row` and `RingRow` that have another key in files of format 1.
KEYS = {
    "implementations": "lineup",
    "comparisons": "matches",
    "equal_flops_of": "beside",
    "baselines": "yardsticks",
    "single_gpu_errors": "alone",
    "retained": "kept",
    "tile_occupancy": "fullness",
}


class ResultsError(ValueError):
    """The file is not a result of these benchmarks, or has another format."""


@dataclass
class Comparison:
    """A row's first implementation (A) against another (B).

    stopped       why there are no figures: "refused", "wrong", "failed" or "out of memory", and
                  a reason
    seconds       per call, pair by pair, of A and of B
    tflops        medians of A and of B
    ratio         median of the paired times B / A: above 1, A is faster
    interval      the 95% interval of `ratio`
    calls         in each timed sample
    host_seconds  to start one call of A and of B
    host_bound    whether that is longer than the device takes
    errors        max|B - float64|, by output
    differences   max|A - B|, by output
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
    """One case in one direction.

    pairs            visible (query, key) pairs of one head
    implementations  names; the first is compared with each of the others
    stopped          why nothing was timed, as in `Comparison`
    errors           max|result - float64| of the first implementation, by output
    allowed          the bound of `errors`
    clocks           of the GPU right after the row, from nvidia-smi
    keys             of each sequence, where they are not its tokens
    scores           as in `Case`
    rms              rms error against float64, pooled over seeds, of each implementation and of
                     `PLAIN` and `PLAIN_FLOAT32`, by output
    """

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
    equal_flops_of: str | None
    pairs: int
    flops: int
    implementations: list[str]
    stopped: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    clocks: dict[str, str] = field(default_factory=dict)
    keys: list[int] | None = None
    scores: str | None = None
    rms: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls: type[R], case: Case, direction: str, dtype: str, implementations: Sequence[str]
    ) -> R:
        """The row of a case, without measurements."""
        in_label = "spans", "mix", "v_dim"
        names = [f.name for f in fields(case) if f.name not in in_label]
        of_case = {name: getattr(case, name) for name in names} | {
            "lengths": list(case.lengths),
            "keys": case.keys and list(case.keys),
        }
        return cls(
            **of_case,
            mask=case.mask,
            dtype=dtype,
            direction=direction,
            pairs=case.pairs,
            flops=case.flops(direction),
            implementations=list(implementations),
        )

    @property
    def first(self) -> str:
        return self.implementations[0]

    @property
    def series(self) -> str:
        """The rows of one series are summarised together."""
        return self.set

    @property
    def first_timed(self) -> Comparison | None:
        """The first comparison with figures; the reported speed of A is the one measured here."""
        return next((c for c in self.comparisons.values() if c.tflops), None)

    def tflops(self, name: str) -> float | None:
        """The median of one implementation; A's from `first_timed`."""
        if name == self.first:
            timed = self.first_timed
            return timed.tflops[0] if timed and timed.tflops else None
        comparison = self.comparisons.get(name)
        return comparison.tflops[1] if comparison and comparison.tflops else None

    @property
    def peers(self) -> list[str]:
        """The others; first `FASTER`, where both FlashAttentions are among them."""
        return [FASTER] * (len(self._flash_attentions) == 2) + self.implementations[1:]

    @property
    def _flash_attentions(self) -> list[str]:
        """FlashAttention-3 and 4, deterministic or not."""
        return [name for name in self.implementations[1:] if name.split()[0] in (FA3, FA4)]

    def comparison(self, peer: str) -> Comparison | None:
        """With one of `peers`; `FASTER` is the only one with figures where the other has none."""
        if peer != FASTER:
            return self.comparisons.get(peer)
        names = self._flash_attentions if FASTER in self.peers else []
        found = [self.comparisons.get(name) for name in names]
        return min((c for c in found if c and c.ratio), key=lambda c: c.ratio or 0.0, default=None)

    @property
    def untimed(self) -> bool:
        """Whether the row has errors alone."""
        return bool(self.rms) and self.first_timed is None

    def error_ratios(self, name: str) -> dict[str, float]:
        """By output, the first implementation's rms error over that of `name`; NaN where that is
        not finite."""
        theirs = self.rms.get(name, {})
        return {
            output: _ratio(error, theirs[output])
            for output, error in self.rms.get(self.first, {}).items()
            if output in theirs
        }

    def stop_reason(self, name: str) -> str | None:
        """Why an implementation has no figure."""
        comparison = self.comparisons.get(name)
        return self.stopped or (comparison.stopped if comparison else None)


@dataclass
class RingRow(Row):
    """One case in one direction on `world` ranks; FLOPs and TFLOP/s are those of one GPU.

    baselines          of the implementations: one GPU without communication on equal FLOPs
    engine             what ran RingFA3's tiles: "kernels" or "executor"
    transport          of RingFA3's K/V; None for one rank
    gathered           bytes of K/V that the forward gathers for one launch, on the rank with most,
                       counted in `memory` too; None: the forward runs hop by hop
    single_gpu_errors  of RingFA3 on one GPU on the same tensors; `errors` are the ring's
    memory             peak bytes of a forward and backward beyond the inputs, on the rank with
                       most, as the device counts them; or why there is no figure. Backward rows
                       only. Of a checkpointed block: of tensors, as PyTorch counts them
    retained           of those bytes, what remains allocated after the call; of a checkpointed
                       block: what is allocated between its forward and its backward
    rings              of a checkpointed block: [forward, backward] ring calls of a step
    host               seconds of the host to start a call, by rank, for each kind of call
    imbalance          visible pairs of the rank with most over the mean
    tile_occupancy     real rows of forward tiles over all, weighted by the keys that they visit
    kv_bytes           of K/V that a forward moves between ranks, by the plan
    kv_share           `kv_bytes` over what an all-gather of K/V moves
    """

    world: int = 1
    baselines: list[str] = field(default_factory=list)
    engine: str = ""
    transport: str | None = None
    gathered: int | None = None
    single_gpu_errors: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int | str] = field(default_factory=dict)
    retained: dict[str, int] = field(default_factory=dict)
    rings: dict[str, list[int]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    imbalance: float = 1.0
    tile_occupancy: float = 1.0
    kv_bytes: int = 0
    kv_share: float = 0.0

    @property
    def series(self) -> str:
        return f"{self.set} on {self.world} GPU{'s' * (self.world > 1)}"

    @property
    def fastest_baseline(self) -> tuple[str, Comparison] | None:
        """The faster baseline; the ratio of its comparison is the ring's share of its speed."""
        timed = [(b, c) for b in self.baselines if (c := self.comparisons.get(b)) and c.ratio]
        return min(timed, key=lambda pair: pair[1].ratio or 0.0, default=None)

    @property
    def error_growth(self) -> dict[str, float]:
        """By output, the ring's error over that of one GPU, both against float64."""
        return self.growth(self.errors)

    def milliseconds(self, name: str) -> float:
        """The median of one implementation's calls; A's from the first comparison."""
        first = next(iter(self.comparisons.values()))
        seconds = first.seconds[0] if name == self.first else self.comparisons[name].seconds[1]
        return 1e3 * float(np.median(seconds))

    def growth(self, errors: dict[str, float]) -> dict[str, float]:
        """`errors` over those of one GPU, by output."""
        single = self.single_gpu_errors
        return {name: error / single[name] for name, error in errors.items() if single.get(name)}


ROW_TYPES: dict[str, type[Row]] = {"attention": Row, "ring": RingRow}


@dataclass
class Results:
    """A run: its settings, its machine, and its rows.

    smoke      True: on the CPU, by the PyTorch fallback; no figure applies to a kernel
    left_out   what was not measured, and why
    complete   whether the run reached its end
    benchmark  a key of `ROW_TYPES`
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    smoke: bool
    left_out: list[str]
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    benchmark: str = "attention"

    @property
    def inputs(self) -> str:
        """The distribution of q, k, v and dout."""
        name = str(self.settings.get("inputs", "unknown"))
        return INPUTS.get(name, name)

    def save(self, folder: Path) -> Path:
        """Write `results.json`; an earlier one is replaced atomically."""
        content = {"format": FORMAT, **asdict(self)}
        content["rows"] = [
            {KEYS.get(name, name): value for name, value in row.items()} for row in content["rows"]
        ]
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
            raise ResultsError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("benchmark") not in ROW_TYPES:
            raise ResultsError(f"{path} is not a result of these benchmarks")
        if content.get("format") != FORMAT:
            raise ResultsError(f"{path} has format {content.get('format')}, this reads {FORMAT}")
        own = {f.name: content[f.name] for f in fields(cls)}
        own["rows"] = [_row(ROW_TYPES[own["benchmark"]], row) for row in content["rows"]]
        return cls(**own)


def _row(row_type: type[Row], content: dict[str, Any]) -> Row:
    names = {key: name for name, key in KEYS.items()}
    own = {names.get(key, key): value for key, value in _tuples(content).items()}
    comparisons = {name: Comparison(**_tuples(c)) for name, c in own["comparisons"].items()}
    return row_type(**{**own, "comparisons": comparisons})


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    """Lists of two as tuples, which JSON does not have."""
    two = ("window", "seconds", "tflops", "interval", "host_seconds", "host_bound")
    return {k: tuple(v) if k in two and v is not None else v for k, v in content.items()}


@dataclass(frozen=True)
class Summary:
    """All rows of one direction, series and head dim against one peer.

    geometric_mean  of the ratios; above 1, A is faster
    """

    direction: str
    set: str
    head_dim: int
    peer: str
    rows: int
    geometric_mean: float
    worst: float
    worst_row: str


def summaries(results: Results) -> list[Summary]:
    """By direction, series, head dim and peer; without the equal-FLOP sequences of masks."""
    return list(_summaries([row for row in results.rows if row.equal_flops_of is None]))


def _summaries(rows: list[Row]) -> Iterator[Summary]:
    keys = dict.fromkeys((r.direction, r.series, r.head_dim) for r in rows)
    for direction, series, d in keys:
        here = [r for r in rows if (r.direction, r.series, r.head_dim) == (direction, series, d)]
        for peer in here[0].peers:
            ratios = {
                f"{r.mask} {r.label}": c.ratio
                for r in here
                if (c := r.comparison(peer)) is not None and c.ratio is not None
            }
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                mean = geometric_mean(ratios.values())
                yield Summary(direction, series, d, peer, len(ratios), mean, ratios[worst], worst)


def _ratio(error: float, other: float) -> float:
    if not np.isfinite(other):
        return np.nan
    if not np.isfinite(error):
        return np.inf
    return error / other if other else np.inf if error else 1.0


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def summary_line(results: Results, peer: str) -> str:
    """Geometric means against `peer` by set and head dim, and the worst row."""
    found = [s for s in summaries(results) if s.peer == peer]
    if not found:
        return f"no row against {peer} was measured"
    first = next(r.first for r in results.rows if peer in r.peers)
    means = ", ".join(f"{s.direction} {s.set} d{s.head_dim} {s.geometric_mean:.3f}" for s in found)
    worst = min(found, key=lambda s: s.worst)
    where = f"{worst.direction} d{worst.head_dim} {worst.worst_row}"
    stopped = sum(1 for r in results.rows if r.stopped)
    rest = f"; {stopped} rows without figures" if stopped else ""
    label = "SMOKE RUN, no kernel figures: " if results.smoke else ""
    means = f"{first} / {peer}, geometric means: {means}"
    return f"{label}{means}; worst {worst.worst:.3f} ({where}){rest}"
