"""`python -m ringfa3.bench`: RingFA3 against other libraries, on one GPU and on several."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from ringfa3.bench.attention.cases import HEAD_DIMS, HOST, OWN_IMPLEMENTATIONS, PEERS, SETS
from ringfa3.bench.cluster.options import HELP, add_options, options
from ringfa3.bench.common.scores import SCORES
from ringfa3.bench.common.timing import SAMPLE_MS
from ringfa3.bench.ring.cases import RING_SETS
from ringfa3.validation import TRANSPORTS

ATTENTION = "Attention on one GPU against FlashAttention-3, FlashAttention-4 and cuDNN."
RING = (
    "Ring attention over the ranks of a torchrun job, and over the first 1, 2, 4, ... of them: "
    "TFLOP/s of one GPU against the same FLOPs without communication, ring-flash-attn and Ulysses "
    "on FlashAttention-3, and PyTorch's context_parallel."
)
FP8 = (
    "Errors of 8-bit attention against float64 on FlashAttention-3's outliers (its Table 3): "
    "RingFA3's precisions, each without one of its parts, and a scale for each tensor. All by the "
    "PyTorch fallback, which rounds as the kernels do."
)
TABLES = "Write the tables of all pages in docs/ from docs/results/*/*/results.json."
EXTRA = "pip install 'ringfa3[bench]'"
T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 success, 1 a result was wrong or a call failed, 2 the run could not start."""
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
        print_error("interrupted; finished rows are in results.json")
        return 130


def attention(given: argparse.Namespace) -> int:
    if HOST in given.set:
        return host(given)
    from ringfa3.bench.attention.run import Options, run

    sets = chosen(given.set, SETS)
    return run(from_arguments(Options, given, sets=sets, head_dims=given.head_dim))


def host(given: argparse.Namespace) -> int:
    from ringfa3.bench.attention.host import Options, run
    from ringfa3.bench.common.machine import BenchError

    if given.set != [HOST]:
        raise BenchError(f"--set {HOST} times the host only: give no other --set with it")
    if given.errors_only or given.fa4 is not None:
        raise BenchError(f"--set {HOST} supports neither --errors-only nor --fa4")
    return run(from_arguments(Options, given, head_dims=given.head_dim))


def ring(given: argparse.Namespace) -> int:
    from ringfa3.bench.ring.run import run
    from ringfa3.bench.ring.run_plan import Options

    sets = chosen(given.set, RING_SETS)
    return run(from_arguments(Options, given, sets=sets, transports=given.transport))


def fp8(given: argparse.Namespace) -> int:
    from ringfa3.bench.fp8 import bandwidth
    from ringfa3.bench.fp8.designs import DESIGNS
    from ringfa3.bench.fp8.kernels import MEASURED
    from ringfa3.bench.fp8.run import Options, run

    if given.bandwidth:
        return bandwidth.run(given.head_dim, given.dtype, given.quiet)
    masks = {"full": [False], "causal": [True], "both": [False, True]}
    own = {
        "head_dims": given.head_dim,
        "causal": masks[given.mask],
        "designs": list(MEASURED if given.kernels else DESIGNS),
    }
    return run(from_arguments(Options, given, **own))


def from_arguments(options: Callable[..., T], given: argparse.Namespace, **own: object) -> T:
    """The dataclass `options` of the arguments that have its fields' names, and of `own`."""
    names = inspect.signature(options).parameters.keys() - own.keys()
    return options(**{name: getattr(given, name) for name in names}, **own)


def cluster(given: argparse.Namespace) -> int:
    from ringfa3.bench.cluster import calibrate
    from ringfa3.bench.cluster.run import run

    found = options(given)
    return of_rank(lambda: calibrate.run(found)) if found.calibrate else run(found)


def of_rank(run: Callable[[], int]) -> int:
    """run(); its errors are one line of this rank."""
    from ringfa3.bench.common.communicator import RankFailedError, RankLostError
    from ringfa3.errors import first_line

    try:
        return run()
    except (RuntimeError, RankLostError, RankFailedError) as error:  # also out of memory
        rank = os.environ.get("RANK", "0")
        print(f"ringfa3.bench: rank {rank}: {first_line(error)}", file=sys.stderr)
        return 1


