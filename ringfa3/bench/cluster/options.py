"""The command line of `python -m ringfa3.bench cluster`, and its checks."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ringfa3.bench.cluster.mixes import DISTRIBUTIONS, Mix, from_lengths
from ringfa3.bench.cluster.rates import (
    MESSAGE_US,
    NIC_GB_S,
    NVLINK_GB_S,
    TFLOPS,
    Overhead,
    Rates,
    kernel_head_dim,
)
from ringfa3.bench.cluster.time_model import Heads
from ringfa3.bench.common.communicator import job_ranks
from ringfa3.bench.common.machine import BenchError
from ringfa3.planning.placement.costs import Ints
from ringfa3.planning.tile_schedule import MAX_ROWS
from ringfa3.validation import TRANSPORTS

HELP = (
    "Predicts attention in a training step on many GPUs, without one: time over the ideal, bytes "
    "by link, balance and buffers, of RingFA3 and of other ways to share out the same documents."
)
MOST_GPUS = 1024
GPUS = "8,64"
TOKENS = 32768  # of a GPU, by default
# Of `--calibrate`: small batches, where launches and the host count, to those of the kernel's speed
MIXES = ",".join(f"{name}{tokens}" for tokens in (4, 8, 32) for name in ("short", "magi", "tail"))


@dataclass(frozen=True)
class Options:
    """As `add_options` describes them."""

    mixes: list[Mix]
    gpus: list[int]
    per_host: int
    heads: Heads
    layers: int
    rates: Rates
    window: int
    seeds: int
    cp: list[int] | None
    calibrate: bool
    device: str
    transport: str
    out: Path | None
    quiet: bool


def add_options(p: argparse.ArgumentParser) -> None:
    names = ", ".join(DISTRIBUTIONS)
    p.add_argument(
        "--mix", metavar="NAMES", help=f"mixes of documents, separated by commas: {names}, each "
        "with the 1024s of tokens of a GPU, as in the default tail32; default of --calibrate "
        f"{MIXES}",
    )  # fmt: skip
    p.add_argument(
        "--lengths", metavar="FILE", help="draw documents from these lengths instead: text with "
        "one a line, or a .npy array of integers",
    )  # fmt: skip
    p.add_argument(
        "--tokens", metavar="N", help=f"of a GPU, for a mix without a number; default {TOKENS}"
    )
    for name, default, meaning in (
        ("--gpus-per-host", "8", "GPUs that share NVLink"),
        ("--heads", "32:8", "query heads and KV heads"),
        ("--head-dim", "128", "up to 256"),
        ("--layers", "16", "of the model"),
        ("--window", "-1", "keys before a query to which it attends, -1 for all"),
        ("--seeds", "5", "batches of each case"),
    ):
        p.add_argument(name, default=default, metavar="N", help=f"{meaning}; default {default}")
    forward, backward = (
        ", ".join(f"{rates[at]} (d{d})" for d, rates in TFLOPS.items()) for at in range(2)
    )
    for name, default, meaning in (
        ("--gpus", GPUS, "numbers of GPUs, separated by commas"),
        ("--nvlink", f"{NVLINK_GB_S:g}", "GB/s over NVLink into a GPU, and out of it"),
        ("--nic", f"{NIC_GB_S:g}", "GB/s of the network card of each GPU, each way"),
        ("--message", f"{MESSAGE_US:g}", "microseconds that each message costs its link"),
        ("--forward", forward, "TFLOP/s of the forward on whole tiles"),
        ("--backward", backward, "TFLOP/s of the backward on whole tiles"),
    ):
        p.add_argument(name, metavar="N", help=f"{meaning}; default {default}")
    p.add_argument(
        "--rates", type=Path, metavar="FILE", help="take rates from calibration.json instead of "
        "these defaults",
    )  # fmt: skip
    p.add_argument(
        "--calibrate", action="store_true", help="under torchrun: measure the mixes on the GPUs of "
        "the job, fit the rates, and compare predictions with further batches",
    )  # fmt: skip
    p.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="of --calibrate; cpu: a smoke run, give small mixes",
    )  # fmt: skip
    p.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="of --calibrate; default auto"
    )
    p.add_argument(
        "--cp", metavar="SIZES", help="sizes of static groups, separated by commas; default all "
        "powers of two that divide the GPUs",
    )  # fmt: skip
    p.add_argument("--out", type=Path, metavar="DIR", help="default runs/bench/cluster")
    p.add_argument("-q", "--quiet", action="store_true", help="print the summary lines alone")


def options(given: argparse.Namespace) -> Options:
    """Raises BenchError: a value is wrong; one line, with what is allowed."""
    heads = _heads(given.heads, _number("--head-dim", given.head_dim, 1, max(TFLOPS)))
    per_host = _number("--gpus-per-host", given.gpus_per_host, 1, MOST_GPUS)
    gpus = _job(given) if given.calibrate else _numbers("--gpus", given.gpus or GPUS, 2, MOST_GPUS)
    for world in () if given.calibrate else gpus:
        if world > per_host and world % per_host:
            near = world // per_host * per_host
            raise BenchError(
                f"--gpus {world}: hosts of --gpus-per-host {per_host} cannot be full; give {near} "
                f"or {near + per_host}"
            )
    cp = None if given.cp is None else _numbers("--cp", given.cp, 1, MOST_GPUS)
    for size in cp or []:
        if uneven := [world for world in gpus if world % size]:
            raise BenchError(f"--cp {size} does not divide --gpus {uneven[0]}: give a divisor")
    mixes = _mixes(given, min(gpus))
    for mix in mixes:
        if mix.tokens * max(gpus) >= MAX_ROWS:
            raise BenchError(
                f"{mix.name}: {mix.tokens} tokens on {max(gpus)} GPUs are 2^31 or more: give fewer"
            )
    return Options(
        mixes=mixes,
        gpus=gpus,
        per_host=per_host,
        heads=heads,
        layers=_number("--layers", given.layers, 1, 10_000),
        rates=_rates(given, heads),
        window=_number("--window", given.window, -1, MAX_ROWS),
        seeds=_number("--seeds", given.seeds, 1, 1000),
        cp=cp,
        calibrate=given.calibrate,
        device=given.device,
        transport=given.transport,
        out=given.out,
        quiet=given.quiet,
    )


def _job(given: argparse.Namespace) -> list[int]:
    """The number of ranks of the torchrun job."""
    if given.gpus is not None:
        raise BenchError(f"--calibrate with --gpus {given.gpus}: it runs on the GPUs of the job")
    world = job_ranks()[1]
    if world < 2:
        raise BenchError("--calibrate on 1 rank: start it with torchrun --nproc-per-node 2 or more")
    return [world]


def _rates(given: argparse.Namespace, heads: Heads) -> Rates:
    """Those of a file or the defaults, and each that is given instead."""
    dim = kernel_head_dim(heads.head_dim)
    forward, backward = (1e12 * speed for speed in TFLOPS[dim])
    rates = Rates(forward, backward, NVLINK_GB_S * 1e9, NIC_GB_S * 1e9, MESSAGE_US * 1e-6)
    if given.rates is not None:
        rates = _read_rates(given.rates, dim)

    def rate(name: str, unit: float, default: float) -> float:
        text = getattr(given, name)
        return default if text is None else unit * _rate(f"--{name}", text, name == "message")

    return replace(
        rates,
        forward=rate("forward", 1e12, rates.forward),
        backward=rate("backward", 1e12, rates.backward),
        nvlink=rate("nvlink", 1e9, rates.nvlink),
        nic=rate("nic", 1e9, rates.nic),
        message=rate("message", 1e-6, rates.message),
    )


def _read_rates(path: Path, dim: int) -> Rates:
    """From `calibration.json`. dim: the kernel's head dim."""
    try:
        content = json.loads(path.read_text())
        found = content["rates"]
        forward, backward = (Overhead(**x) for x in found.pop("overheads"))
        rates, measured = Rates(**found, overheads=(forward, backward)), content["heads"]
        head_dim = int(measured["head_dim"])
    except OSError as error:
        raise BenchError(f"--rates {path}: {error.strerror}: give a file") from None
    except (ValueError, TypeError, KeyError) as error:
        raise BenchError(
            f"--rates {path}: {type(error).__name__} {error}: give calibration.json of --calibrate"
        ) from None
    if kernel_head_dim(head_dim) != dim:
        raise BenchError(
            f"--rates {path}: measured with head dim {head_dim}: give --head-dim {head_dim}"
        )
    return rates


