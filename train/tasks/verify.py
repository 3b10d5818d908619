"""``mode=verify``: a step of this configuration with ``parallel.cp``, and the same step with cp 1.

Both steps have the same samples and the same initial weights. A mask, a position or a gradient that
depends on how a sample is shared shows as a difference of losses or of the norm of gradients.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from train.config import Config, ConfigError
from train.data.batches import Batch, make_batch
from train.data.mixture import Samples, training_samples
from train.data.samples import IGNORED
from train.data.shards import Corpus, open_corpus
from train.engine.make_engine import make_engine
from train.engine.parallel import ParallelLayout, choose_device, join, shutdown, sum_over_ranks
from train.model.window import widest
from train.run.affinity import set_affinity
from train.run.failure import explain, is_out_of_memory


@dataclass(frozen=True)
class Tolerance:
    """What rounding may change: relative for ``loss`` and ``grad_norm``, nats for ``token``."""

    loss: float
    grad_norm: float
    token: float


# Above what correct steps differ by, and below what a mask that is off by one key changes.
TOLERANCES = {
    torch.float32: Tolerance(1e-6, 1e-5, 1e-4),
    torch.bfloat16: Tolerance(1e-4, 3e-3, 0.06),
}


@dataclass(frozen=True)
class StepResult:
    """A step over all ranks, before its update.

    ``losses`` are those of every token of each sample, (T,) float32, on the first rank of the
    sample's group; empty tensors on the others.
    """

    loss: float
    grad_norm: float
    losses: list[Tensor]
    dtype: torch.dtype
    seconds: float


def run(config: Config) -> NoReturn:
    """Compare the steps, print a table, and end with code 0 if they agree and 1 if not.

    ``ConfigError`` passes through. Any other failure is printed with the rank. Attention does not
    reach the loss of a model whose projections start at zero: ``model.zero_init`` is off here.
    """
    rank, parallel = int(os.environ.get("RANK", "0")), None
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        corpus = open_corpus(config.data)
        config = comparable(config)
        parallel = join(config.parallel, device)
        console = Console(quiet=rank != 0, markup=False, highlight=False)
        same = compare(config, corpus, parallel, console)
        shutdown(parallel, 0 if same else 1)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        traceback.print_exc()
        line = f"rank {rank}: {explain(error, config)}"
        if is_out_of_memory(error):
            half = config.data.seq_len // 2
            line = f"rank {rank}: out of memory; shorten the samples with verify.seq_len={half}"
        print(f"pretrain.py: {line}", file=sys.stderr, flush=True)
    shutdown(parallel, 1)


def comparable(config: Config) -> Config:
    """``config`` with samples of ``verify.seq_len`` tokens and with ``zero_init`` off."""
    data = config.data
    seq_len = config.verify.seq_len or data.seq_len
    piece_len = None if data.piece_len is None else min(data.piece_len, seq_len)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, zero_init=False),
        data=dataclasses.replace(data, seq_len=seq_len, piece_len=piece_len),
    )


def compare(config: Config, corpus: Corpus, parallel: ParallelLayout, console: Console) -> bool:
    """Take both steps and print them side by side; whether they agree, on every rank."""
    data, cp = config.data, parallel.cp
    samples = training_samples(corpus.train, data, config.train.seed)
    console.print(f"A step with cp {cp} ...")
    shared = take_step(config, corpus, parallel, samples, parallel)
    console.print("The same step with cp 1 ...")
    single = dataclasses.replace(config.parallel, cp=1)
    config = dataclasses.replace(config, parallel=single)
    alone = take_step(config, corpus, one_process(parallel), samples, parallel)
    apart = [
        (x - y).abs().max() for x, y in zip(shared.losses, alone.losses, strict=True) if len(x)
    ]
    furthest = torch.stack([*apart, torch.zeros((), device=parallel.device)]).max()
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    allowed = TOLERANCES[shared.dtype]
    rows = [
        ("loss", shared.loss, alone.loss, allowed.loss * abs(alone.loss)),
        ("gradient norm", shared.grad_norm, alone.grad_norm, allowed.grad_norm * alone.grad_norm),
    ]
    table = Table("", f"cp {cp}", "cp 1", "difference", "allowed", title=f"{data.seq_len} tokens")
    for name, here, there, limit in rows:
        row = (f"{here:.6f}", f"{there:.6f}", f"{abs(here - there):.1e}", f"{limit:.1e}")
        table.add_row(name, *row)
    table.add_row("loss of a token", "", "", f"{float(furthest):.1e}", f"{allowed.token:.1e}")
    table.add_row("seconds", f"{shared.seconds:.2f}", f"{alone.seconds:.2f}", "", "")
    console.print(table)
    wrong = [name for name, here, there, limit in rows if not abs(here - there) <= limit]
    wrong += [] if float(furthest) <= allowed.token else ["loss of a token"]
    verdict = (
        f"parallel.cp={cp} does NOT compute what one process does: {', '.join(wrong)}"
        if wrong
        else f"parallel.cp={cp} computes what one process does"
    )
    console.print(verdict, soft_wrap=True)
    dist.barrier(group=parallel.host_group)  # torchrun ends all ranks when one fails
    return not wrong


def one_process(parallel: ParallelLayout) -> ParallelLayout:
    """The layout in which each rank of ``parallel`` has a sample of its own."""
    groups = [dist.new_group([rank]) for rank in range(parallel.world)]
    return dataclasses.replace(parallel, cp=1, cp_group=groups[parallel.rank])


def take_step(
    config: Config,
    corpus: Corpus,
    parallel: ParallelLayout,
    samples: Samples,
    given: ParallelLayout,
) -> StepResult:
    """Losses and gradients of the first step under ``given``, computed under ``parallel``.

    Where a sample has one rank of a group under ``given``, the others repeat it without labels, so
    that all ranks run equally many micro-batches.
    """
    engine = make_engine(config, corpus.tokenizer.get_vocab_size(), parallel)
    first = given.cp_rank == 0
    batches = []
    for number in range(config.train.accumulation_over(given.dp)):
        sample = samples[number * given.dp + given.dp_rank]
        place = (parallel.cp_group, config.parallel.layout, widest(config.model))
        batch = make_batch(sample, *place)
        if parallel.cp < given.cp and not first:
            batch = without_labels(batch)
        batches.append(batch.to(parallel.device))
    begin = time.perf_counter()
    n_valid = sum_over_ranks(parallel, torch.tensor(sum(batch.n_valid for batch in batches)))
    scale = parallel.world / n_valid.clamp(min=1)
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    losses = []
    for number, batch in enumerate(batches, start=1):
        local = engine.backward(batch, scale, last=number == len(batches))
        total += local.double().sum()
        whole = batch.plan.unshard(local)
        losses.append(whole if first else whole[:0])
    grad_norm = float(engine.grad_norm(float("inf")))
    loss = float(sum_over_ranks(parallel, total)) / max(1, int(n_valid))
    seconds = time.perf_counter() - begin
    dtype = engine.model.dtype
    del engine
    gc.collect()  # a wrapped model refers to itself
    if parallel.device.type == "cuda":
        torch.cuda.empty_cache()
    return StepResult(loss, grad_norm, losses, dtype, seconds)


def without_labels(batch: Batch) -> Batch:
    """The batch with a loss of 0."""
    return dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORED), n_valid=0)
