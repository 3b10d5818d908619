"""`python -m ringfa3.bench attention`: attention on one GPU against FlashAttention-3 and cuDNN."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ringfa3.bench.cases import ABLATION, HEAD_DIMS, SETS

EXTRA = "pip install 'ringfa3[bench]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 1 something was wrong or failed, 2 nothing could be measured."""
    given = parser().parse_args(arguments)
    try:
        return plot_only(given.plot_only) if given.plot_only else attention(given)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("rich", "matplotlib"):
            raise
        return refuse(f"{error.name} is not installed: {EXTRA}")
    except KeyboardInterrupt:
        print("ringfa3.bench: interrupted; finished rows are in results.json", file=sys.stderr)
        return 130


def attention(given: argparse.Namespace) -> int:
    from ringfa3.bench.attention import BenchError, Options, run

    every = [name for name in SETS if name != ABLATION]
    sets = every if "all" in given.set else list(dict.fromkeys(given.set))
    try:
        return run(
            Options(
                sets=sets,
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
    except BenchError as error:
        return refuse(str(error))


def plot_only(path: Path) -> int:
    from ringfa3.bench.plot import redraw
    from ringfa3.bench.results import ResultsError

    try:
        print("wrote " + ", ".join(map(str, redraw(path))))
    except (ResultsError, OSError) as error:
        return refuse(f"--plot-only: {error}")
    return 0


def refuse(reason: str) -> int:
    print(f"ringfa3.bench: {reason}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser("python -m ringfa3.bench", description="RingFA3's benchmarks")
    add = whole.add_subparsers(required=True, metavar="BENCHMARK").add_parser
    p = add("attention", help="one GPU against FlashAttention-3 and cuDNN", description=__doc__)
    p.add_argument(
        "--set",
        nargs="+",
        choices=[*SETS, "all"],
        default=["paper", "gqa"],
        metavar="SET",
        help="of cases: paper (16k tokens, hidden size 2048), gqa (32:8 heads, 8k to 128k), masks "
        "(packed documents, windows), all of these; or ablation (our kernel without parts of it; "
        "the paper's Table 2 has --dtype fp16); default paper gqa",
    )
    p.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    p.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS))
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
        help="default docs/results/attention/DEVICE-DATE-DTYPE (cpu: runs/bench/attention/...)",
    )  # fmt: skip
    p.add_argument("--plot-only", type=Path, metavar="FILE.json", help="draw a result again")
    p.add_argument("-q", "--quiet", action="store_true", help="print the summary line alone")
    return whole


if __name__ == "__main__":
    sys.exit(main())
