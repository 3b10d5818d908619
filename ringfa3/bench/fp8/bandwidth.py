"""Bytes per second of the kernels that make 8-bit operands, over those of a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ringfa3.bench.common.machine import DTYPES, BenchError, find_device
from ringfa3.bench.common.timing import Call, CudaStopwatch, median
from ringfa3.build.units import Unit
from ringfa3.kernels import dispatch, quantise
from ringfa3.planning.sharding import whole_sequences
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.key_tiles import KeyTiles

TOKENS = 16384
ROW = 8192  # numbers of all heads of a token: a tensor is beyond the L2 cache
COPIED = 1 << 29  # bytes
SAMPLES = 20
HEAD_START_S = 1e-3  # in which the host enqueues a call


def run(head_dims: Sequence[int], dtype: str, quiet: bool) -> int:
    """Measure and print; the exit code. Raises BenchError where there are no kernels."""
    device = find_device("cuda")
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * COPIED / seconds(partial(target.copy_, source))
    table = Table(title=f"TB/s, {dtype}, {TOKENS} tokens; (over those of a copy)")
    for column in ("d", "kernel", "TB/s", ""):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    shares = []
    for head_dim in head_dims:
        q, k, v = (
            torch.randn(TOKENS, ROW // head_dim, head_dim, device=device).to(DTYPES[dtype])
            for _ in range(3)
        )
        unit = dispatch.unit_for("quantise", q)
        if unit is None:
            raise BenchError(f"no kernel quantises on {torch.cuda.get_device_name(device)}")
        for name, moved, call in kernels(unit, q, k, v):
            rate = moved / seconds(call)
            shares.append(rate / copy)
            table.add_row(str(head_dim), name, f"{rate / 1e12:.2f}", f"({rate / copy:.2f})")
        table.add_section()
    Console(quiet=quiet).print(table)
    print(f"of a copy's {copy / 1e12:.2f} TB/s: {min(shares):.2f} to {max(shares):.2f}")
    return 0


def kernels(
    unit: Unit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[str, int, Call]]:
    """(name, bytes that it must read and write, call) of each kernel."""
    tokens, heads, _ = k.shape
    numbers = k.numel()
    tiles = KeyTiles(whole_sequences(np.array([tokens], np.int64)))
    statistics = partial(quantise.channel_statistics, unit, k, v, FORMATS["fp8"])
    yield "statistics", 4 * numbers, statistics
    for precision, formats in FORMATS.items():
        _, centres = quantise.channel_statistics(unit, k, v, formats)
        q_bytes = 3 * numbers + 8 * tokens * heads  # with a scale and an addend to LSE for each row
        yield f"{precision} Q", q_bytes, partial(quantise.quantise_q, unit, q, centres, formats)
        names, tensors = (f"{precision} K", 1) if formats.v is None else (f"{precision} K, V", 2)
        call = partial(quantise.quantise_kv, unit, k, v, tiles, centres, formats)
        yield names, 3 * numbers * tensors, call


def seconds(call: Call) -> float:
    """Seconds of the GPU for one call: the median of ``SAMPLES``, after three that load kernels."""
    stopwatch = CudaStopwatch()
    readings = [stopwatch.sample(call, 1, HEAD_START_S) for _ in range(SAMPLES + 3)]
    stopwatch.wait()
    return median([reading() for reading in readings[3:]])
