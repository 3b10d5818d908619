"""If this fails, gradients differ between calls that start in C++ and in Python. The autograd of
ring calls in the host library, against Python's: equal bits, errors and lives.

Rings of one process and of gloo ranks: autograd knows nothing of what moves K/V.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ringfa3 import ContextPlan, host, keep_attention, plan_context, ring_attn_func
from ringfa3.build.host_library import ensure_host_library
from ringfa3.ring import op
from tests.support.dense import cumulative, tensors
from tests.support.fake_kernels import FakeKernels
from tests.support.ranks import Ranks

LENGTHS = [40, 1, 0, 23]
TOKENS = sum(LENGTHS)
NODES = {"python": "NodeBackward", "cpp": "CppFunction"}

Results = list[torch.Tensor]


def new_plan(group: dist.ProcessGroup | tuple[int, int] = (0, 1)) -> ContextPlan:
    return plan_context(cumulative(LENGTHS), group)


def step(plan: ContextPlan, dtype: torch.dtype = torch.float64, lse_alone: bool = False) -> Results:
    """Out, LSE and gradients of the rank's tokens."""
    inputs, dout, dlse = tensors(3, TOKENS, (4, 2), 8, dtype)
    leaves = [plan.shard(x).requires_grad_() for x in inputs]
    out, lse = ring_attn_func(*leaves, plan, return_lse=True)
    assert type(out.grad_fn).__name__ == NODES[str(host._selected)]
    outputs, grads = [out, lse], [plan.shard(dout), plan.shard(dlse, 1)]
    if lse_alone:
        outputs, grads = outputs[1:], grads[1:]
    return [out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, grads)]


def equal(found: Results, wanted: Results) -> bool:
    return all(map(torch.equal, found, wanted))


@contextmanager
def selected(which: str) -> Iterator[None]:
    host.select(which)
    yield
    host.select("python")


def of_both(call: Callable[[], Any]) -> list[Any]:
    found = []
    for which in host.HOSTS:
        with selected(which):
            found.append(call())
    return found


