"""If this fails, compilers, checkpoints, hooks or captures miss calls that start in C++. What a
call must not lose when the host library starts it: compilers, modes, checkpoints, hooks, captures,
observers, and everything that Python alone can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ringfa3 import flash_attn_func, flash_attn_varlen_func, functional, host, keep_attention
from ringfa3.build import compile as build
from ringfa3.build.units import UNITS
from tests import test_functional
from tests.support.both_hosts import errors_of_both
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import Shape, equal
from tests.support.host_steps import SHAPE, attend, leaves, recorded, replays, step

NODE = "CppFunction"  # the class of the library's autograd node


@pytest.mark.parametrize(
    "test",
    [
        test_functional.test_opcheck,
        test_functional.test_a_second_derivative_raises,
        test_functional.test_rows_without_keys_are_zero_with_zero_gradients,
        lambda: test_functional.test_autocast(torch.float32),
        lambda: test_functional.test_strided_inputs("expanded"),
    ],
)
def test_what_holds_in_python_holds_here(kernels: FakeKernels, test: Any) -> None:
    """Tests of the functions, with the library between them and the reference."""
    test()


@pytest.mark.parametrize("wrong", [x[2] for x in test_functional.REFUSED])
def test_errors_name_the_argument(kernels: FakeKernels, wrong: Any) -> None:
    texts = errors_of_both(wrong)
    assert texts[0] == texts[1]


def test_a_second_derivative_of_a_replayed_call_raises(kernels: FakeKernels) -> None:
    for count in (0, 2):
        inputs = leaves()
        with replays(count):
            out = attend(*inputs)
            (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            dq.sum().backward()
        expected = "ringfa3.attention.default can be differentiated once, not twice"
        assert str(caught.value) == expected


def test_a_thread_without_a_context_is_run_by_python(kernels: FakeKernels) -> None:
    """As autograd's is at first. The driver is not asked what needs a context."""
    wanted = recorded()
    kernels.library.fake_without_context(1)
    with replays(0):
        assert all(map(equal, step(leaves()), wanted))
    kernels.library.fake_without_context(0)
    with replays(2):
        assert all(map(equal, step(leaves()), wanted))


def test_a_captured_call_is_run_by_python(kernels: FakeKernels) -> None:
    """Also when its program is known; a captured call makes none."""
    wanted = recorded()
    kernels.library.fake_capture(1)
    with replays(0):
        assert all(map(equal, step(leaves()), wanted))
    assert host.counts()["built"] == 2
    kernels.library.fake_capture(0)
    with replays(2):
        assert all(map(equal, step(leaves()), wanted))


@pytest.mark.parametrize("replayable", [True, False])
def test_a_capture_finds_the_plan_of_a_program(kernels: FakeKernels, replayable: bool) -> None:
    """Python's own cache of plans has dropped it, and a capture can upload no other."""
    left = 7 + replayable  # a plan for each case
    for _ in range(2):
        wanted = step(leaves(), window_size=(left, 0))
    for tokens in range(functional._plan.cache_info().maxsize or 0):
        functional._plan((1000 + tokens,), (1,), -1, -1)
    if not replayable:
        host._library.clear()
    kernels.library.fake_capture(1)
    if replayable:
        assert all(map(equal, step(leaves(), window_size=(left, 0)), wanted))
    else:  # nothing else keeps plans
        with pytest.raises(RuntimeError, match="run the same call once before"):
            attend(*leaves(), window_size=(left, 0))


def test_8_bits_are_run_by_python(kernels: FakeKernels) -> None:
    recorded()
    with replays(0):
        for _ in range(3):
            attend(*leaves(torch.float32), precision="fp8")
    assert host.counts()["built"] == 2


def test_float64_is_run_by_the_fallback(kernels: FakeKernels) -> None:
    """It launches no kernel, so no program repeats it."""
    for _ in range(3):
        with replays(0):
            assert step(leaves(torch.float64))[0].dtype == torch.float64


def test_inputs_that_are_one_tensor_build_a_program_for_three(kernels: FakeKernels) -> None:
    """An address says to which input it belongs, also where inputs share their first byte."""
    x = SHAPE.inputs()[0]
    attend(x, x, x)
    q, k, v = x.clone(), x.clone() + 1, x.clone() + 2
    host.select("python")
    wanted = attend(q, k, v)
    host.select("cpp")
    with replays(2):
        assert equal(attend(q, k, v), wanted)
        out = attend(x, x, x)
    assert not equal(out, wanted)


