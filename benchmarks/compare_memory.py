"""Times the settings of the trainer's `memory` against each other, in one process on one device.

    python -m benchmarks.compare_memory --layers 4 --tokens 262144 --pairs 3 [key=value ...]

Trains on one document of random tokens, with the settings of `experiment=8b_512k`. Options and
overrides (keys of `configs/`) change them. A step is backward, norm of the gradients and update.
Four settings are compared: full recomputation (`full`), selective recomputation
(`attention-saving`), and the latter with offload of the residual stream (`offload-residual`) or of
all saved tensors (`offload-all`).

Each setting first computes the same gradients with deterministic algorithms, and its device memory
is measured. Offload must not change a bit of loss and gradients. `full` may change the loss by 1e-6
and the norm by 1e-4, relative. Then steps alternate, `--pairs` times for each comparison.

Prints a line for each comparison: the median of the paired changes of a step's time, and their
quartiles; below 0 the second setting is faster. On a CPU this measures no kernel, but the PyTorch
fallback. Exits with 1 if settings disagree, if there is no kernel for the GPU, or if the
configuration is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import Progress

from ringfa3.kernels import dispatch
from train.checks.config import check
from train.config import Config, ConfigError, register_schema
from train.data.batches import Batch, make_batch
from train.data.samples import IGNORED, Sample
from train.engine.engine import Engine
from train.engine.make_engine import make_engine
from train.engine.parallel import choose_device, join
from train.model.offload import Offload
from train.model.transformer import Transformer
from train.model.window import widest
from train.pretrain import explain
from train.run.affinity import set_affinity
from train.run.deterministic import make_deterministic
from train.run.inherit import resolve_inherited
from train.run.schedule import learning_rate

CONFIGS = Path(__file__).absolute().parents[1] / "configs"
SETTINGS = ("full", "attention-saving", "offload-residual", "offload-all")
FULL, SAVING, RESIDUAL, ALL = SETTINGS
FIXED = (  # settings that the comparison needs
    *("mode=estimate", "parallel.cp=1", "train.compile=none", "train.precision=bfloat16"),
    *("train.residual=bfloat16", "memory.recompute=attention-saving", "memory.offload=all"),
)
# The largest change of the time of a step, from the first setting to the second.
BARS = {(FULL, SAVING): -0.14, (SAVING, ALL): 0.02}
# Relative differences that `full` may have: it recomputes attention from the same bits.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-6, 1e-4

Times = tuple[list[float], list[float]]  # of steps with the first setting, with the second


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step before its update.

    ``loss`` is in nats per token, ``norm`` is that of all gradients. ``bits`` has for each gradient
    the sum of its elements' bits, read as int32.
    """

    loss: float
    norm: float
    bits: tuple[int, ...]


def read_config(asked: argparse.Namespace) -> Config:
    """The trainer's config; ``ConfigError``, or an error of Hydra's, if it is not valid."""
    fixed = {setting.partition("=")[0]: setting for setting in FIXED}
    for override in asked.overrides:
        if setting := fixed.get(override.lstrip("+").partition("=")[0]):
            raise ConfigError(f"{override}: this comparison has {setting}; leave the key out")
    given = {"memory.mlp_chunk": asked.mlp_chunk, "memory.loss_chunk": asked.loss_chunk}
    overrides = [
        *("experiment=8b_512k", f"model={asked.model}", "engine=ddp", "model.zero_init=false"),
        *(f"model.n_layers={asked.layers}", f"data.seq_len={asked.tokens}"),
        *(f"{key}={value}" for key, value in given.items() if value is not None),
        *asked.overrides,
        *FIXED,
    ]
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = resolve_inherited(compose("config", overrides))
    check(config, 1)
    return config


class Trial:
    """A model on one device, and a document of random tokens on which it takes steps."""

    def __init__(self, config: Config, device: torch.device) -> None:
        rows = config.model.rows(config.data.vocab_size)
        self.config, self.device = config, device
        self.engine: Engine = make_engine(config, rows, join(config.parallel, device))
        self.transformer: Transformer = self.engine.model.transformer
        self.batch = random_batch(config, rows).to(device)
        self.scale = torch.tensor(1 / self.batch.n_valid, device=device)
        everything = self.transformer.offload
        assert everything is not None
        residual = Offload(everything.blocks, everything.pool.tokens, True, attention=False)
        self.offloads = {FULL: None, SAVING: None, RESIDUAL: residual, ALL: everything}

    def setting(self, name: str) -> tuple[str, Offload | None]:
        """``recompute`` and ``offload`` of the transformer."""
        return "full" if name == FULL else "attention-saving", self.offloads[name]

    def select(self, name: str) -> None:
        self.transformer.recompute, self.transformer.offload = self.setting(name)

    def gradients(self) -> Gradients:
        """The gradients of the document, without an update."""
        losses = self.engine.backward(self.batch, self.scale, last=True)
        norm = float(self.engine.grad_norm(float("inf")))
        tensors = [weight.grad for weight in self.engine.parameters.values()]
        bits = tuple(int(x.view(torch.int32).sum()) for x in tensors if x is not None)
        self.engine.discard()
        return Gradients(float(losses.double().sum()) / self.batch.n_valid, norm, bits)

    def step(self) -> None:
        """A step with the learning rate of the first step."""
        optim, steps = self.config.optim, self.config.train.steps
        self.engine.backward(self.batch, self.scale, last=True)
        self.engine.grad_norm(float("inf") if optim.clip is None else optim.clip)
        self.engine.step(learning_rate(optim, 0, steps))

    def seconds(self, call: Callable[[], None]) -> float:
        """The time of a call, until the device has finished its work."""
        self._wait()
        begin = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """In this context gradients are bit-equal from run to run. Enter it before any product."""
        attends = [block.attention.attend for block in self.transformer.blocks]
        make_deterministic(self.device)
        for attend in attends:
            attend.deterministic = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            for attend in attends:
                attend.deterministic = False