def _mixes(given: argparse.Namespace, least: int) -> list[Mix]:
    """least: the smallest number of GPUs."""
    tokens = None
    if given.tokens is not None:
        tokens = _number("--tokens", given.tokens, 1, MAX_ROWS)
    if given.lengths is not None:
        if given.mix is not None:
            raise BenchError(f"--lengths {given.lengths} with --mix {given.mix}: give one of them")
        path = Path(given.lengths)
        lengths, tokens = _read(path), tokens or TOKENS
        if lengths.max() > tokens * least:
            raise BenchError(
                f"--lengths {path}: {lengths.max()} tokens do not fit {least} GPUs of {tokens}: "
                "give more --gpus or --tokens"
            )
        return [Mix(path.stem, from_lengths(lengths), tokens)]
    default = MIXES if given.calibrate else "tail32"
    return [_mix(name, tokens) for name in _split(default if given.mix is None else given.mix)]


def _mix(name: str, tokens: int | None) -> Mix:
    base = name.rstrip("0123456789")
    if base not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise BenchError(f"--mix {name}: unknown; give {known}, each with a number, as tail32")
    if base == name:
        return Mix(name, DISTRIBUTIONS[base], tokens or TOKENS)
    if tokens is not None:
        raise BenchError(f"--mix {name} with --tokens {tokens}: give --mix {base}")
    number = _number("--mix", name[len(base) :], 1, MAX_ROWS // 1024)
    return Mix(name, DISTRIBUTIONS[base], 1024 * number)


def _read(path: Path) -> Ints:
    """(documents,) the lengths in a file."""
    try:
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        else:
            lines = path.read_text().split()
            found = np.array([int(line) for line in lines], np.int64)
    except OSError as error:
        raise BenchError(f"--lengths {path}: {error.strerror}: give a file") from None
    except (ValueError, OverflowError, EOFError) as error:
        what = "no array of NumPy" if path.suffix == ".npy" else error
        raise BenchError(f"--lengths {path}: {what}: give one length a line, or .npy") from None
    if not found.size:
        raise BenchError(f"--lengths {path}: no lengths: give one a line, or .npy")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise BenchError(
            f"--lengths {path}: shape {found.shape} of {found.dtype}: give one row of integers"
        )
    if found.min() < 1 or found.max() >= MAX_ROWS:
        raise BenchError(
            f"--lengths {path}: lengths are {found.min()} to {found.max()}: give 1 to 2^31 - 1"
        )
    return np.asarray(found, np.int64)


def _heads(text: str, head_dim: int) -> Heads:
    heads, _, kv_heads = text.partition(":")
    queries = _number("--heads", heads, 1, 1024)
    keys = _number("--heads", kv_heads or heads, 1, 1024)
    if queries % keys:
        raise BenchError(f"--heads {text}: {keys} KV heads must divide {queries} heads, as in 32:8")
    return Heads(queries, keys, head_dim)


def _split(text: str) -> list[str]:
    """Names of a list with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    return [_number(option, part, least, most) for part in _split(text)]


def _number(option: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise BenchError(f"{option} {text}: give a whole number from {least} to {most}")
    return number


def _rate(option: str, text: str, zero: bool = False) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (rate > 0 or (zero and rate == 0)) or math.isinf(rate):
        raise BenchError(f"{option} {text}: give a number {'from 0 on' if zero else 'above 0'}")
    return rate
