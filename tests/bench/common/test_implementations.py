"""If this fails, a library in the tables computes another attention than the others. Every
implementation against `dense` attention in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.bench.attention.quantised import QuantisedRingFA3
from ringfa3.bench.attention.sdpa import Sdpa
from ringfa3.bench.attention.zero_columns import ZeroColumns
from ringfa3.bench.common import fa3 as fa3_module
from ringfa3.bench.common import implementations
from ringfa3.bench.common.cases import BACKWARD, FORWARD, Case
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.fa3 import Fa3Module, Fa3Ops, flash_attention_3
from ringfa3.bench.common.implementations import FAR_BELOW, RMS, LoadError, RingFA3
from ringfa3.bench.common.problem import (
    Implementation,
    Problem,
    UnsupportedCaseError,
    make_problem,
)
from ringfa3.bench.ring.implementations import Ring
from ringfa3.kernels import reference
from ringfa3.kernels.sinks import sink_gradient
from tests.support.cases import CASES
from tests.support.dense import attention, gradients, mask, worst

CPU = torch.device("cpu")
asked: list[bool] = []  # of each backward: whether it shall be deterministic
# As the library declares them.
FWD = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,"
    "Tensor? q_v = None,Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,"
    "Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,"
    "Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,"
    "Tensor? q_descale = None,Tensor? k_descale = None,Tensor? v_descale = None,"
    "float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
    "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout,Tensor q,Tensor k,Tensor v,Tensor out,Tensor softmax_lse,"
    "Tensor(dq!)? dq = None,Tensor(dk!)? dk = None,Tensor(dv!)? dv = None,"
    "Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? seqused_q = None,"
    "Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,float softcap = 0.0,bool deterministic = False,"
    "int sm_margin = 0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, "
    "Tensor, Tensor)"
)


def packed_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: dict[str, Any],
    window: tuple[int, int],
) -> torch.Tensor:
    """Attention of batches, or of packed sequences with the lengths that a kernel gets."""
    if q.dim() == 4:
        cu, cu_k = (torch.arange(x.shape[0] + 1) * x.shape[1] for x in (q, k))
    else:
        cu = cu_k = given["cu_seqlens_q"]
        assert cu.dtype == torch.int32
        assert torch.equal(cu, given["cu_seqlens_k"])
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == int(cu.diff().max())
    flat = (x.flatten(0, -3) for x in (q, k, v))
    out = flash_attn_varlen_func(*flat, cu, cu_k, window_size=window)
    assert isinstance(out, torch.Tensor)
    return out.view(q.shape)


def named(schema: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the arguments behind its positional ones by name, as a schema has them."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    positional = run.__code__.co_argcount

    def call(*given: Any, **more: Any) -> Any:
        rest = {a.name: a.default_value for a in arguments[positional:]}
        names = [a.name for a in arguments[positional : len(given)]]
        rest |= dict(zip(names, given[positional:], strict=True))
        return run(*given[:positional], **(rest | more))

    return call


def window_of(given: dict[str, Any]) -> tuple[int, int]:
    return given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]


@contextmanager
def operators_of_fa3() -> Iterator[None]:
    """`torch.ops.flash_attn_3`, with its names and arguments, run by RingFA3 on the CPU."""

    def fwd(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, ...]:
        assert given["num_splits"] == 1
        assert given["softmax_scale"] == q.shape[-1] ** -0.5
        out = packed_call(q, k, v, given, window_of(given))
        none = q.new_empty(0)
        return out, none.clone(), none.clone(), none.clone()

    def bwd(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any,
        **given: Any,
    ) -> Any:  # fmt: skip
        dqkv = (dq, dk, dv)
        asked.append(given["deterministic"])
        assert given["softmax_scale"] == q.shape[-1] ** -0.5
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            again = packed_call(*inputs, given, window_of(given))  # type: ignore[call-arg]
            grads = torch.autograd.grad(again, inputs, dout)
        for target, gradient in zip(dqkv, grads, strict=True):
            target.copy_(gradient)
        return (*dqkv, *(q.new_empty(0) for _ in range(5)))

    operators = torch.library.Library("flash_attn_3", "DEF")
    for schema, run in ((FWD, fwd), (BWD, bwd)):
        operators.define(schema)
        operators.impl(schema.split("(")[0], named(schema, run), "CompositeExplicitAutograd")
    try:
        yield
    finally:
        operators._destroy()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file whose operators run on the CPU."""
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    path = tmp_path / "fa3.so"
    path.write_bytes(b"library")
    with operators_of_fa3():
        yield path


