"""One line about each failed rank: the rank, its step and its error.

torchrun ends with a report of the failed processes. For each it prints the contents of the file in
TORCHELASTIC_ERROR_FILE. A killed process cannot write this file. So every rank writes, at the start
of each step, the message that is right if it is killed in that step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ringfa3.errors import RingError
from train.config import Config
from train.model.precision import compute_dtype
from train.paths import expand
from train.run.run_config import allowed_changes
from train.sections.training import LEAST_LOSS_TOKENS

REFUSED_BY_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class FailureReport:
    """This rank's message in torchrun's report. Without torchrun no message is written in advance.

    ``console`` is the user's terminal, even while the rank's own output goes to a log file.
    """

    def __init__(self, rank: int, console: TextIO) -> None:
        self.rank, self.console = rank, console
        self.step: int | None = None
        self._file = os.environ.get("TORCHELASTIC_ERROR_FILE")

    def begin_step(self, step: int) -> None:
        """Write the message for a rank that is killed in optimiser step ``step``."""
        self.step = step
        self._write(self._line("killed by a signal, for example by the system's OOM killer"))

    def report(self, error: BaseException, log: Path, config: Config) -> None:
        """Report the error that ends this rank in one line; the traceback goes to ``log``.

        torchrun prints the line in its last report. It is printed here only if there is no such
        report: without torchrun, or if torchrun will restart the job.
        """
        line = self._line(f"{explain(error, config)} (traceback: {log})")
        self._write(line, later=is_of_a_peer(error))
        if self._file is None or _restarts_left():
            print(line, file=self.console, flush=True)
        with contextlib.suppress(OSError):  # a full disk: the error itself is already reported
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", errors="backslashreplace") as file:
                file.write("".join(traceback.format_exception(error)))

    def not_saved(self, why: str) -> None:
        """Report why this rank stopped without saving; most often another rank has failed."""
        line = self._line(why)
        self._write(line, later=True)
        print(line, file=sys.stderr, flush=True)

    def _line(self, message: str) -> str:
        """The message with rank and step; characters that a console cannot print are escaped."""
        return f"{self._rank_and_step()}: {message}".encode(errors="backslashreplace").decode()

    def _rank_and_step(self) -> str:
        step = "before the first step" if self.step is None else f"step {self.step}"
        return f"rank {self.rank}, {step}"

    def _write(self, message: str, later: bool = False) -> None:
        """Write the message; ``later`` dates it after failures that may be its cause.

        torchrun reports the failure with the earliest time, in whole seconds, as the root cause.
        """
        if not self._file:
            return
        temporary = f"{self._file}.tmp"
        content: dict[str, Any] = {"message": message, "timestamp": int(time.time()) + later}
        try:
            Path(temporary).write_text(json.dumps(content))
            os.replace(temporary, self._file)
        except OSError:
            self._file = None  # for example a full disk: torchrun then reports the exit code


def explain(error: BaseException, config: Config) -> str:
    """The error in one line; if memory or the disk ran out, with the config values to change."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, OSError) and error.errno in REFUSED_BY_DISK and _may_be_of(error, config):
        return f"{text} -- make run.dir={config.run.dir} writable, or choose another run.dir"
    return f"{text} {memory_advice(config)}" if is_out_of_memory(error) else text


