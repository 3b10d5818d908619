"""`python -m ringfa3.bench`: attention on one GPU, and rings of GPUs, against other libraries."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ringfa3.bench.common.cases import HEAD_DIMS, ITSELF, RING_SETS, SETS
from ringfa3.validation import TRANSPORTS

ATTENTION = "Attention on one GPU against FlashAttention-3 and cuDNN."
RING = (
    "Ring attention over the ranks of a torchrun job, and over the first 1, 2, 4, ... of them: "
    "TFLOP/s of one GPU against the same FLOPs without communication, ring-flash-attn and Ulysses "
    "on FlashAttention-3, and PyTorch's context_parallel."
)
REHEARSAL = (
    "One causal sequence, 32:8 heads of dimension 128, over peers' memory, on two GPUs that play "
    "the same rank of a ring of many and are each all peers of the other: the speed of a ring in "
    "step, beside one GPU with as much work and no communication. What it computes means nothing; "
    "its times do."
)
EXTRA = "pip install 'ringfa3[bench]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 1 something was wrong or failed, 2 nothing could be measured."""
    given = parser().parse_args(arguments)
    from ringfa3.bench.common.machine import BenchError

    try:
        return plot_only(given.plot_only) if given.plot_only else int(given.run(given))
    except BenchError as error:
        return refuse(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("rich", "matplotlib"):
            raise
        return refuse(f"{error.name} is not installed: {EXTRA}")
    except KeyboardInterrupt:
        say("interrupted; finished rows are in results.json")
        return 130


def attention(given: argparse.Namespace) -> int:
    from ringfa3.bench.attention.run import Options, run

    return run(
        Options(
            sets=chosen(given.set, SETS),
            dtype=given.dtype,
            head_dims=given.head_dim,
            shortest=given.shortest,
            direction=given.direction,
            pairs=given.pairs,
            fa3=given.fa3,
            device=given.device,
            out=given.out,
            quiet=given.quiet,
        )
    )


def ring(given: argparse.Namespace) -> int:
    from ringfa3.bench.ring.run import run
    from ringfa3.bench.ring.run_plan import Options

    return run(
        Options(
            sets=chosen(given.set, RING_SETS),
            dtype=given.dtype,
            worlds=given.worlds,
            shortest=given.shortest,
            longest=given.longest,
            direction=given.direction,
            transports=given.transport,
            pairs=given.pairs,
            timeout=given.timeout,
            fa3=given.fa3,
            device=given.device,
            out=given.out,
            quiet=given.quiet,
        )
    )


def rehearsal(given: argparse.Namespace) -> int:
    from ringfa3.bench.common.ranks import LostError, ToldError
    from ringfa3.bench.ring.rehearsal import Options, rehearse
    from ringfa3.errors import first_line

    options = Options(
        ranks=given.ranks,
        plays=given.plays,
        tokens=given.tokens,
        direction=given.direction,
        dtype=given.dtype,
        pairs=given.pairs,
        timeout=given.timeout,
        out=given.out,
    )
    try:
        return rehearse(options)
    except (RuntimeError, LostError, ToldError) as error:  # out of memory, a side that is lost
        rank = os.environ.get("RANK", "0")
        print(f"ringfa3.bench: rank {rank}: {first_line(error)}", file=sys.stderr)
        return 1


def chosen(names: list[str], sets: Mapping[str, object]) -> list[str]:
    """Sets by name; "all" are those against peers."""
    every = [name for name in sets if name not in ITSELF]
    return every if "all" in names else list(dict.fromkeys(names))


def plot_only(path: Path) -> int:
    from ringfa3.bench.common.plot import redraw
    from ringfa3.bench.common.results import ResultsError

    try:
        print("wrote " + ", ".join(map(str, redraw(path))))
    except (ResultsError, OSError) as error:
        return refuse(f"--plot-only: {error}")
    return 0


def refuse(reason: str) -> int:
    say(reason)
    return 2


def say(line: str) -> None:
    """On stderr, by the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"ringfa3.bench: {line}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser("python -m ringfa3.bench", description="RingFA3's benchmarks")
    add = whole.add_subparsers(required=True, metavar="BENCHMARK").add_parser
    p = add("attention", help="one GPU against FlashAttention-3 and cuDNN", description=ATTENTION)
    p.set_defaults(run=attention)
    p.add_argument(
        "--set", nargs="+", choices=[*SETS, "all"], default=["paper", "gqa"], metavar="SET",
        help="of cases: paper (16k tokens, hidden size 2048), gqa (32:8 heads, 8k to 128k), mqa "
        "(2 and 1 KV heads), hops (8k rows on 4k keys), masks (packed documents, windows), all of "
        "these; or, alone, RingFA3 against itself: ablation (the kernel without parts of it; the "
        "paper's Table 2 has --dtype fp16), merge (epilogues of a hop), deterministic (the "
        "backward with turns); default paper gqa",
    )  # fmt: skip
    p.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS))
    common(p, "attention")
    p = add("ring", help="1 to 8 GPUs against other rings, under torchrun", description=RING)
    p.set_defaults(run=ring)
    p.add_argument(
        "--set", nargs="+", choices=[*RING_SETS, "all"], default=["lengths"], metavar="SET",
        help="of cases, 32:8 heads, head dim 128: lengths (one causal sequence, 16k to 256k), "
        "documents (256k tokens), window (4096 of 256k), memory (4k to 64k tokens a GPU), error "
        "(all heads of 8k tokens against float64), host (time to start a call), checkpoint (a "
        "block under activation checkpointing), all; default lengths",
    )  # fmt: skip
    p.add_argument(
        "--worlds", nargs="+", type=int, metavar="N", help="numbers of ranks; default 1, 2, 4, ..."
    )
    p.add_argument(
        "--longest", type=int, default=1 << 31, metavar="TOKENS", help="leave out longer sequences"
    )
    p.add_argument(
        "--transport", nargs="+", default=["auto"], choices=TRANSPORTS, metavar="NAME",
        help=f"of RingFA3: {', '.join(TRANSPORTS)}; the first is held against the others and "
        "the peers",
    )  # fmt: skip
    p.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS",
        help="after which a peer that hangs has failed",
    )  # fmt: skip
    common(p, "ring")
    p = add("rehearsal", help="a ring of many GPUs on two, under torchrun", description=REHEARSAL)
    p.set_defaults(run=rehearsal, plot_only=None)
    p.add_argument("--ranks", type=int, default=4, help="of the ring; default 4")
    p.add_argument("--plays", type=int, default=1, help="the rank that both GPUs play; default 1")
    p.add_argument(
        "--tokens", nargs="+", type=int, default=[4096, 8192, 16384], help="of a rank, each a case"
    )
    p.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    p.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    p.add_argument("--pairs", type=int, default=10, help="A B pairs per comparison (>= 10)")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds; default 120")
    p.add_argument("--out", type=Path, default=Path("runs/bench/rehearsal"), metavar="DIR")
    return whole


def common(p: argparse.ArgumentParser, name: str) -> None:
    """What every benchmark can be told."""
    p.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    p.add_argument(
        "--shortest", type=int, default=0, metavar="TOKENS", help="leave out shorter sequences"
    )
    p.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    p.add_argument("--pairs", type=int, default=10, help="A B pairs per comparison (>= 10)")
    p.add_argument(
        "--fa3", type=Path, metavar="PATH", help="library with torch.ops.flash_attn_3; by default "
        "the package flash_attn_interface, where it is installed",
    )  # fmt: skip
    p.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a smoke run of the machinery on small shapes, no figure of a kernel",
    )  # fmt: skip
    p.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"default docs/results/{name}/DEVICE-DATE-DTYPE (cpu: runs/bench/{name}/...)",
    )  # fmt: skip
    p.add_argument("--plot-only", type=Path, metavar="FILE.json", help="draw a result again")
    p.add_argument("-q", "--quiet", action="store_true", help="print the summary line alone")


def finish(code: int) -> NoReturn:
    """Ends the process; in a job at once: an orderly end could wait for a lost rank."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    finish(main())
