"""``mode=needle``: how often a model finds a needle in a long text, by length and depth.

The model reads the right answer (teacher forcing). A trial is a match if the most probable token is
the right one at each token of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from train.config import Config
from train.data.batches import Batch, make_batch, prefetch
from train.data.documents import Documents
from train.data.encoder import DocumentEncoder
from train.data.samples import IGNORED
from train.engine.parallel import ParallelLayout, sum_over_ranks
from train.log.plots import draw, plot_needle
from train.model.window import widest
from train.probes.haystack import Haystack, Trial, all_trials
from train.probes.measure import Subject, run_probe
from train.run.run_folder import write_atomically


def run(config: Config) -> NoReturn:
    """Run all trials, write ``needle.json`` and ``.png``, print a table, end as ``run_probe``."""

    def prepare(documents: Documents, tokenizer: Tokenizer) -> Haystack:
        encoder = DocumentEncoder(tokenizer, config.data)
        haystack = Haystack(documents, encoder, config.needle)
        for trial in all_trials(config.needle):
            if trial.length == min(config.needle.lengths):
                haystack.sample(trial)  # raises if it does not fit
        return haystack

    run_probe(config, config.needle.checkpoint, prepare, _measure)


def _measure(subject: Subject, haystack: Haystack) -> None:
    trials, model = all_trials(subject.config.needle), subject.loaded.model
    matches = find(model.hits, haystack, trials, subject.config, subject.parallel)
    if subject.parallel.rank == 0:
        _report(subject, cells_of(trials, matches), haystack)


def find(
    hits_of: Callable[[Batch], Tensor],
    haystack: Haystack,
    trials: list[Trial],
    config: Config,
    parallel: ParallelLayout,
) -> list[bool]:
    """Whether each of ``trials`` is a match, on every rank; every rank must call this.

    ``hits_of`` returns (t,) bool: whether the most probable token after each local token is its
    label. Data-parallel ranks share the trials.
    """
    own = range(parallel.dp_rank, len(trials), parallel.dp)
    counts = torch.zeros(2, len(trials), dtype=torch.int64, device=parallel.device)
    sharding = (parallel.cp_group, config.parallel.layout, widest(config.model))

    def make(index: int) -> Batch:
        return make_batch(haystack.sample(trials[own[index]]), *sharding)

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


def _report(subject: Subject, cells: list[dict[str, Any]], haystack: Haystack) -> None:
    console = subject.console
    path, plot = (subject.folder.path / f"needle.{suffix}" for suffix in ("json", "png"))
    result = {
        "checkpoint": str(subject.loaded.checkpoint),
        "text_tokens": haystack.text_tokens,
        "cells": cells,
    }
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
    if haystack.text_tokens < len(haystack.text):
        console.print(
            f"the running text has {haystack.text_tokens:,} tokens and is repeated; name a longer "
            "one with eval.path=...",
        )
    draw(lambda: plot_needle(plot, cells), console)
    console.print(f"written to {path}")