def _may_be_of(error: OSError, config: Config) -> bool:
    """Whether the file of the error may lie in the run folder: an error of an open file names none,
    or a descriptor."""
    if error.filename is None or isinstance(error.filename, int):
        return True
    folder = expand("run.dir", config.run.dir).absolute()
    return Path(os.fsdecode(error.filename)).absolute().is_relative_to(folder)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, if only as the cause of the error."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    allocator = isinstance(error, RuntimeError) and any(
        reason in str(error) for reason in ("DefaultCPUAllocator", "out of memory")
    )
    return allocator or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def memory_advice(config: Config) -> str:
    """Config values that lower the peak memory, the cheapest first.

    Those of ``memory`` are valid together. The number of processes comes from torchrun's
    environment. Values that a run may not change when it continues are listed separately.
    """
    ways: dict[str, str] = {}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dp = max(1, world // config.parallel.cp)
    if config.mode == "verify":  # with cp 1, a process holds a whole sample
        shorter = _shorter_samples(config.comparable())
        return f"-- out of memory; shorten the samples: verify.seq_len={shorter}"
    if (tokens := config.fewer_tokens(config.batch_over(dp), dp)) is not None:
        ways["data.tokens_per_rank"] = " and ".join([str(tokens), *config.same_batch(dp)])
    memory = config.memory
    rows = config.model.vocab_size
    if rows is None and config.data.tokenizer is None:  # else only the tokenizer's file has it
        rows = config.data.vocab_size
    if rows is not None and (tokens := memory.loss_tokens(rows)) > LEAST_LOSS_TOKENS:
        ways["memory.loss_chunk"] = f"{LEAST_LOSS_TOKENS} (now {tokens})"
    on_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    narrow = compute_dtype(config.train.precision, device) != torch.float32
    if config.train.residual == "float32" and narrow:
        ways["train.residual"] = "bfloat16"
    if config.engine.name == "ddp" and world > 1:
        ways["engine"] = "fsdp2"
    ring = config.train.attention == "ringfa3"
    if memory.recompute == "none":
        ways["memory.recompute"] = "attention-saving" if ring else "full"
    elif memory.recompute_layers is not None:
        ways["memory.recompute_layers"] = "null"
    if memory.mlp_chunk is None or memory.mlp_chunk > 16384:
        ways["memory.mlp_chunk"] = "16384"
    most = "all" if ring and memory.recompute != "full" else "residual"
    can_offload = config.model.n_layers > 1 and config.train.compile != "block"
    if memory.offload not in (most, "all") and can_offload:
        ways["memory.offload"] = most
    elif memory.recompute == "attention-saving" and memory.offload == "none":
        ways["memory.recompute"] = "full"
    half, odd = divmod(config.data.tokens_per_rank or 0, 2)
    if ring and not odd:
        fewer = f" and data.tokens_per_rank={half}" if half else ""
        ways["parallel.cp"] = f"{2 * config.parallel.cp} with more processes{fewer}"
    ways["data.seq_len"] = _shorter_samples(config)
    allowed = allowed_changes(config, ways)
    now = ", ".join(f"{key}={value}" for key, value in ways.items() if key in allowed)
    anew = ", ".join(f"{key}={value}" for key, value in ways.items() if key not in allowed)
    advice = [f"in this order try: {now}"] if now else []
    if anew:
        advice.append(f"in a new run (another run.dir, or run.overwrite=true) try: {anew}")
    return "-- out of memory; " + "; ".join(advice)


def _shorter_samples(config: Config) -> str:
    """At most half of ``data.seq_len``, and tokens of a rank that hold as many samples at once."""
    tokens, cp, at_once = config.data.tokens_per_rank, config.parallel.cp, config.samples_at_once()
    if tokens is None:
        return str(config.data.seq_len // 2)
    least = at_once // math.gcd(at_once, cp)  # of a rank: a multiple of it gives whole samples
    tokens = tokens // 2 // least * least
    return f"{tokens * cp // at_once} and data.tokens_per_rank={tokens}"


def is_of_a_peer(error: BaseException) -> bool:
    """Whether the end of another rank could have caused this error."""
    text = str(error)
    lost = isinstance(error, RuntimeError) and ("gloo" in text.lower() or "NCCL" in text)
    return lost or isinstance(error, (dist.DistError, RingError, ConnectionError))


def redirect_output(log: Path) -> TextIO:
    """Append this process's stdout and stderr, also those of C libraries, to ``log``.

    Returns the previous stderr.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    console = os.fdopen(os.dup(2), "w", errors="backslashreplace")
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return console


def _restarts_left() -> bool:
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return done < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
