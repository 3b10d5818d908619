"""If this fails, outputs on a GPU are wrong. The forward kernels on a Hopper GPU against float64:
`pytest -m gpu`."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_varlen_func, functional
from ringfa3.kernels import dispatch, forward
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.planning.tiling import plan_local
from tests.support import forward_checks as checks
from tests.support.launches import leave_sms

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DTYPES = (torch.bfloat16, torch.float16)


def random_cases_hold_the_gate(dtype: torch.dtype, d: int, count: int) -> None:
    """A second run of each case has the same bits."""
    for case in range(count):
        rng = random.Random(1000 * d + case)
        torch.manual_seed(case)
        sequences = rng.randint(1, 6)
        lengths = [
            (n, n if case % 2 else rng.choice((*checks.LENGTHS, rng.randint(1, 1500))))
            for n in (rng.choice((*checks.LENGTHS, rng.randint(1, 1500))) for _ in range(sequences))
        ]
        if not all(map(sum, zip(*lengths, strict=True))):
            continue
        window = rng.choice(checks.WINDOWS)
        q, k, v = checks.inputs(rng, dtype, d, lengths)
        assert dispatch.unit_for("forward", q) is not None
        cu_q, cu_k = (list(accumulate(n, initial=0)) for n in zip(*lengths, strict=True))
        call = (q, k, v, cu_q, cu_k)
        out, lse = flash_attn_varlen_func(*call, window_size=window, return_lse=True)
        again = flash_attn_varlen_func(*call, window_size=window)
        what = f"case {case}: {lengths}, window {window}, heads {q.shape[1]}:{k.shape[1]}"
        checks.hold_gate((out, lse), (q, k, v), lengths, window, what)
        assert torch.equal(out, again), f"{what}: two runs differ"


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
def test_random_sequences_hold_the_gate(dtype: torch.dtype, d: int) -> None:
    random_cases_hold_the_gate(dtype, d, 60)


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["usual", "short"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
def test_both_units_of_head_dim_64_hold_the_gate(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 cases, and rising scores, with each unit whatever the lengths."""
    monkeypatch.setattr(dispatch, "SHORT_SHARE", share)
    monkeypatch.setattr(dispatch, "LONG_ROWS", 10**9)
    random_cases_hold_the_gate(dtype, 64, 24)
    checks.rising_scores_hold_the_gate(dtype, 64)
    checks.bits_do_not_depend_on_neighbours(dtype, 64)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
