"""Compares the speed of this checkout with another commit: `make speed BASE=COMMIT`.

    python -m benchmarks.compare_commits BASE [--libraries PATH] [--rounds 4] [--device cpu]

BASE is a commit, or a folder with a checkout of it. Jobs of both run in turns, A B A B: rows of
`bench attention` (16k tokens, head dim 128), a ring of 2 GPUs (64k tokens), and steps of
`train/pretrain.py` (125m, 16k tokens a GPU). Prints one table: medians of milliseconds, and the
median of the paired ratios with the least and the largest; above 1 this checkout is faster.

`--libraries` has compiled kernels of BASE: the folder that `python -m ringfa3.build` of BASE has
filled, or a wheel. Without it, the first job of BASE compiles them. This checkout uses the kernels
of RINGFA3_CACHE, as always.

It needs a Hopper GPU; with one, no ring is timed. `--device cpu` is a smoke run without figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).absolute().parents[1]
CODE = ("ringfa3", "csrc", "train", "configs")  # what the jobs need of a checkout
BATCH_KEYS = ("train.batch=1", "train.global_batch_size=1")  # in 0.1, and since
ROW = ("set", "label", "mask", "kv_heads", "head_dim", "direction", "world")  # identify a row
UNTIMED = 4  # steps of a training run
TAIL = 30  # lines of a failed job
Times = dict[str, float]  # milliseconds by row
Line = tuple[str, str, str, str]  # of the table: row, two medians in milliseconds, ratio


class SpeedError(Exception):
    """Nothing can be compared; the message has the reason and the fix."""


class Side(NamedTuple):
    """A checkout, and the folder of its kernels; None: that of the environment."""

    name: str
    tree: Path
    cache: Path | None


def base_side(base: str, libraries: Path | None, into: Path) -> Side:
    """A copy of BASE in the folder `into`. Raises SpeedError."""
    if Path(base, "ringfa3").is_dir():
        for name in CODE:
            shutil.copytree(Path(base, name), into / name)
    else:
        command = ["git", "archive", base, *CODE]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True)
        if archive.returncode:
            raise SpeedError(
                f"BASE={base} is no commit of this clone ({archive.stderr.decode().strip()}), "
                "and no folder with a checkout: give one of the two"
            )
        subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)
    if libraries is None or libraries.is_dir():
        return Side(base, into, libraries and libraries.absolute())
    try:
        with zipfile.ZipFile(libraries) as wheel:
            kernels = [n for n in wheel.namelist() if n.startswith("ringfa3/libraries/")]
            wheel.extractall(into, kernels)
    except (OSError, zipfile.BadZipFile) as error:
        raise SpeedError(
            f"BASE_LIBRARIES={libraries}: {error}; give a folder that `python -m ringfa3.build` "
            "of BASE has filled, or a wheel"
        ) from error
    if not kernels:
        raise SpeedError(f"BASE_LIBRARIES={libraries}: the wheel has no compiled kernels")
    return Side(base, into, None)


def run(side: Side, world: int, command: Sequence[str], folder: Path) -> None:
    """A job of `world` processes. Raises SpeedError: it failed."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    start = torchrun if world > 1 else ()
    environment = {**os.environ, "PYTHONPATH": str(side.tree)}
    if side.cache is not None:
        environment["RINGFA3_CACHE"] = str(side.cache)
    job = subprocess.run(
        [sys.executable, *start, *command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if job.returncode:
        tail = "\n".join(job.stdout.splitlines()[-TAIL:])
        raise SpeedError(f"{side.name}: {' '.join(command)} exited with {job.returncode}:\n{tail}")


def rows(results: Path) -> Times:
    """Of RingFA3 in a result file of `bench`: the median of each row."""
    found = {}
    for row in json.loads(results.read_text())["rows"]:
        seconds = [s for match in row["matches"].values() for s in match["seconds"][0]]
        if seconds:
            name = " ".join(str(row[key]) for key in ROW if key in row)
            found[name] = 1e3 * statistics.median(seconds)
    return found


def bench(side: Side, world: int, device: str, folder: Path) -> Times:
    """Of one GPU or, if world > 1, of a ring. Raises SpeedError."""
    options = ["--set", "paper", "--head-dim", "128", "--shortest", "16384"]
    if world > 1:
        options = ["--set", "lengths", "--worlds", str(world)]
        options += ["--shortest", "65536", "--longest", "65536"]
    command = ["-m", "ringfa3.bench", "ring" if world > 1 else "attention", "-q", *options]
    run(side, world, [*command, "--device", device, "--out", str(folder / "bench")], folder)
    return rows(folder / "bench" / "results.json")


def train(side: Side, world: int, device: str, folder: Path) -> Times:
    """Of a step of the trainer. Raises SpeedError."""
    known = (side.tree / "configs" / "config.yaml").read_text()
    batch = BATCH_KEYS["global_batch_size" in known]
    sizes = ("model=125m", f"data.seq_len={16384 * world}", "train.steps=16")
    if device == "cpu":
        sizes = ("model=tiny", "data.seq_len=256", f"train.steps={UNTIMED + 2}")
    run_dir = folder / "run"
    command = [
        str(side.tree / "train" / "pretrain.py"), *sizes, f"parallel.cp={world}",
        f"parallel.device={device}", batch, "train.compile=none", "optim.lr=3e-4",
        "optim.warmup_steps=2", "data=text", f"data.path={ROOT / 'ringfa3'}",
        "data.vocab_size=1024", f"data.cache_dir={folder.parent / 'data'}", "train.eval_every=1000",
        "train.final_eval_bytes=1000", "checkpoint.every=1000", f"run.dir={run_dir}",
    ]  # fmt: skip
    run(side, world, command, folder)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    tokens = int(sizes[1].partition("=")[2])
    seconds = [tokens / line["tokens_per_s"] for line in lines if line["step"] > UNTIMED]
    return {f"step of {sizes[0]}, {tokens} tokens": 1e3 * statistics.median(seconds)}


def in_turns(sides: Sequence[Side], job: Callable[[Side], Times], rounds: int) -> list[list[Times]]:
    """What a job measures for each side, round by round; the side that begins alternates."""
    found: list[list[Times]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append(job(sides[which]))
    return found


def lines(base: Iterable[Times], now: Iterable[Times]) -> list[Line]:
    """Of each row that a round has timed, in pairs. Raises SpeedError: no row has a pair."""
    pairs = list(zip(base, now, strict=True))
    table: list[Line] = []
    for name in dict.fromkeys(name for pair in pairs for found in pair for name in found):
        times = [(a[name], b[name]) for a, b in pairs if name in a and name in b]
        if not times:
            table.append((name, "", "", "timed on one side only"))
            continue
        ratios = [a / b for a, b in times]
        old, new = (statistics.median(x) for x in zip(*times, strict=True))
        spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
        ratio = f"{statistics.median(ratios):.3f} {spread}"
        table.append((name, f"{old:.3f}", f"{new:.3f}", ratio))
    if not any(old for _, old, _, _ in table):
        raise SpeedError(f"no row was timed on both sides, of {[name for name, *_ in table]}")
    return table


def worlds(device: str) -> list[int]:
    """Numbers of processes: 1, and 2 where there are 2 GPUs. Raises SpeedError."""
    import torch

    if device == "cpu":
        return [1, 2]
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        raise SpeedError(
            "it needs a Hopper GPU (H100, H200, GH200), 2 for a ring, and there is none here; "
            "--device cpu is a smoke run without figures"
        )
    return [1, 2][: torch.cuda.device_count()]


def compare(base: str, libraries: Path | None, rounds: int, device: str) -> list[Line]:
    """All lines of the table. Raises SpeedError."""
    known = worlds(device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "base").mkdir()
        sides = base_side(base, libraries, folder / "base"), Side("this checkout", ROOT, None)
        table: list[Line] = []
        jobs = [(bench, world) for world in known] + [(train, known[-1])]
        for measure, world in jobs:

            def job(side: Side, measure: Callable[..., Times] = measure, n: int = world) -> Times:
                return measure(side, n, device, Path(tempfile.mkdtemp(dir=folder)))

            table += lines(*in_turns(sides, job, rounds))
    if len(known) == 1:
        table.append(("ring of 2", "", "", "needs 2 GPUs"))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="a commit, or a folder with a checkout")
    parser.add_argument("--libraries", type=Path, metavar="PATH", help="compiled kernels of BASE")
    parser.add_argument(
        "--rounds", type=int, default=4, help="runs of each job and side; default 4"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: give 1 or more")
    try:
        found = compare(asked.base, asked.libraries, asked.rounds, asked.device)
    except SpeedError as error:
        sys.exit(f"compare_commits: {error}")
    title = "" if asked.device == "cuda" else "SMOKE RUN, no figures: "
    table = Table(
        "row", "base, ms", "now, ms", "base / now",
        title=f"{title}{asked.base} and this checkout, {asked.rounds} rounds",
    )  # fmt: skip
    for line in found:
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()
