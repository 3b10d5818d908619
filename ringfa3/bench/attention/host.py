"""Microseconds that the host needs to start a call of attention on an idle GPU.

RingFA3 from C++ and from Python, FlashAttention-3 where it is given, PyTorch's
scaled_dot_product_attention, and one multiplication, which shows what PyTorch itself needs. They
take turns, so that a change of the machine's load meets all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from ringfa3 import flash_attn_varlen_func, host
from ringfa3.bench.attention.cases import HOST, select
from ringfa3.bench.common import machine
from ringfa3.bench.common.cases import BACKWARD, DIRECTIONS, FORWARD, FULL, Case
from ringfa3.bench.common.fa3 import MODULE, flash_attention_3
from ringfa3.bench.common.implementations import (
    FA3,
    RINGFA3,
    Attend,
    LoadError,
    RingFA3,
    SingleDevice,
    tensor,
)
from ringfa3.bench.common.machine import DTYPES, BenchError
from ringfa3.bench.common.problem import make_problem
from ringfa3.bench.common.report import new_folder
from ringfa3.bench.common.timing import compare, median
from ringfa3.errors import BuildError

CALLS, SMOKE_CALLS = 10, 1  # of a sample; the launch queue of a GPU has room for all of them
WARM_UP = 3  # rounds, in which programs are recorded
CPU_SHRINK = 32  # divides the tokens of a run on the CPU
CPP, PYTHON, SDPA, HARNESS = f"{RINGFA3} cpp", f"{RINGFA3} python", "SDPA", "one multiplication"
KINDS = ("without gradients", "with gradients", BACKWARD)
FILE = "host.json"


@dataclass(frozen=True)
class Options:
    """fa3: a library, or None for the installed package. pairs: rounds that count."""

    dtype: str
    head_dims: Sequence[int]
    direction: str
    pairs: int
    fa3: Path | None
    peers: Sequence[str]
    device: str
    out: Path | None
    quiet: bool


@dataclass(frozen=True)
class Contender:
    """name; attend(q, k, v), of which gradients are asked; begin() runs before its samples."""

    name: str
    attend: Attend
    begin: Callable[[], object] = lambda: None


@dataclass
class Row:
    """One case and type of call: microseconds of each round, by contender."""

    label: str
    head_dim: int
    kind: str  # this name is a key of stored results
    microseconds: dict[str, list[float]] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        return {name: median(times) for name, times in self.microseconds.items()}


def run(options: Options) -> int:
    """Measures, prints and writes. Raises BenchError, where the run cannot start."""
    device = machine.find_device(options.device)
    smoke = device.type == "cpu"
    if options.pairs < 1:
        raise BenchError(f"--pairs {options.pairs}: it must be at least 1")
    folder = new_folder(options.out, Path("runs/bench/host"), FILE)
    directions = DIRECTIONS[options.direction]
    fa3 = _flash_attention_3(options, device)
    rows = []
    kinds = [k for k in KINDS if (BACKWARD if k == BACKWARD else FORWARD) in directions]
    for case in select([HOST], options.head_dims, CPU_SHRINK if smoke else 1):
        contenders = list(_contenders(case, device, fa3))
        for kind in kinds:
            rows.append(Row(case.label, case.head_dim, kind))
            _measure(rows[-1], case, kind, contenders, device, options)
    host.select("python")
    Console(quiet=options.quiet).print(table(rows, smoke))
    settings = {
        k: v for k, v in asdict(options).items() if k not in ("out", "quiet", "fa3", "peers")
    }
    content = {
        "settings": settings,
        "smoke": smoke,
        "machine": machine.describe(device, [fa3] if fa3 else []),
        "rows": [asdict(row) for row in rows],
    }
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
    print(summary(rows, smoke))
    return 0


def _flash_attention_3(options: Options, device: torch.device) -> SingleDevice | None:
    """None, with a line that says why, where it does not take part."""
    if "fa3" not in options.peers or device.type == "cpu":
        if options.fa3 is not None:
            raise BenchError(f"--fa3 {options.fa3}: FA3 runs on a GPU, and where --peers names it")
        return None
    try:
        fa3 = flash_attention_3(options.fa3)
    except LoadError as error:
        raise BenchError(str(error)) from None
    if fa3 is None:
        print(f"not compared with {FA3}: {MODULE} is not installed and no --fa3 PATH was given")
    return fa3


def _contenders(case: Case, device: torch.device, fa3: SingleDevice | None) -> Iterator[Contender]:
    """Raises BenchError: there is no C++ launcher."""
    attend = _documents(case, device) if case.packed else RingFA3().attend(case, device)
    if device.type == "cuda":
        try:
            host.select("cpp")
        except (BuildError, OSError, ImportError, AttributeError) as error:
            raise BenchError(f"the C++ launcher cannot be built or loaded: {error}") from None
        yield Contender(CPP, attend, lambda: host.select("cpp"))
    yield Contender(PYTHON, attend, lambda: host.select("python"))
    if fa3 is not None:
        yield Contender(FA3, fa3.attend(case, device))
    if not case.packed and (case.causal or case.window == FULL):
        yield Contender(SDPA, _sdpa(case))
    yield Contender(HARNESS, lambda q, k, v: q * k)


def _documents(case: Case, device: torch.device) -> Attend:
    """With cumulative lengths on the device, as FlashAttention takes them."""
    cu = torch.tensor(case.cumulative, dtype=torch.int32, device=device)
    return lambda q, k, v: tensor(flash_attn_varlen_func(q, k, v, cu, cu, window_size=case.window))


def _sdpa(case: Case) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=case.causal
        )

    return attend


def _measure(
    row: Row,
    case: Case,
    call_type: str,
    contenders: Sequence[Contender],
    device: torch.device,
    options: Options,
) -> None:
    problem = make_problem(case, BACKWARD, DTYPES[options.dtype], device)
    calls = []
    for contender in contenders:
        contender.begin()
        calls.append(_call(contender.attend, tuple(problem.inputs), call_type))
    for number in range(WARM_UP + options.pairs):
        for contender, call in zip(contenders, calls, strict=True):
            contender.begin()
            taken = _sample(call, device)
            if number >= WARM_UP:
                row.microseconds.setdefault(contender.name, []).append(taken)


def _call(attend: Attend, inputs: tuple[torch.Tensor, ...], call_type: str) -> Callable[[], object]:
    if call_type == KINDS[0]:
        q, k, v = inputs
        return lambda: attend(q, k, v)
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    if call_type == KINDS[1]:
        return lambda: attend(*leaves)
    out = attend(*leaves)
    dout = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True, allow_unused=True)


def _sample(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call, of some in a row on an idle device."""
    cuda = device.type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    calls = CALLS if cuda else SMOKE_CALLS
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    taken = (time.perf_counter() - begin) / calls * 1e6
    wait()
    return taken


