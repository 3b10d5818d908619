"""Compares groups of training runs: `compare_runs.py 'bf16=runs/bf16-*' fp8=runs/fp8-1 --out DIR`.

The other groups are compared with the first one; `*` is expanded. All runs must have the same
held-out text. Writes two files to DIR: `runs.json` has the settings that all runs share and the
results of each run, as means over 10 steps; `runs.png` shows training loss and gradient norm.

Prints a Markdown table with a row for each group. It has the held-out nats per byte of each run and
their mean in nats and in bits per byte. It also has the mean's difference from that of the first
group, and the spread: the largest minus the smallest. A group with a run that ended without a
summary has that run's last step instead.
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
PRIVATE = ("run.dir", "run.name", "sweep.dir", "data.cache_dir", "data.path")  # paths and names


def read_run(folder: Path) -> dict[str, Any]:
    """The settings, held-out loss and thinned metrics of a run. Unfinished runs have no loss."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ended = folder / "summary.json"
    summary = json.loads(ended.read_text()) if ended.is_file() else {}
    parts = [lines[at : at + EVERY] for at in range(0, len(lines), EVERY)]
    keys = ("loss", "grad_norm")
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "steps": lines[-1]["step"],
        "skipped": lines[-1]["skipped"],
        "held_out_bytes": summary.get("held_out_bytes"),
        "nats_per_byte": summary.get("nats_per_byte"),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines),
        "last_step": [part[-1]["step"] for part in parts],
        **{key: [mean([line[key] for line in part]) for part in parts] for key in keys},
    }


def mean(values: list[float | None]) -> float | None:
    """The mean of the steps with a value; a value that is not finite is None in the metrics."""
    found = [value for value in values if value is not None]
    return round(statistics.mean(found), 5) if found else None


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `group.key`, without the names and paths of `PRIVATE`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif prefix + key not in PRIVATE:
            found[prefix + key] = value
    return found


def shared_settings(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all runs share, which are removed from each run."""
    configs = [flat(run["config"]) for run in runs]
    shared = {k: v for k, v in configs[0].items() if all(c.get(k) == v for c in configs)}
    for run, config in zip(runs, configs, strict=True):
        run["config"] = {k: v for k, v in config.items() if k not in shared}
    return shared


def draw(groups: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("loss", "grad_norm"),
        ("training loss (nats per token)", "gradient norm"),
        strict=True,
    ):
        for number, (group, runs) in enumerate(groups.items()):
            for first, run in enumerate(runs):
                axes.plot(
                    run["last_step"],
                    [math.nan if value is None else value for value in run[key]],
                    color=f"C{number}",
                    linewidth=0.8,
                    label=None if first else group,
                )
        axes.set(xlabel="optimiser step", ylabel=f"{label}, mean of {EVERY} steps", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
    figure.savefig(path, dpi=150)


def table(groups: dict[str, list[dict[str, Any]]]) -> str:
    losses = {group: [run["nats_per_byte"] for run in runs] for group, runs in groups.items()}
    reference = statistics.mean(next(iter(losses.values())))
    rows = [
        "| attention | held-out nats per byte, each seed | mean | bits per byte | over the first "
        "| spread |"
    ]
    rows.append("|---|---|--:|--:|--:|--:|")
    for group, values in losses.items():
        if None in values:
            last = max(run["steps"] for run in groups[group] if run["nats_per_byte"] is None)
            rows.append(f"| {group} | ended at step {last} without a summary |  |  |  |  |")
            continue
        mean = statistics.mean(values)
        bits = mean / math.log(2)
        each = " ".join(f"{value:.4f}" for value in values)
        over = f"{mean / reference - 1:+.2%}"
        spread = f"{(max(values) - min(values)) / mean:.2%}" if len(values) > 1 else ""
        rows.append(f"| {group} | {each} | {mean:.4f} | {bits:.4f} | {over} | {spread} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", metavar="GROUP=FOLDER", help="a group may be given more than once"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    args = parser.parse_args()
    groups: dict[str, list[dict[str, Any]]] = {}
    for argument in args.runs:
        group, _, pattern = argument.partition("=")
        for folder in sorted(glob.glob(pattern)) or [pattern]:
            metrics = Path(folder) / "metrics.jsonl"
            if not metrics.is_file() or not metrics.stat().st_size:
                parser.error(f"{argument}: {folder or 'no folder'} has no metrics.jsonl of a run")
            groups.setdefault(group, []).append(read_run(Path(folder)))
    every = [run for runs in groups.values() for run in runs]
    if any(run["nats_per_byte"] is None for run in next(iter(groups.values()))):
        parser.error(
            "a run of the first group has no summary.json, but others are compared with it"
        )
    texts = {run["held_out_bytes"] for run in every if run["nats_per_byte"] is not None}
    if len(texts) > 1:
        parser.error(f"the runs' held-out texts have {sorted(texts)} bytes: they must be the same")
    shared = shared_settings(every)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": shared, "kinds": groups}, separators=(",", ":"))
    (args.out / "runs.json").write_text(text + "\n")
    draw(groups, args.out / "runs.png")
    print(table(groups))


if __name__ == "__main__":
    main()