class Names(TorchDispatchMode):
    """Records the names of ops that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_one_op_a_direction(kernels: FakeKernels) -> None:
    """And its kernel still replays. The autograd node is Python's, as tracers know it."""
    wanted = recorded()
    assert type(attend(*leaves()).grad_fn).__name__ == NODE
    inputs, dout = leaves(), SHAPE.inputs()[3]
    with replays(2), Names() as mode:
        out = attend(*inputs)
        grads = torch.autograd.grad(out, inputs, dout)
    assert type(out.grad_fn).__name__ != NODE
    seen = [name for name in mode.names if name.startswith("ringfa3")]
    assert seen == ["ringfa3.attention.default", "ringfa3.attention_backward.default"]
    assert all(map(equal, [out.detach(), *grads], wanted))


class Wrapper(torch.Tensor):
    """A subclass that unwraps in __torch_dispatch__."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride(),
            requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [x.inner if isinstance(x, cls) else x for x in args]
        result = func(*args, **(kwargs or {}))
        return tuple(map(cls, result)) if isinstance(result, tuple) else cls(result)


def test_a_subclass_keeps_its_dispatch(kernels: FakeKernels) -> None:
    wanted = step(leaves())
    inputs = [Wrapper(x) for x in leaves()]
    out = attend(*inputs)
    assert type(out) is Wrapper
    grads = torch.autograd.grad(out, inputs, Wrapper(SHAPE.inputs()[3]))
    found = [out.inner, *(g.inner for g in grads)]  # type: ignore[attr-defined]
    assert all(map(equal, found, wanted))


@pytest.mark.parametrize(("selective", "forwards"), [(True, 1), (False, 2)])
def test_a_checkpoint_keeps_attention(kernels: FakeKernels, selective: bool, forwards: int) -> None:
    """The test counts launches of the forward; the first call builds a program."""
    wanted = step(leaves())
    options = {"context_fn": keep_attention} if selective else {}
    for _ in range(2):
        inputs = leaves()
        kernels.take()
        out = checkpoint(attend, *inputs, use_reentrant=False, **options)
        grads = torch.autograd.grad(out, inputs, SHAPE.inputs()[3])
        assert [x.name for x in kernels.take()].count("forward") == forwards
        assert all(map(equal, [out.detach(), *grads], wanted))


def test_hooks_see_saved_tensors(kernels: FakeKernels) -> None:
    """q, k, v, out, lse and lengths, as with Python's node; what they give back is used."""
    shape = Shape(tokens=200, keys=200, documents=(150, 50))
    packed: dict[str, list[tuple[int, ...]]] = {}
    cu = shape.cumulative()
    for which in host.HOSTS:
        host.select(which)
        seen = packed.setdefault(which, [])

        def pack(x: torch.Tensor, seen: list[tuple[int, ...]] = seen) -> torch.Tensor:
            seen.append(tuple(x.shape))
            return x.clone()

        inputs = [x.requires_grad_() for x in shape.inputs()[:3]]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = flash_attn_varlen_func(*inputs, cu, cu)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, inputs, shape.inputs()[3])
    assert packed["python"] == packed["cpp"]
    assert len(packed["cpp"]) == 7


def test_compiled_autograd(kernels: FakeKernels) -> None:
    """It takes the library's node as it takes Python's."""
    wanted = recorded()

    def run() -> list[torch.Tensor]:
        inputs = leaves()
        out = attend(*inputs)
        out.backward(SHAPE.inputs()[3])
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        found = run()
    assert all(map(equal, found, wanted))


def test_a_compiled_function_replays(kernels: FakeKernels) -> None:
    """Its graph calls the op, whose kernel is the library's."""
    wanted = recorded()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        inputs = leaves()
        with replays(2):
            out = compiled(*inputs)
            grads = torch.autograd.grad(out, inputs, SHAPE.inputs()[3])
        assert all(map(equal, [out.detach(), *grads], wanted))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(kernels: FakeKernels, mode: Any) -> None:
    """Programs serve calls with gradients and without."""
    wanted = recorded()[0]
    with replays(1), mode():
        out = attend(*leaves())
        assert (out.requires_grad, out.is_inference()) == (False, mode is torch.inference_mode)
    assert equal(out, wanted)


