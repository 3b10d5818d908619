"""If this fails, calls that start in C++ compute other bits than those that start in Python. Calls
that start in C++ against calls that start in Python, bit for bit: `pytest -m gpu`.

Each call runs in Python, then three times with the host library: it builds the program, then it is
replayed twice, the last time on other tensors with equal shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ringfa3 import flash_attn_func, flash_attn_varlen_func, host, keep_attention
from tests.support.both_hosts import errors_of_both, in_threads
from tests.support.gpus import require_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

Inputs = list[torch.Tensor]
LENGTHS = (700, 300, 0, 1, 1047)


@pytest.fixture(autouse=True)
def cpp() -> Iterator[None]:
    """The library without programs; what starts calls afterwards is what did before."""
    before = host._selected
    host.select("cpp")
    host._library.clear()
    yield
    host.stop() if before is None else host.select(before)


def inputs(
    shape: tuple[int, ...] = (2, 1024), heads: tuple[int, int] = (8, 2), d: int = 128,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, layout: str = "plain",
) -> Inputs:  # fmt: skip
    """q, k, v that require gradients, and dout. layout "packed": parts of one projection."""
    g = torch.Generator("cuda").manual_seed(seed)
    h, hk = heads

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(*shape, heads, d, generator=g, device="cuda", dtype=dtype)

    if layout == "packed":
        q, k, v = normal(h + 2 * hk).split((h, hk, hk), -2)
    else:
        q, k, v = normal(h), normal(hk), normal(hk)
    return [*(x.detach().requires_grad_() for x in (q, k, v)), normal(h)]


def run(given: Inputs, cu: Any = None, dlse: bool = False, **options: Any) -> Inputs:
    """Out, LSE and gradients, with deterministic gradients. A sink requires its gradient."""
    *leaves, dout = given
    options = {"deterministic": True, "return_lse": True, **options}
    if cu is None:
        out, lse = flash_attn_func(*leaves, **options)
    else:
        out, lse = flash_attn_varlen_func(*leaves, cu, cu, **options)
    if "sink" in options:
        leaves.append(options["sink"])
    results, grads = ([out, lse], [dout, lse.detach() * 0.1]) if dlse else ([out], [dout])
    return [out.detach(), lse.detach(), *torch.autograd.grad(results, leaves, grads)]


def same(got: Inputs, wanted: Inputs, what: object = "") -> None:
    assert len(got) == len(wanted), what
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, wanted, strict=False):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype), f"{name} {what}"
        assert torch.equal(x, y), f"{name} {what}"


def in_python(call: Callable[[], Any]) -> Any:
    host.select("python")
    try:
        return call()
    finally:
        host.select("cpp")


def replayed(call: Callable[[], Any], count: int) -> Any:
    """The result of a call that replays `count` programs."""
    before = host.counts()["replayed"]
    result = call()
    assert host.counts()["replayed"] == before + count
    return result


def compare(make: Callable[[int], Inputs], **options: Any) -> None:
    """`make(seed)` gives equal shapes for every seed."""
    wanted = [in_python(lambda n=n: run(make(n), **options)) for n in range(2)]
    same(run(make(0), **options), wanted[0], "built")
    for number in (0, 1):
        same(replayed(lambda n=number: run(make(n), **options), 2), wanted[number], "replayed")


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (100, 7)}])
@pytest.mark.parametrize("dlse", [False, True])
def test_dense(d: int, dtype: torch.dtype, mask: dict[str, Any], dlse: bool) -> None:
    compare(lambda n: inputs(d=d, dtype=dtype, seed=n), dlse=dlse, **mask)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dlse", [False, True])
def test_sinks(d: int, dlse: bool) -> None:
    sink = torch.linspace(-2, 4, 8, device="cuda").requires_grad_()
    compare(lambda n: inputs(d=d, seed=n), dlse=dlse, window_size=(127, 0), sink=sink)


@pytest.mark.parametrize("shape", [(1, 64), (1, 4096), (16, 1000), (3, 77)])
@pytest.mark.parametrize("heads", [(1, 1), (16, 16), (32, 1)])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_shapes(shape: tuple[int, ...], heads: tuple[int, int], layout: str) -> None:
    """Few KV heads split backward tiles, whose float32 sums are cleared and cast."""
    compare(lambda n: inputs(shape, heads, seed=n, layout=layout), causal=True)


@pytest.mark.parametrize("heads", [(32, 1), (8, 2)])
def test_split_backward_tiles_that_are_not_deterministic(heads: tuple[int, int]) -> None:
    """Out and LSE bit for bit, gradients within the roundings of sums in another order."""
    make = lambda: inputs((1, 4096), heads)  # noqa: E731
    wanted = in_python(lambda: run(make(), deterministic=False))
    for _ in range(3):
        got = run(make(), deterministic=False)
        assert all(map(torch.equal, got[:2], wanted[:2]))
        for x, y in zip(got[2:], wanted[2:], strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2**-6)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_documents(where: str) -> None:
    """With cu_seqlens of two versions and of two tensors."""
    cu = torch.tensor([0, *LENGTHS], device=where).cumsum(0, dtype=torch.int32)
    make = lambda n=0: inputs((sum(LENGTHS),), seed=n)  # noqa: E731
    for step in range(2):
        wanted = [in_python(lambda n=n: run(make(n), cu, causal=True)) for n in range(2)]
        for _ in range(3):
            same(run(make(), cu, causal=True), wanted[0], f"version {step}")
        same(replayed(lambda: run(make(1), cu, causal=True), 2), wanted[1], f"version {step}")
        cu[1] += 100  # other documents, in place
    fresh = torch.tensor([0, sum(LENGTHS)], device=where)
    wanted = in_python(lambda: run(make(), fresh))
    for _ in range(3):
        same(run(make(), fresh), wanted, "another tensor")


def test_inputs_that_are_one_tensor_and_strided_gradients() -> None:
    x = inputs((1, 512), (4, 4))[0]
    one: Inputs = [x, x, x, torch.ones((), device="cuda", dtype=x.dtype).expand(x.shape)]
    apart: Inputs = [*(x.detach().clone().requires_grad_() for _ in range(3)), one[3]]

    def forward(given: Inputs) -> torch.Tensor:
        out = flash_attn_func(*given[:3], causal=True)
        assert isinstance(out, torch.Tensor)
        return out.detach()

    wanted = in_python(lambda: (forward(one), run(apart)))
    for _ in range(3):
        assert torch.equal(forward(one), wanted[0])
        same(run(apart), wanted[1])


def test_streams() -> None:
    """Five streams at once, with tables and work counters of their own; bits as on the first."""
    make = lambda: inputs((1, 2048))  # noqa: E731
    wanted = in_python(lambda: run(make(), causal=True))
    streams = [torch.cuda.Stream() for _ in range(5)]
    for turn in range(4):
        given, found = [make() for _ in streams], []
        torch.cuda.synchronize()
        for stream, each in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(each, causal=True))
        torch.cuda.synchronize()
        for got in found:
            same(got, wanted, f"turn {turn}")


def test_threads() -> None:
    """Four threads on streams of their own, and backwards on autograd's thread."""
    wanted = [in_python(lambda n=n: run(inputs((1, 512), seed=n))) for n in range(4)]
    torch.cuda.synchronize()
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(50):
                    got = run(inputs((1, 512), seed=number))
                    torch.cuda.current_stream().synchronize()
                    same(got, wanted[number], f"thread {number}, turn {turn}")
        except AssertionError as problem:
            problems.append(str(problem))

    in_threads(work)
    assert not problems


