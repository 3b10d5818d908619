"""Compares the speed of trainers under context parallelism: RingFA3's and Hugging Face's.

    python -m benchmarks.compare_trainers [--shape llama-1b] [--tokens 32768] [--ranks 2]
        [--liger] [--fa3 LIBRARY] [--sides ring own ...] [--profile]

Each side is a job of `--ranks` processes that are one CP group. They train the same model, of
random weights, on the same documents with AdamW and in bfloat16; weights are float32.

    ring       TRL's SFTTrainer in `ringfa3.hf.context_parallel`, with packing
    peer       the same, but every second step has ring-flash-attn's attention on FlashAttention-3.
               Only with --fa3
    own        `train/pretrain.py`, not compiled, as Hugging Face's models are not either
    compiled   the same with train.compile=block; no bar
    documents  SFTTrainer with accelerate's context parallelism (sdpa), which needs FSDP2 and
               refuses packing: the documents of a sample one by one, then an update
    rows       the same, but the tokens of a sample are one document
    errors     no trainer: `compare_hf` on the same shape and number of tokens

Prints the tokens/s of each side, from the median of its steps. Each step begins at the end of the
one before, so it has the loading of its data too. Then it prints the ratios of `ring` to the
others, and of the error of RingFA3's gradients to that of transformers' own attention. The ratio to
ring-flash-attn is the median of pairs of neighbouring steps, after each of which the host waits for
the device. Writes trainers.json into docs/results/hf/, or `--out`.

With `--profile`, on GPUs, it prints where the time of a step goes instead, by default of `ring` and
`own`: kernels, ops of the host, and when the device was idle. `--out` gets profile-SIDE.txt.

Exits with 1 if a side fails, a ratio misses its bar, or the error is too large. On CPUs it measures
no kernel, and the speeds have no bars; accelerate's context parallelism does not run there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.compare_hf import LARGEST_RATIO
from benchmarks.compare_trainers.profile import report
from benchmarks.compare_trainers.sides import (
    COMPILED,
    DOCUMENTS,
    NEED_GPUS,
    OWN,
    PAIRED,
    PEER,
    PROFILED,
    RING,
    ROOT,
    ROWS,
    SHAPES,
    SIDES,
    TRACE,
    Settings,
)
from benchmarks.compare_trainers.stopwatch import UNDISTURBED
from ringfa3.bench.common.machine import BenchError, slug
from ringfa3.bench.common.report import new_folder

FILE = "trainers.json"

# The least speed of RingFA3 under SFTTrainer over that of another; None: it has no bar.
BARS = {OWN: 0.95, COMPILED: None, PEER: 1.02, DOCUMENTS: 1.3, ROWS: 1.3}
TO_END_S = 30.0  # that a job has after SIGTERM
TAIL = 60  # lines of a failed job


class SideError(Exception):
    """A side ended without figures."""


@dataclass(frozen=True)
class Ratio:
    """A line of the verdict.

    bar    None: there is none
    right  whether `value` is at the bar or on its right side; NaN never is
    """

    name: str
    value: float
    bar: float | None
    right: bool


def run(side: str, folder: Path, ranks: int, limit: float) -> dict[str, Any]:
    """The figures of a side. Raises SideError: it failed, or took longer than `limit` seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(ranks),
        "-m",
        "benchmarks.compare_trainers.sides",
        side,
        str(folder),
    ]
    given = {"HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**given, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    log = folder / f"{side}.log"
    with log.open("w") as output:
        job = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
        try:
            problem = f"ended with exit code {code}" if (code := job.wait(limit)) else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {limit:.0f} s"
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its processes
                try:
                    job.wait(TO_END_S)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
    result = folder / f"{side}.json"
    if not problem and not result.exists():
        problem = "wrote no figures"
    if problem:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
        raise SideError(f"{side} {problem}:\n{tail}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def ratios(figures: dict[str, Any], judged: bool) -> list[Ratio]:
    """What the sides give; speeds have bars if `judged`."""
    seconds = {
        name: x for found in figures.values() for name, x in found.get("seconds", {}).items()
    }
    found = []
    for name in BARS:
        base = PAIRED if name == PEER else RING
        if not {name, base} <= seconds.keys():
            continue
        ours, theirs = seconds[base], seconds[name]
        value = statistics.median(theirs) / statistics.median(ours)
        if name == PEER:
            value = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        bar = BARS[name] if judged else None
        found.append(
            Ratio(f"tokens/s over those of {name}", value, bar, bar is None or value >= bar)
        )
    for side in figures.values():
        if "errors" in side:
            (ours, theirs), names = side["errors"].values(), list(side["errors"])
            value = ours / theirs
            name = f"error of gradients over that of {names[1]}"
            found.append(Ratio(name, value, LARGEST_RATIO, value <= LARGEST_RATIO))
    return found


def profile(side: str, found: dict[str, Any], folder: Path, out: Path | None) -> str:
    """The tables of the trace of a side in `folder`, written to the folder `out` too."""
    lines = [
        f"{name}: {1e3 * statistics.mean(seconds[:UNDISTURBED]):.1f} ms a step, before the profiler"
        for name, seconds in found["seconds"].items()
    ]
    trace = json.loads((folder / TRACE).read_text(errors="replace"))
    text = "\n".join([*lines, report(trace["traceEvents"])])
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"profile-{side}.txt").write_text(f"{text}\n")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b", help="tiny: a smoke test")
    parser.add_argument("--tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--ranks", type=int, default=2, help="processes, all in one CP group")
    parser.add_argument("--steps", type=int, default=10, help="that are timed, of each figure")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, help="default: all that can run, but compiled"
    )
    parser.add_argument("--recompute", action="store_true", help="every layer, in all trainers")
    parser.add_argument(
        "--liger", action="store_true", help="Liger's fused layers in SFTTrainer's models"
    )
    parser.add_argument("--fa3", type=Path, help="a library with FlashAttention-3's operators")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for each side")
    parser.add_argument("--out", type=Path, help="the folder of trainers.json")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of a step goes instead"
    )
    args = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    left_out = {"compiled", *(() if gpus else NEED_GPUS), *(() if args.fa3 else ("peer",))}
    sides = args.sides or [side for side in SIDES if side not in left_out]
    if args.profile:
        sides, args.steps = args.sides or ["ring", "own"], PROFILED
        if gpus == 0:
            parser.error("--profile: it shows kernels, and needs GPUs")
        if "errors" in sides:
            parser.error("--sides errors: it trains no steps that --profile could show")
    if "peer" in sides and args.fa3 is None:
        parser.error("--sides peer: it needs --fa3")
    if gpus == 0 and (refused := [side for side in sides if side in NEED_GPUS]):
        parser.error(f"--sides {' '.join(refused)}: PyTorch's context parallelism needs GPUs")
    if gpus and args.ranks > gpus:
        parser.error(f"--ranks {args.ranks}: {gpus} GPUs are visible")
    for name, least in (("ranks", 2), ("steps", 1)):
        if (given := getattr(args, name)) < least:
            parser.error(f"--{name} {given}: it must be at least {least}")
    if args.fa3 is not None and not args.fa3.is_file():
        parser.error(f"--fa3 {args.fa3}: no such file")
    settings = Settings(
        args.shape, args.tokens, args.ranks, args.steps, args.recompute,
        None if args.fa3 is None else str(args.fa3.absolute()), "cuda" if gpus else "cpu",
        args.liger, args.profile,
    )  # fmt: skip
    try:
        settings.lengths()
    except ValueError as problem:
        parser.error(f"--tokens: {problem}")
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings.write(folder)
        figures: dict[str, Any] = {}
        failed = False
        for side in sides:
            begin = time.perf_counter()
            try:
                figures[side] = run(side, folder, args.ranks, args.limit_s)
            except SideError as problem:
                failed = True
                console.print(f"{problem}")
                continue
            if args.profile:
                console.print(profile(side, figures[side], folder, args.out))
                continue
            for name, seconds in figures[side].get("seconds", {}).items():
                speed = settings.tokens / statistics.median(seconds)
                console.print(f"{name}: {speed:,.0f} tokens/s", end="; ")
            for name, error in figures[side].get("errors", {}).items():
                console.print(f"error of {name}'s gradients {error:.3%}", end="; ")
            console.print(f"{side} took {time.perf_counter() - begin:.0f} s")
    if args.profile:
        return int(failed)
    found = ratios(figures, judged=gpus > 0)
    for ratio in found:
        bar = (
            "" if ratio.bar is None else f", bar {ratio.bar}: {'met' if ratio.right else 'MISSED'}"
        )
        console.print(f"{ratio.name}: {ratio.value:.3f}{bar}")
    if figures:
        record = {
            "settings": asdict(settings),
            "sides": figures,
            "ratios": [asdict(r) for r in found],
        }
        try:
            path = (
                results_folder(args.out, next(iter(figures.values()))["machine"], settings) / FILE
            )
        except BenchError as problem:
            parser.error(str(problem))
        path.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written: {path}")
    return int(failed or not all(ratio.right for ratio in found))


def results_folder(out: Path | None, machine: dict[str, Any], settings: Settings) -> Path:
    """Where trainers.json goes. Raises BenchError as `new_folder`."""
    day = datetime.datetime.now(datetime.timezone.utc).date()
    stem = Path("runs/bench/hf") / f"cpu-smoke-{day}"
    if settings.device == "cuda":
        stem = Path("docs/results/hf") / f"{slug(machine['device'])}-x{settings.ranks}-{day}"
    return new_folder(out, stem, FILE)


if __name__ == "__main__":
    sys.exit(main())
