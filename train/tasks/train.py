"""``mode=train`` in one process: choose the device, train, end with an exit code."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any, NoReturn

import torch.distributed as dist

from train.compile_choice import why_uncompiled
from train.config import Config, ConfigError
from train.data.mixture import long_documents
from train.data.shards import open_corpus
from train.data.tokenizer import vocabulary_size
from train.engine.parallel import ParallelLayout, choose_device, from_rank_0, join, shutdown
from train.log.profiler import require_profilable
from train.run.affinity import set_affinity
from train.run.deterministic import make_deterministic
from train.run.failure import FailureReport, redirect_output
from train.run.run_config import held_compile
from train.run.run_folder import RunFolder, write_atomically
from train.run.stopper import Stopper
from train.sections.training import AUTO
from train.tasks.estimate import before_run
from train.tasks.trainer import Trainer


def run(config: Config, stopper: Stopper) -> NoReturn:
    """Train and end the process with code 0 (done or stopped) or 1 (failed).

    ``ConfigError`` passes through to the caller. Any other failure is reported in one line with the
    rank and the step; its traceback goes to the rank's log in the run folder.
    """
    begin = time.monotonic()
    device = choose_device(config)
    require_profilable(config.profile, device)
    set_affinity(config.parallel, device)
    config.train.compile = held_compile(config)
    rank = int(os.environ.get("RANK", "0"))
    folder = RunFolder(config)
    report = FailureReport(rank, sys.stderr)
    if config.train.deterministic:
        line = make_deterministic(device)
        if rank == 0:
            print(line, flush=True)
    reason = why_uncompiled(config, cuda=True) if device.type == "cuda" else ""
    if rank == 0 and reason and config.train.compile == AUTO:
        print(f"train.compile=auto leaves blocks uncompiled: {reason}", flush=True)
    parallel, closers, locks = None, [], []
    try:
        corpus = open_corpus(config.data)
        # Both may raise ConfigError, which must come before any process group exists.
        config.model.rows(vocabulary_size(corpus.tokenizer))
        long_documents(corpus.train, config.data)
        prediction = before_run(config, corpus, device) if device.type == "cuda" else None
        folder.make()
        if rank != 0:
            report.console = redirect_output(folder.log(rank))
        parallel = join(config.parallel, device)
        from_rank_0(parallel, lambda: locks.append(folder.lock()))
        trainer = Trainer(config, corpus, parallel, folder, report, prediction)
        closers = [trainer.close]
        write_ranks(folder, parallel)
        limit = config.train.max_wall_time
        stopper.arm(trainer.stoppable(None if limit is None else begin + limit))
        trainer.train()
        trainer.finish()
        shutdown(parallel, 0, closers, trainer.engine.groups)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        stopper.wait_if_stopping()
        try:
            report.report(error, folder.log(rank), config)
        finally:
            shutdown(parallel, 1, closers)


def write_ranks(folder: RunFolder, parallel: ParallelLayout) -> None:
    """Write ``ranks.json``: host, process and device of each rank."""
    own = {
        "rank": parallel.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(parallel.device),
    }
    everyone: list[Any] = [own]
    if parallel.world > 1:
        everyone = [None] * parallel.world
        dist.all_gather_object(everyone, own, group=parallel.host_group)
    if parallel.rank == 0:
        write_atomically(folder.ranks, json.dumps(everyone, indent=1) + "\n")