def test_a_second_device() -> None:
    """Which is not the current one."""
    require_gpus(2)
    wanted = in_python(lambda: run(inputs((1, 512)), causal=True))
    for _ in range(3):
        *leaves, dout = (x.detach().to("cuda:1") for x in inputs((1, 512)))
        got = run([*(x.requires_grad_() for x in leaves), dout], causal=True)
        same([x.to("cuda:0") for x in got], wanted)


def test_a_captured_call_is_run_by_python() -> None:
    """And its replays equal eager calls, recorded ones and replayed ones."""
    given = inputs((1, 1024))
    wanted = in_python(lambda: run(given, causal=True))
    for _ in range(3):
        run(given, causal=True)
    torch.cuda.synchronize()
    before, graph = host.counts(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(given, causal=True)
    after = host.counts()
    assert (after["replayed"], after["python"]) == (before["replayed"], before["python"] + 2)
    for _ in range(3):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        same(captured, wanted, "graph")
        same(run(given, causal=True), wanted, "eager")


def test_out_of_memory_raises_and_later_calls_work() -> None:
    given = inputs((1, 1 << 16), (16, 16))
    wanted = in_python(lambda: run(given, causal=True))
    for _ in range(3):
        run(given, causal=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    texts = []
    try:
        for which in ("python", "cpp"):
            host.select(which)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                [flash_attn_func(*given[:3]) for _ in range(64)]
            texts.append(str(caught.value).split(".")[0])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        host.select("cpp")
    assert texts[0] == texts[1]
    same(run(given, causal=True), wanted)


def test_errors_are_those_of_python() -> None:
    q, k, _, _ = inputs((1, 64), (4, 2))
    calls: list[Callable[[], object]] = [
        lambda: flash_attn_func(q.float(), k, k),
        lambda: flash_attn_func(q.double(), k.double(), k.double()),
        lambda: flash_attn_func(q, k.half(), k.half()),
        lambda: flash_attn_func(q, k.cpu(), k),
        lambda: flash_attn_func(q, k[..., :64], k[..., :64]),
        lambda: flash_attn_func(q, k, k, softmax_scale=-1.0),
        lambda: flash_attn_func(q, k, k, window_size=(-3, 0)),
        lambda: flash_attn_varlen_func(q[0], k[0], k[0], *[torch.tensor([0, 60]).cuda()] * 2),
        lambda: flash_attn_varlen_func(q[0], k[0], k[0], *[torch.tensor([0, 60])] * 2),
    ]
    for number, call in enumerate(calls):
        said = errors_of_both(call)
        assert said[0] == said[1], number


def test_autocast_casts_as_in_python() -> None:
    given = [x.detach().float().requires_grad_() for x in inputs((1, 256))[:3]]

    def call() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = flash_attn_func(*given, causal=True)
        assert isinstance(out, torch.Tensor)
        return out.detach()

    wanted = in_python(call)
    assert all(torch.equal(call(), wanted) for _ in range(3))


@pytest.mark.parametrize("options", [{}, {"context_fn": keep_attention}])
def test_checkpoints(options: dict[str, Any]) -> None:
    def attend(*x: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(*x, causal=True, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out * 2

    def call() -> Inputs:
        *leaves, dout = inputs((1, 512))
        out = checkpoint(attend, *leaves, use_reentrant=False, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    wanted = in_python(call)
    for _ in range(3):
        assert all(map(torch.equal, call(), wanted))


def test_a_compiled_function_replays() -> None:
    torch._dynamo.reset()
    wanted = in_python(lambda: run(inputs((1, 512)), causal=True))
    for _ in range(2):
        run(inputs((1, 512)), causal=True)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(*x, causal=True, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    *leaves, dout = inputs((1, 512))

    def call() -> Inputs:
        out = compiled(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    got = replayed(call, 2)
    assert all(map(torch.equal, got, [wanted[0], *wanted[2:]]))
