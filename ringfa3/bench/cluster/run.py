"""Predicts all cases of a command, and writes and prints what it found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import Progress

from ringfa3.bench.cluster.mixes import Mix
from ringfa3.bench.cluster.options import Options
from ringfa3.bench.cluster.plot import draw
from ringfa3.bench.cluster.row import Row
from ringfa3.bench.cluster.strategies import Batch, loads
from ringfa3.bench.cluster.table import summary, table
from ringfa3.bench.cluster.time_model import Prediction, predict
from ringfa3.bench.common.report import new_folder

FILE, TABLE, PLOT = "cluster.json", "table.txt", "cluster.png"
WIDTH = 98  # of the table, if the terminal is not narrower


def run(options: Options) -> int:
    """Predict, print and write; the exit code. Raises BenchError, where the run cannot start."""
    folder = new_folder(options.out, Path("runs/bench/cluster"), FILE)
    cases = [(mix, world) for mix in options.mixes for world in options.gpus]
    rows: list[Row] = []
    console = Console(stderr=True, quiet=options.quiet)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("batches", total=len(cases) * options.seeds)
        for mix, world in cases:
            found: dict[str, list[Prediction]] = {}
            batches = []
            for seed in range(options.seeds):
                batches.append(_batch(options, mix, world, seed))
                for strategy, load in loads(batches[-1], _groups(options, world)).items():
                    prediction = predict(load, batches[-1].ideal, options.heads, options.rates)
                    found.setdefault(strategy, []).append(prediction)
                progress.advance(task)
            rows += [_row(options, mix, batches, name, all_) for name, all_ in found.items()]
    content = {"settings": settings(options), "rows": [asdict(row) for row in rows]}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
    with (folder / TABLE).open("w") as file:
        Console(file=file, width=WIDTH).print(table(rows, options))
    try:
        drawn = str(draw(rows, options, folder / PLOT))
    except ModuleNotFoundError as error:
        drawn = f"no plot: {error}; pip install 'ringfa3[bench]'"
    if not options.quiet:
        terminal = Console()
        terminal.print(table(rows, options), width=min(WIDTH, terminal.width))
        print(f"wrote {folder / FILE}, {folder / TABLE}, {drawn}")
    for line in summary(rows):
        print(line)
    return 0


def settings(options: Options) -> dict[str, object]:
    """What a result depends on, for the file."""
    return {
        "gpus_per_host": options.per_host,
        "heads": asdict(options.heads),
        "layers": options.layers,
        "rates": asdict(options.rates),
        "window": options.window,
        "seeds": options.seeds,
    }


def _groups(options: Options, world: int) -> list[int]:
    """Sizes of the static groups: those given, else powers of two that divide the world."""
    powers = [1 << n for n in range(world.bit_length())]
    return options.cp or [size for size in powers if world % size == 0]


def _batch(options: Options, mix: Mix, world: int, seed: int) -> Batch:
    per_host = min(options.per_host, world)
    return Batch(mix.draw(seed, world), world, per_host, options.heads, options.window)


def _row(
    options: Options, mix: Mix, batches: list[Batch], strategy: str, found: list[Prediction]
) -> Row:
    means = {
        f.name: mean(getattr(p, f.name) for p in found)
        for f in fields(Prediction)
        if f.name not in ("parts", "limit")
    }
    for name in ("ms", "ideal_ms", "nvlink_gb", "nic_gb"):
        means[name] *= options.layers
    parts = {
        part: [options.layers * mean(p.parts[part][i] for p in found) for i in range(2)]
        for part in found[0].parts
    }
    return Row(
        mix=mix.name,
        gpus=batches[0].world,
        strategy=strategy,
        tokens_per_gpu=mix.tokens,
        documents=mean(len(b.lengths) for b in batches),
        longest=max(int(b.lengths.max()) for b in batches),
        worst=max(p.step for p in found),
        parts=parts,
        limit=Counter(p.limit for p in found).most_common(1)[0][0],
        **means,
    )
