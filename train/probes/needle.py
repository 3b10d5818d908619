"""``mode=needle``: how often a model finds a fact in a long text, by length and depth.

The answer is given (teacher forcing): a trial is a match if, at each of its tokens, the most
probable token is the right one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from train.config import Config, ConfigError
from train.data.batches import Batch, make_batch, prefetch
from train.data.samples import IGNORED
from train.data.tokenizer import bos_id
from train.engine.parallel import (
    ParallelLayout,
    choose_device,
    join,
    require_agreement,
    shutdown,
    sum_over_ranks,
)
from train.log.plots import plot_needle
from train.model.window import widest
from train.probes.haystack import Haystack, Trial, all_trials
from train.run.affinity import set_affinity
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder, write_atomically
from train.tasks.load_model import load_model, read_tokenizer
from train.tasks.text_loss import read_text


def run(config: Config) -> NoReturn:
    """Run all trials, write ``needle.json`` and ``.png``, print a table, and end the process.

    ``ConfigError`` passes through. Any other failure is reported in one line with the rank.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder, report, parallel = RunFolder(config), FailureReport(rank, sys.stderr), None
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        tokenizer = read_tokenizer(folder)
        documents, text = read_text(config, tokenizer)
        bos = bos_id(tokenizer, config.data.bos_token)
        haystack = Haystack(documents, tokenizer, bos, config.needle)
        trials = all_trials(config.needle)
        for trial in trials:
            if trial.length == min(config.needle.lengths):
                haystack.sample(trial)  # may raise, before groups are made
        parallel = join(config.parallel, device)
        plain = json.dumps(dataclasses.asdict(config))
        digest = hashlib.sha256(f"{plain} {text}".encode()).hexdigest()[:12]
        require_agreement(parallel, {"configuration or text": digest})
        console = Console(quiet=rank != 0, markup=False, highlight=False)
        loaded = load_model(config, folder, parallel, config.needle.checkpoint, console.print)
        matches = find(loaded.model.hits, haystack, trials, config, parallel)
        if rank == 0:
            cells = cells_of(trials, matches)
            _report(cells, loaded.checkpoint, folder, console)
        shutdown(parallel, 0)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        report.report(error, folder.log(rank), config)
    shutdown(parallel, 1)


def find(
    hits_of: Callable[[Batch], Tensor],
    haystack: Haystack,
    trials: list[Trial],
    config: Config,
    parallel: ParallelLayout,
) -> list[bool]:
    """Whether each of ``trials`` is a match, on every rank; every rank must call this.

    ``hits_of`` gives for each local token, (t,) bool, whether its most probable successor is its
    label. Data-parallel ranks share the trials.
    """
    own = range(parallel.dp_rank, len(trials), parallel.dp)
    counts = torch.zeros(2, len(trials), dtype=torch.int64, device=parallel.device)
    place = (parallel.cp_group, config.parallel.layout, widest(config.model))

    def make(index: int) -> Batch:
        return make_batch(haystack.sample(trials[own[index]]), *place)

    for number, on_host in zip(own, prefetch(make, 0, len(own)), strict=True):
        batch = on_host.to(parallel.device)
        labelled = batch.labels != IGNORED
        counts[0, number] = (hits_of(batch) & labelled).sum()
        counts[1, number] = labelled.sum()
    hits, tokens = sum_over_ranks(parallel, counts).tolist()
    return [hit == count for hit, count in zip(hits, tokens, strict=True)]


def cells_of(trials: list[Trial], matches: list[bool]) -> list[dict[str, Any]]:
    """The number of trials and matches of each task, length and depth."""
    cells: dict[tuple[str, int, float], list[bool]] = {}
    for trial, match in zip(trials, matches, strict=True):
        cells.setdefault((trial.task, trial.length, trial.depth), []).append(match)
    return [
        {"task": t, "length": n, "depth": d, "trials": len(found), "matches": sum(found)}
        for (t, n, d), found in cells.items()
    ]


def _report(
    cells: list[dict[str, Any]], checkpoint: Path, folder: RunFolder, console: Console
) -> None:
    path, plot = (folder.path / f"needle.{kind}" for kind in ("json", "png"))
    result = {"checkpoint": str(checkpoint), "cells": cells}
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    lengths = sorted({cell["length"] for cell in cells})
    table = Table("task", "depth", *(f"{length:,}" for length in lengths), title="matches")
    rows: dict[tuple[str, float], dict[int, str]] = {}
    for cell in cells:
        row = rows.setdefault((cell["task"], cell["depth"]), {})
        row[cell["length"]] = f"{cell['matches']}/{cell['trials']}"
    for (task, depth), row in rows.items():
        table.add_row(task, f"{depth:g}", *(row[length] for length in lengths))
    console.print(table)
    try:
        plot_needle(plot, cells)
    except ModuleNotFoundError as error:
        console.print(f"no plot: {error}; pip install 'ringfa3[plots]'", soft_wrap=True)
    console.print(f"written to {path}", soft_wrap=True)
