"""Compares training runs of several kinds: `compare_runs.py 'bf16=runs/bf16-*' fp8=... --out DIR`.

The kind of the first argument is the one that the others are compared with; `*` is expanded. All
runs must have the same held-out text. Writes to DIR
`runs.json`, the settings that all runs share and what each run left, with means over 10 steps, and
`runs.png`, training loss and gradient norm. Prints a Markdown table: held-out nats per byte of each
run, their mean, its difference from that of the first kind, and the spread, largest less smallest.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

EVERY = 10  # steps in a mean
PRIVATE = ("run.dir", "run.name", "sweep.dir", "data.cache_dir", "data.path")  # places, names


def read_run(folder: Path) -> dict[str, Any]:
    """The settings, held-out loss and thinned metrics of a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    parts = [lines[at : at + EVERY] for at in range(0, len(lines), EVERY)]
    keys = ("loss", "grad_norm")
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "steps": summary["steps"],
        "skipped": summary["skipped"],
        "held_out_bytes": summary["held_out_bytes"],
        "nats_per_byte": summary["nats_per_byte"],
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines),
        "last_step": [part[-1]["step"] for part in parts],
        **{key: [mean([line[key] for line in part]) for part in parts] for key in keys},
    }


def mean(values: list[float | None]) -> float | None:
    """Of the steps that have a value: one that is not finite is None in the metrics."""
    found = [value for value in values if value is not None]
    return round(statistics.mean(found), 5) if found else None


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `group.key`, without those that only say where files lie."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif prefix + key not in PRIVATE:
            found[prefix + key] = value
    return found


def shared_settings(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What all runs have; each run keeps the rest."""
    configs = [flat(run["config"]) for run in runs]
    shared = {k: v for k, v in configs[0].items() if all(c.get(k) == v for c in configs)}
    for run, config in zip(runs, configs, strict=True):
        run["config"] = {k: v for k, v in config.items() if k not in shared}
    return shared


def draw(kinds: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("loss", "grad_norm"),
        ("training loss (nats per token)", "gradient norm"),
        strict=True,
    ):
        for number, (kind, runs) in enumerate(kinds.items()):
            for first, run in enumerate(runs):
                axes.plot(
                    run["last_step"],
                    [math.nan if value is None else value for value in run[key]],
                    color=f"C{number}",
                    linewidth=0.8,
                    label=None if first else kind,
                )
        axes.set(xlabel="optimiser step", ylabel=f"{label}, mean of {EVERY} steps", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
    figure.savefig(path, dpi=150)


def table(kinds: dict[str, list[dict[str, Any]]]) -> str:
    losses = {kind: [run["nats_per_byte"] for run in runs] for kind, runs in kinds.items()}
    reference = statistics.mean(next(iter(losses.values())))
    rows = ["| attention | held-out nats per byte, each seed | mean | over the first | spread |"]
    rows.append("|---|---|--:|--:|--:|")
    for kind, values in losses.items():
        mean = statistics.mean(values)
        each = " ".join(f"{value:.4f}" for value in values)
        over = f"{mean / reference - 1:+.2%}"
        spread = f"{(max(values) - min(values)) / mean:.2%}" if len(values) > 1 else ""
        rows.append(f"| {kind} | {each} | {mean:.4f} | {over} | {spread} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="KIND=FOLDER", help="a kind may come again")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    args = parser.parse_args()
    kinds: dict[str, list[dict[str, Any]]] = {}
    for argument in args.runs:
        kind, _, pattern = argument.partition("=")
        for folder in sorted(glob.glob(pattern)) or [pattern]:
            if not (Path(folder) / "summary.json").is_file():
                parser.error(f"{argument}: {folder or 'no folder'} has no summary.json of a run")
            kinds.setdefault(kind, []).append(read_run(Path(folder)))
    every = [run for runs in kinds.values() for run in runs]
    texts = {run["held_out_bytes"] for run in every}
    if len(texts) > 1:
        parser.error(f"the runs' held-out texts have {sorted(texts)} bytes: they must be the same")
    shared = shared_settings(every)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": shared, "kinds": kinds}, separators=(",", ":"))
    (args.out / "runs.json").write_text(text + "\n")
    draw(kinds, args.out / "runs.png")
    print(table(kinds))


if __name__ == "__main__":
    main()
