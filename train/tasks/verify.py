"""``mode=verify``: compare a step with ``parallel.cp`` to the same step with cp 1.

Both steps have the same samples and the same initial weights. A wrong mask or position shows as a
difference of losses. An error of the ring's backward shows as a difference of the gradients of the
projections before attention. With random weights these are a tiny share of the norm of all
gradients. So each parameter type (``attention.wq``, over all blocks) is compared separately.
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
from rich.table import Table
from torch import Tensor

from train.config import Config, ConfigError
from train.console import LineConsole
from train.data.batches import Batch, make_batch
from train.data.mixture import training_samples
from train.data.samples import IGNORED, Sample, concatenate
from train.data.shards import Corpus, open_corpus
from train.data.tokenizer import vocabulary_size
from train.engine.make_engine import make_engine
from train.engine.parallel import ParallelLayout, choose_device, join, shutdown, sum_over_ranks
from train.model.window import widest
from train.run.affinity import set_affinity
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder


@dataclass(frozen=True)
class Tolerance:
    """The differences that rounding may cause.

    ``loss`` and ``grad_norm`` are relative, ``token`` is in nats. ``gradient`` limits, for each
    parameter type, |g_cp - g_1| / |g_1|.
    """

    loss: float
    grad_norm: float
    token: float
    gradient: float


# Larger than the differences of correct steps, smaller than those of a mask that is off by one key.
TOLERANCES = {
    torch.float32: Tolerance(1e-6, 1e-5, 1e-4, 1e-4),
    torch.bfloat16: Tolerance(1e-4, 3e-3, 0.06, 0.01),
}


@dataclass(frozen=True)
class StepResult:
    """A step over all ranks, before its update.

    ``losses`` has the loss of every token of each micro-batch of ``parallel.cp``, (T,) float32, on
    the first rank of its CP group, and empty tensors on the others. ``gradients`` are this rank's
    shares, on the host; ``groups`` are the process groups that the engine has created.
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

    ``ConfigError`` passes through. Any other failure is reported as in training. The comparison
    sets ``model.zero_init`` to false: with output projections of zero, attention would not change
    the loss.
    """
    rank, parallel = int(os.environ.get("RANK", "0")), None
    report = FailureReport(rank, sys.stderr)
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        corpus = open_corpus(config.data)
        config = config.comparable()
        parallel = join(config.parallel, device)
        console = LineConsole(quiet=rank != 0)
        same, groups = compare(config, corpus, parallel, console)
        shutdown(parallel, 0 if same else 1, groups=groups)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        report.report(error, RunFolder(config).log(rank), config)
    shutdown(parallel, 1)


def compare(
    config: Config, corpus: Corpus, parallel: ParallelLayout, console: LineConsole
) -> tuple[bool, list[dist.ProcessGroup]]:
    """Take both steps and print them side by side.

    Returns, on every rank, whether they agree, and the groups that their engines have created.
    """
    cp, at_once = parallel.cp, config.samples_at_once()
    samples = training_samples(corpus.train, config.data, config.train.seed)
    firsts = [
        (number * parallel.dp + parallel.dp_rank) * at_once
        for number in range(config.accumulation_over(parallel.dp))
    ]
    shares = [[samples[first + n] for n in range(at_once)] for first in firsts]
    console.print(f"A step with cp {cp} ...")
    shared = take_step(config, corpus, parallel, shares, parallel)
    console.print("The same step with cp 1 ...")
    single = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, cp=1),
        data=dataclasses.replace(config.data, tokens_per_rank=None),
    )
    alone = take_step(single, corpus, layout_without_cp(parallel), shares, parallel)
    rows = differences(shared, alone, parallel.device)
    title = f"{at_once * config.data.seq_len} tokens"
    table = Table("", f"cp {cp}", "cp 1", "difference", "allowed", title=title)
    for row in rows:
        table.add_row(row.name, *row.values, f"{row.difference:.1e}", f"{row.allowed:.1e}")
    table.add_row("seconds", f"{shared.seconds:.2f}", f"{alone.seconds:.2f}", "", "")
    console.print(table)
    wrong = ", ".join(row.name for row in rows if not row.within)
    verdict = (
        f"parallel.cp={cp} does NOT match parallel.cp=1: {wrong}"
        if wrong
        else f"parallel.cp={cp} matches parallel.cp=1 up to rounding"
    )
    console.print(verdict)
    dist.barrier(group=parallel.host_group)  # torchrun ends all ranks when one fails
    return not wrong, [*shared.groups, *alone.groups]


class Difference(NamedTuple):
    """The difference of a value between the two steps, and the allowed one; NaN is a failure."""

    name: str
    values: tuple[str, str]
    difference: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether the difference is allowed."""
        return self.difference <= self.allowed