def module(old: bool = False) -> ModuleType:
    """A `flash_attn_interface` that runs on the CPU; an old one returns (out, lse)."""
    made = ModuleType("flash_attn_interface")

    def flash_attn_func(
        q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = (-1, -1),
        deterministic: bool = False,
    ) -> Any:  # fmt: skip
        asked.append(deterministic)
        out = packed_call(q, k, v, {}, (window_size[0], 0 if causal else window_size[1]))
        return (out, None) if old else out

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
        max_seqlen_q: int, max_seqlen_k: int, causal: bool = False, window_size: Any = (-1, -1),
    ) -> Any:  # fmt: skip
        out = packed_call(q, k, v, locals(), (window_size[0], 0 if causal else window_size[1]))
        return (out, None) if old else out

    vars(made).update(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        __version__="3.0.0",
    )
    return made


def check(implementation: Implementation, case: Case, direction: str) -> None:
    """Within 1e-5 of dense attention, in float32."""
    problem = make_problem(case, direction, torch.float32, torch.device("cpu"))
    prepared = implementation.prepare(problem)
    found = prepared.outputs(prepared.run())
    q, k, v = (x.reshape(-1, *x.shape[-2:]).requires_grad_() for x in problem.inputs)
    outputs = attention(q, k, v, mask(case.lengths, case.key_lengths, *case.window))
    expected = {"out": outputs[0]}
    if direction == BACKWARD:
        grads = gradients([q, k, v], outputs, problem.dout.reshape(q.shape))
        expected = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert found.keys() == expected.keys()
    assert worst([(found[name], expected[name]) for name in expected]) < 1e-5


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
class TestEveryImplementation:
    def test_ours(self, case: Case, direction: str) -> None:
        check(RingFA3(), case, direction)

    def test_zero_columns(self, case: Case, direction: str) -> None:
        check(ZeroColumns(), case, direction)

    def test_a_sink_far_below(self, case: Case, direction: str) -> None:
        """It counts: its gradient is computed, and one at 0 changes the results."""
        with mock.patch.object(reference, "sink_gradient", wraps=sink_gradient) as computed:
            check(RingFA3(sink=FAR_BELOW), case, direction)
        assert computed.called is (direction == BACKWARD)
        with pytest.raises(AssertionError, match="1e-05"):
            check(RingFA3(sink=0.0), case, direction)

    @pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
    def test_sdpa(self, case: Case, direction: str, backend: str) -> None:
        sdpa = Sdpa("SDPA", getattr(torch.nn.attention.SDPBackend, backend))
        if case.packed or case.label == "window":
            with pytest.raises(UnsupportedCaseError, match=r"no packed documents|no window"):
                check(sdpa, case, direction)
        else:
            check(sdpa, case, direction)

    def test_fa3_by_its_operators(self, case: Case, direction: str, library: Path) -> None:
        check(Fa3Ops(library), case, direction)

    @pytest.mark.parametrize("old", [False, True])
    def test_fa3_by_its_module(self, case: Case, direction: str, old: bool) -> None:
        check(Fa3Module(module(old)), case, direction)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("way", ["operators", "module"])
def test_fa3_is_asked_for_determinism(library: Path, way: str, wanted: bool) -> None:
    fa3 = Fa3Ops(library, wanted) if way == "operators" else Fa3Module(module(), wanted)
    asked.clear()
    check(fa3, CASES[0], BACKWARD)
    assert asked == [wanted]
    assert fa3.name == ("FA3 deterministic" if wanted else "FA3")
    wide = replace(CASES[0], head_dim=256)
    if wanted:
        with pytest.raises(UnsupportedCaseError, match="no deterministic backward at head dim 256"):
            check(fa3, wide, BACKWARD)
    else:
        check(fa3, wide, BACKWARD)


def test_ours_is_asked_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    def func(*qkv: torch.Tensor, deterministic: bool, **_: Any) -> torch.Tensor:
        asked.append(deterministic)
        return flash_attn_func(*qkv)

    monkeypatch.setattr(implementations, "flash_attn_func", func)
    asked.clear()
    for wanted in (False, True):
        RingFA3(deterministic=wanted).prepare(
            make_problem(CASES[1], FORWARD, torch.float32, CPU)
        ).run()
    assert asked == [False, True]


