"""The frame of every probe: the ranks load a checkpoint and a text, measure, and end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from tokenizers import Tokenizer

from train.config import Config, ConfigError
from train.console import LineConsole
from train.data.documents import Documents
from train.engine.parallel import (
    ParallelLayout,
    choose_device,
    join,
    require_agreement,
    shutdown,
)
from train.probes.text import read_text, require_own_text
from train.run.affinity import set_affinity
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks.load_model import LoadedModel, load_model, read_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """What a probe measures, on this rank: a loaded checkpoint of the run in ``folder``.

    ``console`` prints on rank 0 alone.
    """

    config: Config
    folder: RunFolder
    parallel: ParallelLayout
    loaded: LoadedModel
    console: LineConsole


def run_probe(
    config: Config,
    checkpoint: str | None,
    prepare: Callable[[Documents, Tokenizer], T],
    measure: Callable[[Subject, T], None],
) -> NoReturn:
    """Measure ``checkpoint`` (None: the newest of the run), and end the process.

    ``prepare`` converts the text to what ``measure`` needs. It may raise ``ConfigError``, because
    no process group exists yet. ``ConfigError`` passes through; any other failure is reported in
    one line with the rank, as in training.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder, report, parallel = RunFolder(config), FailureReport(rank, sys.stderr), None
    try:
        device = choose_device(config)
        set_affinity(config.parallel, device)
        tokenizer = read_tokenizer(folder)
        documents, text = read_text(config, tokenizer)
        prepared = prepare(documents, tokenizer)
        parallel = join(config.parallel, device)
        plain = json.dumps(dataclasses.asdict(config))
        digest = hashlib.sha256(f"{plain} {text}".encode()).hexdigest()[:12]
        require_agreement(parallel, {"configuration or text": digest})
        console = LineConsole(quiet=rank != 0)
        loaded = load_model(config, folder, parallel, checkpoint, console.print)
        if config.eval.path is None:
            require_own_text(config, text, loaded.checkpoint)
        measure(Subject(config, folder, parallel, loaded, console), prepared)
        shutdown(parallel, 0)
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: every error must name its rank
        report.report(error, folder.log(rank), config)
    shutdown(parallel, 1)