def test_rising_and_falling_scores_hold_the_gate(dtype: torch.dtype, d: int) -> None:
    torch.manual_seed(0)
    checks.rising_scores_hold_the_gate(dtype, d)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_bits_do_not_depend_on_neighbouring_documents(d: int) -> None:
    torch.manual_seed(0)
    checks.bits_do_not_depend_on_neighbours(torch.bfloat16, d)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_nan_and_inf_stay_in_their_document(d: int) -> None:
    """Documents shorter than a key block share it with rows of other documents."""
    lengths = [40, 7, 128, 30, 1, 90]
    cu = list(accumulate(lengths, initial=0))
    q, k, v = (torch.randn(cu[-1], 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    for bad in (1, 3):
        here = slice(cu[bad], cu[bad + 1])
        k[here], v[here] = torch.nan, torch.inf
    spoilt = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    assert isinstance(clean, torch.Tensor)
    assert isinstance(spoilt, torch.Tensor)
    for i in (0, 2, 4, 5):
        here = slice(cu[i], cu[i + 1])
        assert torch.equal(clean[here], spoilt[here]), f"document {i}"


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("check", checks.OF_HOPS, ids=lambda check: check.__name__)
def test_hops_merge_wherever_their_scores_lie(
    check: Callable[..., None], dtype: torch.dtype, d: int
) -> None:
    torch.manual_seed(0)
    unit = dispatch.unit_for("forward", torch.empty(0, 1, d, device="cuda", dtype=dtype))
    assert unit is not None
    check(unit)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
def test_large_values_hold_the_gate(dtype: torch.dtype, d: int) -> None:
    torch.manual_seed(0)
    checks.large_values_hold_the_gate(dtype, d)


def waiting(d: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, Callable[..., None]]:
    """Three documents on the GPU; the spans of the last two wait for arrival flags 1 and 2.

    Returns [q, k, v], out and lse filled with NaN, and the call, which takes the arrival flags.
    """
    lengths = np.array([3000, 700, 2000])
    t, heads = int(lengths.sum()), 4
    q, k, v = (torch.randn(t, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    unit = dispatch.unit_for("forward", q)
    assert unit is not None
    tiling = plan_local(lengths, lengths, -1, 0).forward(unit.tile_m)[0]
    spans = tiling.spans.copy()
    spans["arrival"] = [0, 1, 2]
    tiling = Tiling(tiling.size, tiling.tiles, spans, tiling.earlier)
    out = torch.full_like(q, torch.nan)
    lse = torch.full((heads, t), torch.nan, device="cuda")

    def call(arrivals: torch.Tensor) -> None:
        forward.attend(unit, q, k, v, tiling, d**-0.5, out, lse[:0], lse, arrivals=arrivals)

    return [q, k, v], out, lse, call


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_kernel_waits_for_arrival_words(d: int) -> None:
    """Copies on another stream bring K, V and the words long after the launch; 20 times."""
    (_, k, v), out, lse, call = waiting(d)
    arrived = torch.tensor([0, 1, 1], dtype=torch.int32, device="cuda")
    call(arrived)
    expected, expected_lse = out.clone(), lse.clone()
    host = [x.cpu().pin_memory() for x in (k, v, arrived)]  # pinned: no kernel copies
    words, side = torch.zeros_like(arrived), torch.cuda.Stream()
    for number in range(20):
        for x in (k[3000:], v[3000:], out, lse):
            x.fill_(torch.nan)
        words.zero_()
        torch.cuda.synchronize()
        call(words)
        with torch.cuda.stream(side):
            for word, rows in ((2, slice(3700, None)), (1, slice(3000, 3700))):
                for x, y in zip((k, v), host, strict=False):
                    x[rows].copy_(y[rows], non_blocking=True)
                words[word : word + 1].copy_(host[2][word : word + 1], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(out, expected), f"run {number}"
        assert torch.equal(lse, expected_lse), f"run {number}"


def test_fewer_ctas_change_no_bit() -> None:
    """The same tiles on all SMs, on all but eight, on one."""
    lengths = np.array([3000, 700, 2000])
    q, k, v = (torch.randn(5700, 4, 128, device="cuda").bfloat16() for _ in range(3))
    unit = dispatch.unit_for("forward", q)
    assert unit is not None
    tiling = plan_local(lengths, lengths, -1, 0).forward(unit.tile_m)[0]
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    results = []
    for free in (0, 8, sms - 1):
        out, lse = torch.full_like(q, torch.nan), torch.empty(4, 5700, device="cuda")
        with leave_sms(free):
            forward.attend(unit, q, k, v, tiling, 0.1, out, lse[:0], lse)
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_concurrent_streams_and_graphs_do_not_share_counters() -> None:
    """Launches on four streams beside replays of two graphs; 50 times."""
    q, k, v = (torch.randn(2000, 4, 128, device="cuda").bfloat16() for _ in range(3))
    cu = [0, 700, 2000]
    expected = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    streams = [torch.cuda.Stream() for _ in range(6)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    captured = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(flash_attn_varlen_func(q, k, v, cu, cu, causal=True))
    torch.cuda.synchronize()
    for number in range(50):
        for x in captured:
            x.fill_(torch.nan)
        torch.cuda.synchronize()
        outs = []
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                outs += [flash_attn_varlen_func(q, k, v, cu, cu, causal=True) for _ in range(2)]
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in (*outs, *captured)), f"round {number}"


def test_a_graph_keeps_the_tables_of_a_collected_plan() -> None:
    """Later allocations do not reuse the memory of its tables."""
    q, k, v = (torch.randn(2000, 4, 128, device="cuda").bfloat16() for _ in range(3))
    cu = [0, 600, 2000]
    expected = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    functional._plan.cache_clear()
    gc.collect()
    junk = [torch.full((128,), -1, dtype=torch.int32, device="cuda") for _ in range(1000)]
    graph.replay()
    assert torch.equal(captured, expected), f"{len(junk)} tensors were made meanwhile"


def test_host_time_of_a_call_with_a_cached_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At most 40 us of the CPU thread, the best of 20 times 100 calls."""
    q, k, v = (torch.randn(1024, 8, 128, device="cuda").bfloat16() for _ in range(3))
    unit = dispatch.unit_for("forward", q)
    assert unit is not None
    lengths, costs = np.array([1024]), []
    tiling = plan_local(lengths, lengths, -1, 0).forward(unit.tile_m)[0]
    out, lse = torch.empty_like(q), torch.empty(8, 1024, device="cuda")
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.thread_time_ns()
        for _ in range(100):
            forward.attend(unit, q, k, v, tiling, 0.1, out, lse[:0], lse)
        costs.append((time.thread_time_ns() - began) / 100e3)
    with capsys.disabled():
        print(f"\nforward.attend: {min(costs):.1f} us of the CPU thread")
    assert min(costs) <= 40