def test_rectangles_that_align_elsewhere_are_refused() -> None:
    corner = replace(CASES[0], keys=(40, 40))
    sdpa = Sdpa("SDPA", torch.nn.attention.SDPBackend.MATH)
    with pytest.raises(UnsupportedCaseError, match="aligns at the top left"):
        check(sdpa, corner, FORWARD)


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def on_gpu(direction: str) -> Problem:
    """A problem whose q says that it is on a GPU."""
    problem = make_problem(CASES[0], direction, torch.bfloat16, torch.device("cpu"))
    object.__setattr__(problem, "q", problem.q.as_subclass(OnGpu))
    return problem


def test_on_a_gpu_the_fallback_never_stands_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        implementations, "fallback_reason", lambda direction, *_, **__: f"no {direction} kernel"
    )
    with pytest.raises(UnsupportedCaseError, match="no backward kernel"):
        RingFA3().prepare(on_gpu(BACKWARD))
    with pytest.raises(UnsupportedCaseError, match="no backward kernel"):
        Ring(Communicator()).prepare(on_gpu(BACKWARD))


@pytest.mark.parametrize("precision", RMS)
@pytest.mark.parametrize("missing", ["quantise", FORWARD, BACKWARD])
def test_in_8_bits_all_kernels_must_exist(
    monkeypatch: pytest.MonkeyPatch, precision: str, missing: str
) -> None:
    """The one that quantises, the forward of that precision, and the backward of its operands."""
    precisions = {"quantise": "native", FORWARD: precision, BACKWARD: "dequantised"}

    def reason(direction: str, q: torch.Tensor, of: str, v_dim: int) -> str | None:
        assert (of, v_dim) == (precisions[direction], q.shape[-1])
        return f"no kernel: {direction}" if direction == missing else None

    monkeypatch.setattr(implementations, "fallback_reason", reason)
    needed = pytest.raises(UnsupportedCaseError, match=f"no kernel: {missing}")
    with needed:
        RingFA3(precision=precision).prepare(on_gpu(BACKWARD))
    if missing != BACKWARD:
        for implementation in (QuantisedRingFA3(precision), RingFA3(precision=precision)):
            with needed:
                implementation.prepare(on_gpu(FORWARD))
    with pytest.raises(UnsupportedCaseError, match="only the forward has operands"):
        QuantisedRingFA3(precision).prepare(make_problem(CASES[0], BACKWARD, torch.bfloat16, CPU))


@pytest.mark.parametrize("precision", RMS)
def test_in_8_bits_the_rms_of_errors_is_bounded(precision: str) -> None:
    """The kernel alone and the public function give the same bits, and have the same gate."""
    problem = make_problem(replace(CASES[0], head_dim=64), FORWARD, torch.bfloat16, CPU)
    alone, whole = (
        implementation.prepare(problem)
        for implementation in (QuantisedRingFA3(precision), RingFA3(precision=precision))
    )
    assert alone.rms == whole.rms == RMS[precision]
    assert torch.equal(alone.results()["out"], whole.results()["out"])
    native = RingFA3().prepare(problem)
    assert native.rms is None
    assert not torch.equal(native.results()["out"], whole.results()["out"])


def test_what_was_measured_is_named(library: Path) -> None:
    found = Fa3Ops(library).identity
    assert found["library"] == "fa3.so"  # no path
    library.write_bytes(b"another")
    assert Fa3Ops(library).identity["sha256"] != found["sha256"]
    assert len(found["sha256"]) == 16
    assert Fa3Module(module()).identity["version"] == "3.0.0"


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"missing\.so: no such file"):
        Fa3Ops(tmp_path / "missing.so")
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(LoadError, match=r"text\.so cannot be loaded: "):
        Fa3Ops(tmp_path / "text.so")


def test_a_missing_fa3_is_none_and_a_broken_one_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa3_module, "MODULE", "flash_attn_of_this_test")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attention_3(None) is None
    (tmp_path / "flash_attn_of_this_test.py").write_text("import not_there_at_all")
    with pytest.raises(LoadError, match="not_there_at_all"):
        flash_attention_3(None)
    (tmp_path / "flash_attn_of_this_test.py").write_text("__version__ = '3.1'")
    sys.modules.pop("flash_attn_of_this_test", None)
    found = flash_attention_3(None)
    assert isinstance(found, Fa3Module)
    assert found.identity["version"] == "3.1"