def tables(given: argparse.Namespace) -> int:
    from ringfa3.bench.tables.page import check_pages, write_pages

    return check_pages(given.pages) if given.check else write_pages(given.pages)


def chosen(names: list[str], sets: Mapping[str, object]) -> list[str]:
    """Sets by name; "all" are those that compare with other libraries."""
    every = [name for name in sets if name not in (*OWN_IMPLEMENTATIONS, HOST)]
    return every if "all" in names else list(dict.fromkeys(names))


def plot_only(path: Path) -> int:
    """Draw the plots of a results file again, into its folder."""
    from ringfa3.bench.attention.plot import attention_figures
    from ringfa3.bench.common.plot import draw
    from ringfa3.bench.common.results import Results, ResultsError
    from ringfa3.bench.ring.plot import ring_figures

    figures = {"attention": attention_figures, "ring": ring_figures}
    try:
        results = Results.load(path)
        drawn = draw(results, path.parent, figures[results.benchmark])
    except (ResultsError, OSError) as error:
        return refuse(f"--plot-only: {error}")
    print("wrote " + ", ".join(map(str, drawn)))
    return 0


def refuse(reason: str) -> int:
    print_error(reason)
    return 2


def print_error(line: str) -> None:
    """On stderr, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"ringfa3.bench: {line}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser("python -m ringfa3.bench", description="RingFA3's benchmarks")
    add = whole.add_subparsers(required=True, metavar="BENCHMARK").add_parser
    p = add("attention", help="one GPU against FlashAttention and cuDNN", description=ATTENTION)
    p.set_defaults(run=attention)
    p.add_argument(
        "--set", nargs="+", choices=[*SETS, "all"], default=["paper", "gqa"], metavar="SET",
        help="of cases: paper (16k tokens, hidden size 2048), gqa (32:8 heads, 8k to 128k), mqa "
        "(2 and 1 KV heads), hops (8k rows on 4k keys), masks (packed documents, windows), "
        "packed (16k tokens of documents of 64 to 512 tokens), scores "
        "(of 1 to 16 nats, slopes, a sink; with rms errors), all of these; or one with "
        "implementations of its own: ablation (the kernel without parts of it, with three "
        "stages, or fp8 with V transposed in the kernel or sums promoted; the paper's Table 2 has "
        "--dtype fp16), deterministic (the "
        "deterministic backward), fp8 and int8 (8-bit operands, and the inputs' dtype), "
        "below (head dims 40 to 192, and the next kernel's own), sinks (with them and without), "
        "spans (masks, against causal of equal FLOPs), tree (shared prompts, against their "
        "sequences one by one, FlashAttention-4 and FlexAttention), "
        "host (microseconds to start a call); default paper gqa",
    )  # fmt: skip
    p.add_argument(
        "--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS),
        help="of the kernels that run the cases; default all",
    )  # fmt: skip
    p.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME",
        help=f"libraries to compare with: {', '.join(PEERS)}; default all",
    )  # fmt: skip
    p.add_argument(
        "--fa4", type=Path, metavar="DIR", help="folder of the unpacked wheels of FlashAttention-4 "
        "and of what it requires; by default the package flash_attn.cute, where it is installed",
    )  # fmt: skip
    p.add_argument(
        "--sample-ms", type=float, default=SAMPLE_MS, metavar="MS",
        help="minimum length of a timed sample of the slower of two calls on a GPU; the faster one "
        f"has as many calls; default {SAMPLE_MS:g}",
    )  # fmt: skip
    p.add_argument(
        "--errors-only",
        action="store_true",
        help="time nothing; compute the rms errors of --set scores",
    )
    add_common_options(p, "attention")
    p = add("ring", help="1 to 8 GPUs against other rings, under torchrun", description=RING)
    p.set_defaults(run=ring)
    p.add_argument(
        "--set", nargs="+", choices=[*RING_SETS, "all"], default=["lengths"], metavar="SET",
        help="of cases, 32:8 heads, head dim 128: lengths (one causal sequence, 16k to 256k), "
        "documents (256k tokens), window (4096 of 256k), memory (4k to 64k tokens a GPU), error "
        "(all heads of 8k tokens against float64), host (time to start a call), checkpoint (a "
        "block under activation checkpointing), fresh (16 calls forward and backward on a packing "
        "of their own), magi (MagiAttention's mix of documents, 64:8 heads), mixes (short "
        "documents, and a long tail), spans (trees, a window with first keys), all; default "
        "lengths",
    )  # fmt: skip
    p.add_argument(
        "--worlds", nargs="+", type=int, metavar="N", help="world sizes; default 1, 2, 4, ..."
    )
    p.add_argument(
        "--longest", type=int, default=1 << 31, metavar="TOKENS", help="leave out longer sequences"
    )
    p.add_argument(
        "--transport", nargs="+", default=["auto"], choices=TRANSPORTS, metavar="NAME",
        help=f"of RingFA3: {', '.join(TRANSPORTS)}; the first is compared with the others and "
        "the other libraries",
    )  # fmt: skip
    p.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS",
        help="after which an implementation that hangs has failed",
    )  # fmt: skip
    add_common_options(p, "ring")
    p = add("fp8", help="errors of 8-bit attention", description=FP8)
    p.set_defaults(run=fp8, plot_only=None)
    p.add_argument(
        "--lengths", nargs="+", type=int, default=[4096], metavar="TOKENS", help="default 4096"
    )
    p.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=[128])
    p.add_argument(
        "--bandwidth", action="store_true",
        help="measure no error but the quantisation kernels' bytes per second, on a GPU",
    )  # fmt: skip
    p.add_argument(
        "--kernels", action="store_true",
        help="measure the kernels, on a GPU, whose O has the inputs' dtype: three designs",
    )  # fmt: skip
    p.add_argument("--mask", choices=("full", "causal", "both"), default="both")
    p.add_argument("--heads", type=int, default=16, help="default 16")
    p.add_argument("--seeds", type=int, default=5, help="pooled; default 5")
    p.add_argument(
        "--scores", choices=SCORES, default="outliers", metavar="NAME",
        help="inputs, as in `attention --set scores`; default outliers",
    )  # fmt: skip
    p.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=Path, metavar="DIR", help="default runs/bench/fp8")
    p.add_argument("-q", "--quiet", action="store_true", help="print the summary line alone")
    p = add("cluster", help="predicted steps on many GPUs, without one", description=HELP)
    p.set_defaults(run=cluster, plot_only=None)
    add_options(p)
    p = add("tables", help="write the tables of the pages in docs/", description=TABLES)
    p.set_defaults(run=tables, plot_only=None)
    p.add_argument(
        "--check", action="store_true",
        help="write nothing; exit code 1 if a page differs from what the result files give",
    )  # fmt: skip
    p.add_argument(
        "--pages", type=Path, default=Path("docs"), metavar="DIR",
        help="folder of the pages (*.md, also in subfolders) and of results/; default docs",
    )  # fmt: skip
    return whole


def add_common_options(p: argparse.ArgumentParser, name: str) -> None:
    p.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    p.add_argument(
        "--shortest", type=int, default=0, metavar="TOKENS", help="leave out shorter sequences"
    )
    p.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    p.add_argument("--pairs", type=int, default=10, help="A B pairs per comparison (>= 10)")
    p.add_argument(
        "--one-by-one", action="store_true", help="each call starts on idle GPUs, and its time is "
        "that of the host and the GPU together; by default calls are queued",
    )  # fmt: skip
    p.add_argument(
        "--fa3", type=Path, metavar="PATH", help="library with torch.ops.flash_attn_3; by default "
        "the package flash_attn_interface, where it is installed",
    )  # fmt: skip
    p.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a smoke run on small shapes, without any figure of a kernel",
    )  # fmt: skip
    p.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"default docs/results/{name}/DEVICE-DATE-DTYPE (cpu: runs/bench/{name}/...; "
        "--set host: runs/bench/host)",
    )  # fmt: skip
    p.add_argument("--plot-only", type=Path, metavar="FILE.json", help="draw the plots of a result")
    p.add_argument("-q", "--quiet", action="store_true", help="print the summary line alone")


def finish(code: int) -> NoReturn:
    """End the process. In a job without cleanup, which could wait for a lost rank."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    finish(main())