def random_batch(config: Config, rows: int) -> Batch:
    """One document of ``data.seq_len`` random tokens below ``rows``."""
    tokens = np.random.default_rng(config.train.seed).integers(0, rows, config.data.seq_len)
    sample = Sample(tokens, np.append(tokens[1:], IGNORED), [0, len(tokens)])
    return make_batch(sample, None, config.parallel.layout, widest(config.model))


def disagreement(found: dict[str, Gradients]) -> str | None:
    """The first setting whose step differs from that of ``attention-saving``; None without one."""
    expected = found[SAVING]
    for setting, got in found.items():
        if setting == FULL:
            same = abs(got.loss / expected.loss - 1) <= LOSS_TOLERANCE
            same = same and abs(got.norm / expected.norm - 1) <= NORM_TOLERANCE
        else:
            same = got == expected
        if not same:
            return (
                f"{setting} computes another step than {SAVING}: loss {got.loss!r} against "
                f"{expected.loss!r}, norm of the gradients {got.norm!r} against {expected.norm!r}, "
                f"{sum(map(int.__ne__, got.bits, expected.bits))} gradients with other bits"
            )
    return None


def compare_gradients(trial: Trial, report: Callable[[str], None]) -> None:
    """Compute the gradients once with each setting; end the process if they disagree."""
    cuda, found = trial.device.type == "cuda", {}
    with trial.deterministic():
        for setting in SETTINGS:
            trial.select(setting)
            if cuda:
                torch.cuda.reset_peak_memory_stats(trial.device)
            got = found[setting] = trial.gradients()
            line = f"{setting}: loss {got.loss:.6f}, norm of the gradients {got.norm:.6f}"
            if cuda:
                peak = torch.cuda.max_memory_allocated(trial.device)
                line += f", at most {peak / 1e9:.1f} GB of tensors on the device"
            if (offload := trial.offloads[setting]) is not None:
                on_host = sum(buffer.nbytes for buffer in offload.pool.buffers)
                line += f", {on_host / 1e9:.1f} GB on the host"
            report(line)
    if (problem := disagreement(found)) is not None:
        sys.exit(f"compare_memory: {problem}")


def times(trial: Trial, pair: tuple[str, str], pairs: int, advance: Callable[[], None]) -> Times:
    """Seconds of steps with both settings; the one that runs first alternates."""
    result: Times = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            trial.select(pair[which])
            result[which].append(trial.seconds(trial.step))
            advance()
    return result


def line(pair: tuple[str, str], seconds: Times) -> str:
    """The result of a comparison."""
    before, after = seconds
    changes = [b / a - 1 for a, b in zip(before, after, strict=True)]
    low, middle, high = statistics.quantiles(changes, n=4)
    text = (
        f"{pair[1]} over {pair[0]}: {middle:+.1%} ({low:+.1%} to {high:+.1%}) of a step, "
        f"{statistics.median(after):.2f} s after {statistics.median(before):.2f} s"
    )
    if (bar := BARS.get(pair)) is None:
        return text
    return f"{text}; bar {bar:+.0%}: {'reached' if middle <= bar else 'missed'}"


def comparison(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    if first == second or not {first, second} <= set(SETTINGS):
        raise argparse.ArgumentTypeError(f"{text}: two of {', '.join(SETTINGS)}, as FIRST:SECOND")
    return first, second


def require_kernels(config: Config, device: torch.device) -> None:
    """End the process if the GPU has no kernel: the PyTorch fallback must not be timed instead."""
    q = torch.empty(1, 1, config.model.resolved_head_dim(), dtype=torch.bfloat16, device=device)
    for direction in ("forward", "backward"):
        if (reason := dispatch.fallback_reason(direction, q)) is not None:
            sys.exit(f"compare_memory: no {direction} kernel: {reason}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of train/pretrain.py")
    parser.add_argument("--model", default="8b", help="a file of configs/model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--mlp-chunk", type=int, help="default: that of experiment=8b_512k")
    parser.add_argument("--loss-chunk", type=int, help="default: that of experiment=8b_512k")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        *("--compare", "-c"),
        action="append",
        type=comparison,
        metavar="FIRST:SECOND",
        help="two settings; may come again (default: full:attention-saving and\n"
        "attention-saving:offload-all)",
    )
    asked = parser.parse_intermixed_args(arguments)
    pairs = asked.compare or list(BARS)
    if asked.pairs < 2:
        parser.error(f"--pairs {asked.pairs}: quartiles need at least 2")
    try:
        config = read_config(asked)
        device = choose_device(config)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"compare_memory: {explain(error)}")
    set_affinity(config.parallel, device)
    name = "CPU"
    if device.type == "cuda":
        require_kernels(config, device)
        name = torch.cuda.get_device_name(device)
    console = Console(markup=False, highlight=False)

    def report(text: str) -> None:
        console.print(text, soft_wrap=True)

    loss_chunk = config.memory.loss_tokens(config.model.rows(config.data.vocab_size))
    report(
        f"{name}: {config.model.n_layers} layers, {config.data.seq_len:,} tokens, mlp_chunk "
        f"{config.memory.mlp_chunk}, loss_chunk {loss_chunk}"
    )
    trial = Trial(config, device)
    compare_gradients(trial, report)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        steps = progress.add_task("steps", total=2 * asked.pairs * len(pairs))
        for pair in pairs:
            report(line(pair, times(trial, pair, asked.pairs, lambda: progress.advance(steps))))


if __name__ == "__main__":
    main()
