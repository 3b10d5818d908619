"""Errors of 8-bit attention on FlashAttention-3's outliers, design by design (its Table 3)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ringfa3.bench.common import machine
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.report import new_folder
from ringfa3.bench.common.scores import SCORES
from ringfa3.bench.fp8 import kernels
from ringfa3.bench.fp8.designs import DESIGNS, FIRST, attention

FILE = "errors.json"
CHUNK = 1 << 25  # scores that the reference holds at once: 256 MiB in float64


@dataclass(frozen=True)
class Options:
    """lengths: tokens of a sequence, each a case; causal: which masks; seeds: pooled; kernels: not
    the PyTorch fallback."""

    lengths: Sequence[int]
    head_dims: Sequence[int]
    causal: Sequence[bool]
    designs: Sequence[str]
    heads: int
    seeds: int
    scores: str
    dtype: str
    device: str
    kernels: bool
    out: Path | None
    quiet: bool


@dataclass
class Row:
    """Errors of one case, pooled over heads, rows and seeds.

    out   rms error of O of each design
    lse   rms error of LSE, in nats
    size  rms of O
    """

    tokens: int
    head_dim: int
    causal: bool
    out: dict[str, float] = field(default_factory=dict)
    lse: dict[str, float] = field(default_factory=dict)
    size: float = 0.0


def run(options: Options) -> int:
    """Measure, print and write; the exit code. Raises BenchError, where the run cannot start."""
    if min(options.lengths) < 1 or options.heads < 1 or options.seeds < 1:
        raise BenchError("--lengths, --heads and --seeds must be at least 1")
    device = machine.find_device(options.device)
    folder = new_folder(options.out, Path("runs/bench/fp8"), FILE)
    cases = [
        (tokens, d, causal)
        for d in options.head_dims
        for causal in options.causal
        for tokens in options.lengths
    ]
    console = Console(quiet=options.quiet)
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("errors", total=len(cases) * options.seeds)
        for tokens, d, causal in cases:
            row = Row(tokens, d, causal)
            for seed in range(options.seeds):
                _measure(row, options, device, seed)
                progress.advance(task)
            _finish(row, options.seeds)
            rows.append(row)
    console.print(_table(rows, options))
    content = {
        "settings": {k: v for k, v in asdict(options).items() if k not in ("out", "quiet")},
        "machine": machine.describe(device, []),
        "rows": [asdict(row) for row in rows],
    }
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
    print(summary(rows, options.designs))
    return 0


def summary(rows: Sequence[Row], designs: Sequence[str]) -> str:
    """How many times less each design's error is than the first's: the geometric mean of rows."""
    parts = []
    for name in designs:
        if name != FIRST and FIRST in designs:
            logs = [math.log(row.out[FIRST] / row.out[name]) for row in rows]
            parts.append(f"{name} {math.exp(sum(logs) / len(logs)):.2f}")
    return f"times less error than {FIRST}: " + ", ".join(parts or ["not measured"])


def _measure(row: Row, options: Options, device: torch.device, seed: int) -> None:
    """Adds the squared errors of one seed to the row."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (row.tokens, options.heads, row.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device) for _ in range(3))
    SCORES[options.scores](q, k, v, generator)
    q, k, v = (x.to(DTYPES[options.dtype]) for x in (q, k, v))
    exact = list(_exact(q, k, v, row.causal))
    row.size += sum(out.square().sum().item() for _, out, _ in exact) / q.numel()
    for name in options.designs:
        if options.kernels:
            out, lse = kernels.attention(name, q, k, v, row.causal)
        else:
            out, lse = attention(DESIGNS[name], q, k, v, row.causal)
        errors = [
            ((out[rows] - o).square().sum().item(), (lse[:, rows] - x).square().sum().item())
            for rows, o, x in exact
        ]
        row.out[name] = row.out.get(name, 0.0) + sum(a for a, _ in errors) / q.numel()
        row.lse[name] = row.lse.get(name, 0.0) + sum(b for _, b in errors) / lse.numel()


def _finish(row: Row, seeds: int) -> None:
    """Means of squares to rms."""
    for errors in (row.out, row.lse):
        for name, squares in errors.items():
            errors[name] = math.sqrt(squares / seeds)
    row.size = math.sqrt(row.size / seeds)


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows, their O (rows, h, d) and LSE (h, rows) in float64, q, k, v (t, h, d)."""
    t, h, d = q.shape
    step = max(1, CHUNK // (t * h))
    keys, values = k.double().permute(1, 2, 0), v.double().transpose(0, 1)
    for begin in range(0, t, step):
        rows = slice(begin, min(begin + step, t))
        s = q[rows].double().transpose(0, 1) @ keys * d**-0.5  # (h, rows, t)
        if causal:
            at = torch.arange(rows.start, rows.stop, device=q.device)
            s.masked_fill_(torch.arange(t, device=q.device) > at[:, None], -torch.inf)
        lse = s.logsumexp(-1)
        yield rows, (s.sub_(lse.unsqueeze(-1)).exp_() @ values).transpose(0, 1), lse


def _table(rows: Sequence[Row], options: Options) -> Table:
    table = Table(
        title=f"rms error of O, {options.scores}, {options.dtype}; (times less than {FIRST})",
        caption=f"{options.heads} heads x {options.seeds} seeds, against float64; by the "
        + ("kernels" if options.kernels else "PyTorch fallback"),
        caption_style="dim",
    )
    for column in ("d", "tokens", "mask", "design", "error", "", "of O", "LSE, nats"):
        table.add_column(column, justify="left" if column in ("mask", "design") else "right")
    for row in rows:
        for i, name in enumerate(options.designs):
            mask = "causal" if row.causal else "full"
            case = (str(row.head_dim), str(row.tokens), mask) if i == 0 else ("", "", "")
            first = row.out.get(FIRST)
            ratio = f"({first / row.out[name]:.2f})" if first and name != FIRST else ""
            figures = f"{row.out[name]:.2e}", ratio, f"{row.out[name] / row.size:.2%}"
            table.add_row(*case, name, *figures, f"{row.lse[name]:.4f}")
        table.add_section()
    return table