def differences(shared: StepResult, alone: StepResult, device: torch.device) -> list[Difference]:
    """The differences of two steps, the same on all ranks; every rank must call this.

    If all parameter types pass, only the one with the largest difference is listed; otherwise every
    one that fails.
    """
    allowed = TOLERANCES[shared.dtype]
    rows = []
    for name, here, there, part in (
        ("loss", shared.loss, alone.loss, allowed.loss),
        ("gradient norm", shared.grad_norm, alone.grad_norm, allowed.grad_norm),
    ):
        values = f"{here:.6f}", f"{there:.6f}"
        rows.append(Difference(name, values, abs(here - there), part * abs(there)))
    of_samples = [
        (x - y).abs().max() for x, y in zip(shared.losses, alone.losses, strict=True) if len(x)
    ]
    zero = torch.zeros((), dtype=torch.float32, device=device)
    largest = torch.stack([*of_samples, zero]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    rows.append(Difference("loss of a token", ("", ""), float(largest), allowed.token))
    errors = gradient_errors(shared.gradients, alone.gradients, device)
    gradients = [
        Difference(f"gradient of {param_type}", ("", ""), error, allowed.gradient)
        for param_type, error in errors.items()
    ]
    wrong = [row for row in gradients if not row.within]
    return rows + (wrong or [max(gradients, key=lambda row: row.difference)])


def param_type_of(name: str) -> str:
    """The type of a parameter: its name without the block, and without ``weight`` or ``bias``.

    A bias counts with its weight, because its own gradient may consist of rounding errors.
    """
    return re.sub(r"^blocks\.\d+\.|\.(weight|bias)$", "", name)


def gradient_errors(
    here: dict[str, Tensor], there: dict[str, Tensor], device: torch.device
) -> dict[str, float]:
    """By parameter type: the norm of ``here - there`` over the norm of ``there``."""
    squares: dict[str, Tensor] = {}
    for name, expected in there.items():
        found = (here[name].double() - expected.double()).square().sum()
        pair = torch.stack([found, expected.double().square().sum()])
        param_type = param_type_of(name)
        squares[param_type] = squares.get(param_type, 0) + pair
    table = torch.stack(list(squares.values())).to(device)
    dist.all_reduce(table)
    difference, size = table.sqrt().unbind(1)
    relative = torch.where(difference == 0, difference, difference / size)
    return dict(zip(squares, relative.tolist(), strict=True))


def layout_without_cp(parallel: ParallelLayout) -> ParallelLayout:
    """The layout in which each rank of ``parallel`` has samples of its own."""
    groups = [dist.new_group([rank]) for rank in range(parallel.world)]
    return dataclasses.replace(parallel, cp=1, cp_group=groups[parallel.rank])


def take_step(
    config: Config,
    corpus: Corpus,
    parallel: ParallelLayout,
    shares: list[list[Sample]],
    given: ParallelLayout,
) -> StepResult:
    """Losses and gradients of a step under ``parallel``.

    ``shares`` are the samples of this rank's CP group in ``given``, by micro-batch. With cp 1 each
    sample is a micro-batch, and only the first rank of a CP group of ``given`` counts it. The other
    ranks repeat it without labels, so that all ranks run equally many micro-batches.
    """
    engine = make_engine(config, vocabulary_size(corpus.tokenizer), parallel)
    first, apart = given.cp_rank == 0, parallel.cp < given.cp
    sharding = (parallel.cp_group, config.parallel.layout, widest(config.model))
    batches, of_share = [], []  # the second has the number of the share
    for number, samples in enumerate(shares):
        for sample in samples if apart else [concatenate(samples)]:
            batch = make_batch(sample, *sharding, kv_budget=config.parallel.kv_budget)
            if apart and not first:
                batch = without_labels(batch)
            batches.append(batch.to(parallel.device))
            of_share.append(number)
    begin = time.perf_counter()
    here = sum(batch.n_valid for batch in batches)
    n_valid = sum_over_ranks(parallel, torch.tensor(here, dtype=torch.int64, device="cpu"))
    scale = parallel.world / n_valid.clamp(min=1).float()
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    losses: list[list[Tensor]] = [[] for _ in shares]
    for number, batch in enumerate(batches):
        local = engine.backward(batch, scale, last=number == len(batches) - 1)
        total += local.double().sum()
        whole = batch.plan.unshard(local)
        losses[of_share[number]].append(whole if first else whole[:0])
    grad_norm = float(engine.grad_norm(float("inf")))
    loss = float(sum_over_ranks(parallel, total)) / max(1, int(n_valid))
    seconds = time.perf_counter() - begin
    gradients = {name: share.cpu() for name, share in engine.gradients()}
    dtype, groups = engine.model.dtype, engine.groups
    del engine
    gc.collect()  # a wrapped model refers to itself
    if parallel.device.type == "cuda":
        torch.cuda.empty_cache()
    of_shares = [torch.cat(parts) for parts in losses]
    return StepResult(loss, grad_norm, of_shares, gradients, groups, dtype, seconds)


def without_labels(batch: Batch) -> Batch:
    """The batch with all labels ignored, so that its loss is 0."""
    return dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORED), n_valid=0)