def test_a_gradient_of_lse_alone(kernels: FakeKernels) -> None:
    """dout becomes zeros, as in Python."""
    found = []
    for which in host.HOSTS:
        host.select(which)
        for _ in range(3):
            inputs = leaves()
            _, lse = flash_attn_func(*inputs, return_lse=True)
            found.append(torch.autograd.grad(lse.sum(), inputs))
    for other in found[1:]:
        assert all(map(equal, other, found[0]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_as_in_python(kernels: FakeKernels) -> None:
    """torch.func.grad, and vmap over it, have the bits of plain autograd; twice is refused."""
    q, k, v = SHAPE.inputs()[:3]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return attend(x, k, v).float().sum()

    for which in host.HOSTS:
        host.select(which)
        for _ in range(3):  # in C++ the third plain call replays
            leaf = q.clone().requires_grad_()
            (wanted,) = torch.autograd.grad(loss(leaf), leaf)
            assert torch.equal(torch.func.grad(loss)(q), wanted)
            per_sample = torch.func.vmap(torch.func.grad(loss))(torch.stack((q, q)))
            assert torch.equal(per_sample, torch.stack((wanted, wanted)))
        with pytest.raises(RuntimeError, match="can be differentiated once, not twice"):
            torch.func.grad(lambda x: torch.func.grad(loss)(x).float().sum())(q)


@pytest.mark.parametrize("number", range(4))  # of q, k, v and the gradient of out
def test_tangents_are_refused_as_in_python(kernels: FakeKernels, number: int) -> None:
    """Type and text, with gradients and without, also where a program is known."""
    recorded()
    *qkv, dout = SHAPE.inputs()
    raised = set()
    for which in host.HOSTS:
        host.select(which)
        for requires_grad in (True,) if number == 3 else (False, True):
            inputs = [x.clone().requires_grad_(requires_grad) for x in qkv]
            with forward_ad.dual_level():
                given = [*inputs, dout]
                given[number] = forward_ad.make_dual(given[number], torch.ones_like(given[number]))
                with pytest.raises(NotImplementedError) as caught:
                    torch.autograd.grad(attend(*given[:3]), inputs, given[3])
            raised.add(str(caught.value))
    assert len(raised) == 1
    assert "ringfa3.attention.default has no forward-mode derivative" in raised.pop()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_a_call_beside_a_transform(kernels: FakeKernels, transform: Any) -> None:
    """Whose tensors it does not have."""
    inputs = leaves()
    x = torch.tensor(2.0) if transform is torch.func.grad else torch.tensor([2.0, 3.0])
    found = []
    for which in host.HOSTS:
        host.select(which)
        for _ in range(3):
            try:
                found.append(transform(lambda y: attend(*inputs).float().sum() * y)(x).tolist())
            except RuntimeError as refused:
                found.append(str(refused))
    assert all(x == found[0] for x in found), found


def test_a_choice_is_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="host='c': allowed are 'python', 'cpp'"):
        host.select("c")
    monkeypatch.setenv("RINGFA3_HOST", "c++")
    with pytest.raises(ValueError, match=r"RINGFA3_HOST='c\+\+': allowed are 'python', 'cpp'"):
        host.ensure()


def test_python_serves_where_the_library_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, once."""
    monkeypatch.setenv("RINGFA3_HOST", "cpp")
    monkeypatch.setenv("RINGFA3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("NVCC_CCBIN", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    try:
        for _ in range(2):
            host.ensure()
        assert host.attend is None
    finally:
        host.stop()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        "ringfa3: C++ launcher unavailable, launching from Python (higher CPU overhead): host C++"
    )


def test_cpp_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.delenv("RINGFA3_HOST", raising=False)
    monkeypatch.setattr(host, "select", chosen.append)
    host.ensure()
    assert chosen == ["cpp"]


def test_kernels_do_not_depend_on_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A change of csrc/host compiles no kernel; a change beside it does."""
    (tmp_path / "host").mkdir()
    for name in ("host/key.h", "params.h"):
        (tmp_path / name).write_text("1")
    (tmp_path / f"{UNITS[0].direction}.cu").write_text('#include "params.h"\n')
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    stem = build.library_stem(UNITS[0])
    (tmp_path / "host" / "key.h").write_text("2")
    assert build.library_stem(UNITS[0]) == stem
    (tmp_path / "params.h").write_text("2")
    assert build.library_stem(UNITS[0]) != stem
