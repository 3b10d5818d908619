"""The summary of a finished run: its results and the baselines as JSON, plots and a table."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.table import Table

from train.config import Config
from train.console import LineConsole
from train.engine.train_state import TrainState
from train.log.json_lines import read_lines
from train.log.plots import draw, plot_run
from train.log.smoothing import mean, window_of
from train.log.units import UNITS, bits, cells, loss_of
from train.run.run_folder import RunFolder, write_atomically
from train.tasks.baselines import BASELINES, measure_baselines
from train.tasks.evaluate import Evaluation, budget_of


def summarise(
    state: TrainState,
    folder: RunFolder,
    full: Evaluation,
    alone: Evaluation,
    short: Evaluation | None = None,
) -> dict[str, Any]:
    """The contents of ``summary.json``, after the lines of all steps are in ``folder``.

    In ``alone`` each token attended only to itself. ``short`` read documents in windows of
    ``train.final_eval_len`` tokens. ``train_loss`` is the mean of the last steps, in nats per
    token.
    """
    config, parallel = state.config, state.engine.parallel
    last = read_lines(folder.metrics)[-window_of(state.step) :]
    train = {
        "train_loss": mean([loss_of(line) for line in last]),
        "train_nats_per_byte": mean([line.get("nats_per_byte") for line in last]),
    }
    return {
        **full.units,
        **{key: loss if math.isfinite(loss) else None for key, loss in train.items()},
        "train_last_steps": len(last),
        "loss_self_only": alone.nats_per_token,
        "nats_per_byte_self_only": alone.nats_per_byte,
        **measure_baselines(state.corpus, budget_of(config, "final_eval_bytes")),
        "train_seconds": state.seconds,
        "steps": state.step,
        "skipped": state.spike_filter.skipped,
        "world_size": parallel.world,
        "cp": parallel.cp,
        "seq_len": config.data.seq_len,
        "held_out_bytes": full.n_bytes,
        "held_out_tokens": full.tokens,
        **full.by_source,
        **_of_lengths(config, full, short),
    }


def _of_lengths(config: Config, full: Evaluation, short: Evaluation | None) -> dict[str, Any]:
    """The entries for ``train.final_eval_last`` and ``final_eval_len``, if they are given."""
    found: dict[str, Any] = {}
    if config.train.final_eval_last is not None:
        found["last"] = _last(config, config.data.max_doc_len or config.data.seq_len, full)
    if short is not None:
        found["short"] = {
            "length": config.train.final_eval_len,
            "nats_per_byte": short.nats_per_byte,
            "nats_per_token": short.nats_per_token,
        }
        if config.train.final_eval_last is not None:
            found["short_last"] = _last(config, config.train.final_eval_len, short)
    return found


def _last(config: Config, length: int, result: Evaluation) -> dict[str, Any]:
    mean = result.last_loss / result.last_tokens if result.last_tokens else None
    first = length - config.train.final_eval_last
    return {
        "positions": [first, length - 1],
        "tokens": result.last_tokens,
        "nats_per_token": mean,
    }


def write_summary(
    folder: RunFolder,
    summary: dict[str, Any],
    full: Evaluation,
    alone: Evaluation,
    console: LineConsole,
) -> None:
    """Write ``summary.json`` and the plots, and print the table."""
    write_atomically(folder.summary, json.dumps(summary, indent=1) + "\n")
    bytes_per_token = full.n_bytes / max(1, full.tokens)
    baselines = {name: summary[key] for key, name in BASELINES.items()}
    by_bucket = full.loss_by_bucket, alone.loss_by_bucket
    draw(lambda: plot_run(folder.path, *by_bucket, baselines, bytes_per_token), console)
    title = f"Held out: {summary['held_out_bytes']:,} bytes"
    if summary["baseline_bytes"] < summary["held_out_bytes"]:
        title += f", of which baselines: {summary['baseline_bytes']:,}"
    table = Table("", *UNITS, title=title, title_justify="left")
    table.add_row("held out", *cells(full.nats_per_token, full.nats_per_byte))
    alone_cells = cells(alone.nats_per_token, alone.nats_per_byte)
    table.add_row("held out, current token only", *alone_cells)
    train = summary["train_loss"], summary["train_nats_per_byte"]
    if None not in train:
        table.add_row(f"train, last {summary['train_last_steps']} steps", *cells(*train))
    for key, name in BASELINES.items():
        table.add_row(f"{name}, held out", "", "", f"{bits(summary[key]):.3f}")
    console.print(table)
    console.print(
        f"{summary['steps']} steps in {summary['train_seconds']:.0f} s; everything is in "
        f"{folder.path}",
    )