def table(rows: Sequence[Row], smoke: bool) -> Table:
    """Medians, and the 95% interval of how much longer each contender takes than the first."""
    title = "microseconds of the host to start a call"
    made = Table(title=f"SMOKE RUN, no kernel figures: {title}" if smoke else title)
    for heading in ("case", "head dim", "call", "started by", "median", "over the first"):
        made.add_column(heading, justify="left" if heading in ("case", "call") else "right")
    for row in rows:
        first = next(iter(row.microseconds.values()))
        for name, times in row.microseconds.items():
            ratio = compare(first, times)
            cells = (
                f"{median(times):.1f}",
                f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            )
            made.add_row(row.label, str(row.head_dim), row.kind, name, *cells)
    return made


def summary(rows: Sequence[Row], smoke: bool) -> str:
    """A line with the medians over rows of each type of call."""
    parts = []
    for kind in dict.fromkeys(row.kind for row in rows):
        found: dict[str, list[float]] = {}
        for row in rows:
            if row.kind == kind:
                for name, value in row.medians().items():
                    found.setdefault(name, []).append(value)
        figures = ", ".join(f"{name} {median(values):.0f}" for name, values in found.items())
        parts.append(f"{kind}: {figures}")
    start = "SMOKE RUN, no kernel figures: " if smoke else ""
    return f"{start}µs of the host a call, {'; '.join(parts)}"
