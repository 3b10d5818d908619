"""The quantisation kernels on a Hopper GPU against their definition: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfa3.build.units import UNITS, Unit
from ringfa3.kernels import quantise
from ringfa3.planning.sharding import whole_sequences
from ringfa3.quantisation.channels import KVCentres
from ringfa3.quantisation.formats import FORMATS
from tests.support import quantise_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

UNITS = [pytest.param(u, id=u.name) for u in UNITS if u.direction == "quantise"]
TOKENS = 16384


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_operands_are_those_of_the_definition(unit: Unit, precision: str) -> None:
    checks.operands_are_those_of_the_definition(unit, "cuda", precision)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("unit", UNITS)
def test_bad_input_stays_where_it_is(unit: Unit, precision: str) -> None:
    checks.bad_input_stays_where_it_is(unit, "cuda", precision)


@pytest.mark.parametrize("unit", UNITS)
def test_statistics_hold(unit: Unit) -> None:
    checks.statistics_hold(unit, "cuda")


@pytest.mark.parametrize("unit", UNITS)
def test_statistics_have_the_same_bits_in_every_run(unit: Unit) -> None:
    """100 runs; a bandwidth-bound kernel runs beside every second one."""
    _, k, v = checks.tensors(unit, "cuda", TOKENS)
    first = quantise.channel_statistics(unit, k, v).values
    side, busy = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    for n in range(100):
        if n % 2:
            with torch.cuda.stream(side):
                busy.add_(1)
        assert torch.equal(quantise.channel_statistics(unit, k, v).values, first), n


@pytest.mark.parametrize("unit", UNITS)
def test_a_line_of_bandwidth(unit: Unit, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the bytes per second of each kernel, and over those of a copy of 512 MiB.

    Of 16k tokens and heads that make a row of 16 KiB, beyond the L2 cache.
    """
    heads = 8192 // unit.head_dim
    shape = (TOKENS, heads, unit.head_dim)
    q, k, v = (torch.randn(shape, device="cuda").to(getattr(torch, unit.dtype)) for _ in range(3))
    tiles = quantise.KeyTiles(whole_sequences(torch.tensor([TOKENS]).numpy()))
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))
    elements = q.numel()
    line = [f"{unit.name}: copy {copy / 1e12:.2f} TB/s"]
    work: list[tuple[str, int, Callable[[], object]]] = [
        ("statistics", 4 * elements, lambda: quantise.channel_statistics(unit, k, v))
    ]
    for precision, formats in FORMATS.items():
        centres = KVCentres.of(quantise.channel_statistics(unit, k, v), formats)
        work += [
            (
                f"{precision} q",
                3 * elements + 8 * TOKENS * heads,
                lambda c=centres, f=formats: quantise.quantise_q(unit, q, c, f),
            ),
            (
                f"{precision} kv",
                3 * elements * (1 if formats.v is None else 2),
                lambda c=centres, f=formats: quantise.quantise_kv(unit, k, v, tiles, c, f),
            ),
        ]
    for name, moved, call in work:
        rate = moved / seconds(call)
        line.append(f"{name} {rate / 1e12:.2f} ({rate / copy:.2f})")
    with capsys.disabled():
        print("\n" + ", ".join(line))
    assert len(line) == 6


def seconds(call: Callable[[], object]) -> float:
    """Of a call, the median of 20 behind 3; the GPU's time."""
    times = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the host enqueues the call meanwhile
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times[3:])[10]
