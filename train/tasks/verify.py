"""``mode=verify``: a step of this configuration with ``parallel.cp``, and the same step with cp 1.

Both steps have the same samples and the same initial weights. A mask or a position that depends on
how a sample is shared shows as a difference of losses, an error of the ring's backward as one of
the gradients of the projections before it. Their share of the norm of all gradients is tiny where
weights are random, so each kind of parameter, of all blocks, is compared on its own.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

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
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder


@dataclass(frozen=True)
class Tolerance:
    """What rounding may change: relative for ``loss`` and ``grad_norm``, nats for ``token``;
    ``gradient`` is the norm of a kind's difference over the norm of its gradients."""

    loss: float
    grad_norm: float
    token: float
    gradient: float


# Above what correct steps differ by, and below what a mask that is off by one key changes.
TOLERANCES = {
    torch.float32: Tolerance(1e-6, 1e-5, 1e-4, 1e-4),
    torch.bfloat16: Tolerance(1e-4, 3e-3, 0.06, 0.01),
}


@dataclass(frozen=True)
class StepResult:
    """A step over all ranks, before its update.

    ``losses`` are those of every token of each sample, (T,) float32, on the first rank of the
    sample's group; empty tensors on the others. ``gradients`` are this rank's shares, on the host;
    ``groups`` those that the engine has made.
    """

    loss: float
    grad_norm: float
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    groups: list[dist.ProcessGroup]
    dtype: torch.dtype
    seconds: float


def run(config: Config) -> NoReturn:
    """Compare the steps, print a table, and end with code 0 if they agree and 1 if not.

    ``ConfigError`` passes through. Any other failure is reported as in training. Attention does not
    reach the loss of a model whose projections start at zero: ``model.zero_init`` is off here.
    """
    rank, parallel = int(os.environ.get("RANK", "0")), None
    report = FailureReport(rank, sys.stderr)
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        corpus = open_corpus(config.data)
        config = comparable(config)
        parallel = join(config.parallel, device)
        console = Console(quiet=rank != 0, markup=False, highlight=False)
        same, groups = compare(config, corpus, parallel, console)
        shutdown(parallel, 0 if same else 1, groups=groups)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        report.report(error, RunFolder(config).log(rank), config)
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


def compare(
    config: Config, corpus: Corpus, parallel: ParallelLayout, console: Console
) -> tuple[bool, list[dist.ProcessGroup]]:
    """Take both steps and print them side by side.

    Returns, on every rank, whether they agree, and the groups that their engines have made.
    """
    data, cp = config.data, parallel.cp
    samples = training_samples(corpus.train, data, config.train.seed)
    console.print(f"A step with cp {cp} ...")
    shared = take_step(config, corpus, parallel, samples, parallel)
    console.print("The same step with cp 1 ...")
    single = dataclasses.replace(config.parallel, cp=1)
    config = dataclasses.replace(config, parallel=single)
    alone = take_step(config, corpus, one_process(parallel), samples, parallel)
    rows = differences(shared, alone, parallel.device)
    table = Table("", f"cp {cp}", "cp 1", "difference", "allowed", title=f"{data.seq_len} tokens")
    for row in rows:
        table.add_row(row.name, *row.values, f"{row.apart:.1e}", f"{row.allowed:.1e}")
    table.add_row("seconds", f"{shared.seconds:.2f}", f"{alone.seconds:.2f}", "", "")
    console.print(table)
    wrong = ", ".join(row.name for row in rows if not row.apart <= row.allowed)
    verdict = (
        f"parallel.cp={cp} does NOT match parallel.cp=1: {wrong}"
        if wrong
        else f"parallel.cp={cp} matches parallel.cp=1 up to rounding"
    )
    console.print(verdict, soft_wrap=True)
    dist.barrier(group=parallel.host_group)  # torchrun ends all ranks when one fails
    return not wrong, [*shared.groups, *alone.groups]


class Difference(NamedTuple):
    """How far the steps are apart in something, and how far they may be; NaN is too far."""

    name: str
    values: tuple[str, str]
    apart: float
    allowed: float


def differences(shared: StepResult, alone: StepResult, device: torch.device) -> list[Difference]:
    """The same on all ranks, which all call it. Of kinds of gradients within the tolerance only the
    one that is furthest apart."""
    allowed = TOLERANCES[shared.dtype]
    rows = []
    for name, here, there, part in (
        ("loss", shared.loss, alone.loss, allowed.loss),
        ("gradient norm", shared.grad_norm, alone.grad_norm, allowed.grad_norm),
    ):
        values = f"{here:.6f}", f"{there:.6f}"
        rows.append(Difference(name, values, abs(here - there), part * abs(there)))
    apart = [
        (x - y).abs().max() for x, y in zip(shared.losses, alone.losses, strict=True) if len(x)
    ]
    furthest = torch.stack([*apart, torch.zeros((), dtype=torch.float32, device=device)]).max()
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    rows.append(Difference("loss of a token", ("", ""), float(furthest), allowed.token))
    kinds = [
        Difference(f"gradient of {kind}", ("", ""), part, allowed.gradient)
        for kind, part in gradient_differences(shared.gradients, alone.gradients, device).items()
    ]
    wrong = [row for row in kinds if not row.apart <= row.allowed]
    return rows + (wrong or [max(kinds, key=lambda row: row.apart)])


def kind_of(name: str) -> str:
    """What parameters of all blocks have in common: a bias belongs to its weight, as it may have a
    gradient of rounding errors alone."""
    return re.sub(r"^blocks\.\d+\.|\.(weight|bias)$", "", name)


def gradient_differences(
    here: dict[str, Tensor], there: dict[str, Tensor], device: torch.device
) -> dict[str, float]:
    """By kind, the norm of the difference of the gradients over the norm of ``there``."""
    squares: dict[str, Tensor] = {}
    for name, expected in there.items():
        found = (here[name].double() - expected.double()).square().sum()
        pair = torch.stack([found, expected.double().square().sum()])
        kind = kind_of(name)
        squares[kind] = squares.get(kind, 0) + pair
    table = torch.stack(list(squares.values())).to(device)
    dist.all_reduce(table)
    apart, size = table.sqrt().unbind(1)
    relative = torch.where(apart == 0, apart, apart / size)
    return dict(zip(squares, relative.tolist(), strict=True))


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
    here = sum(batch.n_valid for batch in batches)
    n_valid = sum_over_ranks(parallel, torch.tensor(here, dtype=torch.int64, device="cpu"))
    scale = parallel.world / n_valid.clamp(min=1).float()
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
    gradients = {name: share.cpu() for name, share in engine.gradients()}
    dtype, groups = engine.model.dtype, engine.groups
    del engine
    gc.collect()  # a wrapped model refers to itself
    if parallel.device.type == "cuda":
        torch.cuda.empty_cache()
    return StepResult(loss, grad_norm, losses, gradients, groups, dtype, seconds)


def without_labels(batch: Batch) -> Batch:
    """The batch with a loss of 0."""
    return dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORED), n_valid=0)