@pytest.fixture
def library(host_library: Any, fake_library: FakeKernels) -> Iterator[None]:
    """The host library has the autograd of CPU tensors; the PyTorch fallback attends."""
    host.start(host_library, "cpu", fake_library.driver())
    yield
    host.stop()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("lse_alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_rank_has_the_bits_of_python(dtype: torch.dtype, lse_alone: bool) -> None:
    plan = new_plan()
    python, cpp = of_both(lambda: step(plan, dtype, lse_alone))
    assert equal(cpp, python)


def _bits(group: dist.ProcessGroup, driver_of: str) -> bool:
    host.start(host.load(ensure_host_library()), "cpu", FakeKernels(driver_of).driver())
    try:
        plan = new_plan(group)
        python, cpp = of_both(lambda: step(plan))
    finally:
        host.stop()
    return equal(cpp, python)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_have_the_bits_of_python(
    ranks: Ranks, host_library: Any, fake_library: FakeKernels, world: int
) -> None:
    del host_library  # built before the ranks need it
    assert all(ranks.run(world, _bits, fake_library.library._name))


@pytest.mark.usefixtures("library")
def test_the_plan_lives_until_the_backward() -> None:
    """And no longer: a plan may hold memory of a device."""

    def live() -> list[bool]:
        plan = copy.copy(new_plan())  # which no cache holds
        handle = plan.handle
        inputs = [x.requires_grad_() for x in tensors(3, TOKENS, (4, 2), 8)[0]]
        out = ring_attn_func(*inputs, plan)
        del plan
        gc.collect()
        before = is_alive(handle)
        out.sum().backward()
        del out
        return [before, is_alive(handle)]

    assert of_both(live) == [[True, False], [True, False]]


def is_alive(handle: int) -> bool:
    try:
        return ContextPlan.from_handle(handle) is not None
    except RuntimeError:
        return False


def raised_by_both(kind: type[Exception], call: Callable[[], object]) -> str:
    texts = []
    for which in host.HOSTS:
        with selected(which), pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.usefixtures("library")
def test_a_plan_that_is_gone_is_refused() -> None:
    handle = copy.copy(new_plan()).handle
    gc.collect()
    inputs = [x.requires_grad_() for x in tensors(3, TOKENS, (4, 2), 8)[0]]

    def call() -> object:
        return op.ring_attention(*inputs, None, handle, 0.5, False, "native", "auto")

    assert raised_by_both(RuntimeError, call).startswith(f"plan {handle} no longer exists")


@pytest.mark.usefixtures("library")
def test_a_second_derivative_raises() -> None:
    plan = new_plan()

    def call() -> None:
        q, k, v = (x.requires_grad_() for x in tensors(3, TOKENS, (4, 2), 8)[0])
        (dq,) = torch.autograd.grad(ring_attn_func(q, k, v, plan).sum(), q, create_graph=True)
        dq.sum().backward()

    text = raised_by_both(RuntimeError, call)
    assert text == "ringfa3.ring_attention.default can be differentiated once, not twice"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("number", range(4))  # of q, k, v and the gradient of out
def test_tangents_are_refused(number: int) -> None:
    plan = new_plan()
    inputs, dout, _ = tensors(3, TOKENS, (4, 2), 8)
    leaves = [x.requires_grad_() for x in inputs]

    def call() -> None:
        with forward_ad.dual_level():
            given = [*leaves, dout]
            given[number] = forward_ad.make_dual(given[number], torch.ones_like(given[number]))
            torch.autograd.grad(ring_attn_func(*given[:3], plan), leaves, given[3])

    text = raised_by_both(NotImplementedError, call)
    assert text.startswith("ringfa3.ring_attention.default has no forward-mode derivative")


@pytest.mark.usefixtures("library")
def test_hooks_see_the_saved_tensors_of_python() -> None:
    """In another order: q, k, v, out and lse."""
    plan = new_plan()

    def saved() -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []

        def pack(x: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(x.shape))
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            step(plan)
        return sorted(seen)

    python, cpp = of_both(saved)
    assert cpp == python
    assert len(cpp) == 5


@pytest.mark.usefixtures("library")
def test_a_sink_keeps_pythons_autograd() -> None:
    plan = new_plan()
    inputs, dout, _ = tensors(3, TOKENS, (4, 2), 8)

    def run() -> Results:
        leaves = [x.clone().requires_grad_() for x in (*inputs, torch.linspace(-1, 1, 4).double())]
        out = ring_attn_func(*leaves[:3], plan, sink=leaves[3])
        assert type(out.grad_fn).__name__ == NODES["python"]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    python, cpp = of_both(run)
    assert equal(cpp, python)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("selective", "forwards"), [(True, 1), (False, 2)])
def test_a_checkpoint_keeps_attention(
    monkeypatch: pytest.MonkeyPatch, selective: bool, forwards: int
) -> None:
    plan, calls = new_plan(), []
    run_forward = op.run_forward
    monkeypatch.setattr(op, "run_forward", lambda *a: (calls.append(1), run_forward(*a))[1])
    options = {"context_fn": keep_attention} if selective else {}
    leaves = [x.requires_grad_() for x in tensors(3, TOKENS, (4, 2), 8)[0]]
    with selected("cpp"):
        out = checkpoint(ring_attn_func, *leaves, plan, use_reentrant=False, **options)
        out.sum().backward()
    assert len(calls) == forwards


@pytest.mark.usefixtures("library")
def test_a_compiled_function_and_compiled_autograd() -> None:
    """A graph calls the op, and compiled autograd takes the library's node."""
    plan = new_plan()
    inputs, dout, _ = tensors(3, TOKENS, (4, 2), 8)

    def run(attend: Callable[..., Any]) -> Results:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves, plan)
        nodes.add(type(out.grad_fn).__name__)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    nodes: set[str] = set()
    with selected("python"):
        wanted = run(ring_attn_func)
    torch._dynamo.reset()
    with selected("cpp"):
        compiled = torch.compile(ring_attn_func, fullgraph=True, backend="aot_eager")
        assert equal(run(compiled), wanted)
        nodes.clear()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            assert equal(run(ring_attn_func), wanted)
        assert nodes == {NODES["cpp"]}
